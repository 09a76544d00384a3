"""The report: agreement, memory, needle tables from recorded trials, and what it recommends."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import spearmanr

from sglang_kv import cli
from sglang_kv.calibration import needles, report, simulate
from sglang_kv.calibration.agreement import overlap, rank_correlation, retrieval_shares
from sglang_kv.calibration.needles import FULL, INVERTED, RANDOM, Arm, Trial, Trials
from sglang_kv.calibration.prefill import compare
from sglang_kv.compression.gates import HeadGates, model_hash, save_gates

VALUES = np.array([[0.0, 0.9], [0.8, 0.1], [0.2, 1.0]], np.float32)
SHARES = ["--sparsity", "0.5", "--window-sparsity", "0.5"]


# -- agreement --


def test_rank_correlation_is_spearmans() -> None:
    rng = np.random.default_rng(0)
    for _ in range(5):
        a, b = rng.random((2, 6, 3)).astype(np.float32).round(1)  # with equal values
        assert rank_correlation(a, b) == pytest.approx(spearmanr(a.ravel(), b.ravel())[0])
    assert rank_correlation(VALUES, VALUES) == pytest.approx(1)
    assert rank_correlation(VALUES, 1 - VALUES) == pytest.approx(-1)
    assert np.isnan(rank_correlation(VALUES, np.ones((3, 2), np.float32)))


def test_overlap_counts_shared_retrieval_heads() -> None:
    assert overlap(VALUES, VALUES, 0.5) == 1
    assert overlap(VALUES, 1 - VALUES, 0.5) == 0
    assert overlap(VALUES, 1 - VALUES, 0) == 1
    assert np.isnan(overlap(VALUES, VALUES, 1))


def test_shares_by_threshold() -> None:
    assert retrieval_shares(VALUES, (0.1, 0.85)) == {0.1: pytest.approx(5 / 6), 0.85: 1 / 3}


# -- trials --


def test_arms_choose_their_heads() -> None:
    other = np.flip(VALUES).copy()
    gates = {"main": VALUES, "other": other}

    def heads(name: str, sparsity: float = 0.5, seed: int = 0) -> list[Any]:
        found: list[Any] = Arm(name, sparsity, 4, 64).heads(gates, "main", seed).tolist()
        return found

    assert heads("main") == [[False, True], [True, False], [False, True]]
    assert heads("other") == np.flip(heads("main")).tolist()
    assert heads(INVERTED) == (~np.array(heads("main"))).tolist()
    assert np.all(heads(FULL, 0.0))
    draws = [heads(RANDOM, seed=seed) for seed in range(6)]
    assert all(np.sum(draw) == 3 for draw in draws)
    assert len({str(draw) for draw in draws}) > 1
    assert heads(RANDOM, seed=3) == draws[3]


def test_trials_are_kept_and_only_of_the_same_model(tmp_path: Path) -> None:
    path = tmp_path / "new" / "needles.jsonl"
    trials = Trials(path, {"model": "a"})
    trial = Trial(Arm("main", 0.5, 4, 64, "d"), 2048, 1, 3, True, -0.25)
    trials.add(trial)
    assert list(Trials(path, {"model": "a"}).rows.values()) == [trial]
    assert not Trials(path, {"model": "b"}).rows
    assert trials.of(trial.arm, seed=1) == [trial]
    assert trials.of(trial.arm, seed=2) == []
    assert trials.of(Arm("main", 0.5, 4, 64, "e")) == []


def test_only_what_the_full_cache_finds_is_tried(tmp_path: Path) -> None:
    tried: list[tuple[str, Any]] = []

    def answer(passkey: Any, tries: Any) -> list[tuple[bool, float]]:
        tried.extend((heads, passkey) for heads, _, _ in tries)
        return [(passkey % 2 == 1 if heads == FULL else True, -1.0) for heads, _, _ in tries]

    arm = Arm("main", 0.5, 4, 64)
    arguments = {
        "texts": lambda length, seed: ([n, n + 1] for n in range(length, length + 100, 2)),
        "heads": lambda arm, seed: arm.name,
        "lengths": (10, 40),
        "seeds": (0,),
        "count": 2,
    }
    trials = Trials(tmp_path / "t.jsonl", {})
    shown: list[int] = []
    needles.run(trials, [arm], answer, progress=shown.append, **arguments)
    # Text by text in turns: 10 and 11 are one text's, 12 and 13 the next one's.
    assert [passkey for heads, passkey in tried if heads == FULL] == [
        10,
        11,
        40,
        41,
        12,
        13,
        42,
        43,
    ]
    assert [passkey for heads, passkey in tried if heads == "main"] == [11, 41, 13, 43]
    assert shown == [1, 2, 3, 4]
    assert len(Trials(trials.path, {}).rows) == 12
    before = len(tried)
    needles.run(Trials(trials.path, {}), [arm], answer, **arguments)
    assert len(tried) == before
    needles.run(Trials(tmp_path / "u.jsonl", {}), [arm], answer, **arguments, deadline=0)
    assert len(tried) == before


def test_a_model_that_finds_nothing_ends(tmp_path: Path) -> None:
    tried: list[Any] = []

    def answer(passkey: Any, tries: Any) -> list[tuple[bool, float]]:
        tried.append(passkey)
        return [(False, -1.0)] * len(tries)

    needles.run(
        Trials(tmp_path / "t.jsonl", {}),
        [Arm("main", 0.5, 4, 64)],
        answer,
        lambda length, seed: ([n] for n in itertools.count()),
        lambda arm, seed: np.ones((1, 1), np.bool_),
        lengths=(10,),
        seeds=(0,),
        count=3,
    )
    assert tried == list(range(3 * needles.TRIES))


def test_both_prefills_are_compared_on_the_same_texts(tmp_path: Path) -> None:
    arm, alone = Arm("main", 0.5, 4, 64), Arm("main", 0.9, 4, 64)
    here, there = Trials(tmp_path / "a.jsonl", {}), Trials(tmp_path / "b.jsonl", {})
    for index, found in enumerate((True, True, True, False)):
        here.add(Trial(arm, 2048, 0, index, found, -1.0))
        here.add(Trial(alone, 2048, 0, index, found, -1.0))
    for index, found in ((1, True), (2, False), (3, True), (9, True)):
        there.add(Trial(arm, 2048, 0, index, found, -2.0))
    (row,) = compare(here, there)
    assert (row["sparsity"], row["tried"], row["here"], row["there"]) == (0.5, 3, 2, 2)
    assert (row["only_here"], row["only_there"], row["likelihood"]) == (1, 1, [-1.0, -2.0])


# -- figures --


def row(sparsity: float, *found: tuple[int, int], window: tuple[int, int] = (64, 256)) -> Any:
    return {
        "name": "main",
        "sparsity": sparsity,
        "sinks": window[0],
        "recent": window[1],
        "by_length": {i: list(counts) for i, counts in enumerate(found)},
    }


def test_the_recommended_sparsity_is_good_and_so_are_all_below() -> None:
    rows = [row(0.9, (40, 40)), row(0.25, (50, 50)), row(0.5, (49, 50)), row(0.75, (48, 50))]
    assert report.recommended(rows) == 0.5
    assert report.recommended([row(0.25, (50, 50), (48, 50))]) is None
    assert report.recommended([row(0.25, (0, 0))]) is None


def test_the_smallest_good_window() -> None:
    rows = [row(0.5, (40, 40), window=(64, 256)), row(0.5, (40, 40), window=(16, 64))]
    assert report.smallest_window([*rows, row(0.5, (30, 40), window=(4, 64))]) == [16, 64]
    assert report.smallest_window([row(0.5, (30, 40))]) is None


def test_memory_is_that_of_the_servers_pages() -> None:
    gates = HeadGates(VALUES, "m", "x", "s")
    arm = Arm("main", 0.5, 64, 256)
    # 4,096 tokens are 256 pages; a streaming head keeps 4 for the sinks and 16 for the window.
    assert report.memory(arm, gates, 4096) == pytest.approx((256 + 4 + 16) / 512, abs=1e-4)
    assert report.memory(Arm("main", 0.0, 64, 256), gates, 4096) == 1
    assert report.memory(arm, gates, 256) == 1


# -- the command --


@pytest.fixture
def files(tmp_path: Path, folder: Path) -> list[str]:
    paths = []
    for name, values in (("first", VALUES), ("second", np.flip(VALUES))):
        gates = HeadGates(values, "tiny", name, "", 8, 64, model_hash(folder))
        save_gates(tmp_path / f"{name}.json", gates)
        paths.append(str(tmp_path / f"{name}.json"))
    return paths


def command(common: list[str], files: list[str], out: Path, *more: str) -> list[str]:
    sizes = [
        "--lengths",
        "900",
        "--samples",
        "1",
        "--passkeys",
        "2",
        "--seeds",
        "0",
        "1",
        "--dtype",
        "float32",
    ]
    windows = ["--windows", "4+16", "8+64", *SHARES]
    named = ["calibrate-report", common[0], *files, *common[1:], "--out", str(out)]
    return [*named, *sizes, *windows, *more]


def test_a_report_is_written_and_completed(
    common: list[str],
    files: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "report"
    arguments = command(common, files, out, "--no-plots")
    cli.main([*arguments, "--minutes", "0"])
    assert "No passkeys were tried." in (out / "report.md").read_text()

    calls: list[Any] = []

    def finds(self: Any, passkey: Any, tries: Any) -> list[tuple[bool, float]]:
        calls.extend((sinks, recent) for _, sinks, recent in tries)
        return [(bool(heads[0, 1]), -0.5) for heads, _, _ in tries]  # one of the first file's

    monkeypatch.setattr(simulate.Answers, "__call__", finds)
    cli.main(arguments)
    assert capsys.readouterr().out.splitlines()[-1] == str(out / "report.md")
    text = (out / "report.md").read_text()
    data = json.loads((out / "report.json").read_text())
    assert data["recommended"] == 0.5
    assert "**Recommended sparsity: 0.5**" in text
    assert "| first | 50% | " in text
    assert "| inverted | 50% | " in text
    assert "0/2" in next(line for line in text.splitlines() if line.startswith("| inverted"))
    assert "The smallest that keeps 98 % at every length: 4 + 16." in text
    assert "| first, second | " in text
    # Full, and five arms: the two files, random, inverted, and the other window.
    assert len(calls) == 2 * 6
    assert (4, 16) in calls
    cli.main(arguments)
    assert len(calls) == 2 * 6
    assert (out / "report.md").read_text() == text
    assert "**Dense prefill, heads cut afterwards**" in text
    assert "## Dense and windowed prefill" not in text

    # The same folder takes the stricter prefill; then the two are compared.
    cli.main([*arguments, "--prefill", "windowed", "--control-sparsity", "0.75"])
    assert len(calls) == 2 * 2 * 6
    strict = (out / "report.md").read_text()
    assert "**Windowed prefill**" in strict
    assert "| random | 75% | " in strict
    assert "| random | 50% | " not in strict.split("## Dense and windowed")[0]
    assert "| first | 50% | 8 + 64 | 2/2 | 2/2 | 0 | 0 | -0.50 | -0.50 |" in strict


def test_the_report_draws_plots(common: list[str], files: list[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs the bench extra")
    out = tmp_path / "report"
    cli.main(command(common, files, out))
    names = sorted(path.name for path in out.glob("*.png"))
    assert set(names) >= {"heads-first.png", "heads-second.png", "sorted.png"}
    text = (out / "report.md").read_text()
    assert all(f"]({name})" in text for name in names)


def test_plots_without_matplotlib_are_refused_at_once(
    common: list[str], files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit, match=r"pip install 'sglang-kv\[bench\]', or give --no-plots"):
        cli.main(command(common, files, tmp_path / "report"))


def test_another_models_gates_are_refused(
    common: list[str], files: list[str], tmp_path: Path
) -> None:
    wide = HeadGates(np.ones((3, 6)), "other", "x", "")
    save_gates(tmp_path / "wide.json", wide)
    save_gates(tmp_path / "hash.json", HeadGates(VALUES, "other", "x", "", model_hash="sha256:0"))
    for name, message in (
        ("wide", r"wide.json holds gates for 3 layers of 6 KV heads, this model has 3 of 2"),
        ("hash", r"hash.json holds gates of other with other weights .sha256:0"),
    ):
        bad = [str(tmp_path / f"{name}.json")]
        with pytest.raises(SystemExit, match=message):
            cli.main(command(common, bad, tmp_path / "report", "--no-plots"))
    with pytest.raises(SystemExit, match=r"GATES: .*another name than 'first'"):
        cli.main(command(common, [files[0], files[0]], tmp_path / "report", "--no-plots"))
