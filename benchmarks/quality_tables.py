"""The tables of docs/QUALITY.md: what is still found, agreed on and graded, by arm.

A cell is of the line with the most cases for it, of its arm's newest policy; each table says which
commits that makes.
"""

from __future__ import annotations

from collections.abc import Iterable

from sglang_kv.benchmarks.arms import FULL
from sglang_kv.benchmarks.headline import found
from sglang_kv.benchmarks.markdown import NOTHING, head
from sglang_kv.benchmarks.methods import not_the_preset
from sglang_kv.benchmarks.needle import ALL_KINDS, COLUMNS, KINDS, MULTIPLE
from sglang_kv.benchmarks.records import Cells, Row, commits, needle_cells, suite_cells
from sglang_kv.benchmarks.verdicts import percent

#: Hits of the full cache from which a needle figure decides anything.
ENOUGH = 150
ASKED = {"aware": "seen", "agnostic": "not seen"}
NOT_RUN = "(not run: no line of this suite is recorded)"


def needles() -> str:
    """Needles found, of those that the full cache finds."""
    arms = needle_cells()
    if not arms:
        return NOTHING
    every = {kind for cells in arms.values() for kind, _ in cells}
    kinds = [kind for kind in ALL_KINDS if kind in every or kind in KINDS]
    heads = [f"{kind}, question {asked}" for kind in kinds for asked in ASKED.values()]
    table = head("arm", "memory", *heads)
    for cells in arms.values():
        shown = [found(cells.get((kind, column))) for kind in kinds for column in COLUMNS]
        memory = next((c["memory"] for c in cells.values() if c["memory"] is not None), None)
        share = "-" if memory is None else f"{memory:.2f}"
        table.append(f"| {_arm(cells.values())} | {share} | {' | '.join(shown)} |")
    said = _origin(cell for cells in arms.values() for cell in cells.values())
    if missing := [kind for kind in MULTIPLE if kind not in every]:
        said += f" Not run: {', '.join(missing)}."
    return "\n".join([*table, "", said])


def decided() -> str:
    """The needle figures with enough cases to decide, with their intervals."""
    table = head("arm", "memory", "question", "kept, of the full cache's hits", "", "95 %")
    shown = []
    for arm, cells in needle_cells().items():
        for (kind, column), cell in cells.items():
            if kind != "number" or cell["full_hits"] < ENOUGH:
                continue
            low, high = cell["kept_interval"]
            asked = ASKED[column] if arm != FULL else "-"
            table.append(
                f"| {_arm([cell])} | {cell['memory']:.2f} | {asked} | {found(cell)} "
                f"| {cell['kept'] / cell['full_hits']:.1%} | {low:.1%} - {high:.1%} |"
            )
            shown.append(cell)
    return "\n".join([*table, "", _origin(shown)]) if shown else NOTHING


def fidelity() -> str:
    """Next-token agreement with the full cache, the KL from it, and the first divergence."""
    arms = suite_cells("fidelity", "column", "length")
    if not arms:
        return NOTHING
    every = [cell for cells in arms.values() for cell in cells.values()]
    sizes = sorted({cell["length"] for cell in every})

    def agreed(cell: Row) -> str:
        share = f"{cell['agreed'] / cell['tokens']:.1%} ({percent(cell['interval'])})"
        return f"{share}, {cell['kl']:.3f}"

    def leaves(cell: Row) -> str:
        return f"{cell['divergence']:.0f} ({cell['same_answers']}/{cell['n']})"

    parts = []
    for show in (agreed, leaves):
        table = head("arm", "question", *(f"{n:,} tokens" for n in sizes))
        for arm, cells in arms.items():
            for column in COLUMNS:
                of_column = {n: cell for (c, n), cell in cells.items() if c == column}
                if of_column:
                    asked = ASKED[column] if arm != FULL else "-"
                    shown = [show(of_column[n]) if n in of_column else "-" for n in sizes]
                    label = _arm(of_column.values())
                    table.append(f"| {label} | {asked} | {' | '.join(shown)} |")
        parts.append("\n".join(table))
    tokens, prompts = (_span(cell[key] for cell in every) for key in ("tokens", "n"))
    said = (
        f"Same next token (95 %, which takes tokens as independent), KL; n = {tokens} tokens of "
        f"{prompts} prompts in each cell. {_origin(every)}"
    )
    between = (
        "Where an arm answers by itself: the first token that is not the full cache's, on average, "
        "and how many answers are the same to their end."
    )
    return "\n\n".join([parts[0], said, between, parts[1]])


