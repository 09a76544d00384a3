"""What prefixes are worth, what they are thinned to, and what is told of them."""

from __future__ import annotations

import random
from array import array
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sglang")

from ledger_harness import GATES, HEADS, LAYERS, Harness, Req, made_up_attention
from mirrored_harness import Mirrored
from sglang.srt.disaggregation.kv_events import BlockRemoved, BlockStored
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

from sglang_kv.compression import Compressor, PolicyError, parse_policy
from sglang_kv.radix.dump import as_json, as_text
from sglang_kv.radix.importance import page_density, profile
from sglang_kv.radix.node import State
from sglang_kv.thinning import require_need
from sglang_kv.worth import QUERIES, SINKS

NONE = parse_policy("none")
STREAM = parse_policy({"method": "streamingllm", "sinks": 2, "recent": 9})
SNAPKV = parse_policy({"method": "snapkv", "budget": 20, "window": 5, "kernel_size": 3})
H2O = parse_policy({"method": "h2o", "heavy": 12, "recent": 9})
SPARSE = {"method": "duoattention", "sinks": 3, "recent": 10, "sparsity": 0.5}
DUO = parse_policy(SPARSE)
LESS = parse_policy({**SPARSE, "sinks": 2, "recent": 6})
MORE = parse_policy({**SPARSE, "recent": 11})


def serve(h: Harness, req: Req, answer: int = 0, chunk: int = 1000) -> Req:
    h.admit(req)
    while req.extend_end < len(req.full_untruncated_fill_ids):
        h.extend(req, chunk)
        h.checkpoint(req)
    for token in range(answer):
        h.decode(req, 900 + token)
    return req


def words(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(1000), k=count)


def known(h: Harness, ids: list[int], policy: Compressor, *, thinned: bool = False) -> int:
    """How much of a prompt a request would find."""
    req = Req(ids, policy, thinned=thinned)
    h.admit(req)
    h.tree.set_reader(req.sglang_kv, None)
    h.tree.unlock(req.lock)
    return req.prefix_len


# -- what a prompt's last queries say --


