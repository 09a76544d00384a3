"""The KV memory in use, on `/metrics`, in the log and in the host's own numbers.

The host counts virtual tokens: one id per logical token, whatever was dropped. Its leak check needs
that, so the fields of `PoolStats` stay as they are. What it *reports* is replaced here by the
physical occupancy, in whole-token equivalents: `head pages * page_size / streams`.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang_kv import runtime
from sglang_kv.prefix_metrics import PrefixExporter

if TYPE_CHECKING:
    from sglang.srt.managers.load_snapshot import LoadSnapshot
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.scheduler_components.internal_state import (
        SchedulerInternalStateController,
    )
    from sglang.srt.managers.scheduler_components.kv_events_publisher import (
        SchedulerKvEventsPublisher,
    )
    from sglang.srt.managers.scheduler_components.load_inquirer import SchedulerLoadInquirer
    from sglang.srt.managers.scheduler_components.metrics_reporter import SchedulerMetricsReporter
    from sglang.srt.managers.scheduler_components.pool_stats_observer import PoolStats
    from sglang.srt.observability.metrics_collector import (
        SchedulerMetricsCollector,
        SchedulerStats,
    )

    from sglang_kv.state import LedgerStats

# An idle scheduler asks at every turn of its loop, thousands of times a second.
IDLE_CHECK_SECONDS = 0.5

GAUGES: list[tuple[str, str, Callable[[LedgerStats], float]]] = [
    ("head_pages_total", "Head pages that the KV memory holds.", lambda s: s.total_pages),
    ("head_pages_used", "Head pages with an owner.", lambda s: s.used_pages),
    ("head_pages_free", "Head pages without an owner.", lambda s: s.free_pages),
    (
        "head_pages_evictable",
        "Used head pages that only the prefix cache holds and no request reads.",
        lambda s: s.evictable_pages,
    ),
    ("kv_bytes_total", "Bytes of KV memory.", lambda s: s.total_pages * s.page_bytes),
    ("kv_bytes_used", "Bytes of KV memory in use.", lambda s: s.used_pages * s.page_bytes),
]


# Our own metrics ---------------------------------------------------------------------------------


class LedgerExporter:
    """The `sglang_kv:` metrics of one scheduler process."""

    def __init__(self, collector: SchedulerMetricsCollector) -> None:
        # Not at import: prometheus_client chooses between its single- and multi-process modes when
        # it is first imported, and the host sets the directory for the latter only at start.
        from prometheus_client import Counter, Gauge

        # Where the host's metrics go to another backend, ours go with them.
        make_gauge = getattr(collector, "_gauge_cls", None) or Gauge
        make_counter = getattr(collector, "_counter_cls", None) or Counter
        self.labels: dict[str, str] = collector.labels

        def gauge(name: str, documentation: str, *more: str) -> Any:
            return make_gauge(
                name=f"sglang_kv:{name}",
                documentation=documentation,
                labelnames=[*self.labels, *more],
                multiprocess_mode="mostrecent",
            )

        def counter(name: str, documentation: str, *more: str) -> Any:
            return make_counter(
                name=f"sglang_kv:{name}",
                documentation=documentation,
                labelnames=[*self.labels, *more],
            )

        self.gauges = [(gauge(name, doc).labels(**self.labels), get) for name, doc, get in GAUGES]
        self.running = gauge("running_requests", "Running requests by KV policy.", "policy")
        self.requests = counter("requests_total", "Requests since start by KV policy.", "policy")
        self.dropped = counter(
            "tokens_dropped_total", "Tokens dropped from the KV memory, in whole tokens."
        ).labels(**self.labels)
        self.folds = counter("folds_total", "Times that a policy was applied.").labels(
            **self.labels
        )
        self.evicted = counter(
            "tokens_evicted_total", "Of those dropped: tokens taken under memory pressure."
        ).labels(**self.labels)
        self.prefixes = PrefixExporter(gauge, counter, self.labels)
        self.policies: set[str] = set()
        self.exported: LedgerStats | None = None
        self.checked = float("-inf")

    def export(self, stats: LedgerStats) -> None:
        for gauge, get in self.gauges:
            gauge.set(get(stats))
        self.policies |= stats.requests_by_policy.keys()
        for policy in self.policies:
            running = stats.requests_by_policy.get(policy, 0)
            self.running.labels(**self.labels, policy=policy).set(running)
        before = self.exported
        for policy, count in stats.requests_total.items():
            counted = before.requests_total.get(policy, 0) if before else 0
            self.requests.labels(**self.labels, policy=policy).inc(count - counted)
        self.dropped.inc(stats.dropped_tokens - (before.dropped_tokens if before else 0.0))
        self.folds.inc(stats.folds - (before.folds if before else 0))
        self.evicted.inc(stats.evicted_tokens - (before.evicted_tokens if before else 0.0))
        self.prefixes.export(stats.prefixes, before.prefixes if before else None)
        # Copies: the ledger goes on counting in its own.
        self.exported = dataclasses.replace(
            stats,
            requests_by_policy=dict(stats.requests_by_policy),
            requests_total=dict(stats.requests_total),
        )

    def outdated(self, now: float) -> bool:
        ledger = runtime.current()
        if ledger is None or now - self.checked < IDLE_CHECK_SECONDS:
            return False
        self.checked = now
        return ledger.stats() != self.exported


def exporter_of(collector: SchedulerMetricsCollector) -> LedgerExporter:
    exporter: LedgerExporter | None = getattr(collector, "sglang_kv_exporter", None)
    if exporter is None:
        exporter = LedgerExporter(collector)
        collector.sglang_kv_exporter = exporter
    return exporter


def export_ledger(_: None, collector: SchedulerMetricsCollector, stats: SchedulerStats) -> None:
    if (ledger := runtime.current()) is not None:
        exporter_of(collector).export(ledger.stats())


def export_at_idle(reporter: SchedulerMetricsReporter) -> None:
    """Make the host log now if the ledger has moved since it last did.

    At idle it logs every 30 seconds, or when its count of running requests is off; after a request
    shorter than `--decode-log-interval` that count may well be right and the memory not.
    """
    collector = reporter.metrics_collector
    if runtime.current() is None or not reporter.current_scheduler_metrics_enabled:
        return
    if exporter_of(collector).outdated(time.monotonic()):
        collector.last_log_time = float("-inf")


# The host's numbers ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Occupancy:
    """The ledger in the host's words: tokens, and what is evictable is not used."""

    stats: LedgerStats

    def tokens(self, pages: int) -> int:
        # Rounded down, so that the parts never add up to more than the whole.
        return pages * self.stats.page_size // self.stats.num_streams

    @property
    def total(self) -> int:
        return self.tokens(self.stats.total_pages)

    @property
    def read_pages(self) -> int:
        # The tree may count a page as evictable that a compressed request still reads.
        return max(0, self.stats.used_pages - self.stats.evictable_pages)

    @property
    def used(self) -> int:
        return self.tokens(self.read_pages)

    @property
    def usage(self) -> float:
        return self.read_pages / self.stats.total_pages


