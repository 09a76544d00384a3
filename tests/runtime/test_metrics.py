"""The ledger on /metrics and in the host's own numbers, over the host's real classes."""

from __future__ import annotations

import functools
import inspect
import pkgutil
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge
from sglang.srt.managers.load_snapshot import LoadSnapshot, MemoryMetrics
from sglang.srt.managers.scheduler_components.pool_stats_observer import PoolStats
from sglang.srt.observability.metrics_collector import SchedulerStats
from sglang.srt.plugins.hook_registry import HookType, _wrap_fn

from sglang_kv import metrics, prefix_metrics, report, tenants
from sglang_kv.state import LedgerStats

LABELS = {"model_name": "m", "tp_rank": "0"}


def ledger_stats(**changes: Any) -> LedgerStats:
    values: dict[str, Any] = {
        "total_pages": 4000,  # with 16 tokens a page over 8 streams: 8,000 tokens
        "used_pages": 1000,
        "free_pages": 3000,
        "evictable_pages": 200,
        "page_bytes": 4096,
        "page_size": 16,
        "num_streams": 8,
        "requests_by_policy": {"snapkv": 2},
        "requests_total": {"snapkv": 3},
        "dropped_tokens": 12.5,
        "folds": 2,
        "evicted_tokens": 4.5,
    }
    return LedgerStats(**{**values, **changes})


@dataclass
class FakeRuntime:
    now: LedgerStats = field(default_factory=ledger_stats)

    def stats(self) -> LedgerStats:
        return self.now


