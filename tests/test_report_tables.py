"""What the documents' tables take from the lines, and what they say of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from quality_lines import agreed, fidelity, line, needle, perplexity, write

from sglang_kv.benchmarks import bench_tables, choosing, figures, headline, plots, records
from sglang_kv.benchmarks import quality_tables as tables
from sglang_kv.benchmarks.methods import copy, not_the_preset

WINDOW: dict[str, Any] = {"method": "streamingllm", "budget": 1024}
SNAPKV: dict[str, Any] = {"method": "snapkv", "keep_ratio": 0.25}
EARLIER = {**copy(0.25), "head_floor": 0.1}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where lines are read from; none at first."""
    monkeypatch.setattr(records, "FOLDER", tmp_path)
    return tmp_path


def row_of(table: str, name: str) -> list[str]:
    (row,) = [r for r in table.splitlines() if r.startswith(f"| {name} |")]
    return [cell.strip() for cell in row.strip("|").split("|")]


# Which lines count


def test_needles_by_length_are_of_one_run(folder: Path) -> None:
    """A window of 1,024 keeps all of 1,024 tokens and a quarter of 4,096."""
    hits = {1024: (5, 5), 2048: (3, 5), 4096: (1, 5)}
    small = needle("window", WINDOW, {4096: (3, 3)})
    other = needle("window", WINDOW, {7500: (0, 40)})
    write(folder, "quality", small, needle("window", WINDOW, hits, memory=0.59), other)
    whole, quarter = (records.number_needles("window", length=n) for n in (None, 4096))
    assert whole is not None
    assert (whole["kept"], whole["full_hits"], whole["lengths"]) == (0, 40, [7500])
    # Of the larger run that has this length, though the largest has not.
    assert quarter is not None
    assert (quarter["kept"], quarter["full_hits"], quarter["lengths"]) == (1, 5, [4096])
    assert quarter["memory"] is None  # 0.59 is of three lengths
    assert records.number_needles("window", length=512) is None
    write(folder, "quality", small)
    alone = records.number_needles("window", length=4096)
    assert alone is not None
    assert alone["memory"] == 0.25


def test_a_short_run_takes_nothing_away(folder: Path) -> None:
    long = fidelity("a", SNAPKV, *(agreed(n, 180, 192, n=3) for n in (1024, 2048, 4096)))
    short = fidelity("a", SNAPKV, agreed(2048, 50, 64, n=1), agreed(8000, 60, 64, n=1))
    again = fidelity("a", SNAPKV, agreed(4096, 190, 192, n=3), commit="def")
    write(folder, "quality", long, short, again)
    cells = records.suite_cells("fidelity", "length")["a"]
    assert {n: cell["agreed"] for (n,), cell in cells.items()} == {
        **{1024: 180, 2048: 180},
        **{4096: 190},  # as many prompts, and newer
        **{8000: 60},
    }
    assert records.largest_lines("fidelity")["a"]["cells"] == long["cells"]
    text = tables.fidelity()
    assert row_of(text.split("\n\n")[0], "a")[2:] == [
        "93.8% (89% - 96%), 0.010",
        "93.8% (89% - 96%), 0.010",
        "99.0% (96% - 100%), 0.010",
        "93.8% (85% - 98%), 0.010",
    ]
    assert "n = 64 to 192 tokens of 1 to 3 prompts" in text
    assert "texts: a.txt; commits abc, def." in text
    assert "| a | seen | 4 (1/3) | 4 (1/3) | 4 (1/3) | 4 (1/1) |" in text


def test_lines_that_no_table_takes(folder: Path) -> None:
    """Another model's, an earlier policy's, and those of 8-bit pages."""
    mine = fidelity("a", SNAPKV, agreed(1024, 180, 192))
    more = [agreed(1024, 0, 999, n=9)]
    other = fidelity("a", SNAPKV, *more, model="another")
    before = fidelity("a", {**SNAPKV, "window": 8}, *more)
    pages = fidelity("a", SNAPKV, *more, settings={"kv_cache_dtype": "fp8_e4m3"})
    write(folder, "quality", before, other, mine, pages)
    (cell,) = records.suite_cells("fidelity", "length")["a"].values()
    assert cell["agreed"] == 180


def test_columns_stay_where_a_length_is_missing(folder: Path) -> None:
    write(
        folder,
        "quality",
        perplexity("a", SNAPKV, {2048: 1.1, 8000: 1.2}),
        perplexity("b", WINDOW, {8000: 1.3}),
    )
    table = tables.perplexity()
    assert row_of(table, "arm") == ["arm", "2,048 tokens", "8,000 tokens"]
    assert row_of(table, "a")[1:] == [
        "11.00 (1.100x, 1.090 - 1.110)",
        "12.00 (1.200x, 1.190 - 1.210)",
    ]
    assert row_of(table, "b")[1:] == ["-", "13.00 (1.300x, 1.290 - 1.310)"]
    assert "n = 4,096, 16,000 tokens" in table


