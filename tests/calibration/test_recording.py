"""Lines of results about calibrations: times of stopped runs, and a report's rows."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from sglang_kv.benchmarks import calibration, calibration_tables

WRITES = """
import json, pathlib, sys, time
out = pathlib.Path(sys.argv[sys.argv.index("--out") + 1])
while time.process_time() < 0.3:
    pass
out.write_text(json.dumps({"model": "m", "parameters": {"samples": 2}, "sinks": 4, "recent": 8}))
"""


def test_a_stopped_calibrations_time_counts_all_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script, program = tmp_path / "work.py", tmp_path / "python"
    script.write_text(WRITES)
    first = tmp_path / "first"
    first.touch()
    # The first piece never ends by itself, and is stopped wherever a busy machine has let it come.
    program.write_text(
        f"#!/bin/sh\nif [ -e {first} ]; then exec sleep 600; fi\n"
        f'exec {sys.executable} {script} "$@"\n'
    )
    program.chmod(0o755)
    monkeypatch.setattr(calibration.sys, "executable", str(program))
    lines: list[Any] = []
    monkeypatch.setattr(calibration, "record", lambda name, row: lines.append((name, row)))
    args = argparse.Namespace(
        model=tmp_path, method="trained", out=tmp_path / "g.json", minutes=1 / 60
    )
    with pytest.raises(SystemExit, match="not done yet"):
        calibration.time_calibration(args, ["--seed", "3"])
    assert not lines
    first.unlink()
    args.minutes = None
    calibration.time_calibration(args, ["--seed", "3"])
    ((name, row),) = lines
    assert (name, row["arm"], row["pieces"]) == ("calibration", "trained", 2)
    # The first piece ran into its limit of a second, the second worked for 0.3 s; tenths are kept.
    assert row["seconds"] >= 1.3
    assert 0.3 <= row["cpu_seconds"] < row["seconds"]
    assert row["parameters"] == {"samples": 2}
    assert sorted(path.name for path in tmp_path.glob("g.*")) == ["g.json"]


def test_a_failed_calibration_is_no_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "record", lambda name, row: pytest.fail("recorded"))
    args = argparse.Namespace(
        model=tmp_path, method="trained", out=tmp_path / "g.json", minutes=None
    )
    with pytest.raises(calibration.subprocess.CalledProcessError):
        calibration.time_calibration(args, [])


def test_a_reports_rows_become_lines() -> None:
    row = {"name": "main", "sparsity": 0.5, "sinks": 4, "recent": 64}
    data = {
        "model": "m",
        "hash": "sha256:1",
        "settings": {"lengths": [2048]},
        "full": {"name": "full", "sparsity": 0.0},
        "needles": [row, {**row, "name": "random"}],
        "windows": [row],
        "prefill": [{**row, "here": 3}],
        "gates": [{"name": "main", "method": "trained", "shares": {"0.5": 0.2}, "values": [[1]]}],
        "agreement": [{"first": "a", "second": "b", "rank_correlation": 0.9}],
        "recommended": 0.5,
        "window": [4, 64],
    }
    lines = list(calibration.rows(data))
    kinds = [(line["kind"], line["arm"]) for line in lines]
    assert kinds == [
        ("needles", "main 0.5 4+64"),
        ("needles", "random 0.5 4+64"),
        ("windows", "main 0.5 4+64"),
        ("prefill", "main 0.5 4+64"),
        ("needles", "full"),
        ("shares", "main"),
        ("agreement", "a, b"),
        ("chosen", "main"),
    ]
    assert all(line["model_hash"] == "sha256:1" and line["settings"] for line in lines)
    assert lines[3]["here"] == 3
    assert lines[-1]["recommended"] == 0.5
    json.dumps(lines)


def test_tables_show_the_newest_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    def line(arm: str, found: int, passkeys: int = 1, **more: Any) -> dict[str, Any]:
        name, _, share = arm.partition(" ")
        return {
            "arm": arm,
            "kind": "needles",
            "name": name,
            "sparsity": float(share or 0),
            "memory": {"2048": 0.5, "4096": 0.3},
            "by_length": {"2048": [found, 20], "4096": [found, 20]},
            "by_seed": {"0": [2 * found, 40]},
            "settings": {"passkeys": passkeys, "prefill": "dense"},
            **more,
        }

    recorded = [line("a 0.5", 10), line("full", 20), line("a 0.5", 19), line("a 0.5", 1, 5)]
    monkeypatch.setattr(calibration_tables, "lines", lambda name: recorded)
    table = calibration_tables.needles(1).splitlines()
    assert table[2:] == [
        "| full | 0% | 0.30 | 20/20 | 20/20 | 40/40 | (40 of 40 tried) |",
        "| a | 50% | 0.30 | 19/20 | 19/20 | 38/40 | 95.0% |",
    ]
    assert "| a | 50% | 0.30 | 1/20 | 1/20 | 2/40 | 5.0% |" in calibration_tables.needles(5)
    assert calibration_tables.prefill() == calibration_tables.times() == "(no results recorded yet)"