@pytest.fixture
def ledger(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    fake = FakeRuntime()
    monkeypatch.setattr("sglang_kv.runtime.current", lambda: fake)
    return fake


@pytest.fixture
def no_ledger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang_kv.runtime.current", lambda: None)


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def collector(registry: CollectorRegistry) -> Any:
    """The parts of the host's collector that are used, its own injection points included."""
    return SimpleNamespace(
        labels=LABELS,
        last_log_time=0.0,
        _gauge_cls=functools.partial(Gauge, registry=registry),
        _counter_cls=functools.partial(Counter, registry=registry),
    )


@pytest.fixture
def hooked(monkeypatch: pytest.MonkeyPatch) -> None:
    """`PoolStats` with our hooks, applied as the host's registry applies them."""
    for target, hook, kind in metrics.HOOKS:
        owner, _, name = target.rpartition(".")
        if owner == metrics.POOL_STATS:
            wrapped = _wrap_fn(getattr(PoolStats, name), hook, HookType[kind])
            monkeypatch.setattr(PoolStats, name, wrapped)


def virtual_pool(**changes: Any) -> PoolStats:
    values: dict[str, Any] = {
        "full_num_used": 30_000,
        "full_token_usage": 0.5,
        "full_available_size": 20_000,
        "full_evictable_size": 10_000,
        "full_capacity": 60_000,
    }
    return PoolStats(**{**values, **changes})


# Our own metrics ---------------------------------------------------------------------------------


def test_gauges_and_counters_carry_the_hosts_labels(
    ledger: FakeRuntime, collector: Any, registry: CollectorRegistry
) -> None:
    metrics.export_ledger(None, collector, SchedulerStats())
    exported = {
        sample.name: sample.value
        for family in registry.collect()
        for sample in family.samples
        if not sample.name.endswith("_created")
    }
    assert exported == {
        "sglang_kv:head_pages_total": 4000,
        "sglang_kv:head_pages_used": 1000,
        "sglang_kv:head_pages_free": 3000,
        "sglang_kv:head_pages_evictable": 200,
        "sglang_kv:kv_bytes_total": 4000 * 4096,
        "sglang_kv:kv_bytes_used": 1000 * 4096,
        "sglang_kv:running_requests": 2,
        "sglang_kv:requests_total": 3,
        "sglang_kv:tokens_dropped_total": 12.5,
        "sglang_kv:tokens_evicted_total": 4.5,
        "sglang_kv:folds_total": 2,
    }
    value = registry.get_sample_value("sglang_kv:running_requests", {**LABELS, "policy": "snapkv"})
    assert value == 2


def test_a_policy_without_requests_goes_to_zero(
    ledger: FakeRuntime, collector: Any, registry: CollectorRegistry
) -> None:
    metrics.export_ledger(None, collector, SchedulerStats())
    ledger.now = ledger_stats(requests_by_policy={"h2o": 1})
    metrics.export_ledger(None, collector, SchedulerStats())

    def running(policy: str) -> float | None:
        labels = {**LABELS, "policy": policy}
        return registry.get_sample_value("sglang_kv:running_requests", labels)

    assert (running("snapkv"), running("h2o")) == (0, 1)


def test_counters_follow_a_ledger_that_counts_in_place(
    ledger: FakeRuntime, collector: Any, registry: CollectorRegistry
) -> None:
    metrics.export_ledger(None, collector, SchedulerStats())
    ledger.now.requests_total["snapkv"] += 4
    ledger.now.requests_total["none"] = 1
    metrics.export_ledger(None, collector, SchedulerStats())
    totals = {
        policy: registry.get_sample_value("sglang_kv:requests_total", {**LABELS, "policy": policy})
        for policy in ("snapkv", "none")
    }
    assert totals == {"snapkv": 7, "none": 1}


def test_nothing_is_created_without_a_ledger(
    no_ledger: None, collector: Any, registry: CollectorRegistry
) -> None:
    metrics.export_ledger(None, collector, SchedulerStats())
    metrics.export_at_idle(
        SimpleNamespace(metrics_collector=collector, current_scheduler_metrics_enabled=True)
    )
    assert list(registry.collect()) == []
    assert collector.last_log_time == 0.0


def test_idle_logs_when_the_ledger_has_moved(
    ledger: FakeRuntime, collector: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    reporter = SimpleNamespace(metrics_collector=collector, current_scheduler_metrics_enabled=True)
    clock = 100.0
    monkeypatch.setattr("time.monotonic", lambda: clock)

    def asks_for_a_log() -> bool:
        collector.last_log_time = 0.0
        metrics.export_at_idle(reporter)
        return bool(collector.last_log_time == float("-inf"))

    assert asks_for_a_log()  # never logged: the first values appear at start
    metrics.export_ledger(None, collector, SchedulerStats())
    clock += metrics.IDLE_CHECK_SECONDS
    assert not asks_for_a_log()
    ledger.now = ledger_stats(used_pages=0, free_pages=4000, evictable_pages=0)
    assert not asks_for_a_log()  # too soon after the last look
    clock += metrics.IDLE_CHECK_SECONDS
    assert asks_for_a_log()


def test_idle_without_metrics_touches_no_collector(ledger: FakeRuntime) -> None:
    reporter = SimpleNamespace(metrics_collector=None, current_scheduler_metrics_enabled=False)
    metrics.export_at_idle(reporter)


# The host's numbers ------------------------------------------------------------------------------


def test_host_stats_are_physical_and_the_pool_fields_are_not(
    ledger: FakeRuntime, hooked: None
) -> None:
    pool, stats = virtual_pool(), SchedulerStats()
    pool.update_scheduler_stats(stats)
    assert pool == virtual_pool(), "the leak check reads these"
    assert pool.get_kv_token_stats() == (1600, 0.2)
    assert pool.get_max_pool_usage() == 0.2
    reported = {
        name: getattr(stats, name)
        for name in (
            "token_usage",
            "full_token_usage",
            "num_used_tokens",
            "kv_used_tokens",
            "kv_evictable_tokens",
            "kv_available_tokens",
        )
    }
    assert reported == {
        "token_usage": 0.2,
        "full_token_usage": 0.2,
        "num_used_tokens": 1600,
        "kv_used_tokens": 1600,
        "kv_evictable_tokens": 400,
        "kv_available_tokens": 6000,
    }


def test_an_empty_ledger_reports_zero_and_not_the_virtual_value(
    ledger: FakeRuntime, hooked: None
) -> None:
    ledger.now = ledger_stats(used_pages=200, free_pages=3800, evictable_pages=200)
    assert virtual_pool().get_kv_token_stats() == (0, 0.0)
    assert virtual_pool().get_max_pool_usage() == 0.0


def test_the_fullest_pool_may_be_the_mamba_pool(ledger: FakeRuntime, hooked: None) -> None:
    pool = virtual_pool(is_hybrid_ssm=True, mamba_num_used=9, mamba_usage=0.9)
    assert pool.get_max_pool_usage() == 0.9
    assert pool.get_prefill_usage_msg_parts() == ["token usage: 0.20", "mamba usage: 0.90"]


def test_log_lines(ledger: FakeRuntime, hooked: None) -> None:
    pool = virtual_pool()
    assert ", ".join(pool.get_prefill_usage_msg_parts()) == "token usage: 0.20"
    assert ", ".join(pool.get_decode_usage_msg_parts()) == (
        "#token: 30000, token usage: 0.20, head pages: 1000/4000 (0.05 evictable)"
    )


def test_without_a_ledger_the_host_reports_as_ever(no_ledger: None, hooked: None) -> None:
    pool, stats = virtual_pool(), SchedulerStats()
    pool.update_scheduler_stats(stats)
    assert (stats.token_usage, stats.kv_used_tokens) == (0.5, 30_000)
    assert pool.get_kv_token_stats() == (30_000, 0.5)
    assert pool.get_decode_usage_msg_parts() == ["#token: 30000, token usage: 0.50"]
    load = LoadSnapshot(max_total_num_tokens=60_000)
    metrics.physical_load(load, None)
    assert load.max_total_num_tokens == 60_000
    assert metrics.physical_constants(None, max_total_num_tokens=1) is None


def test_capacity_is_physical_wherever_it_is_told(ledger: FakeRuntime) -> None:
    memory = MemoryMetrics(weight_gb=1.0, kv_cache_gb=1.0, graph_gb=0.0, token_capacity=60_000)
    load = LoadSnapshot(max_total_num_tokens=60_000, memory=memory)
    metrics.physical_load(load, None)
    assert (load.max_total_num_tokens, memory.token_capacity) == (8000, 8000)

    state: dict[str, Any] = {"memory_usage": {"token_capacity": 60_000}}
    metrics.physical_internal_state(None, None, state)
    assert state["memory_usage"]["token_capacity"] == 8000
    assert state["kv_compression"]["used_pages"] == 1000

    info = {"status": "ready", "max_total_num_tokens": 60_000}
    metrics.physical_init_info(info, None)
    assert info == {"status": "ready", "max_total_num_tokens": 8000}

    publisher = SimpleNamespace(max_total_num_tokens=60_000)
    metrics.physical_kv_metrics(publisher)
    assert publisher.max_total_num_tokens == 8000

    changed = metrics.physical_constants("self", max_total_num_tokens=60_000, num_pages=3750, p=1)
    assert changed == (("self",), {"max_total_num_tokens": 8000, "num_pages": 500, "p": 1})


# The host's side of the contract -----------------------------------------------------------------


HOOKS = metrics.HOOKS + report.HOOKS + prefix_metrics.HOOKS + tenants.HOOKS


@pytest.mark.parametrize(("target", "hook", "kind"), HOOKS, ids=[target for target, *_ in HOOKS])
def test_hooks_fit_the_pinned_host(target: str, hook: Any, kind: str) -> None:
    host = pkgutil.resolve_name(target)
    first, *others = inspect.signature(host).parameters
    assert first == "self"
    arguments: list[Any] = [None] if kind in ("AFTER", "AROUND") else []
    signature = inspect.signature(hook)
    if any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values()):
        signature.bind(*arguments, first, **dict.fromkeys(others))
    else:
        signature.bind(*arguments, first, *others)