def occupancy() -> Occupancy | None:
    ledger = runtime.current()
    return None if ledger is None else Occupancy(ledger.stats())


def physical_token_stats(_: tuple[int, float], pool: PoolStats) -> tuple[int, float] | None:
    now = occupancy()
    return None if now is None else (now.used, now.usage)


def physical_pool_usage(_: float, pool: PoolStats) -> float | None:
    if (now := occupancy()) is None:
        return None
    return max(now.usage, pool.mamba_usage) if pool.is_hybrid_ssm else now.usage


def physical_scheduler_stats(_: None, pool: PoolStats, stats: SchedulerStats) -> None:
    if (now := occupancy()) is None:
        return
    # num_used_tokens and token_usage come from the two methods above.
    stats.full_token_usage = now.usage
    stats.kv_used_tokens = now.used
    stats.kv_available_tokens = now.tokens(now.stats.free_pages)
    stats.kv_evictable_tokens = now.tokens(now.stats.evictable_pages)


def physical_prefill_parts(parts: list[str], pool: PoolStats) -> list[str] | None:
    if (now := occupancy()) is None:
        return None
    return [f"token usage: {now.usage:.2f}", *other_pools(parts)]


def physical_decode_parts(parts: list[str], pool: PoolStats) -> list[str] | None:
    if (now := occupancy()) is None:
        return None
    stats = now.stats
    return [
        f"#token: {pool.full_num_used}, token usage: {now.usage:.2f}",
        f"head pages: {stats.used_pages}/{stats.total_pages} "
        f"({stats.evictable_pages / stats.total_pages:.2f} evictable)",
        *other_pools(parts),
    ]


