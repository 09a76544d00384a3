"""Pages taken from running requests under pressure: which, how many, from whom."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("sglang")

from ledger_harness import HEADS, LAYERS, Harness, Req, made_up_attention

from sglang_kv.compression import parse_policy
from sglang_kv.kernels.layout import KV_LEN
from sglang_kv.pressure import NEWEST, Pressure
from sglang_kv.request import SCORED_QUERIES

STREAMS = list(np.ndindex(LAYERS, HEADS))
NONE = parse_policy("none")
PAGE = 4


def running(h: Harness, length: int, *, evictable: bool = True, policy: object = NONE) -> Req:
    req = Req(list(range(length)), policy, evictable=evictable)  # type: ignore[arg-type]
    h.admit(req)
    while req.extend_end < length:
        h.extend(req, 50)
        h.checkpoint(req)
    return req


def want(h: Harness, pages_per_stream: int) -> int:
    return h.ledger.pool.num_free + pages_per_stream * LAYERS * HEADS


def test_the_lowest_pages_of_each_stream_go_and_no_more() -> None:
    h = Harness(page_size=PAGE, pool_tokens=400, disable_tree=True)
    length = 200
    req = running(h, length)
    for token in range(10):
        h.decode(req, token)
    assert Pressure(floor=0.25).relieve(h.ledger, want(h, 5))
    counts = req.sglang_kv.counts
    gone = -(-210 // PAGE) - int(counts[0, 0])
    assert (counts == counts[0, 0]).all()  # the same number in each stream
    assert gone >= 5
    queries = np.arange(length - SCORED_QUERIES, length)[:, None]
    scored = min(length, 210 - NEWEST) // PAGE * PAGE
    for stream in STREAMS:
        received = (made_up_attention(stream, queries, np.arange(scored))) * (
            queries >= np.arange(scored)
        )
        blocks = received.sum(0).reshape(-1, PAGE).sum(-1)
        lowest = sorted(range(len(blocks)), key=lambda i: (blocks[i], i))[:gone]
        kept = [p for p in range(210) if p // PAGE not in lowest]
        assert h.kept[req.sglang_kv][stream] == kept
    state = req.sglang_kv
    assert state.evicted == gone * PAGE * len(STREAMS)
    for token in range(20):  # every step checks what the streams read
        h.decode(req, token)
    h.release(req, publish=True)
    h.check_empty()


def test_the_floor_holds_and_the_newest_stay() -> None:
    h = Harness(page_size=PAGE, pool_tokens=400, disable_tree=True)
    req = running(h, 200)
    left = h.ledger.pool.num_free
    assert not Pressure(floor=0.5).relieve(h.ledger, left + 26 * len(STREAMS))
    assert Pressure(floor=0.5).relieve(h.ledger, left + 25 * len(STREAMS))
    assert req.sglang_kv.counts.min() * PAGE == 100
    assert Pressure(floor=0.01).relieve(h.ledger, left + 26 * len(STREAMS))
    for stream in STREAMS:
        assert set(range(200 - NEWEST, 200)) <= set(h.kept[req.sglang_kv][stream])
    assert not Pressure(floor=0.01, min_keep=150).relieve(h.ledger, want(h, 1))


def test_only_requests_that_allow_it_give() -> None:
    h = Harness(page_size=PAGE, pool_tokens=800, disable_tree=True)
    stays, gives = running(h, 200, evictable=False), running(h, 180)
    window = running(h, 200, policy=parse_policy({"method": "streamingllm", "recent": 120}))
    before = window.sglang_kv.counts.copy()
    assert Pressure(floor=0.25).relieve(h.ledger, want(h, 10))
    assert stays.sglang_kv.evicted == 0
    assert (window.sglang_kv.counts == before).all()
    assert gives.sglang_kv.evicted > 0


def test_a_shared_prefix_stays_for_those_who_read_it() -> None:
    h = Harness(page_size=PAGE, pool_tokens=1200)
    dense, gives = running(h, 120, evictable=False), running(h, 300)
    assert gives.sglang_kv.reader_node is not None
    assert Pressure(floor=0.25).relieve(h.ledger, want(h, 10))
    assert gives.sglang_kv.evicted > 0
    for stream in STREAMS:  # 120 tokens are read by another
        assert set(range(120 // PAGE * PAGE)) <= set(h.kept[gives.sglang_kv][stream])
    for token in range(5):
        h.decode(dense, token)
        h.decode(gives, token)
    h.release(gives, publish=True)
    h.release(dense, publish=True)
    h.check_empty()


def test_a_request_that_is_computed_again_is_whole() -> None:
    h = Harness(page_size=PAGE, pool_tokens=800)
    req = running(h, 200)
    assert Pressure(floor=0.25).relieve(h.ledger, want(h, 10))
    h.decode(req, 1)
    h.release(req, publish=False)
    h.admit(req)
    while req.extend_end < 201:
        h.extend(req, 64)
        h.checkpoint(req)
    assert req.sglang_kv.evicted == 0
    assert all(len(kept) == 201 for kept in h.kept[req.sglang_kv].values())
    h.release(req, publish=True)
    h.check_empty()


def test_the_report_says_what_is_kept_when_later_folds_refill_the_budget() -> None:
    """What a fold would have dropped anyway makes good for what pressure took."""
    h = Harness(page_size=PAGE, pool_tokens=800, disable_tree=True)
    policy = parse_policy({"method": "h2o", "budget": 120, "interval": 8})
    req = running(h, 200, policy=policy)
    state = req.sglang_kv
    for token in range(100):
        h.decode(req, token)
        if token % 20 == 19:
            Pressure(floor=0.25).relieve(h.ledger, want(h, 5))
    assert state.evicted > 0
    held = h.ledger.streams.desc[state.slot, :, :, KV_LEN].mean()
    h.release(req, publish=False)
    report = state.report()
    assert report is not None
    assert report["evicted_tokens"] > 0
    assert report["kept_tokens"] == round(float(held))


def test_a_later_fold_by_token_leaves_shared_pages_alone() -> None:
    """Pages kept by reference belong to the tree, too: tokens must not be moved within them."""
    for spec in (
        {"method": "h2o", "heavy": 110, "recent": 100, "interval": 4},
        {"method": "snapkv", "budget": 400, "window": 8, "decode_budget": 140, "interval": 4},
    ):
        h = Harness(page_size=PAGE, pool_tokens=2000)
        reader = running(h, 200, evictable=False)
        req = running(h, 200, policy=parse_policy(spec))
        Pressure(floor=0.25).relieve(h.ledger, h.ledger.pool.num_free + 1)
        for token in range(100):
            h.decode(req, token)
            h.decode(reader, token)
        assert req.sglang_kv.private


def test_nothing_is_taken_that_would_not_get_free() -> None:
    """Equal prompts: what one request gives up, the other still reads."""
    h = Harness(page_size=PAGE, pool_tokens=800)
    reader, req = running(h, 200, evictable=False), running(h, 200)
    for _ in range(4):
        assert not Pressure(floor=0.25).relieve(h.ledger, want(h, 60))
    assert req.sglang_kv.evicted == 0
    h.release(reader, publish=True)
    assert Pressure(floor=0.25).relieve(h.ledger, h.ledger.pool.num_free + 1)


def test_what_would_not_be_enough_is_not_taken() -> None:
    h = Harness(page_size=PAGE, pool_tokens=400, disable_tree=True)
    req = running(h, 200)
    assert not Pressure(floor=0.25).relieve(h.ledger, want(h, 100))
    assert req.sglang_kv.evicted == 0
