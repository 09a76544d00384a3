"""The benchmark of eviction orders through a server, with SGLang's own tree as the server."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

from sglang_kv.benchmarks import prefix_orders, prefix_tables, records
from sglang_kv.benchmarks.markdown import NOTHING


class TreeServer:
    """Answers `/generate` with what SGLang's tree, of any size, has of a prompt."""

    started: ClassVar[list[list[str]]] = []
    #: Who was asked, in time.
    asked: ClassVar[list[str]] = []
    #: What the log says, whatever was asked for.
    stubborn = ""

    def __init__(self, model: str, *flags: str) -> None:
        self.started.append(list(flags))
        ours = "--radix-eviction-policy" in flags
        self.log = self.stubborn or ("impl=HeadPageRadixCache" if ours else "impl=RadixCache")
        self.ours = ours
        self.flush()
        self.hits = 0

    def __enter__(self) -> TreeServer:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def flush(self) -> None:
        self.tree = RadixCache.create_simulated(page_size=16)

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        assert path == "/generate"
        self.asked.append("ours" if self.ours else "stock")
        ids, salt = body["input_ids"], body["extra_key"]
        match = self.tree.match_prefix(
            MatchPrefixParams(key=RadixKey(array("q", ids[:-1]), extra_key=salt))
        )
        self.tree.insert(InsertParams(key=RadixKey(array("q", ids), extra_key=salt)))
        self.hits += match.device_prefix_len
        yield {"meta_info": {"cached_tokens": match.device_prefix_len}}

    def get(self, path: str) -> str:
        """As a server that has evicted nothing: a counter with labels has no line until then."""
        assert path == "/metrics"
        assert self.ours, "stock SGLang has no such metric"
        return (
            "# TYPE sglang_kv:prefix_hit_tokens_total counter\n"
            f'sglang_kv:prefix_hit_tokens_total{{model="m",policy="none"}} {100.0 + self.hits}\n'
        )


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> type[TreeServer]:
    monkeypatch.setattr(prefix_orders, "Server", TreeServer)
    monkeypatch.setattr(TreeServer, "started", [])
    monkeypatch.setattr(TreeServer, "asked", [])
    return TreeServer


def run(monkeypatch: pytest.MonkeyPatch, model: Path, out: Path, *flags: str) -> None:
    fixed = ["--model", str(model), "--out", str(out), "--requests", "12", "--metrics-every", "0"]
    monkeypatch.setattr("sys.argv", ["prefix_orders", *fixed, *flags])
    prefix_orders.main()


def test_stock_and_ours_are_asked_the_same(
    served: type[TreeServer], monkeypatch: pytest.MonkeyPatch, demo_model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "prefix_orders.jsonl"
    flags = ("--orders", "stock", "importance", "--traffic", "tenants", "agents")
    run(monkeypatch, demo_model, out, *flags, "--pool", "40000")
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    pairs = [("stock", "tenants"), ("importance", "tenants")]
    pairs += [("stock", "agents"), ("importance", "agents")]
    assert [(row["order"], row["traffic"]) for row in rows] == pairs
    for stock, ours in zip(rows[::2], rows[1::2], strict=True):
        # A request's last token is computed always; the replayer counts by the same rule.
        assert stock["hit_tokens"] == ours["hit_tokens"] == ours["replayed_evenly"] > 0
        assert ours["hit_tokens_by_metrics"] == ours["hit_tokens"]
        assert (ours["evicted_tokens"], stock["hit_tokens_by_metrics"]) == (0, None)
    flags_of_stock, flags_of_ours = served.started  # once for both workloads
    assert "--kv-compression" not in flags_of_stock
    assert flags_of_stock[flags_of_stock.index("--attention-backend") + 1] == "torch_native"
    assert "importance" in flags_of_ours
    assert all("--sleep-on-idle" in flags for flags in served.started)
    # After the warm-ups each request goes to both, the first one changing.
    turns = served.asked[2:6]
    assert turns == ["stock", "ours", "ours", "stock"]
    assert {row["ttft_to_lru"] for row in rows} == {None}


def test_another_tree_than_was_asked_for_is_refused(
    served: type[TreeServer], monkeypatch: pytest.MonkeyPatch, demo_model: Path, tmp_path: Path
) -> None:
    monkeypatch.setattr(served, "stubborn", "impl=HeadPageRadixCache")
    out = tmp_path / "rows.jsonl"
    with pytest.raises(RuntimeError, match="stock: the server runs another tree"):
        run(monkeypatch, demo_model, out, "--orders", "stock", "--pool", "40000")
    assert not out.exists()


def test_a_prompt_must_fit(
    monkeypatch: pytest.MonkeyPatch,
    demo_model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        run(monkeypatch, demo_model, tmp_path / "rows.jsonl", "--pool", "512")
    assert "--context and --pool must hold the longest prompt" in capsys.readouterr().err


def test_the_table_has_a_row_for_each_line(
    served: type[TreeServer], monkeypatch: pytest.MonkeyPatch, demo_model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "prefix_orders.jsonl"
    monkeypatch.setattr(records, "FOLDER", tmp_path)
    assert prefix_tables.served() == NOTHING
    flags = ("--orders", "stock", "lru", "--traffic", "tenants", "agents", "--pool", "40000")
    run(monkeypatch, demo_model, out, *flags)
    again = ("--orders", "lru", "--traffic", "agents", "--pool", "40000")
    run(monkeypatch, demo_model, out, *again)  # of an arm the newest line counts
    rows = records.newest("prefix_orders")
    assert (len(records.lines("prefix_orders")), len(rows)) == (5, 4)
    shown = [line for line in prefix_tables.served().splitlines() if line.startswith("| `")]
    assert len(shown) == 4
    for line, row in zip(shown, rows.values(), strict=True):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert cells[:2] == [f"`{row['traffic']}`", str(row["requests"])]
        assert cells[2] == f"{row['prompt_tokens']:,}"
        assert cells[3:5] == ["40,000", f"`{row['order']}`"]
        assert cells[5] == f"{row['hit_tokens']:,}" != "0"
        assert cells[-1] == ("-" if row["order"] == "stock" else cells[5])
