"""The series behind the plots, from the recorded lines; no drawing."""

from __future__ import annotations

from collections.abc import Callable

from sglang_kv.benchmarks import endless_figures
from sglang_kv.benchmarks.common import wilson
from sglang_kv.benchmarks.figure import Figure, Series
from sglang_kv.benchmarks.methods import not_the_preset
from sglang_kv.benchmarks.records import (
    Row,
    at_once,
    largest_lines,
    needle_cells,
    newest,
    suite_cells,
)

#: The workload whose hits by memory are plotted.
PREFIXES = "shared_system_prompts"


def quality_against_memory() -> Figure | None:
    """Needles kept against memory kept, one point per arm with the question seen."""
    points: list[Series] = []
    lengths, models = set[int](), set[str]()
    for cells in needle_cells().values():
        cell = cells.get(("number", "aware"))
        if cell is None or not cell["full_hits"] or cell["memory"] is None:
            continue
        low, high = cell["kept_interval"]
        share = cell["kept"] / cell["full_hits"]
        points.append(
            Series(f"{_label(cell)} (n={cell['full_hits']})", ((cell["memory"], share, low, high),))
        )
        lengths |= set(cell["lengths"])
        models.add(cell["model"])
    if not points:
        return None
    return Figure(
        "quality-memory",
        f"7-digit needles against memory ({_named(models, lengths)}, question seen)",
        "share of the KV memory kept",
        "needles kept, of the full cache's",
        "points",
        tuple(points),
        "bars: 95 %; filled: no other arm keeps more with less",
    )


def agreement_against_memory() -> Figure | None:
    """Next-token agreement against memory kept, over all lengths of an arm's largest run."""
    points = []
    lengths, models = set[int](), set[str]()
    for row in largest_lines("fidelity").values():
        cells = [cell for cell in row["cells"] if cell["column"] == "aware"]
        agreed, tokens = (sum(cell[key] for cell in cells) for key in ("agreed", "tokens"))
        if not tokens:
            continue
        low, high = wilson(agreed, tokens) or (None, None)
        point = (row["memory"], agreed / tokens, low, high)
        points.append(Series(f"{_label(row)} (n={tokens})", (point,)))
        lengths |= {cell["length"] for cell in cells}
        models.add(row["model"])
    if not points:
        return None
    return Figure(
        "agreement-memory",
        f"Same next token as the full cache, against memory ({_named(models, lengths)})",
        "share of the KV memory kept",
        "same next token",
        "points",
        tuple(points),
        "bars: 95 %, tokens taken as independent; filled: no other arm agrees more with less",
    )


def throughput_against_context() -> Figure | None:
    """Decode speed by context, of arms measured at two contexts or more."""
    at: dict[str, dict[int, float]] = {}
    for row in newest("decode_shapes", page_size=16).values():
        at.setdefault(row["name"], {})[row["context"]] = row["decode_tok_s"]
    series = [
        Series(arm, tuple((n, speeds[n], None, None) for n in sorted(speeds)))
        for arm, speeds in at.items()
        if len(speeds) > 1
    ]
    if not series:
        return None
    title = "Decode throughput against context (the demo model, one CPU server)"
    name, y = "throughput-context", "output tokens per second"
    return Figure(name, title, "prompt tokens", y, "lines", tuple(series))


def requests_that_fit() -> Figure | None:
    """Requests at once in one pool, measured beside the arithmetic."""
    rows = at_once()
    if not rows:
        return None
    measured = tuple((row["arm"], float(row["running_at_once"]), None, None) for row in rows)
    planned = tuple((row["arm"], float(row["predicted"]), None, None) for row in rows)
    first = rows[0]
    return Figure(
        "requests-that-fit",
        f"Requests at once, prompts of {first['context']:,} tokens in memory for "
        f"{first['pool_tokens']:,}",
        "",
        "requests running at once",
        "bars",
        (Series("measured", measured), Series("by the arithmetic", planned)),
    )


def perplexity_against_position() -> Figure | None:
    """Perplexity beside the full cache's on the same tokens, by position in the longest text."""
    arms = suite_cells("perplexity", "length", "from")
    every = [cell for cells in arms.values() for cell in cells.values()]
    if not every:
        return None
    longest = max(cell["length"] for cell in every)
    series = []
    for arm, cells in arms.items():
        shown = sorted((c for c in cells.values() if c["length"] == longest), key=_start)
        points = tuple((float(c["from"]), c["ratio"], *c["ratio_interval"]) for c in shown)
        if points and arm != "none":
            series.append(Series(_label(shown[0]), points))
    models = {cell["model"] for cell in every}
    return Figure(
        "perplexity-position",
        f"Perplexity beside the full cache's ({_named(models, {longest})})",
        "position",
        "perplexity / full cache's",
        "lines",
        tuple(series),
        "methods that act once begin at their fold, half the text; bars: 95 %, tokens taken as "
        "independent",
    )


def _label(row: Row) -> str:
    """The arm, and what a preset's was measured with that is the preset's no more."""
    other = not_the_preset(row["arm"], row["policy"]).replace("`", "")
    return f"{row['arm']}, {other}" if other else str(row["arm"])


def _start(cell: Row) -> int:
    return int(cell["from"])


def hit_rate_against_memory() -> Figure | None:
    """Hit rate of each order against memory, on the first workload."""
    rows = [row for row in newest("prefix_replay").values() if row["workload"] == PREFIXES]
    if not rows:
        return None
    series = []
    for order in rows[0]["hit_tokens"]:
        points = tuple(
            (
                row["memory_tokens"] / 1024,
                round(row["hit_tokens"][order] / row["prompt_tokens"], 4),
                None,
                None,
            )
            for row in sorted(rows, key=lambda row: int(row["memory_tokens"]))
        )
        series.append(Series(order, points))
    return Figure(
        "prefix-hits-memory",
        f"Hit rate against memory ({PREFIXES}, {rows[0]['requests']} requests, replayed)",
        "memory, thousands (1,024) of tokens",
        "prompt tokens hit",
        "lines",
        tuple(series),
    )


def _named(models: set[str], lengths: set[int]) -> str:
    shown = ", ".join(f"{n:,}" for n in sorted(lengths))
    return f"{', '.join(sorted(models))}, {shown} tokens"


MAKERS: tuple[Callable[[], Figure | None], ...] = (
    quality_against_memory,
    agreement_against_memory,
    throughput_against_context,
    requests_that_fit,
    perplexity_against_position,
    endless_figures.figure,
    hit_rate_against_memory,
)


def figures() -> list[Figure]:
    """Those that there are lines for."""
    return [figure for make in MAKERS if (figure := make()) is not None]
