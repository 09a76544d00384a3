"""All methods on pages of 8-bit floats, through the backend of a server, against fp32 attention."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from cache_positions import plain_rotary
from ledger_harness import LAYERS, Req
from policies import label, variants
from served_harness import DIM, PAGE, SCALES, Served, make_layer, make_pool
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache import kv_cache_configurator, kv_cache_dtype
from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from torch import nn

from sglang_kv import kv_dtypes, runtime
from sglang_kv.compression import Compressor, parse_policy
from sglang_kv.compression.base import methods
from sglang_kv.config import Options
from sglang_kv.kernels.layout import FP8_DTYPES
from sglang_kv.kv_dtypes import Scales

DTYPES = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
SMALL: list[Compressor] = [parse_policy(variants(method)[0]) for method in methods()]


@pytest.fixture(autouse=True)
def _no_runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    plain_rotary(monkeypatch)
    before = runtime.current()
    yield
    runtime.install(before)


@pytest.mark.parametrize("dtype", FP8_DTYPES, ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("policy", SMALL, ids=label)
def test_every_method(policy: Compressor, dtype: torch.dtype) -> None:
    """Chunks, a fold, an answer, and then a request that takes the dense prefix from the tree."""
    torch.manual_seed(0)
    h = Served(dtype)
    prompt = list(range(90))
    for end, kind, answer in ((90, policy, 12), (70, parse_policy("none"), 2)):
        req = Req(prompt[:end], kind)
        h.admit(req)
        while req.extend_end < end:
            h.extend(req, 33)
            h.checkpoint(req)
        for token in range(answer):
            h.decode(req, token)
        h.release(req, publish=True)
    assert h.forwards >= 17
    assert (h.scored > 0) == policy.scores_tokens


def test_a_page_takes_half_of_a_bf16_one() -> None:
    wide = make_pool(torch.bfloat16)
    for dtype in FP8_DTYPES:
        pool = make_pool(dtype)
        assert pool.pages.dtype == dtype
        assert pool.page_bytes == 2 * PAGE * DIM == wide.page_bytes // 2
        assert sum(pool.get_kv_size_bytes()) == sum(wide.get_kv_size_bytes()) // 2


def test_scales_of_a_layer() -> None:
    pool = make_pool(torch.float8_e4m3fn)
    model = nn.ModuleList([make_layer(0), make_layer(1)])
    found = kv_dtypes.layer_scales(model, pool)
    assert [tuple(scales) for scales in found] == [pytest.approx(s) for s in SCALES]
    assert kv_dtypes.layer_scales(model, make_pool(torch.bfloat16)) == [Scales()] * LAYERS
    assert kv_dtypes.scales_of(RadixAttention(2, DIM, 1.0, 1, 0)) == Scales(1.0, 1.0)
    for bad in (0.0, -1.0, math.nan, math.inf):
        model[1].v_scale = bad
        with pytest.raises(ValueError, match="v_scale of layer 1 is"):
            kv_dtypes.layer_scales(model, pool)


class Reached(Exception):
    """SGLang went on to size its pools."""


class Maker(KVCacheConfigurator):
    """SGLang's, as far as it asks for the dtype."""

    def __init__(self, flag: str):
        self.device, self.kv_cache_dtype_str, self.kv_cache_dtype = "cpu", flag, DTYPES[flag]
        self.use_mla_backend = False
        self.spec_algorithm = SpeculativeAlgorithm.NONE

    def _resolve_memory_pool_config(self, _memory: int) -> Any:
        assert self._build_mha_quant_method(num_layers=1) is None, "another pool than ours"
        raise Reached


@pytest.fixture
def _on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    platform = SimpleNamespace(is_cpu=lambda: True)
    for module in (kv_cache_configurator, kv_cache_dtype):
        monkeypatch.setattr(module, "current_platform", platform)
    monkeypatch.setattr(kv_cache_configurator, "cpu_has_amx_support", lambda: False)


@pytest.mark.usefixtures("_on_a_cpu")
@pytest.mark.parametrize("flag", ["fp8_e4m3", "fp8_e5m2"])
def test_cpus_have_both_formats(monkeypatch: pytest.MonkeyPatch, flag: str) -> None:
    """SGLang refuses both on CPUs without AMX, and still does where nothing is compressed."""

    def choose_and_configure() -> Maker:
        asked = {"server_args_kv_cache_dtype": flag, "model": None, "model_dtype": torch.bfloat16}
        asked |= {"is_draft_worker": False, "is_dflash": False}
        original = unhooked(kv_cache_dtype.configure_kv_cache_dtype)
        found = kv_dtypes._choose(  # noqa: SLF001
            original, **asked, speculative_draft_attention_backend=""
        )
        assert found == (None, DTYPES[flag])
        maker = Maker(flag)
        kv_dtypes._configure(maker)  # noqa: SLF001
        with pytest.raises(Reached):
            unhooked(KVCacheConfigurator.configure)(maker, pre_model_load_memory=0)
        assert maker.kv_cache_dtype.itemsize == 1
        return maker

    monkeypatch.setattr(kv_dtypes, "active_options", lambda: Options(method="snapkv"))
    maker = choose_and_configure()
    kv_dtypes.settle(maker)
    assert maker.kv_cache_dtype == DTYPES[flag]

    monkeypatch.setattr(kv_dtypes, "active_options", Options)
    with pytest.raises(ValueError, match=r"not supported on CPU|requires Intel AMX"):
        choose_and_configure()


def unhooked(function: Any) -> Any:
    """SGLang's own, whether or not this process has loaded the plugin."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function
