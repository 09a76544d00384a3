"""The backend class that GPUs use, with the kernels that it would launch there: which are called,
and that attention and scores are those of fp32."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

import flashinfer_executor
from cache_positions import Engine, paper, plain_rotary, rope_of, run
from ledger_harness import Req
from policies import SMALL
from served_harness import Served

from sglang_kv import backend, rotary, runtime
from sglang_kv.backend_gpu import DeviceAttnBackend
from sglang_kv.compression import parse_policy
from sglang_kv.kernel_paths import FLASHINFER, TRITON, Kernels, kernels_of
from sglang_kv.kernels import reference
from sglang_kv.kernels.flashinfer import wrappers

H2O = {"method": "h2o", "heavy": SMALL["heavy"], "recent": SMALL["recent"]}
STREAMING = {"method": "streamingllm", "sinks": SMALL["sinks"], "recent": SMALL["recent"]}
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
PROMPT, CHUNK, ANSWER = 26, 14, 3


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Tensors on a CPU are served as those on a GPU; how often each op was called, and how."""
    calls: Counter[str] = Counter()
    on_gpus = kernels_of("cuda")

    def counted(name: str) -> Callable[..., Any]:
        op = getattr(on_gpus, name)

        def call(*args: Any, **options: Any) -> Any:
            calls[name] += 1
            if options.get("scores") is not None:
                calls["decode with scores"] += 1
            if name == "column_sums" and args[1] is None:
                calls["column_sums of a decode step"] += 1
            return op(*args, **options)

        return call

    ops = ("decode", "extend", "append", "column_sums", "turned_queries", "turn_keys")
    kernels: Kernels = replace(on_gpus, **{name: counted(name) for name in ops})
    for module in (backend, rotary):
        monkeypatch.setattr(module, "kernels_of", lambda _device: kernels)
    plain_rotary(monkeypatch)
    before = runtime.current()
    yield calls
    runtime.install(before)


def serve(policy: dict[str, Any], dtype: torch.dtype, path: str) -> Served:
    """One request; each of its forwards is held against fp32: attention, and the scores."""
    h = Served(dtype, DeviceAttnBackend, path)
    req = Req(list(range(PROMPT)), parse_policy(policy))
    h.admit(req)
    while req.extend_end < PROMPT:
        h.extend(req, CHUNK)
        h.checkpoint(req)
    for token in range(ANSWER):
        h.decode(req, token)
    return h


def test_decode_scores_as_it_attends(called: Counter[str]) -> None:
    h = serve(H2O, E4M3, TRITON)
    layers = len(h.layers)
    assert called["decode"] == called["decode with scores"] == ANSWER * layers
    assert called["column_sums of a decode step"] == 0
    assert called["column_sums"] == called["extend"] == 2 * layers
    assert h.scored == h.forwards * layers * 3  # KV heads


def test_flashinfers_decode_is_summed_by_triton(
    called: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("decode_wrapper", "prefill_wrapper", "merge_state_in_place"):
        monkeypatch.setattr(wrappers, name, getattr(wrappers, name))  # put back afterwards
    flashinfer_executor.install()
    h = serve(H2O, E4M3, FLASHINFER)
    layers = len(h.layers)
    assert called["decode"] == called["extend"] == 0
    assert called["column_sums of a decode step"] == ANSWER * layers
    assert h.scored == h.forwards * layers * 3


def test_sinks_see_queries_that_triton_turned(called: Counter[str]) -> None:
    h = serve(STREAMING, E5M2, TRITON)
    assert 0 < called["turned_queries"] <= h.forwards * len(h.layers)


@pytest.mark.parametrize("dtype", [torch.float32, E5M2])
def test_a_rebase_turns_keys_by_triton(called: Counter[str], dtype: torch.dtype) -> None:
    """The ledger's own call; in fp32 the whole answer is the paper's."""
    rope, length = rope_of("none"), 80
    engine = Engine(rope, 16, 64, dtype=dtype)
    turn_keys, moved = engine.rotary.turn_keys, []

    def turn(pages: torch.Tensor, ids: torch.Tensor, distance: int) -> None:
        before = pages.float().clone()
        turn_keys(pages, ids, distance)
        row = table[distance]
        for of_layer in ids:
            exact = reference.turned(before[of_layer, 0], row)
            assert (reference.beyond_rounding(pages[of_layer, 0], exact).nan_to_num() < 1e-5).all()
        moved.append(distance)

    table = next(t.cos_sin for t in engine.rotary.layers if t is not None)
    engine.rotary.turn_keys = turn  # type: ignore[method-assign]
    run(engine, {"method": "streamingllm", "sinks": 4, "recent": 12}, length, 72, 16)
    assert called["turn_keys"] == len(moved) * len(engine.rotary.layers) > 0
    if dtype == torch.float32:
        expected = paper(rope, length, 4, 12)
        worst = max(float((engine.out[t] - expected[t]).abs().max()) for t in range(length))
        assert worst < 1e-3
