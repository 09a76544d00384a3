"""Nobody shares a page with somebody else: proved from the pool's references, page by page."""

from __future__ import annotations

import pkgutil
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sglang")

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ledger_harness import Harness, Req
from sglang.srt.plugins.hook_registry import HookType, _wrap_fn

from sglang_kv import tenants
from sglang_kv.compression import Compressor, parse_policy
from sglang_kv.config import Options
from sglang_kv.namespaces import Sharing
from sglang_kv.radix.node import State

NONE = parse_policy("none")
POLICIES = [
    NONE,
    parse_policy({"method": "streamingllm", "sinks": 2, "recent": 9}),
    parse_policy({"method": "streamingllm", "sinks": 2, "recent": 13}),
    parse_policy({"method": "duoattention", "sinks": 3, "recent": 10, "sparsity": 0.5}),
    parse_policy({"method": "snapkv", "budget": 20, "window": 5, "kernel_size": 3}),
]
TEXT = list(range(100, 180))

# Short words, of which pieces put together make others: ("a", "bc") and ("ab", "c").
words = st.sampled_from([None, "a", "ab", "bc", "c", "abc"])
lives = st.lists(
    st.tuples(
        st.sampled_from([None, "t1", "t2", "t1#1"]),
        words,
        words,
        words,
        st.sampled_from(POLICIES),
        st.integers(20, 70),  # tokens of the common text, and then one's own
        st.integers(0, 6),  # answer
        st.booleans(),  # ends at once, or stays
    ),
    min_size=2,
    max_size=14,
)


def serve(h: Harness, req: Req, answer: int) -> None:
    h.admit(req)
    while req.extend_end < len(req.origin_input_ids):
        h.extend(req, 23)
        h.checkpoint(req)
    for token in range(answer):
        h.decode(req, 900 + token)


def whose(req: Req) -> tuple[Any, ...]:
    lora = req.lora_id
    extra = req.extra_key if lora is None else (req.extra_key or "")[: -len(lora)] or None
    # Without an identity it is alone.
    return (req.tenant if req.tenant is not None else id(req), req.cache_salt, extra, lora)


def assert_nobody_shares(h: Harness) -> None:
    """By running request and tree node: who may read each page, and after whose drop it came."""
    readers: dict[int, set[Any]] = defaultdict(set)
    droppers: dict[int, set[str]] = defaultdict(set)
    in_table = set(h.ledger.page_table[h.ledger.page_table >= 0].tolist())
    for req in h.running:
        for page in h.ledger.lists(req.sglang_kv).tolist():
            readers[page].add(whose(req))
            if page not in in_table:
                droppers[page].add(repr(req.policy))
    for node in h.tree.tree.nodes():
        name = node.namespace
        assert name.tenant is not None
        owner = (name.tenant.rpartition("#")[0], name.salt, name.extra_key, name.lora_id)
        if node.snapshot is not None:
            pages = node.snapshot.pages
        else:
            held = h.ledger.page_table[h.tree.owner.token_pages(node.value)]
            pages = held[held >= 0]
            assert (len(pages) > 0) == (node.state is not State.HOLLOW)
        for page in pages.reshape(-1).tolist():
            readers[page].add(owner)
            if node.snapshot is not None and page not in in_table:
                droppers[page].add(f"snapshot {name.policy}")
    used = set(np.flatnonzero(h.ledger.pool.refs).tolist())
    assert used == set(readers), "a page is held by nobody known"
    assert all(len(who) == 1 for who in readers.values()), "two namespaces share a page"
    for policies in droppers.values():
        running = {name for name in policies if not name.startswith("snapshot")}
        kept = policies - running
        assert len(running) <= 1 and len(kept) <= 1, policies  # noqa: PT018


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(lives)
def test_two_namespaces_never_share_a_page(requests: list[tuple[Any, ...]]) -> None:
    """Tenants, salts, extra keys, adapters and, after a drop, policies; whatever clients choose.

    The harness besides reads back every page that a stream would attend to.
    """
    h = Harness(page_size=4, pool_tokens=3000, virtual_tokens=8192, sharing=Sharing("tenant"))
    for number, (tenant, salt, extra, lora, policy, length, answer, ends) in enumerate(requests):
        ids = [*TEXT[:length], *range(1000 * (number % 3), 1000 * (number % 3) + 13)]
        req = Req(ids, policy, tenant=tenant, salt=salt, extra_key=extra, lora_id=lora)
        serve(h, req, answer)
        assert_nobody_shares(h)
        if ends:
            req.output_ids.append(7)
            h.release(req, publish=True)
            assert_nobody_shares(h)
    for req in list(h.running):
        h.release(req, publish=False)
    h.check_empty()


def first_match(h: Harness, req: Req) -> int:
    h.admit(req)
    found = req.prefix_len
    h.tree.set_reader(req.sglang_kv, None)
    h.tree.unlock(req.lock)
    return found


