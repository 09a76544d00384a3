"""The prefix tree on /metrics, read back as Prometheus reads it."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.utils import floatToGoString

from sglang_kv.metrics import LedgerExporter
from sglang_kv.radix.key import Key
from sglang_kv.radix.tree import RadixTree
from sglang_kv.state import LedgerStats, PrefixStats
from sglang_kv.tree_stats import BOUNDS, importance_spread

LABELS = {"model_name": "m", "tp_rank": "0"}


def tree_worth(*importance: float) -> RadixTree[range]:
    """A node of one page, two tokens, for each."""
    tree: RadixTree[range] = RadixTree(2)
    for index, worth in enumerate(importance):
        tree.credit(tree.insert(Key.of([index, index]), range(2)).node, [worth])
    return tree


def reading(tree: RadixTree[range]) -> LedgerStats:
    prefixes = PrefixStats({"none": 5}, {"none": 9}, {}, importance_spread(tree))
    return LedgerStats(
        *(10, 0, 10, 0, 4096, 2, 1, {}, {}),
        dropped_tokens=0.0,
        folds=0,
        prefixes=prefixes,
    )


def families(registry: CollectorRegistry) -> dict[str, Any]:
    text = generate_latest(registry).decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def test_importance_is_exported_as_a_histograms_buckets_are() -> None:
    registry = CollectorRegistry()
    collector: Any = SimpleNamespace(
        labels=LABELS,
        _gauge_cls=functools.partial(Gauge, registry=registry),
        _counter_cls=functools.partial(Counter, registry=registry),
    )
    exporter = LedgerExporter(collector)
    exporter.export(reading(tree_worth(0.0, 0.05, 0.05, 1.0, 2.0, 5.0, 1000.0)))
    family = families(registry)["sglang_kv:prefix_tokens_by_importance"]
    assert family.type == "gauge"
    assert all(LABELS.items() <= sample.labels.items() for sample in family.samples)
    buckets = {sample.labels["le"]: sample.value for sample in family.samples}
    # Bounds as Prometheus writes them, rising to infinity.
    assert list(buckets) == [floatToGoString(bound) for bound in BOUNDS]
    assert list(buckets)[-1] == "+Inf"
    assert [float(bound) for bound in buckets] == sorted(BOUNDS)
    # Two tokens of each node, in every bucket from its own on.
    assert list(buckets.values()) == [2, 6, 6, 8, 10, 12, 12, 14]
    # It is what there is now, not what there was since start.
    exporter.export(reading(tree_worth(0.2)))
    family = families(registry)["sglang_kv:prefix_tokens_by_importance"]
    assert [sample.value for sample in family.samples] == [0, 0, 2, 2, 2, 2, 2, 2]


def test_a_reading_counts_each_page_once() -> None:
    """Beside the metric, `/server_info` has it bucket by bucket."""
    spread = importance_spread(tree_worth(0.0, 0.05, 0.05, 1.0, 2.0, 5.0, 1000.0))
    assert list(spread.values()) == [2, 4, 0, 2, 2, 2, 0, 2]