def other_pools(parts: list[str]) -> list[str]:
    return [part for part in parts if part.startswith("mamba")]


def physical_constants(
    collector: SchedulerMetricsCollector, **constants: Any
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    if (now := occupancy()) is None:
        return None
    pages = now.total // now.stats.page_size
    return (collector,), {**constants, "max_total_num_tokens": now.total, "num_pages": pages}


def physical_load(load: LoadSnapshot, inquirer: SchedulerLoadInquirer) -> None:
    # num_used_tokens and token_usage come from `physical_token_stats`.
    if (now := occupancy()) is not None:
        load.max_total_num_tokens = now.total
        if load.memory is not None:
            load.memory.token_capacity = now.total


def physical_internal_state(
    _: None, controller: SchedulerInternalStateController, state: dict[str, Any]
) -> None:
    if (now := occupancy()) is not None:
        state["memory_usage"]["token_capacity"] = now.total
        state["kv_compression"] = dataclasses.asdict(now.stats)


def physical_init_info(info: dict[str, Any], scheduler: Scheduler) -> None:
    if (now := occupancy()) is not None:
        info["max_total_num_tokens"] = now.total


def physical_kv_metrics(publisher: SchedulerKvEventsPublisher) -> None:
    # It multiplies the usage, physical by now, by this; nothing else reads it.
    if (now := occupancy()) is not None:
        publisher.max_total_num_tokens = now.total


COMPONENTS = "sglang.srt.managers.scheduler_components"
POOL_STATS = f"{COMPONENTS}.pool_stats_observer.PoolStats"
COLLECTOR = "sglang.srt.observability.metrics_collector.SchedulerMetricsCollector"

HOOKS: list[tuple[str, Callable[..., Any], str]] = [
    (f"{COLLECTOR}.log_stats", export_ledger, "AFTER"),
    (f"{COLLECTOR}.emit_constants", physical_constants, "BEFORE"),
    (
        f"{COMPONENTS}.metrics_reporter.SchedulerMetricsReporter._maybe_log_idle_metrics",
        export_at_idle,
        "BEFORE",
    ),
    (f"{POOL_STATS}.get_kv_token_stats", physical_token_stats, "AFTER"),
    (f"{POOL_STATS}.get_max_pool_usage", physical_pool_usage, "AFTER"),
    (f"{POOL_STATS}.update_scheduler_stats", physical_scheduler_stats, "AFTER"),
    (f"{POOL_STATS}.get_prefill_usage_msg_parts", physical_prefill_parts, "AFTER"),
    (f"{POOL_STATS}.get_decode_usage_msg_parts", physical_decode_parts, "AFTER"),
    (f"{COMPONENTS}.load_inquirer.SchedulerLoadInquirer.get_loads", physical_load, "AFTER"),
    (
        f"{COMPONENTS}.internal_state.SchedulerInternalStateController._add_memory_usage",
        physical_internal_state,
        "AFTER",
    ),
    ("sglang.srt.managers.scheduler.Scheduler.get_init_info", physical_init_info, "AFTER"),
    (
        f"{COMPONENTS}.kv_events_publisher.SchedulerKvEventsPublisher.emit_kv_metrics",
        physical_kv_metrics,
        "BEFORE",
    ),
]