def test_kinds_of_needles_that_were_run_have_columns(folder: Path) -> None:
    rows = [needle("a", SNAPKV, {2048: (3, 4)}), needle("a", SNAPKV, {2048: (1, 2)}, kind="word")]
    write(folder, "quality", *rows)
    table = tables.needles()
    assert "multikey, question" not in table.splitlines()[0]
    assert table.endswith("Not run: multikey, multivalue, multiquery.")
    write(folder, "quality", *rows, needle("a", SNAPKV, {2048: (2, 5)}, kind="multivalue"))
    table = tables.needles()
    heads = row_of(table, "arm")
    assert row_of(table, "a")[heads.index("multivalue, question seen")] == "2/5"
    assert table.endswith("Not run: multikey, multiquery.")


def test_graded_tasks(folder: Path) -> None:
    assert tables.graded("longbench") == "(not run: no line of this suite is recorded)"

    def cell(task: str, score: float, able: bool) -> dict[str, Any]:
        about = {"column": "aware", "task": task, "length": 2048, "n": 4, "able": able}
        return about | {"score": score}

    def graded(arm: str, policy: dict[str, Any], score: float) -> dict[str, Any]:
        cells = [cell("qa_1", score, able=True), cell("vt", 0.1, able=False)]
        mean = {"column": "aware", "length": 2048, "n": 4, "score": score}
        mean["interval"] = [score - 0.1, score + 0.1]
        return line("ruler", arm, policy, cells=cells, summary=[mean])

    write(folder, "quality", graded("none", {"method": "none"}, 0.8), graded("a", SNAPKV, 0.5))
    table = tables.graded("ruler")
    assert table.startswith("2,048 tokens:")
    assert row_of(table, "arm")[3:] == ["qa_1 (n = 4)", "vt x (n = 4)"]
    assert row_of(table, "none")[1:] == ["-", "80.0 (70% - 90%)", "80.0", "10.0"]
    assert row_of(table, "a")[1:] == ["seen", "50.0 (40% - 60%)", "50.0", "10.0"]


# The headline


def speed(arm: str, policy: dict[str, Any] | None, tok_s: float, **more: Any) -> dict[str, Any]:
    env = line("", "", {})["environment"]
    about = {"benchmark": "decode_speed", "arm": arm, "policy": policy, "batch": 8, "context": 4000}
    about |= {"decode_tok_s": tok_s, "prefill_tok_s": 500.0, "ratio_to_first_arm": 1.0}
    return {**about, "environment": env, **more}


def counted(arm: str, policy: dict[str, Any] | None, n: int, **more: Any) -> dict[str, Any]:
    about = {"benchmark": "concurrency", "arm": arm, "policy": policy, "running_at_once": n}
    size = {"context": 4000, "new_tokens": 64, "pool_tokens": 34000, "predicted": n}
    return {**about, **size, "environment": line("", "", {}, commit="count")["environment"], **more}


def test_memory_and_needles_of_a_row_are_of_one_length(folder: Path) -> None:
    assert headline.table() == "(no results recorded yet)"
    streaming = {"method": "streamingllm", "budget": 1000}
    rows = [speed("stock", None, 10.0), speed("streamingllm 1/4", streaming, 150.0)]
    write(folder, "decode_speed", *rows, speed("copy 1/4", EARLIER, 120.0))
    write(
        folder,
        "concurrency",
        counted("none", {"method": "none"}, 8),
        counted("stock", None, 7, shape_only=True),
    )
    hits = {1024: (5, 5), 2048: (3, 5), 4096: (1, 5)}
    write(
        folder,
        "quality",
        needle("streamingllm 0.25", WINDOW, hits, memory=0.59, commit="run"),
        needle("copy 0.25", copy(0.25), {4096: (9, 9), 7500: (0, 2)}),
    )
    table = headline.table()
    heads = row_of(table, "")
    assert heads[-1] == "7-digit needles at 4,096"
    shown = dict(zip(heads, row_of(table, "`streamingllm`, 4 + 996"), strict=True))
    assert shown["KV memory"] == "26%"
    assert shown["beside stock"] == "15.0x"  # of the speeds, whatever the first arm of the run was
    assert shown["7-digit needles at 4,096"] == "1/5"
    assert row_of(table, "preset `copy`, 1/4 kept")[-1] == "9/9"
    assert row_of(table, "stock SGLang (`torch_native`)")[2] == "7"
    said = table.splitlines()[-1]
    assert "Speed: commit abc, 2026-01-02." in said
    assert "in memory for 34,000, commit count (stock: random weights of that shape)." in said
    assert "the run with the most cases, commit abc." in said
    assert "The speed of `copy`: with an earlier `head_floor` 0.1." in said