@pytest.mark.parametrize(
    ("policy", "chunk", "window"),
    [
        (NONE, 1000, QUERIES),
        (NONE, 45, 10),  # chunks 45, 45, 10: the last has ten queries
        (SNAPKV, 1000, 5),  # what it scores for itself
        (SNAPKV, 45, 5),
        (H2O, 1000, None),  # all queries: no measure
        (STREAM, 1000, None),
        (DUO, 1000, None),
    ],
    ids=str,
)
def test_the_last_queries_attention_is_what_pages_are_worth(
    policy: Compressor, chunk: int, window: int | None
) -> None:
    h = Harness(page_size=4, pool_tokens=2048, measures=True)
    length = 100
    req = serve(h, Req(words(length), policy), chunk=chunk)
    expected = np.ones(length // 4)
    if window is not None:
        queries, keys = np.arange(length - window, length)[:, None], np.arange(length)
        mass = np.zeros(length)
        for stream in np.ndindex(LAYERS, HEADS):
            given = made_up_attention(stream, queries, keys) * (queries >= keys)
            mass += float(GATES.values[stream]) * given.sum(0)
        left_out = QUERIES if policy is NONE else window
        expected = profile(page_density(mass, 4, sinks=SINKS, window=left_out))
        assert not np.allclose(expected, 1)
    path = req.last_node.path()
    found = np.concatenate([node.density for node in path])
    np.testing.assert_allclose(found, expected[: len(found)], rtol=1e-5)
    assert all(node.hits == 1 for node in path)
    assert h.ledger.scored == req.sglang_kv.scores  # nothing is scored for it any more
    # Once per request, retracted or not; its answer is worth what nobody has looked at yet.
    h.release(req, publish=False)
    serve(h, req, answer=9, chunk=chunk)
    h.release(req, publish=True)
    assert all(node.hits == 1 for node in h.tree.tree.nodes() if node.end <= length)
    h.check_empty()


def test_least_worth_goes_first() -> None:
    """Two documents, one of which was asked about again, and the tree's order of eviction."""
    h = Harness(page_size=4, pool_tokens=2048, order="importance", measures=True)
    for seed, times in ((1, 3), (2, 1)):
        for question in range(times):
            req = serve(h, Req([*words(60, seed), *words(8, 10 * seed + question)], NONE))
            h.release(req, publish=True)
    h.tree.evict(EvictParams(num_tokens=60))
    assert known(h, words(64, 2), NONE) == 0
    assert known(h, words(64, 1), NONE) == 60
    assert h.tree.stats().given_up.keys() == {"remove/ids"}
    h.check_empty()


def test_what_many_read_outlives_what_one_reads_once() -> None:
    """Questions behind one system prompt, and more one-off documents between than memory holds.

    The same tree, at equal memory, by recency and by importance.
    """

    def hits(order: str) -> int:
        h = Harness(page_size=4, pool_tokens=560, order=order, measures=True)
        for turn in range(7):
            questions = [[*words(80), *words(8, 50 + 2 * turn + n)] for n in range(2)]
            documents = [words(300, 100 + 2 * turn + n) for n in range(2)]
            for ids in (*questions, *documents):
                req = Req(ids, NONE)
                room = len(req.origin_input_ids) + 8
                assert h.tree.evict_pages(-(-room // 4) * h.ledger.num_streams)
                h.release(serve(h, req), publish=True)
        return int(h.tree.stats().hit_tokens["none"])

    assert hits("importance") >= 1.2 * hits("lru") > 0


# -- thinning --


def test_a_thinned_prefix_serves_who_asked_for_it() -> None:
    h = Harness(page_size=4, pool_tokens=4096, virtual_tokens=8192, thinned_for=DUO)
    ids = words(160)
    h.release(serve(h, Req(ids, NONE)), publish=True)
    assert h.tree.evict_pages(h.ledger.pool.num_free + 1)
    (node,) = h.tree.tree.nodes()
    assert node.state is State.THINNED
    # Three of six heads keep all 40 pages, three the sinks' page and those of the last 10 tokens.
    assert h.ledger.pool.num_used == 3 * 40 + 3 * (1 + 3)
    h.check()
    tail = words(30, 1)
    assert known(h, [*ids, *tail], NONE) == known(h, [*ids, *tail], DUO) == 0
    assert known(h, [*ids[:100], *tail], DUO, thinned=True) == 0  # at its end only
    assert known(h, [*ids, *tail], MORE, thinned=True) == 0  # needs more
    for policy in (DUO, LESS):
        req = Req([*ids, *tail], policy, thinned=True)
        h.admit(req)
        assert req.prefix_len == 160
        while req.extend_end < 190:
            h.extend(req, 13)
            h.checkpoint(req)
        for token in range(40):
            h.decode(req, token)
        req.output_ids.append(7)
        h.release(req, publish=True)
        report = req.sglang_kv.report()
        assert report is not None
        assert report["thinned_prefix_tokens"] == 160
        # The next turn goes on from its end, for those who asked alike.
        turn = [*req.full_untruncated_fill_ids, 1, 2, 3]
        assert known(h, turn, policy, thinned=True) == 228
        assert known(h, turn, policy) == 0
    # Who computes it densely fills it again, and it serves everybody.
    h.release(serve(h, Req([*ids, *tail], NONE)), publish=True)
    assert known(h, [*ids, 1], NONE) == 160
    h.check_empty()


def test_a_whole_prefix_serves_them_anywhere() -> None:
    h = Harness(page_size=4, pool_tokens=4096, thinned_for=DUO)
    ids = words(160)
    dense = serve(h, Req(ids, NONE))
    assert known(h, [*ids[:101], 7], DUO) == 12
    assert known(h, [*ids[:101], 7], DUO, thinned=True) == 100
    req = serve(h, Req([*ids[:101], 7], DUO, thinned=True), answer=20)
    assert h.tree.stats().hit_tokens == {"duoattention": 100, "none": 0}
    h.release(dense, publish=True)
    h.release(req, publish=True)
    h.check_empty()


def test_only_who_may_ask_for_it() -> None:
    geometry = Harness().ledger.geometry
    for policy in (NONE, STREAM, SNAPKV, parse_policy({"method": "duoattention", "fold_at": 9})):
        with pytest.raises(PolicyError, match="kv_prefix"):
            require_need(policy.plan(100, geometry))


def test_thinning_keeps_half_as_many_prefixes_again() -> None:
    """Documents through a memory for a few of them: tokens that duoattention requests may hit."""

    def cached(thinned_for: Compressor | None) -> int:
        h = Harness(
            page_size=4,
            pool_tokens=2000,
            virtual_tokens=8192,
            order="importance",
            thinned_for=thinned_for,
        )
        for seed in range(18):
            h.tree.evict_pages(210 // 4 * h.ledger.num_streams)
            h.release(serve(h, Req(words(200, seed), NONE)), publish=True)
        held = sum(len(node) for node in h.tree.tree.nodes() if node.holds_memory)
        asks = thinned_for is not None
        found = [
            known(h, [*words(200, n), 1], DUO if asks else NONE, thinned=asks) for n in range(18)
        ]
        assert sum(found) == held
        return held

    assert cached(DUO) >= 1.5 * cached(None)


def read_from(plan: Any, end: int) -> set[int]:
    """Of the first ``end`` tokens, those that a streaming head of a request reads that matched all
    of them: every one where they are no more than it shares with everybody, and else what its later
    queries see."""
    if end <= plan.match_limit:
        return set(range(end))
    queries = range(end, end + 40)
    sinks, recent = plan.window.num_sinks, plan.window.window_left
    return {p for p in range(end) if p < sinks or any(t - p <= recent for t in queries)}


@pytest.mark.parametrize("size", [1, 4, 16])
@pytest.mark.parametrize("policy", [DUO, LESS, parse_policy({**SPARSE, "sinks": 0})], ids=str)
def test_nothing_is_given_up_that_somebody_reads(policy: Compressor, size: int) -> None:
    """At every end of a node, for every request that the thinned node serves."""
    h = Harness(page_size=size, thinned_for=policy)
    thinner = h.tree.thinner
    assert thinner is not None
    plans = [p.plan(400, h.ledger.geometry) for p in (policy, DUO, LESS, MORE)]
    served = [p for p in plans if thinner.thin.covers(require_need(p))]
    assert plans[0] in served
    lost = 0
    for end in range(size, 20 * size + 40, size):
        node: Any = SimpleNamespace(start=0, end=end)
        pages = np.flatnonzero(thinner.given_up(node))
        gone = {int(p) * size + i for p in pages for i in range(size)}
        for plan in served:
            assert not gone & read_from(plan, end), f"a node of {end} tokens"
        assert (thinner.plan_thin(node) is not None) == bool(gone)
        lost += len(gone)
    assert lost


def test_what_everybody_shares_stays_whole() -> None:
    """With pages of one token, the window of the query behind what a request shares with dense
    ones is past a token of it already. A request that matches no more than that reads it all."""
    h = Harness(page_size=1, pool_tokens=2048, thinned_for=DUO)
    stem = words(14)  # 3 sinks, 10 recent, and the query
    h.release(serve(h, Req([*stem, *words(60, 1)], NONE)), publish=True)
    h.release(serve(h, Req([*stem, *words(20, 2)], DUO)), publish=False)  # splits there
    upper, lower = h.tree.tree.nodes()
    assert (upper.end, lower.end) == (14, 74)
    h.tree.evict_pages(h.ledger.pool.num_free + 1)
    assert (upper.state, lower.state) == (State.RESIDENT, State.THINNED)
    h.tree.evict_pages(h.ledger.pool.num_free + 1)
    req = serve(h, Req([*stem, *words(40, 3)], DUO, thinned=True), answer=5)
    assert h.tree.stats().hit_tokens["duoattention"] == 14 + 14
    assert req.sglang_kv.thinned_prefix == 0
    h.release(req, publish=True)
    h.check_empty()


#: Who comes, and whether it asks for thinned prefixes. One needs less than nodes keep, one more.
COMERS = [(NONE, False), (NONE, False), (SNAPKV, False), (DUO, False)]
COMERS += [(DUO, True), (DUO, True), (DUO, True), (LESS, True), (MORE, True)]


@pytest.mark.parametrize("seed", range(5))
def test_random_traffic_with_thinning(seed: int) -> None:
    """Sessions, forks, evictions and retractions; every page that is read is read back."""
    rng = random.Random(seed)
    size = (1, 4, 8)[seed % 3]
    h = Mirrored(
        page_size=size,
        pool_tokens=1200,
        virtual_tokens=4096,
        thinned_for=DUO,
        order=rng.choice(["lru", "importance"]),
        measures=True,
    )
    check, h.check = h.check, lambda: None  # type: ignore[method-assign]
    stems = [words(70, stem) for stem in range(3)]
    running: list[Req] = []
    for _ in range(90):
        move = rng.random()
        if move < 0.45 and len(running) < 5:
            ids = [*rng.choice(stems), *words(rng.randrange(1, 30), rng.randrange(4))]
            policy, thinned = rng.choice(COMERS)
            if len(ids) < 300:
                room = -(-rng.choice([len(ids) + 40, 320]) // size)
                if not h.tree.evict_pages(room * h.ledger.num_streams):
                    continue
                req = Req(ids, policy, thinned=thinned)
                running.append(serve(h, req, rng.randrange(8), chunk=rng.choice([17, 40, 500])))
        elif move < 0.75 and running:
            req = running.pop(rng.randrange(len(running)))
            publish = rng.random() < 0.8
            if publish:
                req.output_ids.append(7)
                stems = [*stems[-5:], list(req.full_untruncated_fill_ids)]
            h.release(req, publish=publish)
        elif move < 0.95:
            h.tree.evict_pages(h.ledger.pool.num_free + rng.randrange(1, 300 // size))
        else:
            h.tree.evict(EvictParams(num_tokens=rng.randrange(1, 100)))
        check()
    for req in running:
        h.release(req, publish=False)
    h.check = check  # type: ignore[method-assign]
    h.check_empty()


# -- what is told --


def announced(h: Harness, held: set[int]) -> None:
    """Follow SGLang's events as a router does."""
    for event in h.tree.take_events():
        if isinstance(event, BlockStored):
            assert event.parent_block_hash is None or event.parent_block_hash in held
            held |= set(event.block_hashes)
        else:
            assert isinstance(event, BlockRemoved)
            assert held >= set(event.block_hashes)
            held -= set(event.block_hashes)


def test_events_tell_what_serves_everybody() -> None:
    """Against the hashes that SGLang's own tree gives to the same prefixes."""
    rng = random.Random(0)
    h = Harness(page_size=4, pool_tokens=1200, virtual_tokens=4096, thinned_for=DUO, events=True)
    h.tree.take_events()
    held: set[int] = set()
    check, h.check = h.check, lambda: None  # type: ignore[method-assign]
    for step in range(18):
        ids = [*words(60, rng.randrange(3)), *words(rng.randrange(40), rng.randrange(3))]
        h.tree.evict_pages(150 // 4 * h.ledger.num_streams)
        req = serve(h, Req(ids, rng.choice([NONE, NONE, STREAM, DUO])), answer=5)
        req.output_ids.append(7)
        h.release(req, publish=True)
        if step % 3 == 0:
            h.tree.evict_pages(h.ledger.pool.num_free + rng.randrange(300))
        announced(h, held)
        check()
    stock = RadixCache.create_simulated(page_size=4, enable_kv_cache_events=True)
    stock.take_events()
    for node in h.tree.tree.nodes():
        if node.state is State.RESIDENT:
            tokens = array("q", [int(t) for n in node.path() for t in n.tokens])
            stock.insert(InsertParams(key=RadixKey(tokens)))
    expected = {block for event in stock.take_events() for block in event.block_hashes}
    assert held == expected != set()


def test_hits_are_counted_once_and_by_policy() -> None:
    h = Harness(page_size=4, pool_tokens=2048)
    ids = words(80)
    for policy in (NONE, NONE, STREAM):
        h.release(serve(h, Req([*ids, 1, 2], policy)), publish=True)
    stats: Any = h.ledger.stats().prefixes
    assert stats.prompt_tokens == {"none": 164, "streamingllm": 82}
    assert stats.hit_tokens == {"none": 80, "streamingllm": 12}
    h.tree.evict_pages(h.ledger.pool.num_pages)
    assert set(h.tree.stats().given_up) == {"remove/memory"}


def test_a_person_can_look_at_it() -> None:
    h = Harness(page_size=4, pool_tokens=2048)
    running = serve(h, Req(words(80), NONE))
    h.release(serve(h, Req([*words(40), *words(20, 1)], NONE)), publish=True)
    whole = as_json(h.tree.tree, secrets=True)
    spans = [(n["start"], n["end"], n["readers"]) for n in whole["nodes"]]
    assert spans[0] == (0, 40, 1)
    assert sorted(spans[1:]) == [(40, 60, 0), (40, 80, 1)]
    assert whole["nodes"][0]["tokens"] == words(8)
    text = as_text(h.tree.dump())
    assert text.splitlines()[0].startswith("lru: 3 nodes, 100 tokens (80 locked)")
    assert "  [0, 40)  resident" in text
    assert "    [40, 60)  resident" in text
    assert all(len(n["namespace"]) == 16 and "tokens" not in n for n in h.tree.dump()["nodes"])
    assert "and 2 more nodes" in as_text(as_json(h.tree.tree, most=1))
    h.release(running, publish=False)
