"""What holds for every method, whatever it keeps: run from the registry, on both ledgers."""

from __future__ import annotations

import dataclasses
import json
import random
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sglang")

from arithmetic import kept_tokens
from ledger_harness import HEADS, LAYERS, Harness, Req
from policies import all_variants, full_budget, label

from sglang_kv.compression import Compressor, FoldPlan, Plan, WindowPlan, parse_policy
from sglang_kv.compression.base import methods
from sglang_kv.kernels.layout import KV_LEN

PROMPT = random.Random(0).choices(range(1000), k=100)
POLICIES = all_variants()
NONE = parse_policy("none")

pytestmark = pytest.mark.parametrize("policy", POLICIES, ids=label)


def prefill(h: Harness, req: Req, chunk: int = 200) -> None:
    h.admit(req)
    while req.extend_end < len(req.full_untruncated_fill_ids):
        h.extend(req, chunk)
        h.checkpoint(req)


def run(policy: Compressor, h: Harness | None = None, chunk: int = 200, answer: int = 20) -> Any:
    """Serve one request; the kept positions of every fold, and of every stream at the end."""
    h = h or Harness(pool_tokens=2048)
    req = Req(PROMPT, policy)
    prefill(h, req, chunk)
    for token in range(answer):
        h.decode(req, token)
    return outcome(h, req)


def outcome(h: Harness, req: Req) -> Any:
    folds = [(position, kept) for state, position, kept in h.folds if state is req.sglang_kv]
    return folds, {k: list(v) for k, v in h.kept[req.sglang_kv].items()}


def test_the_budget_is_kept_to_the_page(policy: Compressor) -> None:
    h = Harness(pool_tokens=2048)
    req = Req(PROMPT, policy)
    prefill(h, req)
    state, plan = req.sglang_kv, req.sglang_kv.plan
    if isinstance(plan, FoldPlan) and plan.fold_at == len(PROMPT):
        assert plan.kept is not None
        lengths = h.ledger.streams.desc[state.slot, :, :, KV_LEN]
        if plan.adaptive:  # the total of a layer is fixed, and a budget is a most
            assert (lengths.sum(-1) == plan.kept.sum(-1)).all()
        else:
            assert (lengths == plan.kept).all()
        assert state.held_pages == plan.pages(len(PROMPT))
    h.tree.evict_pages(h.ledger.pool.num_pages)
    for token in range(40):
        h.decode(req, token)
        # One page per windowed stream: the next query's window may begin in the page before.
        slack = plan.num_windowed if isinstance(plan, WindowPlan) else 0
        assert state.held_pages <= plan.pages(req.extend_end) + slack
    assert h.ledger.pool.num_used <= state.held_pages + len(PROMPT) // 4 * LAYERS * HEADS
    h.release(req, publish=True)
    h.check_empty()


def test_the_report_says_what_is_held(policy: Compressor) -> None:
    """At each token of an answer, those of a fold that is due included."""
    h = Harness(pool_tokens=2048)
    req = Req(PROMPT, policy)
    prefill(h, req)
    state, plan = req.sglang_kv, req.sglang_kv.plan
    for token in range(30):
        h.ledger.note(state)
        report = state.report()
        assert report is not None
        # With a window, not all that lies in its pages is seen.
        if not isinstance(plan, WindowPlan):
            held = [len(positions) for positions in h.kept[state].values()]
            assert report["kept_tokens"] == round(float(np.mean(held)))
        if not (isinstance(plan, FoldPlan) and plan.adaptive):
            assert report["kept_tokens"] == kept_tokens(plan, len(PROMPT), req.extend_end)
        h.decode(req, token)


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_prefill_stays_below_its_promised_peak(policy: Compressor, page_size: int) -> None:
    """Also when others come to read what it publishes, and when it is computed again."""
    for chunk, answer in ((7, 0), (40, 50)):
        h = Harness(page_size=page_size, pool_tokens=2048, virtual_tokens=4096)
        req = Req(PROMPT, policy)
        req.output_ids.extend(range(answer))
        total = len(PROMPT) + answer
        h.admit(req)
        plan = req.sglang_kv.plan
        published = (plan.dense_prefix or 0) // page_size
        peak = plan.peak_pages(total, chunk, published=published)
        free = h.ledger.pool.num_free
        while req.extend_end < total:
            h.extend(req, chunk)
            assert free - h.ledger.pool.num_free <= peak
            h.checkpoint(req)
            h.admit(Req([*PROMPT, *range(answer)], NONE))


def promised(plan: Any) -> tuple[int, int]:
    """First and newest tokens that every stream keeps, beside the token that is computed."""
    if isinstance(plan, WindowPlan):
        return plan.window.num_sinks, plan.window.window_left
    if not isinstance(plan, FoldPlan):
        return 0, len(PROMPT) + 20
    assert plan.policy is not None
    given = plan.policy.parameters  # with the plan's own amounts in place of a ratio
    newest = given.get("recent") or given.get("window") or 0
    return given.get("sinks") or 0, newest - 1  # a fold's newest is the token just computed


