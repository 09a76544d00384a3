"""Turn after turn: a session goes on where its last turn ended, and computes what is new."""

from __future__ import annotations

import random
from array import array
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

pytest.importorskip("sglang")

from ledger_harness import HEADS, LAYERS, Harness, Req
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.session.session_controller import Session

from sglang_kv.compression import parse_policy

STREAMING = {"method": "streamingllm", "sinks": 4, "recent": 21}
DUO = {"method": "duoattention", "sinks": 3, "recent": 18, "sparsity": 0.5}


def turn(
    h: Harness, ids: list[int], policy: dict[str, Any], answer: int, *, chunk: int = 29
) -> tuple[list[int], int]:
    """Serve a prompt to its end. Returns the session so far, and how much of it was known."""
    req = Req(ids, parse_policy(policy))
    h.admit(req)
    known = req.prefix_len
    while req.extend_end < len(ids):
        h.extend(req, chunk)
        h.checkpoint(req)
    for token in range(answer):
        h.decode(req, 5000 + len(ids) + token)
    req.output_ids.append(7)  # the last token of an answer is never computed
    h.release(req, publish=True)
    return [*ids, *req.output_ids], known


def words(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(1000), k=count)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("policy", [STREAMING, {**STREAMING, "recent": 20}, DUO])
def test_a_session_computes_only_what_is_new(page_size: int, policy: dict[str, Any]) -> None:
    h = Harness(page_size=page_size, pool_tokens=4096, virtual_tokens=8192)
    ids = words(90)
    for new in (0, 3, 17, 16, 40, 1):
        computed = len(ids) - 1
        ids = [*ids, *words(new, seed=new)]
        before = len(ids)
        ids, known = turn(h, ids, policy, answer=1 + new % 7)
        if new == 0:
            assert known == 0
        elif before - new > 90:
            assert known >= computed // page_size * page_size
    h.check_empty()


def test_from_one_end_two_ways_lead_on() -> None:
    h = Harness(page_size=4, pool_tokens=4096, virtual_tokens=8192)
    ids, _ = turn(h, words(100), STREAMING, answer=8)
    for seed in (1, 2, 3):
        _, known = turn(h, [*ids, *words(30, seed)], STREAMING, answer=5)
        assert known == 108
    # Both at once, while a third one decodes on the same pages.
    reqs = [Req([*ids, *words(9, seed)], parse_policy(STREAMING)) for seed in (4, 5)]
    for req in reqs:
        h.admit(req)
        assert req.prefix_len == 108
    for req in reqs:
        h.extend(req, 64)
        h.checkpoint(req)
    for token in range(40):
        for req in reqs:
            h.decode(req, token)
    for req in reqs:
        h.release(req, publish=False)
    h.check_empty()


def test_an_end_that_several_go_on_from_stays() -> None:
    """A session's later turns do not take away what other sessions began with."""
    h = Harness(page_size=4, pool_tokens=4096, virtual_tokens=8192)
    prologue, _ = turn(h, words(100), STREAMING, answer=8)
    sessions = [[*prologue, *words(30, seed)] for seed in (1, 2)]
    for _ in range(3):
        sessions = [
            [*turn(h, ids, STREAMING, answer=5)[0], *words(20, len(ids))] for ids in sessions
        ]
    _, known = turn(h, [*prologue, *words(30, 3)], STREAMING, answer=5)
    assert known == 108
    given_up = h.tree.owner.stats.given_up
    assert set(given_up) == {"snapshot/superseded"}
    h.check_empty()


def test_a_session_alone_leaves_its_earlier_ends_behind() -> None:
    h = Harness(page_size=4, pool_tokens=4096, virtual_tokens=8192)
    first, _ = turn(h, words(100), STREAMING, answer=8)
    ids = first
    for seed in range(3):
        ids, _ = turn(h, [*ids, *words(30, seed)], STREAMING, answer=5)
    assert len(h.tree.snapshots.of_node) == 2  # the last, and the one before it
    _, known = turn(h, [*first, *words(9, 8)], STREAMING, answer=5)
    assert known <= 28  # the dense prefix
    h.check_empty()


@pytest.mark.parametrize(
    "other",
    [
        {**STREAMING, "recent": 22},
        {**STREAMING, "positions": "original"},
        {**STREAMING, "fold_at": 50},
        {"method": "none"},
        DUO,
    ],
)
def test_no_other_policy_goes_on_from_it(other: dict[str, Any]) -> None:
    h = Harness(page_size=4, pool_tokens=4096, virtual_tokens=8192)
    ids, _ = turn(h, words(100), STREAMING, answer=8)
    _, known = turn(h, [*ids, 1, 2, 3], other, answer=3)
    assert known <= 24 + 4  # the dense prefix that all share
    h.check_empty()


def test_no_other_tenant_goes_on_from_it() -> None:
    h = Harness(page_size=4, pool_tokens=4096, virtual_tokens=8192)
    ids, _ = turn(h, words(100), STREAMING, answer=8)
    for name in ("extra_key", "cache_salt"):
        req = Req([*ids, 1, 2, 3], parse_policy(STREAMING))
        setattr(req, name, "other")
        req.sglang_kv = None  # type: ignore[assignment]
        h.admit(req)
        assert req.prefix_len <= 28
        h.tree.set_reader(req.sglang_kv, None)
        h.tree.unlock(req.lock)


class Turn(Req):
    """With the fields that SGLang's own sessions read and write."""

    multimodal_inputs = None

    def inherit_mm_token_counts(self, last: Turn) -> None:
        """There are none."""

    @property
    def origin_input_ids_unpadded(self) -> array[int]:
        return self.origin_input_ids