def test_joined_names_are_taken_apart() -> None:
    """SGLang joins a LoRA's id to the extra key; 'a' with 'bc' is not 'abc', nor 'ab' with 'c'."""
    names: list[dict[str, str]] = [
        {"extra_key": "abc"},
        {"extra_key": "a", "lora_id": "bc"},
        {"extra_key": "ab", "lora_id": "c"},
        {"lora_id": "abc"},
        {"salt": "abc"},
    ]
    h = Harness(pool_tokens=2048)
    for index, name in enumerate(names):
        # SGLang has put them together: to its own tree three of them are the same.
        assert Req(TEXT, NONE, **name).extra_key in ("abc", None)
        found = [first_match(h, Req(TEXT, NONE, **other)) > 0 for other in names]
        assert found == [other in names[:index] for other in names]
        req = Req(TEXT, NONE, **name)
        serve(h, req, 0)
        h.release(req, publish=True)


@pytest.mark.parametrize(("mode", "tenant"), [("off", "t"), ("tenant", None)])
def test_who_has_no_identity_shares_nothing(mode: str, tenant: str | None) -> None:
    h = Harness(pool_tokens=2048, sharing=Sharing(mode))
    for policy in POLICIES:
        for _ in range(2):
            req = Req(TEXT, policy, tenant=tenant)
            serve(h, req, 5)
            req.output_ids.append(7)
            h.release(req, publish=True)
            assert req.prefix_len == 85 and h.ledger.pool.num_used == 0  # noqa: PT018
    assert h.tree.tree.num_nodes == 0


def of_tenant(h: Harness, tenant: str, policy: Compressor = NONE) -> int:
    return first_match(h, Req([*TEXT, 1, 2, 3], policy, tenant=tenant))


def test_flushing_one_tenant_leaves_the_others_alone() -> None:
    h = Harness(pool_tokens=4096, sharing=Sharing("tenant"))
    stream = POLICIES[1]
    for tenant in ("t1", "t2"):
        for policy in (NONE, stream):
            req = Req(TEXT, policy, tenant=tenant)
            serve(h, req, 3)
            req.output_ids.append(7)
            h.release(req, publish=True)
    reading = Req([*TEXT, 5], NONE, tenant="t1")
    serve(h, reading, 1)
    held = h.ledger.pool.num_used
    h.tree.flush_tenant("t1")
    h.check()
    assert h.ledger.pool.num_used < held
    assert of_tenant(h, "t1") == of_tenant(h, "t1", stream) == 0  # what is read serves nobody new
    assert of_tenant(h, "t2") == 80
    for token in range(10):
        h.decode(reading, token)
    h.release(reading, publish=True)
    assert of_tenant(h, "t1") == 0
    assert {name.tenant for name in h.tree.tree.namespaces()} == {"t2#0"}  # nothing is left of it
    again = Req(TEXT, NONE, tenant="t1")
    serve(h, again, 0)
    h.release(again, publish=True)
    assert of_tenant(h, "t1") == 80
    h.check_empty()


def test_other_weights_empty_the_tree() -> None:
    h = Harness(pool_tokens=4096)
    running = Req(TEXT, NONE)
    serve(h, running, 1)
    done = Req([*TEXT[:40], 9, 9, 9, 9], NONE)
    serve(h, done, 0)
    h.release(done, publish=True)
    h.tree.weights_changed()
    h.check()
    h.decode(running, 5)
    assert first_match(h, Req([*TEXT, 1], NONE)) == 0
    h.release(running, publish=True)  # half of it is the old weights'
    assert h.ledger.pool.num_used == h.tree.tree.num_nodes == 0


@pytest.mark.parametrize("options", [None, Options(), Options(method="none")])
def test_sglangs_weight_update_empties_the_tree(
    options: Options | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hooked as SGLang hooks it: before its own flush, which may be refused or not asked for."""
    target = (
        "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager."
        "flush_cache_after_weight_update"
    )
    ((hook, kind),) = [(hook, kind) for name, hook, kind in tenants.HOOKS if name == target]
    update = _wrap_fn(pkgutil.resolve_name(target), hook, HookType[kind])
    monkeypatch.setattr("sglang_kv.startup._options", options)
    active = options is not None and options.active
    h = Harness(pool_tokens=4096)
    req = Req(TEXT, NONE)
    serve(h, req, 0)
    h.release(req, publish=True)
    manager = SimpleNamespace(scheduler=SimpleNamespace(tree_cache=h.tree))
    asked = SimpleNamespace(flush_cache=False, torch_empty_cache=False)
    assert update(manager, asked, True, "done") == (True, "done")
    assert first_match(h, Req([*TEXT, 1], NONE)) == (0 if active else 80)
    assert (h.ledger.pool.num_used == 0) == active
    # Without a scheduler nobody knows the tree: better no answer than an old model's.
    orphan = SimpleNamespace(scheduler=None)
    if active:
        with pytest.raises(RuntimeError, match="the prefixes of the old ones are kept"):
            update(orphan, asked, True, "done")
    else:
        assert update(orphan, asked, True, "done") == (True, "done")
