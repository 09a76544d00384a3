"""What the benchmarks have recorded, for tables, plots and claims."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

from sglang_kv.benchmarks.common import wilson
from sglang_kv.benchmarks.methods import arms

Row = dict[str, Any]
#: Of each arm, its cells by some of their keys.
Cells = dict[str, dict[tuple[Any, ...], Row]]

#: The model of README and docs. Lines that name no model are of it.
DEMO = "SmolLM2-135M-Instruct"

FOLDER = Path(__file__).resolve().parent / "results"


def lines(name: str) -> list[Row]:
    """All lines of ``results/NAME.jsonl``, oldest first; none where there is no such file."""
    path = FOLDER / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def newest(name: str, **fields: Any) -> dict[str, Row]:
    """The newest line of each arm of a benchmark, in the order the arms first appeared.

    Of the demo model's lines with these ``fields`` only.
    """
    found = [row for row in lines(name) if of_demo(row) and fields.items() <= row.items()]
    return {row["arm"]: row for row in found}


def last(name: str, fits: Callable[[Row], bool], **fields: Any) -> Row | None:
    """The demo model's newest line with these ``fields`` that ``fits``."""
    found = [row for row in lines(name) if of_demo(row) and fields.items() <= row.items()]
    return next((row for row in reversed(found) if fits(row)), None)


def of_demo(row: Row) -> bool:
    return bool(row.get("model", DEMO) == DEMO)


def commits(rows: Iterable[Row]) -> str:
    """The commits of lines or of their cells, each once, in this order."""
    return ", ".join(
        dict.fromkeys(row.get("commit") or row["environment"]["commit"] for row in rows)
    )


def suite_lines(suite: str) -> list[Row]:
    """A quality suite's lines that documents may show, oldest first.

    The demo model's, of pages in its own dtype, and of each arm those with its newest policy.
    """
    found = [row for row in lines("quality") if row["suite"] == suite and of_demo(row)]
    found = [row for row in found if "kv_cache_dtype" not in row["settings"]]
    policies = {row["arm"]: row["policy"] for row in found}
    return [row for row in found if row["policy"] == policies[row["arm"]]]


def suite_cells(
    suite: str, *by: str, field: str = "cells"
) -> dict[str, dict[tuple[Any, ...], Row]]:
    """Of each arm, by these keys of a cell: the one with the most cases, the newest of equals.

    A line's facts stand in its cells. A short run so adds its cells and hides no larger ones.
    """
    arms: Cells = {}
    for row in suite_lines(suite):
        cells = arms.setdefault(row["arm"], {})
        for cell in row[field]:
            at = tuple(cell[key] for key in by)
            if at not in cells or cell["n"] >= cells[at]["n"]:
                cells[at] = {**cell, **_about(row)}
    return arms


def largest_lines(suite: str) -> dict[str, Row]:
    """Of each arm its line with the most cases, the newest of equals: where one memory counts."""
    found: dict[str, tuple[int, Row]] = {}
    for row in suite_lines(suite):
        count = sum(cell["n"] for cell in row["cells"])
        if row["arm"] not in found or count >= found[row["arm"]][0]:
            found[row["arm"]] = (count, row)
    return {arm: row for arm, (_, row) in found.items()}


def _about(row: Row) -> Row:
    facts = {key: row[key] for key in ("arm", "policy", "memory", "seed", "model")}
    return {**facts, "text": row["settings"].get("text"), "commit": row["environment"]["commit"]}


def needle_cells(length: int | None = None) -> dict[str, dict[tuple[str, str], Row]]:
    """Of each arm, by kind and column: the line with the most cases, the newest of equals.

    Args:
        length: only the prompts of so many tokens, of the lines that have such. Their memory is
            then known only where the line has no others.
    """
    arms: dict[str, dict[tuple[str, str], Row]] = {}
    for row in suite_lines("needle"):
        cells = arms.setdefault(row["arm"], {})
        for whole in row["summary"]:
            at = (whole["kind"], whole["column"])
            cell = whole if length is None else _at_length(row, whole, length)
            if cell and (at not in cells or whole["n"] >= cells[at]["of"]):
                lengths = row["settings"]["lengths"]
                cells[at] = {**cell, **_about(row), "lengths": lengths, "of": whole["n"]}
                if length is not None:
                    cells[at] |= {"lengths": [length]}
                    cells[at] |= {"memory": row["memory"] if lengths == [length] else None}
    return arms


def _at_length(row: Row, whole: Row, length: int) -> Row | None:
    """The share of a summary's cell that is of prompts of one length, over all depths."""
    same = {"kind": whole["kind"], "column": whole["column"], "length": length}.items()
    found = [cell for cell in row["cells"] if same <= cell.items()]
    if not found:
        return None
    counts = {key: sum(c[key] for c in found) for key in ("n", "hits", "full_hits", "kept")}
    intervals = {
        "interval": wilson(counts["hits"], counts["n"]),
        "kept_interval": wilson(counts["kept"], counts["full_hits"]),
    }
    return {"kind": whole["kind"], "column": whole["column"], **counts, **intervals}


def at_once() -> list[Row]:
    """The newest counts of requests at once: stock SGLang, then in the order of `methods.arms`.

    With the model's own weights where there is such a line; of the newest line's prompts and pool.
    """
    counts = [row for row in lines("concurrency") if "new_tokens" in row and of_demo(row)]
    if not counts:
        return []
    size = [counts[-1][key] for key in _SIZE]
    counts = [row for row in counts if [row[key] for key in _SIZE] == size]
    counts.sort(key=lambda row: not row.get("shape_only"))
    rows = {row["arm"]: row for row in counts}
    order = ["stock", *arms(counts[0]["context"])]
    return sorted(rows.values(), key=lambda row: order.index(row["arm"]))


_SIZE = ("context", "new_tokens", "pool_tokens")


def decode_speeds() -> dict[str, Row]:
    """The newest decode speeds, of the newest line's batch and context: none where none."""
    row = last("decode_speed", lambda row: True)
    if row is None:
        return {}
    return newest("decode_speed", batch=row["batch"], context=row["context"])


def number_needles(arm: str, column: str = "aware", length: int | None = None) -> Row | None:
    """The seven-digit needles of an arm, where it has such a cell."""
    return needle_cells(length).get(arm, {}).get(("number", column))


@cache
def planned(*argv: str) -> list[Row]:
    """What ``sglang-kv plan ... --json`` says, a row per cell of its table."""
    from sglang_kv.planner import command

    found = json.loads(command.output(*argv, "--json"))
    return found if isinstance(found, list) else [found]
