"""The two ledgers and the tree together, without a model: every page, every reader."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("sglang")

from ledger_harness import CONTEXT, HEADS, LAYERS, Harness, Req
from policies import all_variants

from sglang_kv.compression import Compressor, parse_policy
from sglang_kv.pressure import Pressure

NONE = parse_policy("none")
STREAM = parse_policy({"method": "streamingllm", "sinks": 2, "recent": 13})


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("chunk", [1, 5, 16, 40, 200])
def test_streaming_sees_what_the_papers_loop_keeps(page_size: int, chunk: int) -> None:
    h = Harness(page_size=page_size, pool_tokens=256)
    req = Req(list(range(100, 200)), STREAM)
    h.admit(req)
    while req.extend_end < 100:
        h.extend(req, chunk)
        h.checkpoint(req)
    for token in range(60):
        h.decode(req, token)
    # Sinks and window have pages of their own; at most one more page is held per stream.
    bound = -(-2 // page_size) + -(-13 // page_size) + 1
    assert req.sglang_kv.counts.max() <= bound
    h.release(req, publish=True)
    h.check_empty()


def test_a_drop_gives_pages_back_before_the_request_ends() -> None:
    h = Harness(page_size=4, pool_tokens=256)
    req = Req(list(range(100, 200)), STREAM)
    h.admit(req)
    h.extend(req, 100)
    after_prefill = h.ledger.pool.num_used
    assert after_prefill < 100 // 4 * LAYERS * HEADS
    h.checkpoint(req)
    # Under SGLang's lock rule the prompt's path stays until the request ends; without
    # readers it goes when memory is wanted: only the private window remains.
    assert h.tree.protected_size() > 0
    assert h.tree.evict_pages(h.ledger.pool.num_pages - req.sglang_kv.held_pages)
    assert h.ledger.pool.num_used == req.sglang_kv.held_pages
    h.decode(req, 1)
    h.release(req, publish=True)
    h.check_empty()


def test_a_dense_reader_keeps_its_prefix() -> None:
    h = Harness()
    req = Req(list(range(100, 160)), NONE)
    h.admit(req)
    h.extend(req, 60)
    h.checkpoint(req)
    assert not h.tree.evict_pages(h.ledger.pool.num_pages)
    h.decode(req, 1)
    h.release(req, publish=True)
    h.check_empty()


def test_newcomer_fills_hollow_nodes() -> None:
    h = Harness()
    prompt = list(range(100, 116))
    first = Req(prompt + [1, 2, 3, 4] * 8, STREAM)
    h.admit(first)
    h.extend(first, 100)
    h.checkpoint(first)
    assert h.tree.evict_pages(h.ledger.pool.num_pages - first.sglang_kv.held_pages)
    second = Req([*prompt, 9, 9, 9, 9], NONE)
    h.admit(second)
    assert second.prefix_len == 0  # hollow: a miss
    h.extend(second, 100)
    h.checkpoint(second)
    third = Req([*prompt, 8, 8], NONE)
    h.admit(third)
    assert third.prefix_len >= 12  # adopted
    h.extend(third, 100)
    for req in (first, second, third):
        h.release(req, publish=False)
    h.check_empty()


def test_prefix_is_shared_across_policies_only_where_it_is_dense() -> None:
    h = Harness()
    prompt = list(range(100, 180))
    dense = Req(prompt, NONE)
    h.admit(dense)
    h.extend(dense, 100)
    h.checkpoint(dense)
    stream = Req(prompt, STREAM)
    h.admit(stream)
    assert stream.prefix_len == 16  # sinks + recent + 1 = 16 tokens are dense
    h.extend(stream, 100)
    h.checkpoint(stream)
    for token in range(5):
        h.decode(stream, token)
        h.decode(dense, token)
    h.release(stream, publish=True)
    h.release(dense, publish=True)
    h.check_empty()


def test_a_published_prefix_makes_room_for_its_own_next_chunk() -> None:
    # 15 pages: window and chunk need 4 + 10 + 1, and chunk 1 leaves 4 more in the tree.
    h = Harness(page_size=4, pool_tokens=60)
    req = Req(list(range(100, 300)), STREAM)
    h.admit(req)
    while req.extend_end < 200:
        h.extend(req, 40)
        h.checkpoint(req)
    h.release(req, publish=True)
    h.check_empty()


@pytest.mark.parametrize("fold_at", [1, 17, 60, 100, 500])
@pytest.mark.parametrize("chunk", [7, 40, 200])
def test_fold_at_keeps_the_prompt_dense_up_to_it(fold_at: int, chunk: int) -> None:
    policy = parse_policy({"method": "streamingllm", "sinks": 2, "recent": 13, "fold_at": fold_at})
    h = Harness()
    prompt = list(range(100, 200))
    req = Req(prompt, policy)
    h.admit(req)
    while req.extend_end < 100:
        h.extend(req, chunk)
        h.checkpoint(req)
    assert req.sglang_kv.private
    for token in range(9):
        h.decode(req, token)
    # What was computed densely serves a request with another policy.
    other = Req(prompt, NONE)
    h.admit(other)
    assert other.prefix_len == max(16, min(fold_at, 99)) // 4 * 4
    h.extend(other, 100)
    h.release(other, publish=False)
    # Retracted and computed again, it folds at the same place.
    h.release(req, publish=False)
    h.admit(req)
    while req.extend_end < len(req.full_untruncated_fill_ids):
        h.extend(req, chunk)
        h.checkpoint(req)
    h.release(req, publish=True)
    h.check_empty()


def test_disabled_tree() -> None:
    h = Harness(disable_tree=True)
    req = Req(list(range(100, 180)), STREAM)
    h.admit(req)
    h.extend(req, 80)
    assert req.sglang_kv.held_pages == h.ledger.pool.num_used
    h.decode(req, 3)
    h.release(req, publish=True)
    h.check_empty()


@pytest.mark.parametrize("seed", range(40))
def test_random_traffic(seed: int) -> None:
    """Shared prefixes, chunks, decodes, aborts mid-prompt, retractions and evictions."""
    rng = random.Random(seed)
    h = Harness(page_size=rng.choice([1, 4, 8]), pool_tokens=1024, virtual_tokens=4096)
    # Half of them any method, with any of its parameters.
    policies = [NONE, STREAM, *rng.sample(all_variants(), 4)]
    h.ledger.pressure = Pressure(floor=0.25)
    stems = [[rng.randrange(1000) for _ in range(50)] for _ in range(3)]
    prefilling: list[Req] = []
    decoding: list[Req] = []
    ended: list[tuple[list[int], Compressor]] = []
    owed: list[Req] = []  # prefilled, result not processed: SGLang is a step behind
    for _ in range(250):
        move = rng.random()
        if move < 0.25 and len(h.running) < 8:
            stem = rng.choice(stems)[: rng.randrange(1, 50)]
            tail = [rng.randrange(1000) for _ in range(rng.randrange(1, 30))]
            policy = rng.choice(policies)
            if ended and rng.random() < 0.4:  # the next turn of a session
                stem, policy = rng.choice(ended)
            if len(stem) + len(tail) > CONTEXT - 100:
                continue
            req = Req(stem + tail, policy, evictable=rng.random() < 0.5)
            h.admit(req)
            h.extend(req, rng.choice([3, 16, 100]))
            prefilling.append(req)
        elif move < 0.5 and prefilling:
            req = rng.choice(prefilling)
            if req.extend_end < len(req.full_untruncated_fill_ids):
                h.checkpoint(req)
                h.extend(req, rng.choice([3, 16, 100]))
            else:
                prefilling.remove(req)
                owed.append(req)
        elif move < 0.6 and owed:
            req = owed.pop()
            if rng.random() < 0.5:  # the next decode was allocated before the checkpoint
                end = req.extend_end
                h.decode(req, rng.randrange(1000))
                req.extend_end = end
                h.tree.checkpoint(req, up_to=end)
                req.extend_end = req.prefix_len = end + 1
            else:
                h.checkpoint(req)
            decoding.append(req)
        elif move < 0.85 and decoding:
            h.decode(rng.choice(decoding), rng.randrange(1000))
        elif move < 0.93 and decoding:
            req = decoding.pop(rng.randrange(len(decoding)))
            publish = rng.random() < 0.7
            h.release(req, publish=publish)
            if publish:
                ended = [*ended[-4:], (list(req.full_untruncated_fill_ids), req.policy)]
        elif move < 0.96 and prefilling:
            h.release(prefilling.pop(), publish=False)
        elif move < 0.98:
            h.ledger.pressure.relieve(h.ledger, h.ledger.pool.num_free + rng.randrange(1, 200))
            h.check()
        else:
            h.tree.evict_pages(h.ledger.pool.num_free + rng.randrange(1, 200))
            h.check()
        if h.ledger.pool.num_free < 300 * LAYERS:  # a pool under pressure: evict, retract
            if not h.tree.evict_pages(300 * LAYERS) and rng.random() < 0.5:
                h.ledger.pressure.relieve(h.ledger, 300 * LAYERS)
            while decoding and h.ledger.pool.num_free < 300 * LAYERS:
                h.release(decoding.pop(), publish=False)
    for req in list(h.running):
        h.release(req, publish=False)
    h.check_empty()