def perplexity() -> str:
    """Perplexity of what follows the fold, beside the full cache's on the same tokens."""
    arms = suite_cells("perplexity", "length", field="summary")
    if not arms:
        return NOTHING
    every = [cell for cells in arms.values() for cell in cells.values()]
    sizes = sorted({cell["length"] for cell in every})

    def shown(cell: Row) -> str:
        if cell["arm"] == FULL:
            return f"{cell['ppl']:.2f}"
        low, high = cell["ratio_interval"]
        return f"{cell['ppl']:.2f} ({cell['ratio']:.3f}x, {low:.3f} - {high:.3f})"

    table = head("arm", *(f"{n:,} tokens" for n in sizes))
    for cells in arms.values():
        row = [shown(cells[n,]) if (n,) in cells else "-" for n in sizes]
        table.append(f"| {_arm(cells.values())} | {' | '.join(row)} |")
    counts = [_span(cell["n"] for cell in every if cell["length"] == n) for n in sizes]
    said = (
        "In brackets the ratio to the full cache's, and its 95 %, which takes tokens as "
        f"independent; n = {', '.join(counts)} tokens. {_origin(every)}"
    )
    return "\n".join([*table, "", said])


def graded(suite: str) -> str:
    """Grades in percent of a suite of tasks, by length: averages over what is possible, then all.

    A task that the full cache cannot do is marked, and in no average.
    """
    arms = suite_cells(suite, "column", "task", "length")
    if not arms:
        return NOT_RUN
    averages = suite_cells(suite, "column", "length", field="summary")
    every = [cell for cells in arms.values() for cell in cells.values()]
    parts = []
    for length in sorted({cell["length"] for cell in every}):
        parts.append(f"{length:,} tokens:\n\n{_graded_at(length, arms, averages)}")
    said = (
        "Average over the tasks that the full cache can do (the others are marked x), with its "
        f"95 %. {_origin(every)}"
    )
    return "\n\n".join([*parts, said])


def _graded_at(length: int, arms: Cells, averages: Cells) -> str:
    here = [c for cells in arms.values() for c in cells.values() if c["length"] == length]
    able = {cell["task"]: cell["able"] for cell in here}
    counts = {task: _span(cell["n"] for cell in here if cell["task"] == task) for task in able}
    names = (f"{task}{'' if able[task] else ' x'} (n = {counts[task]})" for task in able)
    table = head("arm", "question", "average", *names)
    for arm, cells in arms.items():
        for column in COLUMNS:
            row = {task: cells.get((column, task, length)) for task in able}
            if not any(row.values()):
                continue
            mean = averages[arm].get((column, length))
            average = "-"
            if mean and mean["score"] is not None:
                average = f"{100 * mean['score']:.1f} ({percent(mean['interval'])})"
            grades = (f"{100 * cell['score']:.1f}" if cell else "-" for cell in row.values())
            asked = ASKED[column] if arm != FULL else "-"
            label = _arm(cell for cell in row.values() if cell)
            table.append(f"| {label} | {asked} | {average} | {' | '.join(grades)} |")
    return "\n".join(table)


def _arm(cells: Iterable[Row]) -> str:
    """An arm's name; of a preset's, what it was measured with that is the preset's no more."""
    first = next(iter(cells))
    other = not_the_preset(first["arm"], first["policy"])
    return f"{first['arm']} ({other})" if other else str(first["arm"])


def _origin(cells: Iterable[Row]) -> str:
    cells = list(cells)
    texts = ", ".join(dict.fromkeys(cell["text"] for cell in cells if cell["text"]))
    return (
        "Each cell is of the run with the most cases for it, the newest of equals; "
        f"{f'texts: {texts}; ' if texts else ''}commits {commits(cells)}."
    )


def _span(numbers: Iterable[int]) -> str:
    """One number where all are equal, else the least and the most."""
    every = list(numbers)
    low, high = min(every), max(every)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"
