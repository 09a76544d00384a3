"""Tables and heat maps of the quality suites, from the lines that they recorded."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from itertools import product
from pathlib import Path
from typing import Any

Row = dict[str, Any]

ARM = "| arm | memory |"


def table(rows: Iterable[Row]) -> str:
    """Markdown: a section per model, suite and settings, the newest line of each arm.

    Arms stand in the order in which they first appeared, the full cache first.
    """
    sections: dict[str, dict[str, Row]] = {}
    for row in rows:
        place = json.dumps([row["suite"], row["model"], row["seed"], row["settings"]])
        sections.setdefault(place, {})[row["arm"]] = row
    makers: dict[str, Callable[[list[Row]], list[str]]] = {
        "needle": needle_tables,
        "fidelity": fidelity_tables,
        "perplexity": perplexity_tables,
        **dict.fromkeys(("ruler", "standins", "longbench"), graded_tables),
    }
    parts = []
    for arms in sections.values():
        ordered = sorted(arms.values(), key=lambda row: row["arm"] != "none")
        first = ordered[0]
        title = f"### {first['suite']}: {first['model']}, seed {first['seed']}"
        policies = [f"- `{row['arm']}`: `{json.dumps(row['policy'])}`" for row in ordered]
        where = first["environment"]
        machine = (
            f"{where['cores']} cores of an {where['cpu']}, sglang {where['versions']['sglang']}"
        )
        origin = f"{machine}, commit {where['commit']}, {where['date'][:10]}."
        parts += [title, "", origin, "", *policies, "", *makers[first["suite"]](ordered)]
    return "\n".join(parts)


def needle_tables(rows: list[Row]) -> list[str]:
    lines = [
        f"{ARM} question | needle | found | 95 % | of the full cache's | 95 % |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        for cell in row["summary"]:
            lines.append(
                f"{_arm(row)} {_column(row, cell)} | {cell['kind']} | {cell['hits']}/{cell['n']} | "
                f"{_interval(cell['interval'])} | {cell['kept']}/{cell['full_hits']} | "
                f"{_interval(cell['kept_interval'])} |"
            )
    for axis in ("length", "depth"):
        values = sorted({cell[axis] for row in rows for cell in row["cells"]})
        heads = " | ".join(f"{value:g}" for value in values)
        lines += ["", f"By {axis}: found/n, kept of the full cache's hits in brackets.", ""]
        lines += [f"{ARM} question | needle | {heads} |", "|---" * (4 + len(values)) + "|"]
        for row in rows:
            for cell in row["summary"]:
                same = [c for c in row["cells"] if _kind(c) == _kind(cell)]
                found = [_counts([c for c in same if c[axis] == value]) for value in values]
                lines.append(
                    f"{_arm(row)} {_column(row, cell)} | {cell['kind']} | {' | '.join(found)} |"
                )
    return [*lines, ""]


def fidelity_tables(rows: list[Row]) -> list[str]:
    lines = [
        f"{ARM} question | length | same next token | 95 % | KL | worst KL | first divergence | "
        "same answers |",
        "|---" * 10 + "|",
    ]
    for row in rows:
        for cell in row["cells"]:
            lines.append(
                f"{_arm(row)} {_column(row, cell)} | {cell['length']} | "
                f"{cell['agreed']}/{cell['tokens']} | {_interval(cell['interval'])} | "
                f"{cell['kl']:.4f} | {cell['kl_worst_case']:.4f} | {cell['divergence']:g} | "
                f"{cell['same_answers']}/{cell['n']} |"
            )
    return [*lines, ""]


def perplexity_tables(rows: list[Row]) -> list[str]:
    lines = [
        f"{ARM} length | tokens | perplexity | full cache | ratio | 95 % |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        for cell in row["summary"]:
            low, high = cell["ratio_interval"]
            lines.append(
                f"{_arm(row)} {cell['length']} | {cell['n']} | {cell['ppl']:.2f} | "
                f"{cell['full_ppl']:.2f} | {cell['ratio']:.3f} | {low:.3f} - {high:.3f} |"
            )
    for length in sorted({cell["length"] for row in rows for cell in row["cells"]}):
        starts = sorted({c["from"] for row in rows for c in row["cells"] if c["length"] == length})
        heads = " | ".join(f"from {start}" for start in starts)
        lines += ["", f"By position, texts of {length} tokens.", ""]
        lines += [f"{ARM} {heads} |", "|---" * (2 + len(starts)) + "|"]
        for row in rows:
            at = {c["from"]: f"{c['ppl']:.2f}" for c in row["cells"] if c["length"] == length}
            lines.append(f"{_arm(row)} {' | '.join(at.get(start, '-') for start in starts)} |")
    return [*lines, ""]


def graded_tables(rows: list[Row]) -> list[str]:
    """Grades in percent by length, their averages over able tasks first."""
    lines = []
    lengths = sorted({cell["length"] for row in rows for cell in row["cells"]})
    for length in lengths:
        lines += [
            f"{length} tokens. A task marked x, where the full cache has less than "
            f"{100 * rows[0]['able_from']:.0f} %, is not in the averages.",
            "",
            f"{ARM} question | task | n (texts) | grade | 95 % | full cache | difference | 95 % |",
            "|---" * 10 + "|",
        ]
        for row in rows:
            for cell in (c for c in row["summary"] if c["length"] == length):
                score = "-" if cell["score"] is None else f"**{100 * cell['score']:.1f}**"
                full = "-" if cell["full_score"] is None else f"{100 * cell['full_score']:.1f}"
                lines.append(
                    f"{_arm(row)} {_column(row, cell)} | average of {len(cell['tasks'])} | "
                    f"{cell['n']} | {score} | {_interval(cell['interval'])} | {full} | | |"
                )
        for row in rows:
            for cell in (c for c in row["cells"] if c["length"] == length):
                lines.append(
                    f"{_arm(row)} {_column(row, cell)} | {cell['task']}"
                    f"{'' if cell['able'] else ' x'} | {cell['n']} ({cell['contexts']}) | "
                    f"{100 * cell['score']:.1f} | {_interval(cell['interval'])} | "
                    f"{100 * cell['full_score']:.1f} | {100 * cell['difference']:+.1f} | "
                    f"{_interval(cell['difference_interval'])} |"
                )
        lines.append("")
    return lines


def heat_maps(rows: Iterable[Row], folder: Path) -> list[Path]:
    """One PNG per arm of the needle suite: length by depth, a panel per needle and column.

    The newest run of each cell, of runs with the arm's newest policy. Numbers stand in the cells,
    so the maps read in black and white. Needs matplotlib.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    runs: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row["suite"] == "needle":
            runs.setdefault((row["model"], row["arm"]), []).append(row)
    paths = []
    for (model, arm), every in runs.items():
        every = [r for r in every if r["policy"] == every[-1]["policy"]]
        found = [cell for r in every for cell in r["cells"]]
        row = max(every, key=lambda r: len(r["cells"]))  # whose memory stands in the title
        lengths, depths = (sorted({c[axis] for c in found}) for axis in ("length", "depth"))
        columns, kinds = (list({c[axis]: 0 for c in found}) for axis in ("column", "kind"))
        cells = {(c["column"], c["kind"], c["depth"], c["length"]): c for c in found}
        size = (
            max(2.4, 0.7 * len(lengths) + 0.8) * len(kinds) + 0.4,
            (0.4 * len(depths) + 1.0) * len(columns) + 0.5,
        )
        figure, axes = plt.subplots(
            len(columns),
            len(kinds),
            figsize=size,
            squeeze=False,
            sharex=True,
            sharey=True,
            layout="constrained",
        )
        for (i, column), (j, kind) in product(enumerate(columns), enumerate(kinds)):
            axis = axes[i][j]
            grid = [[_share(cells.get((column, kind, d, n))) for n in lengths] for d in depths]
            axis.imshow(grid, cmap="Greys_r", vmin=0, vmax=1, aspect="auto")
            for y, x in product(range(len(depths)), range(len(lengths))):
                value = grid[y][x]
                ink = "black" if value > 0.45 else "white"
                text = "" if value != value else f"{100 * value:.0f}"
                axis.text(x, y, text, ha="center", va="center", color=ink)
            axis.set_xticks(range(len(lengths)), [f"{n:,}" for n in lengths])
            axis.set_yticks(range(len(depths)), [f"{100 * d:g}" for d in depths])
            question = _column(row, {"column": column})
            axis.set_title(kind if question == "-" else f"{kind}, question {question}", fontsize=9)
        figure.supxlabel("prompt tokens", fontsize=9)
        figure.supylabel("depth of the needle, %", fontsize=9)
        memory = "" if row["memory"] is None else f", {row['memory']:.0%} of the memory"
        figure.suptitle(f"{arm}{memory}\nneedles found, %\n{model}", fontsize=9)
        path = folder / f"needle-{_slug(model)}-{_slug(arm)}.png"
        figure.savefig(path, dpi=120)
        plt.close(figure)
        paths.append(path)
    return paths


def _arm(row: Row) -> str:
    memory = "-" if row["memory"] is None else f"{row['memory']:.2f}"
    return f"| {row['arm']} | {memory} |"


def _column(row: Row, cell: Row) -> str:
    if row["policy"] == {"method": "none"}:
        return "-"
    return {"aware": "seen", "agnostic": "not seen"}[cell["column"]]


def _kind(cell: Row) -> tuple[str, str]:
    return cell["column"], cell["kind"]


def _interval(interval: list[float] | None) -> str:
    return "-" if interval is None else f"{100 * interval[0]:.0f} - {100 * interval[1]:.0f} %"


def _counts(cells: list[Row]) -> str:
    hits, n = sum(c["hits"] for c in cells), sum(c["n"] for c in cells)
    kept, full = sum(c["kept"] for c in cells), sum(c["full_hits"] for c in cells)
    return f"{hits}/{n} ({kept}/{full})" if n else "-"


def _share(cell: Row | None) -> float:
    return cell["hits"] / cell["n"] if cell else float("nan")


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-")