@pytest.mark.parametrize("policy", [{"method": "none"}, STREAMING, DUO])
def test_sglangs_own_sessions_go_on_where_they_ended(policy: dict[str, Any]) -> None:
    """Not the streaming ones: SGLang puts each turn's prompt together, and looks it up whole."""
    h = Harness(page_size=4, pool_tokens=4096, virtual_tokens=8192)
    session = Session(capacity_of_str_len=10_000)

    def ask(ids: list[int], rid: str, after: str | None, **how: Any) -> tuple[int, int]:
        """Tokens of the prompt, and how many of them were known."""
        received = MagicMock(rid=rid, input_ids=array("q", ids), extra_key=None, cache_salt=None)
        received.session_params = SimpleNamespace(
            **{"rid": after, "replace": False, "offset": None, "drop_previous_output": False, **how}
        )

        def made(**fields: Any) -> Turn:
            return Turn(list(fields["origin_input_ids"]), parse_policy(policy))

        req = session.create_req(received, None, 1000, req_factory=made)
        h.admit(req)
        known, prompt = req.prefix_len, len(req.origin_input_ids)
        while req.extend_end < prompt:
            h.extend(req, 29)
            h.checkpoint(req)
        for token in range(6):
            h.decode(req, token)
        req.output_ids.append(7)
        h.release(req, publish=True)
        return prompt, known

    assert ask(words(101), "one", None) == (101, 0)
    # Of an answer of seven tokens, six were computed.
    assert ask(words(40, 1), "two", "one") == (101 + 7 + 40, 104)
    # Another second turn, from the same end; of a prefix, up to where the two prompts part.
    known = 108 if policy["method"] == "none" else 104
    assert ask(words(30, 3), "three", "one") == (101 + 7 + 30, known)
    assert ask(words(9, 2), "four", "two") == (148 + 7 + 9, 152)
    # One that takes back what the first had answered.
    prompt, known = ask(words(30, 4), "five", "one", drop_previous_output=True)
    assert prompt == 101 + 30
    assert known == {"none": 100, "streamingllm": 24, "duoattention": 20}[policy["method"]]
    h.check_empty()


def test_memory_is_given_back_when_it_is_wanted() -> None:
    h = Harness(page_size=4, pool_tokens=4096, virtual_tokens=8192)
    ids, _ = turn(h, words(100), STREAMING, answer=8)
    held = h.ledger.pool.num_used
    assert held == h.tree.idle_pages() > 0
    assert h.tree.evict_pages(h.ledger.pool.num_pages)
    h.check_empty()
    _, known = turn(h, [*ids, 1, 2, 3], STREAMING, answer=3)
    assert known == 0
    h.check_empty()


def test_a_snapshot_that_is_in_use_keeps_its_ids() -> None:
    h = Harness(page_size=4, pool_tokens=4096, virtual_tokens=8192)
    ids, _ = turn(h, words(100), STREAMING, answer=8)
    req = Req([*ids, *words(20, 7)], parse_policy(STREAMING))
    h.admit(req)
    h.extend(req, 64)
    h.checkpoint(req)
    h.tree.evict_pages(h.ledger.pool.num_pages)
    h.check()
    for token in range(30):
        h.decode(req, token)
    h.release(req, publish=True)
    h.check_empty()


def test_when_names_run_out_older_ends_go() -> None:
    h = Harness(page_size=4, pool_tokens=4096, virtual_tokens=512)
    for seed in range(12):
        if h.allocator.available_size() < 128:  # as SGLang does before it allocates
            h.tree.evict(EvictParams(num_tokens=128))
        turn(h, words(100, seed), STREAMING, answer=4)
        h.check()
    assert 0 < len(h.tree.snapshots.of_node) < 12
    h.check_empty()


def test_who_was_aborted_or_retracted_leaves_nothing() -> None:
    h = Harness(page_size=4, pool_tokens=4096, virtual_tokens=8192)
    req = Req(words(100), parse_policy(STREAMING))
    h.admit(req)
    while req.extend_end < 100:
        h.extend(req, 29)
        h.checkpoint(req)
    h.release(req, publish=False)
    assert not h.tree.snapshots.of_node
    h.check_empty()


def test_ends_of_one_session_share_pages() -> None:
    """The full heads' pages of all turns are the same ones."""
    h = Harness(page_size=4, pool_tokens=4096, virtual_tokens=8192)
    ids = words(200)
    for _ in range(5):
        ids, _ = turn(h, [*ids, 1, 2, 3, 4], DUO, answer=5)
    pages = -(-len(ids) // 4) * LAYERS * HEADS
    assert h.tree.idle_pages() == h.ledger.pool.num_used < 2 * pages
    h.check_empty()


def test_names_that_cannot_be_had_cost_nobody_anything() -> None:
    """SGLang releases what has finished within a group, whose frees come later."""
    h = Harness(page_size=4, pool_tokens=4096, virtual_tokens=480)
    other = [*words(100, 99), 1]
    turn(h, other[:100], {"method": "none"}, answer=0)
    req = Req(words(200), parse_policy(STREAMING))
    h.admit(req)
    while req.extend_end < 200:
        h.extend(req, 50)
        h.checkpoint(req)
    check, h.check = h.check, lambda: None  # type: ignore[method-assign]
    h.allocator.free_group_begin()
    h.release(req, publish=True)
    h.allocator.free_group_end()
    check()
    again = Req(other, parse_policy("none"))
    h.admit(again)
    assert again.prefix_len == 100


def test_of_a_long_session_two_ends_stay() -> None:
    h = Harness(page_size=4, pool_tokens=4096, virtual_tokens=8192)
    ids = words(60)
    for _ in range(6):
        ids, _ = turn(h, [*ids, *words(20, len(ids))], STREAMING, answer=5)
    assert len(h.tree.snapshots.of_node) == 2
    h.check_empty()