def test_newest_tokens_and_sinks_stay(policy: Compressor) -> None:
    """In every stream after every forward and at every fold."""
    h = Harness(pool_tokens=2048)
    req = Req(PROMPT, policy)
    h.admit(req)
    state, found = req.sglang_kv, []
    while req.extend_end < len(PROMPT) + 20:
        if req.extend_end < len(PROMPT):
            h.extend(req, 33)
            h.checkpoint(req)
        else:
            h.decode(req, req.extend_end)
        found.append((req.extend_end, {k: list(v) for k, v in h.kept[state].items()}))
    found += [(position, kept) for _, position, kept in h.folds]
    sinks, newest = promised(state.plan)
    assert len(found) > 20
    for position, kept in found:
        assert len(kept) == LAYERS * HEADS
        for stream in kept.values():
            first = range(min(sinks, position))
            assert set(first) | {*range(max(0, position - 1 - newest), position)} <= set(stream)
    # The others do go: at the end some stream has lost a token, unless nothing is ever dropped or
    # all that there are are sinks.
    lost = any(len(stream) < position for position, kept in found for stream in kept.values())
    assert lost == (type(state.plan) is not Plan and sinks < len(PROMPT) + 20)


def test_the_same_input_keeps_the_same_tokens(policy: Compressor) -> None:
    assert run(policy) == run(policy)


def test_how_a_prompt_is_cut_does_not_matter(policy: Compressor) -> None:
    if policy.parameters.get("first_chunk") == "dense":
        pytest.skip("the reference's dense first chunk depends on how the prompt is cut")
    whole = run(policy)
    assert run(policy, chunk=4) == whole  # one page
    assert run(policy, chunk=37) == whole


def test_neighbours_do_not_matter(policy: Compressor) -> None:
    alone = run(policy)
    h = Harness(pool_tokens=4096)
    others = [Req([7, *PROMPT[: 30 + i]], p) for i, p in enumerate(POLICIES[::7])]
    for other in others:
        prefill(h, other, 16)
    assert run(policy, h) == alone


def test_a_cached_prefix_does_not_matter(policy: Compressor) -> None:
    if policy.parameters.get("first_chunk") == "dense":
        pytest.skip("the reference's dense first chunk depends on how the prompt is cut")
    h = Harness(pool_tokens=2048)
    dense = Req(PROMPT, parse_policy("none"))
    prefill(h, dense)
    assert run(policy, h) == run(policy)


def test_a_request_that_is_computed_again_keeps_the_same(policy: Compressor) -> None:
    if policy.parameters.get("first_chunk") == "dense":
        pytest.skip("the reference's dense first chunk depends on how the prompt is cut")
    h = Harness(pool_tokens=2048)
    req = Req(PROMPT, policy)
    prefill(h, req)
    for token in range(20):
        h.decode(req, token)
    first = outcome(h, req)
    h.release(req, publish=False)
    h.folds.clear()
    # SGLang drops the newest token, whose KV it has not; here all are known, and computed.
    prefill(h, req, 16)
    again = outcome(h, req)
    assert [f for f in again[0] if f[0] < req.extend_end] == [
        f for f in first[0] if f[0] < req.extend_end
    ]
    # Which pages lie before a window depends on the steps; what is seen is checked at each one.
    window = isinstance(req.sglang_kv.plan, WindowPlan)
    # A fold is due behind the last token: the prefill has done it, the decode had not yet.
    if not window and not any(position == req.extend_end for position, _ in again[0]):
        assert {k: set(v) for k, v in again[1].items()} == {k: set(v) for k, v in first[1].items()}


def test_a_budget_beyond_the_length_changes_nothing(policy: Compressor) -> None:
    h = Harness(pool_tokens=2048)
    req = Req(PROMPT, full_budget(policy.name))
    prefill(h, req)
    for token in range(20):
        h.decode(req, token)
    assert not req.sglang_kv.private or not isinstance(req.sglang_kv.plan, FoldPlan)
    assert h.ledger.dropped == 0
    assert all(len(kept) == 120 for kept in outcome(h, req)[1].values())


def test_the_page_size_does_not_matter_where_tokens_are_kept(policy: Compressor) -> None:
    plan_of = {}
    for size in (1, 4, 16):
        h = Harness(page_size=size, pool_tokens=4096, virtual_tokens=4096)
        plan_of[size] = run(policy, h)
    plan = policy.plan(len(PROMPT), h.ledger.geometry)
    if isinstance(plan, FoldPlan) and not plan.by_page and not plan.adaptive:
        assert plan_of[1] == plan_of[4] == plan_of[16]


def test_parameters_say_who_it_is(policy: Compressor) -> None:
    """What differs from the defaults makes the same policy again, and nothing else does."""
    default = methods()[policy.name]()
    given = {k: v for k, v in policy.parameters.items() if v != getattr(default, k)}
    asked = {k: v for k, v in given.items() if v is not None}  # None: another one took its place
    again = parse_policy(json.loads(json.dumps({"method": policy.name, **asked})))
    assert again == policy
    assert (repr(again), hash(again)) == (repr(policy), hash(policy))
    assert again.parameters == policy.parameters
    others = [other for other in POLICIES if other is not policy]
    assert policy not in others
    assert repr(policy) not in {repr(other) for other in others}
    for name, value in policy.parameters.items():
        changed = dataclasses.replace(policy, **{name: "other" if value is None else None})
        assert changed != policy
        assert repr(changed) != repr(policy)


def test_every_method_is_here(policy: Compressor) -> None:
    """Each with a policy that drops something of the laws' prompt; `none` alone does not."""
    of_method = [p for p in POLICIES if p.name == policy.name]
    geometry = Harness(pool_tokens=2048).ledger.geometry
    drops = [type(p.plan(len(PROMPT), geometry)) is not Plan for p in of_method]
    assert {p.name for p in POLICIES} == set(methods())
    assert any(drops) == (policy.name != "none")