def test_the_headline_is_of_the_demo_model_and_one_shape(folder: Path) -> None:
    rows = [speed("stock", None, 10.0), speed("none", {"method": "none"}, 80.0)]
    write(folder, "decode_speed", *rows, speed("none", {"method": "none"}, 7.0, model="another"))
    assert row_of(headline.table(), "sglang-kv, `none`")[3] == "80 tok/s"
    mine = speed("none", {"method": "none"}, 90.0, model=records.DEMO)
    write(folder, "decode_speed", *rows, mine)
    assert row_of(headline.table(), "sglang-kv, `none`")[3] == "90 tok/s"
    # Another context is no row beside these.
    write(folder, "decode_speed", {**mine, "context": 500}, *rows)
    assert row_of(headline.table(), "sglang-kv, `none`")[3] == "80 tok/s"


# Choosing


def test_advice_stands_beside_what_was_measured(folder: Path) -> None:
    hits = {1024: (5, 5), 2048: (3, 5), 4096: (1, 5)}
    write(
        folder,
        "quality",
        needle("streamingllm 0.25", WINDOW, hits, memory=0.59),
        fidelity("copy 0.16", {**EARLIER, "keep_ratio": 0.16}, agreed(7500, 178, 192)),
    )
    table = choosing.traffic()
    (window,) = [row for row in table.splitlines() if row.startswith("| endless dialogue")]
    assert "| 1/5 (4% - 62%; streamingllm 0.25) |" in window
    assert "9/15" not in table
    assert "4,096 |" not in window  # no window that was not measured
    assert "92.7% of 192 at 7,500 (88% - 96%; copy 0.16, `head_floor` 0.1)" in table
    assert table.count("not measured yet") == 4 * 6 - 2


@pytest.mark.parametrize(
    ("arm", "policy", "expected"),
    [
        ("copy 1/4", EARLIER, "`head_floor` 0.1"),
        ("copy 0.16", {**EARLIER, "window": 8}, "`window` 8, `head_floor` 0.1"),
        ("copy 1/4", {**copy(0.25), "head_floor": 0.2}, ""),  # the default, said aloud
        ("copy 0.1", copy(0.1), ""),  # the share is the arm's own
        ("snapkv 0.25", {**SNAPKV, "head_floor": 0.1, "head_budgets": "gates"}, ""),
        ("stock", None, ""),
    ],
)
def test_an_earlier_preset_is_named(arm: str, policy: dict[str, Any] | None, expected: str) -> None:
    assert sorted(not_the_preset(arm, policy).split(", ")) == sorted(expected.split(", "))


# Under load, and plots


def test_what_bench_recorded(folder: Path) -> None:
    assert bench_tables.bench() == "(no results recorded yet)"
    workload = {"name": "document", "requests": 8, "context": 4000, "output": 64, "question": 32}
    workload |= {"turns": 1, "groups": 1}
    times = {"p50": 1000.0, "p99": 2000.0}
    about = {"workload": workload, "model": "m", "device": "cpu", "flags": ["--a"], "seed": 0}
    about |= {"requests_per_s": 0.5, "output_tok_s": 32.0, "ttft_ms": times, "tpot_ms": times}
    about |= {"running_at_once": 4, "kv_bytes": {"peak": 2**20}, "hit_rate": 0.0}
    env = line("", "", {})["environment"]
    rows = [
        {**about, "arm": "none", "flags": ["--other-pool"], "environment": env},
        {**about, "arm": "none", "output_tok_s": 1.0, "environment": env},
        {**about, "arm": "none", "environment": env},
        {**about, "arm": "snapkv 1/4", "refused": "too long", "environment": env},
    ]
    write(folder, "throughput", *rows)
    text = bench_tables.bench()
    assert row_of(text, "none")[:3] == ["none", "0.500", "32.0"]
    assert "refused: too long" in text
    assert "2 cores of an AMD EPYC" in text
    assert "commits abc; one run of each arm." in text


def test_intervals_are_drawn() -> None:
    points = ((0.0, 1.0, 0.9, 1.2), (1.0, 2.0, None, None))
    below, above = plots.bars_of(points) or ([], [])
    assert below == pytest.approx([0.1, 0.0])
    assert above == pytest.approx([0.2, 0.0])
    assert plots.bars_of(points[1:]) is None


def test_plots_by_position_have_intervals(folder: Path) -> None:
    write(folder, "quality", perplexity("a", SNAPKV, {8000: 1.2}))
    figure = figures.perplexity_against_position()
    assert figure is not None
    (point,) = figure.series[0].points
    assert point == (0.0, 1.2, pytest.approx(1.19), pytest.approx(1.21))
    assert figure.note.endswith("bars: 95 %, tokens taken as independent")
