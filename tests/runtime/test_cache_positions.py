"""Positions in the cache: the ledger, the kernels and the rotations against the paper's loop."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("sglang")

from cache_positions import (
    DIM,
    SCALINGS,
    Engine,
    paper,
    plain_rotary,
    rope_of,
    rotate,
    run,
)
from ledger_harness import Harness, Req
from torch import Tensor, nn

from sglang_kv.admission import _chunk_limit, check_request, growth_pages
from sglang_kv.compression import PolicyError, WindowPlan, parse_policy
from sglang_kv.kernels import reference
from sglang_kv.kernels.layout import FP8_DTYPES
from sglang_kv.rotary import Rotary, TurnBack
from sglang_kv.streams import ANYWHERE


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    plain_rotary(monkeypatch)


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("halves", [True, False])
@pytest.mark.parametrize("rotary_dim", [64, 16])
def test_turned_back_is_rotated_less(scaling: str, halves: bool, rotary_dim: int) -> None:
    rope = rope_of(scaling, halves=halves, rotary_dim=rotary_dim)
    x = torch.randn(50, 3, DIM, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(50) * 9
    distances = torch.tensor([random.Random(0).randint(0, int(p)) for p in positions])
    turned = rotate(rope, x, positions)
    turned = TurnBack.of(rope, 512).queries(turned, distances)
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


@pytest.mark.parametrize("dtype", FP8_DTYPES, ids=["e4m3", "e5m2"])
def test_pages_of_8_bits_move_down(dtype: torch.dtype) -> None:
    """Each rebase turns each key of the window by itself, rounded once, and nothing else; pages
    that another request and the tree hold, too, are copied first."""
    rope, length = rope_of("none"), 240
    engine = Engine(rope, 16, 128, dtype=dtype)
    seen = watched(engine)
    policy = {"method": "streamingllm", "sinks": 4, "recent": 60}
    first = run(engine, policy, 90, 90, 16)
    table = engine.ledger.streams.table[first.sglang_kv.slot]
    theirs = torch.from_numpy(table[..., : int(first.sglang_kv.counts.max())].astype("int64"))
    held = engine.pages.view(torch.uint8)[theirs]
    req = run(engine, policy, length, 150, 16)
    assert len(seen) >= 2
    assert max(engine.told) < 128
    assert torch.equal(engine.pages.view(torch.uint8)[theirs], held)
    # What rounding of keys and values leaves of the fp32 loop: three or two bits of mantissa.
    expected = paper(rope, length, 4, 60)
    off = torch.stack([(engine.out[t] - expected[t]).abs().mean() for t in range(length)])
    assert off.max() < {torch.float8_e4m3fn: 0.03, torch.float8_e5m2: 0.06}[dtype]
    for each in (first, req):
        engine.release(each, publish=True)
    engine.check_empty()


def watched(engine: Engine) -> list[int]:
    """Holds each rebase of `engine` against fp32; how far each moved."""
    seen: list[int] = []
    turn_keys = engine.rotary.turn_keys

    def turn(pages: Tensor, ids: Tensor, distance: int) -> None:
        before = pages.clone()
        turn_keys(pages, ids, distance)
        exact = before.float()
        for turn_back, of_layer in zip(engine.rotary.layers, ids, strict=True):
            assert turn_back is not None
            row = turn_back.cos_sin[distance]
            exact[of_layer, 0] = reference.turned(exact[of_layer, 0], row)
        window = torch.zeros(len(pages), dtype=torch.bool)
        window[ids.flatten()] = True
        keys, others = pages[window, 0], pages.view(torch.uint8).clone()
        known = ~exact[window, 0].isnan()  # slots that no token has come to
        assert (reference.beyond_rounding(keys, exact[window, 0])[known] <= 1e-5).all()
        others[window, 0] = before.view(torch.uint8)[window, 0]
        assert torch.equal(others, before.view(torch.uint8))
        seen.append(distance)

    engine.rotary.turn_keys = turn  # type: ignore[method-assign]
    return seen


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
