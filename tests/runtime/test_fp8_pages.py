"""All methods on pages of 8-bit floats, through the backend of a server, against fp32 attention."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("sglang")

from ledger_harness import CONTEXT, HEADS, LAYERS, Harness, Req
from policies import label, small_policy
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache import kv_cache_configurator, kv_cache_dtype
from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_kv import kv_dtypes, runtime
from sglang_kv.backend import HeadPageAttnBackend
from sglang_kv.compression import Compressor, parse_policy
from sglang_kv.compression.base import methods
from sglang_kv.config import Options
from sglang_kv.kernels.layout import FP8_DTYPES
from sglang_kv.kernels.reference import visible_mask
from sglang_kv.kv_dtypes import Scales
from sglang_kv.kvcache import HeadPageKVPool
from sglang_kv.namespaces import Sharing

DIM, GROUP, PAGE, POOL = 64, 2, 16, 1024
SCALES = [Scales(0.5, 3.0), Scales(0.11, 0.7)]
DTYPES = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
SMALL = [small_policy(method) for method in methods()]


@pytest.fixture(autouse=True)
def _no_runtime() -> Iterator[None]:
    before = runtime.current()
    yield
    runtime.install(before)


def make_pool(dtype: torch.dtype) -> HeadPageKVPool:
    return HeadPageKVPool(
        POOL,
        page_size=PAGE,
        dtype=dtype,
        head_num=HEADS,
        head_dim=DIM,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
    )


def make_layer(index: int) -> Any:
    """SGLang's, with the scales of an FP8 checkpoint, and of ``--quantization-param-path``."""
    layer = RadixAttention(GROUP * HEADS, DIM, DIM**-0.5, HEADS, index)
    if index == 0:
        layer.k_scale, layer.v_scale = map(torch.tensor, SCALES[0])
        layer.k_scale_float, layer.v_scale_float = SCALES[0]
    else:
        layer.k_scale, layer.v_scale = SCALES[index]
    return layer


class Served(Harness):
    """The harness, and beside its digests real K and V, which each forward attends to.

    What a token's K and V are follows from its digest. The oracle keeps what a page should give
    back, by position, and knows from the harness which positions a stream holds.
    """

    def __init__(self, dtype: torch.dtype):
        super().__init__(page_size=PAGE, pool_tokens=POOL, virtual_tokens=4096)
        self.pool = make_pool(dtype)
        assert self.pool.num_head_pages == self.ledger.pool.num_pages
        move = self.ledger.folder.gather_tokens

        def gather(pages: Tensor, *lists: Tensor) -> None:
            move(pages, *lists)
            move(self.pool.pages, *lists)

        self.ledger.folder.gather_tokens = gather
        self.layers = [make_layer(i) for i in range(LAYERS)]
        runtime.install(runtime.Runtime(Options(method="none"), self.ledger, Sharing(), 0.0))
        runner: Any = SimpleNamespace(
            token_to_kv_pool=self.pool,
            req_to_token_pool=self.rows,
            model=nn.ModuleList(self.layers),
            model_config=SimpleNamespace(context_len=CONTEXT),
        )
        self.backend = HeadPageAttnBackend(runner)
        self.made: dict[int, Tensor] = {}
        self.received: dict[Any, dict[tuple[int, int], Tensor]] = {}  # by position
        self.forwards = self.scored = 0

    def keys_and_values(self, req: Req, position: int) -> Tensor:
        """``[2, LAYERS, HEADS, DIM]``; some are beyond what 8 bits can say."""
        digest = self._digest(req, position)
        if digest not in self.made:
            random = torch.Generator().manual_seed(digest)
            kv = self.made[digest] = torch.randn((2, LAYERS, HEADS, DIM), generator=random)
            kv[1] *= 3
            kv[:, ..., 1] *= 1e6
        return self.made[digest]

    def given_back(self, kv: Tensor) -> Tensor:
        """What pages make of ``[tokens, 2, LAYERS, HEADS, DIM]``, in fp32."""
        largest = torch.finfo(self.pool.dtype).max
        scales = torch.tensor(SCALES).T[..., None, None]
        return (kv / scales).clamp(-largest, largest).to(self.pool.dtype).float() * scales

    def _score(self, req: Req, start: int, target: int) -> None:
        """In place of made-up attention: the backend's forward."""
        count = target - start
        decodes = bool(req.output_ids) and count == 1
        batch: Any = SimpleNamespace(
            req_pool_indices=torch.tensor([req.kv.req_pool_idx]),
            forward_mode=SimpleNamespace(is_decode_or_idle=lambda: decodes),
            extend_seq_lens=torch.tensor([count]),
            positions=torch.arange(start, target),
        )
        kv = torch.stack([self.keys_and_values(req, p) for p in range(start, target)])
        q = torch.randn(count, LAYERS, HEADS * GROUP, DIM)
        q[..., 1] *= 1e-3
        held = range(max(map(max, self.kept[req.sglang_kv].values())) + 1)
        memory = self.given_back(torch.stack([self.keys_and_values(req, p) for p in held]))
        self.backend.init_forward_metadata(batch)
        for index, layer in enumerate(self.layers):
            rows = [t[:, index].reshape(count, -1) for t in (q, kv[:, 0], kv[:, 1])]
            out = self.backend.forward_decode(*rows, layer, batch)
            want = [self.expected(req, (index, h), q[:, index], memory) for h in range(HEADS)]
            close(out.view(count, HEADS, GROUP, DIM), torch.stack(want, 1))
        self.forwards += 1

    def expected(self, req: Req, stream: tuple[int, int], q: Tensor, memory: Tensor) -> Tensor:
        """Attention of the new tokens in one stream, ``[tokens, GROUP, DIM]``; checks scores."""
        state, (layer, head) = req.sglang_kv, stream
        positions = self.kept[state][stream]
        desc = torch.from_numpy(self.ledger.streams.desc[state.slot][stream])
        mask = visible_mask(len(q), desc, PAGE)
        k, v = memory[positions, :, layer, head].unbind(1)
        queries = q[:, head * GROUP : (head + 1) * GROUP]
        logits = torch.einsum("qgd,kd->gqk", queries, k) * DIM**-0.5
        weights = logits.masked_fill(~mask, -math.inf).softmax(-1)
        self.check_scores(state, stream, positions, weights)
        return torch.einsum("gqk,kd->qgd", weights, v)

    def check_scores(
        self, state: Any, stream: tuple[int, int], positions: list[int], weights: Tensor
    ) -> None:
        passed = self.backend._scored  # noqa: SLF001
        if passed is None or state.score_slot < 0:
            self.received.pop(state, None)
            return
        known = self.received.setdefault(state, {}).setdefault(stream, torch.zeros(CONTEXT))
        first = int(passed.first_query[0])
        known[positions] += weights[:, first:].sum((0, 1))
        got = self.ledger.folder.scores.values[state.score_slot][stream][: len(positions)]
        torch.testing.assert_close(got, known[positions], atol=1e-3, rtol=1e-3)
        self.scored += 1


def close(got: Tensor, want: Tensor) -> None:
    """Equal, beside the largest number of each dimension."""
    assert got.isfinite().all()
    top = want.abs().flatten(0, -2).amax(0) + 1
    torch.testing.assert_close(got / top, want / top, atol=3e-4, rtol=0)


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
