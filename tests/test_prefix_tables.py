"""The tables of docs/PREFIXES.md, from lines that the test writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sglang_kv.benchmarks import prefix_replay, prefix_tables, radix_tree, records
from sglang_kv.benchmarks.markdown import NOTHING
from sglang_kv.radix.workloads import rag

ENVIRONMENT = {"cores": 1, "cpu": "a CPU", "commit": "abc", "date": "2026-01-02T03:04:05Z"}


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(records, "FOLDER", tmp_path)
    return tmp_path


def write(results: Path, name: str, *rows: dict[str, Any]) -> None:
    lines = [json.dumps({**row, "environment": ENVIRONMENT}) + "\n" for row in rows]
    (results / f"{name}.jsonl").write_text("".join(lines))


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def table(text: str) -> list[dict[str, str]]:
    """The rows of a Markdown table, by column."""
    head, _, *rows = [line for line in text.splitlines() if line.startswith("|")]
    return [dict(zip(cells(head), cells(row), strict=True)) for row in rows]


def thinned(workload: str, *arms: tuple[int, int, int | None]) -> dict[str, Any]:
    """A line of `prefix_replay`: (resident, hits, those of duoattention requests) of each arm."""
    found: dict[str, dict[str, Any]] = {}
    names = ("whole", "thinned", "thinned first")
    for name, (resident, hits, duo) in zip(names, arms, strict=True):
        found[name] = {"resident_tokens": resident, "hit_tokens": hits, "thinnings": 1}
        if duo is not None:
            found[name]["hit_tokens_by_kind"] = {"dense": hits - duo, "duoattention": duo}
    return {
        "arm": f"{workload} 1024",
        "workload": workload,
        "memory_tokens": 1024,
        "duoattention": found,
    }


def test_hits_by_kind_of_request(results: Path) -> None:
    assert prefix_tables.thinning() == NOTHING
    write(
        results,
        "prefix_replay",
        thinned("new", (100, 200, 50), (150, 200, 75), (180, 100, 100)),
        thinned("old", (100, 200, None), (150, 190, None), (180, 100, None)),
        thinned("nothing hit", (100, 0, 0), (150, 0, 0), (180, 8, 8)),
    )
    new, old, none = table(prefix_tables.thinning())
    assert new == {
        "workload": "`new`",
        "memory": "1,024",
        "thinned: in memory": "1.50x",
        "thinned: hits": "1.00x",
        "thinned: hits, dense": "0.83x",
        "thinned: hits, duoattention": "1.50x",
        "thinned first: in memory": "1.80x",
        "thinned first: hits": "0.50x",
        "thinned first: hits, dense": "0.00x",
        "thinned first: hits, duoattention": "2.00x",
    }
    assert old["thinned: hits"] == "0.95x"
    assert {value for key, value in old.items() if "hits," in key} == {"-"}
    assert none["thinned first: hits, duoattention"] == "-"


def test_a_measured_line_has_hits_by_kind(results: Path) -> None:
    requests = rag(0, requests=40)
    row = {"arm": "rag", "workload": "rag", "memory_tokens": 16_384}
    measured = prefix_replay.measure(requests, 16_384)
    for arm in measured["duoattention"].values():
        assert set(arm["hit_tokens_by_kind"]) == {"dense", "duoattention"}
        assert sum(arm["hit_tokens_by_kind"].values()) == arm["hit_tokens"]
    write(results, "prefix_replay", {**row, **measured})
    (shown,) = table(prefix_tables.thinning())
    assert "-" not in shown.values()


def test_every_recorded_cost_of_the_tree_is_shown(
    results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert prefix_tables.costs() == NOTHING
    monkeypatch.setattr(radix_tree, "PROMPT", 640)  # whose fields are those of a long one
    row = radix_tree.measure(10, repeats=2)
    costs = [name for name in row if name.endswith("_ms")]
    # Each has a value of its own, by which it is known again.
    told = {name: 1.0 + index for index, name in enumerate(costs)}
    write(results, "radix_tree", {**row, "nodes": 1_000, **told}, {**row, "nodes": 10})
    small, large = table(prefix_tables.costs())
    assert (small["nodes"], large.pop("nodes")) == ("10", "1,000")
    assert sorted(float(value.removesuffix(" ms")) for value in large.values()) == sorted(
        told.values()
    )
    assert "a match along 40 nodes of one page each" in prefix_tables.costs()
