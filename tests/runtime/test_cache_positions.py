"""Positions in the cache: the ledger, the kernels and the rotations against the paper's loop."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("sglang")

from ledger_harness import HEADS, LAYERS, Harness, Req
from paper_loop import RollingCache
from torch import Tensor, nn

from sglang_kv.admission import _chunk_limit, check_request, growth_pages
from sglang_kv.compression import PolicyError, WindowPlan, parse_policy
from sglang_kv.kernels import attention, transfer
from sglang_kv.kernels.layout import PagedStreams, allocate_pages
from sglang_kv.rotary import Rotary, TurnBack
from sglang_kv.streams import ANYWHERE

DIM, GROUP = 64, 2


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang decides at import whose rotary kernels it would use; here, its plain torch code."""
    from sglang.srt.layers.rotary_embedding import base

    monkeypatch.setattr(base, "_is_cpu", True)


SCALINGS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    "linear": {"rope_type": "linear", "factor": 4.0},
}


def rope_of(scaling: str, *, halves: bool = True, rotary_dim: int = DIM) -> Any:
    from sglang.srt.layers.rotary_embedding import get_rope

    return get_rope(DIM, rotary_dim, 512, 10000, halves, SCALINGS[scaling], torch.float32)


def rotate(rope: Any, x: Tensor, positions: Tensor) -> Tensor:
    """[n, heads, head_dim] at those positions, by SGLang's own module."""
    flat = x.reshape(len(x), -1).contiguous()
    return rope.forward_native(positions, flat, flat.clone())[0].view(x.shape)


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("halves", [True, False])
@pytest.mark.parametrize("rotary_dim", [64, 16])
def test_turned_back_is_rotated_less(scaling: str, halves: bool, rotary_dim: int) -> None:
    rope = rope_of(scaling, halves=halves, rotary_dim=rotary_dim)
    x = torch.randn(50, 3, DIM, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(50) * 9
    distances = torch.tensor([random.Random(0).randint(0, int(p)) for p in positions])
    turned = rotate(rope, x, positions)
    TurnBack.of(rope, 512).turn(turned, distances)
    torch.testing.assert_close(turned, rotate(rope, x, positions - distances), atol=1e-4, rtol=0)


def test_what_cannot_be_turned_back_is_refused() -> None:
    from sglang.srt.layers.rotary_embedding import get_rope

    ntk = {"rope_type": "dynamic", "factor": 2.0}
    rope = get_rope(DIM, DIM, 512, 10000, True, ntk, torch.float32)
    with pytest.raises(PolicyError, match="DynamicNTKScalingRotaryEmbedding"):
        TurnBack.of(rope, 512)
    with pytest.raises(PolicyError, match="ends at position 512"):
        TurnBack.of(rope_of("none"), 513)
    assert "do not show" in str(Rotary.of(nn.Linear(1, 1), range(1), 8).refusal)


class Engine(Harness):
    """The harness with real keys, values and attention, of tokens that are random vectors."""

    def __init__(self, rope: Any, page_size: int, trained: int | None, **options: Any):
        super().__init__(page_size=page_size, pool_tokens=1024, **options)
        self.pages = allocate_pages(self.ledger.pool.num_pages, page_size, DIM, torch.float32)
        self.ledger.folder.memory = self.pages
        self.rope = rope
        self.ledger.trained_length = trained
        self.ledger.rotary = self.rotary = Rotary([TurnBack.of(rope, trained or 512)] * LAYERS)
        self.told: list[int] = []
        self.out: dict[int, Tensor] = {}

    def _forward(self, req: Req, start: int, target: int) -> None:
        ledger, slot = self.ledger, req.sglang_kv.slot
        streams = PagedStreams(
            self.pages,
            ledger.streams.table_tensor,
            ledger.streams.desc_tensor,
            torch.tensor([slot], dtype=torch.int32),
        )
        indptr = torch.tensor([0, target - start], dtype=torch.int32)
        positions = torch.arange(start, target) - int(ledger.streams.offset[slot])
        last = int(ledger.streams.last_position[slot])
        self.told += positions.tolist()
        outs = []
        for layer in range(LAYERS):
            q, k, v = vectors(layer, range(start, target))
            q, k = rotate(self.rope, q, positions), rotate(self.rope, k, positions)
            transfer.append(k, v, indptr, streams, layer)
            sink_q = self.rotary.sink_queries(q, (positions - last).clamp(min=0), layer)
            out = attention.extend(q, indptr, streams, layer, sm_scale=0.125, sink_q=sink_q)
            outs.append(out)
        for i, t in enumerate(range(start, target)):
            self.out[t] = torch.stack([out[i] for out in outs])


def vectors(layer: int, positions: range) -> tuple[Tensor, Tensor, Tensor]:
    """q [n, heads, head_dim], k and v [n, kv_heads, head_dim] before RoPE."""
    found = [
        torch.randn(3, HEADS * GROUP, DIM, generator=torch.Generator().manual_seed(t * 7 + layer))
        for t in positions
    ]
    q, k, v = torch.stack(found).unbind(1)
    return q, k[:, :HEADS], v[:, :HEADS]


def paper(rope: Any, length: int, sinks: int, recent: int) -> Tensor:
    """[length, layers, heads, head_dim]"""
    caches = [RollingCache(sinks, recent) for _ in range(LAYERS)]
    outs = []
    for t in range(length):
        of_layers = []
        for layer, cache in enumerate(caches):
            q, k, v = (x[0] for x in vectors(layer, range(t, t + 1)))
            of_layers.append(cache.attend(q, k, v, lambda x, p: rotate(rope, x, p), 0.125))
        outs.append(torch.stack(of_layers))
    return torch.stack(outs)


def run(engine: Engine, policy: dict[str, Any], length: int, prompt: int, chunk: int) -> Req:
    req = Req(list(range(prompt)), parse_policy(policy))
    engine.admit(req)
    while req.extend_end < prompt:
        engine.extend(req, chunk)
        engine.checkpoint(req)
    while req.extend_end < length:
        engine.decode(req, req.extend_end)
    return req


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize(
    ("page_size", "sinks", "recent", "chunk", "trained"),
    [
        (16, 4, 44, 13, None),  # nothing is ever moved down
        (16, 4, 28, 16, 96),
        (16, 4, 28, 36, 96),  # the longest chunk
        (16, 20, 27, 7, 96),  # sinks end within a page
        (1, 3, 30, 9, 50),
        (16, 0, 24, 11, 64),
        (32, 4, 60, 32, 160),
    ],
)
def test_the_papers_loop(
    scaling: str, page_size: int, sinks: int, recent: int, chunk: int, trained: int | None
) -> None:
    rope, length = rope_of(scaling), 240
    engine = Engine(rope, page_size, trained)
    policy = {"method": "streamingllm", "sinks": sinks, "recent": recent}
    req = run(engine, policy, length, 150, chunk)
    expected = paper(rope, length, sinks, recent)
    worst = max(float((engine.out[t] - expected[t]).abs().max()) for t in range(length))
    assert worst < 1e-3, worst
    if trained is not None:
        assert max(engine.told) < trained
        assert req.sglang_kv.offset > 0
        assert req.sglang_kv.offset % page_size == 0
    assert req.sglang_kv.length == length
    engine.release(req, publish=True)
    engine.check_empty()


@pytest.mark.parametrize("chunk", [8, 29])
def test_a_window_over_shared_pages_moves_on_copies(chunk: int) -> None:
    """Two requests and the tree hold the same first pages; the window still covers some of them."""
    rope, length = rope_of("none"), 160
    engine = Engine(rope, 16, 128)
    policy = {"method": "streamingllm", "sinks": 4, "recent": 60}
    first = run(engine, policy, 90, 90, chunk)
    req = run(engine, policy, length, 120, chunk)
    assert req.sglang_kv.offset > 0
    expected = paper(rope, length, 4, 60)
    assert max(float((engine.out[t] - expected[t]).abs().max()) for t in range(length)) < 1e-3
    engine.out.clear()
    for t in range(90, 95):
        engine.decode(first, t)
    for t, out in engine.out.items():
        torch.testing.assert_close(out, expected[t], atol=1e-3, rtol=0)
    for each in (first, req):
        engine.release(each, publish=True)
    engine.check_empty()


def test_original_positions_move_the_sinks_away() -> None:
    rope, length = rope_of("none"), 120
    engine = Engine(rope, 16, None)
    policy = {"method": "streamingllm", "sinks": 4, "recent": 20, "positions": "original"}
    req = run(engine, policy, length, 60, 16)
    assert engine.ledger.streams.last_position[req.sglang_kv.slot] == ANYWHERE
    expected = paper(rope, length, 4, 20)
    assert float((engine.out[20] - expected[20]).abs().max()) < 1e-3
    assert float((engine.out[119] - expected[119]).abs().max()) > 1e-2


def test_a_step_that_copies_asks_for_the_pages() -> None:
    engine = Engine(rope_of("none"), 16, 128)
    policy = {"method": "streamingllm", "sinks": 4, "recent": 90}
    req = run(engine, policy, 127, 100, 16)
    state, ledger = req.sglang_kv, engine.ledger
    engine.decode(req, 1)
    assert not ledger.dropper.rebases(state, state.length)
    assert ledger.dropper.rebases(state, state.length + 1)
    before, asked = ledger.pool.num_used, ledger.pages_for_next_token(state)
    engine.decode(req, 2)
    taken = ledger.pool.num_used - before
    assert 0 < taken <= asked
    assert growth_pages(ledger, state, 64) == 0


@pytest.mark.parametrize(
    ("policy", "prompt", "chunk", "named"),
    [
        ({"method": "none"}, 128, 64, "input_ids: the prompt of 128 tokens exceeds the 128"),
        ({"positions": "original"}, 128, 64, "streamingllm does not"),
        ({"sinks": 4, "recent": 120}, 10, 64, "kv_compression.recent"),
        ({"sinks": 4, "recent": 60, "fold_at": 129}, 200, 64, "kv_compression.fold_at"),
        ({"sinks": 4, "recent": 60}, 200, None, "chunked-prefill-size"),
        ({"sinks": 4, "recent": 60}, 500, 64, None),
        ({"sinks": 4, "recent": 60, "fold_at": 128}, 200, 64, None),
    ],
)
def test_the_trained_length(
    policy: dict[str, Any], prompt: int, chunk: int | None, named: str | None
) -> None:
    h = Harness(page_size=4, pool_tokens=4096, virtual_tokens=8192)
    h.ledger.trained_length, h.ledger.chunk_tokens = 128, chunk
    req = Req(list(range(prompt)), parse_policy({"method": "streamingllm", **policy}))
    req.sampling_params.min_new_tokens = 0
    h.admit(req)
    refusal = check_request(h.ledger, req)
    assert refusal is None if named is None else named in str(refusal)
    # Refused or not, the scheduler has to be able to take it through.
    limit = _chunk_limit(h.ledger, req.sglang_kv)
    assert limit == chunk or (limit is not None and limit >= 4)


def test_the_longest_chunk_is_within_the_trained_length() -> None:
    plan = parse_policy({"method": "streamingllm", "sinks": 5, "recent": 23}).plan(
        1, Harness(page_size=4).ledger.geometry
    )
    assert isinstance(plan, WindowPlan)
    assert plan.longest_chunk(48) == 48 - 8 - 23 - 4
    assert np.iinfo(np.int64).max == ANYWHERE
