"""What the benchmarks have recorded, for tables, plots and claims."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from sglang_kv.benchmarks.methods import arms

Row = dict[str, Any]

FOLDER = Path(__file__).resolve().parent / "results"


def lines(name: str) -> list[Row]:
    """All lines of ``results/NAME.jsonl``, oldest first; none where there is no such file."""
    path = FOLDER / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def newest(name: str, **fields: Any) -> dict[str, Row]:
    """The newest line of each arm of a benchmark, in the order the arms first appeared.

    Of lines with these ``fields`` only.
    """
    found = [row for row in lines(name) if fields.items() <= row.items()]
    return {row["arm"]: row for row in found}


def last(name: str, fits: Callable[[Row], bool], **fields: Any) -> Row | None:
    """The newest line with these ``fields`` that ``fits``."""
    found = [row for row in lines(name) if fields.items() <= row.items() and fits(row)]
    return found[-1] if found else None


def of_method(method: str, **parameters: Any) -> Callable[[Row], bool]:
    """Lines of one method with just these parameters."""
    return lambda row: row.get("policy") == {"method": method, **parameters}


def needle_cells() -> dict[str, dict[tuple[str, str], Row]]:
    """Of each arm, by kind and column: its cell with the most cases, its line's facts beside it.

    Of an arm whose policy has changed since, only lines with the newest one count.
    """
    rows = [row for row in lines("quality") if row["suite"] == "needle"]
    policies = {row["arm"]: row["policy"] for row in rows}
    arms: dict[str, dict[tuple[str, str], Row]] = {}
    for row in rows:
        if row["policy"] != policies[row["arm"]]:
            continue
        cells = arms.setdefault(row["arm"], {})
        for cell in row["summary"]:
            at = (cell["kind"], cell["column"])
            if at not in cells or cell["n"] >= cells[at]["n"]:
                about = {key: row[key] for key in ("memory", "seed", "model")}
                cells[at] = {**cell, **about, "lengths": row["settings"]["lengths"]}
    return arms


def at_once() -> list[Row]:
    """The newest counts of requests at once: stock SGLang, then in the order of `methods.arms`.

    With the model's own weights where there is such a line.
    """
    counts = [row for row in lines("concurrency") if "new_tokens" in row]
    counts.sort(key=lambda row: not row.get("shape_only"))
    rows = {row["arm"]: row for row in counts}
    if not rows:
        return []
    order = ["stock", *arms(counts[0]["context"])]
    return sorted(rows.values(), key=lambda row: order.index(row["arm"]))


def number_needles(arm: str, column: str = "aware") -> Row | None:
    """The seven-digit needles of an arm, where it has such a cell."""
    return needle_cells().get(arm, {}).get(("number", column))


@cache
def planned(*argv: str) -> list[Row]:
    """What ``sglang-kv plan ... --json`` says, a row per cell of its table."""
    from sglang_kv.planner import command

    found = json.loads(command.output(*argv, "--json"))
    return found if isinstance(found, list) else [found]
