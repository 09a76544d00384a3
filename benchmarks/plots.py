"""Draw the figures as SVG and PNG, readable in black and white. Needs matplotlib.

Every file carries the digest of what it shows, so that a test without matplotlib can tell whether
it is of the present results.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sglang_kv.benchmarks.figure import Figure, Point, best
from sglang_kv.benchmarks.figures import figures

MARKERS = "osD^vP*XhpdH<>"
DASHES = ("-", "--", "-.", ":")
HATCHES = ("", "///")


def draw(folder: Path) -> list[Path]:
    """All figures into ``folder``; the files."""
    import matplotlib

    matplotlib.use("Agg")
    # The same results give the same bytes.
    matplotlib.rcParams.update({"svg.hashsalt": "sglang-kv", "svg.fonttype": "none"})
    import matplotlib.pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for figure in figures():
        sheet, axes = plt.subplots(figsize=(8, 4.8), layout="constrained")
        {"points": _points, "lines": _lines, "bars": _bars}[figure.kind](axes, figure)
        axes.set(xlabel=figure.x, ylabel=figure.y, yscale="log" if figure.log else "linear")
        sheet.suptitle(figure.title, fontsize=10)
        if figure.note:
            sheet.supxlabel(figure.note, fontsize=8)
        axes.grid(alpha=0.25)
        for kind, field in (("svg", "Description"), ("png", "Description")):
            path = folder / f"{figure.name}.{kind}"
            known = {field: figure.digest, **({"Date": None} if kind == "svg" else {})}
            sheet.savefig(path, dpi=120, metadata=known)
            if kind == "svg":  # matplotlib leaves spaces at line ends
                lines = path.read_text().splitlines()
                path.write_text("\n".join(line.rstrip() for line in lines) + "\n")
            paths.append(path)
        plt.close(sheet)
    return paths


def is_current(path: Path, figure: Figure) -> bool:
    """Whether a file shows what ``figure`` is now."""
    return path.exists() and figure.digest.encode() in path.read_bytes()


def _points(axes: Any, figure: Figure) -> None:
    """A marker per arm, named in the legend; filled where nothing else is better with less."""
    points = [series.points[0] for series in figure.series]
    leading = best([(float(x), y) for x, y, _, _ in points])
    for i, (series, (x, y, _, _)) in enumerate(zip(figure.series, points, strict=True)):
        axes.errorbar(
            [x],
            [y],
            yerr=bars_of(series.points),
            fmt=MARKERS[i % len(MARKERS)],
            color="black",
            ecolor="0.6",
            markerfacecolor="black" if leading[i] else "white",
            markersize=8,
            capsize=3,
            label=series.label,
        )
    axes.set_xlim(0, 1.05)
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))


def _lines(axes: Any, figure: Figure) -> None:
    """A line per arm; bars where a point has an interval."""
    for i, series in enumerate(figure.series):
        axes.errorbar(
            [point[0] for point in series.points],
            [point[1] for point in series.points],
            yerr=bars_of(series.points),
            marker=MARKERS[i % len(MARKERS)],
            linestyle=DASHES[i % len(DASHES)],
            color=str(0.55 * (i % 2)),
            ecolor="0.6",
            elinewidth=0.8,
            capsize=2,
            markerfacecolor="white" if i % 2 else "black",
            label=series.label,
        )
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))


def bars_of(points: tuple[Point, ...]) -> list[list[float]] | None:
    """How far each interval reaches below and above its point; None where no point has one."""
    if all(low is None or high is None for _, _, low, high in points):
        return None
    below = [0.0 if low is None else max(0.0, y - low) for _, y, low, _ in points]
    above = [0.0 if high is None else max(0.0, high - y) for _, y, _, high in points]
    return [below, above]


def _bars(axes: Any, figure: Figure) -> None:
    names = [str(point[0]) for point in figure.series[0].points]
    width = 0.8 / len(figure.series)
    for i, series in enumerate(figure.series):
        places = [j + (i - (len(figure.series) - 1) / 2) * width for j in range(len(names))]
        drawn = axes.bar(
            places,
            [point[1] for point in series.points],
            width,
            label=series.label,
            color=("0.35", "white")[i % 2],
            edgecolor="black",
            hatch=HATCHES[i % 2],
        )
        axes.bar_label(drawn, fmt="%d", fontsize=8)
    axes.set_xticks(range(len(names)), names, rotation=25, ha="right", fontsize=8)
    axes.legend(fontsize=8, loc="upper left")
