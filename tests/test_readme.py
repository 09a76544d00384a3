"""README and docs say and show what the benchmarks recorded and the registry has."""

import json
import re
import subprocess
from pathlib import Path

import pytest
from quality_lines import perplexity, write

from sglang_kv.benchmarks import claims, claims_quality, figure, figures, plots, records, report

STALE = "run: python -m sglang_kv.benchmarks.report --write --plots"


@pytest.mark.parametrize("document", report.DOCUMENTS)
def test_tables_are_current(root: Path, document: str) -> None:
    text = (root / document).read_text()
    for name in report.DOCUMENTS[document]:
        assert f"<!-- {name} -->" in text
    assert report.render(text) == text, STALE


def test_plots_are_current(root: Path) -> None:
    """Every file carries the digest of what it shows; and none is left over."""
    wanted = {f"{f.name}.{kind}": f for f in figures.figures() for kind in ("svg", "png")}
    folder = root / report.FIGURES
    assert {path.name for path in folder.iterdir()} == set(wanted), STALE
    for name, shown in wanted.items():
        assert plots.is_current(folder / name, shown), STALE


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the results, to change."""
    for path in records.FOLDER.glob("*.jsonl"):
        (tmp_path / path.name).write_text(path.read_text())
    monkeypatch.setattr(records, "FOLDER", tmp_path)
    return tmp_path


def test_another_result_makes_documents_and_plots_stale(root: Path, results: Path) -> None:
    """One more hit in one line, and table, claim and plot all say something else."""
    before = {f.name: f.digest for f in figures.figures()}
    path = results / "quality.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    changed = [
        cell
        for row in lines
        if row["suite"] == "needle" and row["arm"] == "snapkv 0.16"
        for cell in row["summary"]
        if cell["kind"] == "number" and cell["kept"] == 3
    ]
    assert changed
    for cell in changed:
        cell["kept"] += 1
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for document in ("docs/QUALITY.md", "docs/CHOOSING.md"):
        text = (root / document).read_text()
        assert report.render(text) != text
    after = {f.name: f.digest for f in figures.figures()}
    assert {name for name in before if before[name] != after[name]} == {"quality-memory"}


def test_without_lines_nothing_is_claimed(results: Path) -> None:
    """Every claim that is not the planner's or plain arithmetic says that it is not measured."""
    for path in results.iterdir():
        path.unlink()
    verdicts = [line.rsplit("|", 2)[-2].strip() for line in claims.table().splitlines()[2:]]
    known = [verdict for verdict in verdicts if verdict != "not measured yet"]
    assert len(verdicts) == len(claims.CLAIMS)
    assert len(known) == 4  # 70 % of the memory, FLOP per byte, 16 GiB, the method table
    assert figures.figures() == []


def test_a_claim_that_fails_says_so(results: Path) -> None:
    policy = {"method": "streamingllm", "sinks": 0, "recent": 1024}
    (results / "endless_stream.jsonl").unlink()  # where there are its lines, they decide
    for ppl, verdict in ((5158.0, "holds"), (90.0, "in part"), (11.0, "no collapse here")):
        write(results, "quality", perplexity("window", policy, {8000: ppl / 10}))
        found = claims_quality.no_sinks_collapse()
        assert found is not None
        assert found[1] == verdict
        assert re.search(rf"window: {ppl:.0f} beside 10\.0, 8,000 tokens; SmolLM2", found[0])


@pytest.mark.parametrize(("flags", "minutes"), [(["--quick"], 8), ([], 90), (["--full"], 720)])
def test_reproducing_has_a_budget_for_each_part(root: Path, flags: list[str], minutes: int) -> None:
    command = [str(root / "scripts" / "reproduce.sh"), *flags, "--list"]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    parts = [line.split() for line in listed.splitlines()]
    names = {part[0] for part in parts}
    assert {"speed", "concurrency", "report"} <= names
    assert names & {"needle", "quality"}
    if flags == ["--full"]:
        assert {"ruler", "fidelity", "perplexity", "pressure", "calibration", "bench"} <= names
    assert sum(int(part[1]) for part in parts) <= minutes
    # With its n, or why it has nothing to run.
    assert all(len(part) == 4 or part[3:5] == ["left", "out:"] for part in parts)


def test_the_best_points_are_those_that_none_beats() -> None:
    points = [(0.1, 0.5), (0.2, 0.9), (0.2, 0.8), (0.3, 0.9), (1.0, 1.0)]
    assert figure.best(points) == [True, True, False, False, True]


def test_plots_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    paths = plots.draw(tmp_path)
    assert len(paths) == 2 * len(figures.figures())
    for drawn in figures.figures():
        for kind in ("svg", "png"):
            assert plots.is_current(tmp_path / f"{drawn.name}.{kind}", drawn)
