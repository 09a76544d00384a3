"""Traces small enough to follow by hand, and the four kinds of traffic."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_kv.radix.key import Namespace, pages_of
from sglang_kv.radix.node import Thin
from sglang_kv.radix.optimum import optimum
from sglang_kv.radix.orders import ORDERS
from sglang_kv.radix.replay import PrefillOwner, compare, main, replay, with_signal
from sglang_kv.radix.shapes import conversation, tool_agent
from sglang_kv.radix.trace import MAX_SEGMENT, Request, expand, read_trace, write_trace
from sglang_kv.radix.workloads import (
    WORKLOADS,
    agents,
    chats,
    rag,
    shared_system_prompts,
)


def trace(*names: str, tokens: int = 4) -> list[Request]:
    """One request per string, each letter a segment; pages of 2 and 5 tokens a prompt, so that all
    of "A" but the last token, which is always computed, may be hit."""
    return [
        Request((*((ord(n), tokens) for n in name), (1000 + i, 1))) for i, name in enumerate(names)
    ]


def hits(requests: Sequence[Request], memory: int, order: str) -> int:
    return replay(requests, memory, order, page_size=2).hit_tokens


def test_lru_by_hand() -> None:
    story = trace("A", "B", "A", "C", "B", "A")
    # 8 tokens hold two of the three: B was the oldest when C came, and A when B came back.
    assert hits(story, 8, "lru") == 4
    assert hits(story, 12, "lru") == 3 * 4
    # With the future in hand, C is not kept, since it never comes back.
    assert optimum(story, 8, page_size=2) == 3 * 4


def test_lfu_by_hand() -> None:
    story = trace("A", "A", "B", "C", "A")
    assert hits(story, 8, "lfu") == 4 + 4
    assert hits(story, 8, "lru") == 4


def test_shared_beginnings_are_hit_as_far_as_they_go() -> None:
    assert hits(trace("AB", "AC", "AB"), 100, "lru") == 4 + 8
    tenants = [
        Request(((1, 5),), namespace=Namespace(tenant=name)) for name in ("a", "b", "a", "b")
    ]
    assert hits(tenants, 100, "lru") == 8


def test_the_last_token_is_always_computed() -> None:
    same = [Request(((1, 4),))] * 3
    assert hits(same, 100, "lru") == 2 * 2
    assert optimum(same, 100, page_size=2) == 2 * 2


def test_an_answer_is_hit_by_the_next_turn() -> None:
    turns = [
        Request(((1, 4),), output=((2, 4),)),
        Request(((1, 4), (2, 4), (3, 2))),
    ]
    assert hits(turns, 100, "importance") == 8
    assert optimum(turns, 100, page_size=2) == 8
    assert optimum(turns, 8, page_size=2) == 0  # the second does not fit


def test_what_cannot_fit_is_served_without_the_tree() -> None:
    story = trace("A", "ABCDEFGH", "A")
    for order in ORDERS:
        assert hits(story, 8, order) == 4


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.text("ABC", min_size=1, max_size=3), min_size=1, max_size=12),
    st.integers(6, 20),
)
def test_no_order_beats_the_optimum(names: list[str], memory: int) -> None:
    story = trace(*names, tokens=2)
    best = optimum(story, memory, page_size=2)
    for order in ORDERS:
        assert hits(story, memory, order) <= best


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text("AB", min_size=1, max_size=2), min_size=1, max_size=6), st.integers(2, 4))
def test_the_optimum_is_that_of_trying_everything(names: list[str], capacity: int) -> None:
    story = trace(*names, tokens=2)
    memory = 2 * capacity
    assert optimum(story, memory, page_size=2) == 2 * _best_of_all(story, capacity)


def _best_of_all(story: Sequence[Request], capacity: int) -> int:
    """Page hits of the best schedule, by dynamic programming over all contents of the memory."""
    best: dict[frozenset[bytes], int] = {frozenset(): 0}
    for request in story:
        tokens = request.key().tokens
        pages = pages_of(tokens, 2)
        if len(pages) > capacity:
            continue
        for index in range(len(pages)):
            page = b"".join(pages[: index + 1])
            counted = index < (request.prompt_tokens - 1) // 2
            after: dict[frozenset[bytes], int] = {}
            for contents, hits_so_far in best.items():
                score = hits_so_far + (counted and page in contents)
                whole = contents | {page}
                for size in range(min(len(whole), capacity) + 1):
                    for kept in combinations(sorted(whole), size):
                        key = frozenset(kept)
                        after[key] = max(after.get(key, 0), score)
            best = after
    return max(best.values())


# -- files --


def test_a_trace_comes_back_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    requests = WORKLOADS["agents"][0](3)[:20]
    write_trace(path, requests)
    back = list(read_trace(path))
    for one, two in zip(requests, back, strict=True):
        assert (one.prompt, one.output, one.namespace) == (two.prompt, two.output, two.namespace)
        assert one.importance is not None
        assert two.importance is not None
        np.testing.assert_allclose(one.importance, two.importance, rtol=1e-4)


def test_a_bad_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"prompt": [[1, 4]]}\n{"output": []}\n')
    with pytest.raises(ValueError, match="line 2"):
        list(read_trace(path))
    for bad in ((1, 0), (1, MAX_SEGMENT + 1), (-1, 4)):
        with pytest.raises(ValueError, match="bad segment"):
            expand((bad,))
    with pytest.raises(ValueError, match="unknown signal"):
        with_signal([], "gates")


def test_the_command_prints_a_row_per_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.jsonl"
    write_trace(path, trace("A", "B", "A"))
    main([str(path), "--memory", "64", "--page-size", "2"])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["order"] for row in rows] == [
        *ORDERS,
        "importance-uniform",
        "importance-shuffled",
        "optimum",
    ]
    assert {row["hit_tokens"] for row in rows} == {4}


def test_replays_do_not_depend_on_hash_seeds(run_python: Callable[..., str], root: Path) -> None:
    code = (
        "from sglang_kv.radix.workloads import rag\n"
        "from sglang_kv.radix.replay import compare\n"
        "print(compare(rag(1, requests=60), 16384))\n"
    )
    one, two = (run_python(code, PYTHONPATH=str(root), PYTHONHASHSEED=seed) for seed in "12")
    assert one == two


# -- workloads --

#: Never less of lru's hit tokens than this; at least so much on the first.
FLOOR = {
    "shared_system_prompts": 1.2,
    **dict.fromkeys(("agents", "rag", "chats", "rewritten"), 0.97),
}


@pytest.mark.parametrize("name", WORKLOADS)
def test_importance_against_lru(name: str) -> None:
    generate, memory = WORKLOADS[name]
    requests = generate(0)
    tokens = {order: replay(requests, memory, order).hit_tokens for order in ("importance", "lru")}
    assert tokens["importance"] >= FLOOR[name] * tokens["lru"]
    assert tokens["importance"] <= optimum(requests, memory)


#: The shapes of public traces, whose requests are longer: generator and tokens of memory.
SHAPES = {"conversation": (conversation, 262_144), "tool_agent": (tool_agent, 262_144)}


@pytest.mark.parametrize("name", SHAPES)
def test_importance_against_lru_on_public_shapes(name: str) -> None:
    generate, memory = SHAPES[name]
    requests = generate(0, requests=300)
    tokens = {order: replay(requests, memory, order).hit_tokens for order in ("importance", "lru")}
    assert tokens["importance"] >= 0.97 * tokens["lru"] > 0
    best = optimum(requests, memory)
    assert tokens["importance"] <= best
    # Memory is short, or all orders would be alike.
    assert tokens["lru"] < 0.95 * best


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", WORKLOADS)
def test_importance_against_lru_with_other_seeds(name: str, seed: int) -> None:
    generate, memory = WORKLOADS[name]
    rows = {row["order"]: row["hit_tokens"] for row in compare(generate(seed), memory)}
    assert rows["importance"] >= FLOOR[name] * rows["lru"]
    assert max(rows.values()) == rows["optimum"]


def test_thinning_keeps_more_prefixes_for_those_who_can_use_them() -> None:
    generate, memory = WORKLOADS["rag"]
    requests = generate(0)[:400]
    thin = Thin("half", frozenset(), sinks=64, recent=256)
    plain = replay(requests, memory, "importance")
    thinned = replay(requests, memory, "importance", owner=PrefillOwner(thin=thin))
    assert thinned.thinnings > 0
    assert thinned.resident_tokens > plain.resident_tokens


def test_hits_of_dense_and_of_duoattention_requests_are_told_apart() -> None:
    """Every second request is dense and stores; the others only read."""
    story = trace("A", "A", "B", "AB", "AB", "B")
    done = replay(story, 100, "lru", page_size=2, publish_every=2)
    # Dense: A (nothing), B (nothing), AB (A). The others: A (A), AB (A), B (B).
    assert (done.hit_tokens, done.duoattention_hit_tokens) == (4 + 12, 12)
    assert replay(story, 100, "lru", page_size=2).duoattention_hit_tokens == 0


def test_workloads_depend_on_their_seed_alone() -> None:
    for generate in (shared_system_prompts, agents, rag, chats):
        one, two, other = (generate(seed, requests=80) for seed in (4, 4, 5))
        assert [r.prompt for r in one] == [r.prompt for r in two] != [r.prompt for r in other]
        for a, b in zip(one, two, strict=True):
            assert a.importance is not None
            assert b.importance is not None
            assert a.importance.tobytes() == b.importance.tobytes()
            assert len(a.importance) == a.prompt_tokens // 16
