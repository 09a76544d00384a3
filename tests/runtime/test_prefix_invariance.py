"""Who else is served, before or meanwhile, changes nothing for a request that shares a prefix."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sglang")

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ledger_harness import HEADS, LAYERS, Harness, Req

from sglang_kv.compression import Compressor, parse_policy

NONE = parse_policy("none")
STREAM = parse_policy({"method": "streamingllm", "sinks": 2, "recent": 9})
SNAPKV = parse_policy({"method": "snapkv", "budget": 20, "window": 5, "kernel_size": 3})
H2O = parse_policy({"method": "h2o", "heavy": 12, "recent": 9})
DUO = parse_policy({"method": "duoattention", "sinks": 3, "recent": 10, "sparsity": 0.5})
STEM = random.Random(0).choices(range(1000), k=48)


def life(h: Harness, req: Req, answer: int = 6) -> Iterator[Any]:
    """A request's steps, one at a time; what it kept at each fold and at its end comes last."""
    h.admit(req)
    yield None
    while req.extend_end < len(req.origin_input_ids):
        h.extend(req, 19)
        h.checkpoint(req)
        yield None
    for token in range(answer):
        h.decode(req, 900 + token)
        yield None
    folds = [(at, kept) for state, at, kept in h.folds if state is req.sglang_kv]
    kept = {stream: list(at) for stream, at in h.kept[req.sglang_kv].items()}
    req.output_ids.append(7)
    h.release(req, publish=True)
    yield folds, kept


def harness() -> Harness:
    return Harness(page_size=4, pool_tokens=4096, virtual_tokens=8192)


@cache
def cold(number: int) -> Any:
    """What a request of `REQUESTS` keeps that nobody was before, nor beside."""
    return list(life(harness(), Req(*REQUESTS[number])))[-1]


REQUESTS = [
    ([*STEM, *random.Random(n).choices(range(1000), k=12 + 9 * n)], policy)
    for n, policy in enumerate((NONE, STREAM, SNAPKV, H2O, DUO, SNAPKV, NONE))
]


@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.permutations(range(len(REQUESTS))), st.randoms(use_true_random=False))
def test_any_order_and_interleaving_keeps_the_same(order: list[int], rng: random.Random) -> None:
    h = harness()
    lives = {n: life(h, Req(*REQUESTS[n])) for n in order}
    waiting, running, found = list(order), list[int](), dict[int, Any]()
    while waiting or running:
        if waiting and (not running or rng.random() < 0.3):
            running.append(waiting.pop(0))
        turn = rng.choice(running)
        step = next(lives[turn])
        if step is not None:
            found[turn] = step
            running.remove(turn)
    assert found == {n: cold(n) for n in order}
    h.check_empty()


def pages_of(h: Harness, req: Req) -> dict[tuple[int, int], bytes]:
    """What lies in memory for a request's whole pages, stream by stream."""
    table = h.ledger.streams.table[req.sglang_kv.slot]
    whole = req.extend_end // h.page_size
    return {
        stream: h.memory[table[stream][:whole]].tobytes() for stream in np.ndindex(LAYERS, HEADS)
    }


@pytest.mark.parametrize("policy", [STREAM, SNAPKV, H2O, DUO], ids=lambda p: p.name)
def test_a_shared_prefix_stays_byte_for_byte(policy: Compressor) -> None:
    """A plain request's pages while a compressed one reads, folds and leaves the same prefix."""
    ids = [*STEM, *range(2000, 2020)]
    alone = harness()
    only = Req(ids, NONE)
    for _ in zip(range(6), life(alone, only), strict=False):
        pass
    h = harness()
    list(life(h, Req([*STEM, 1, 2, 3], policy)))  # was there before, and has left
    plain, other = Req(ids, NONE), Req([*STEM, *range(3000, 3040)], policy)
    mine, others = life(h, plain), life(h, other)
    for _ in range(6):
        next(mine)
        next(others)
    while plain.extend_end < only.extend_end:
        next(mine)
    assert plain.extend_end >= only.extend_end
    before, wanted = pages_of(h, plain), pages_of(alone, only)
    for stream, content in wanted.items():
        assert before[stream][: len(content)] == content
    for _ in others:
        for stream, content in pages_of(h, plain).items():
            assert content == before[stream]
