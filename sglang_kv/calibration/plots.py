"""A report's plots, as PNG files. Needs matplotlib, which the `bench` extra brings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sglang_kv.compression.base import PolicyError

Data = dict[str, Any]


def require_matplotlib() -> None:
    try:
        import matplotlib
    except ImportError:
        raise PolicyError(
            "plots need matplotlib: pip install 'sglang-kv[bench]', or give --no-plots"
        ) from None
    matplotlib.use("Agg")


def draw(data: Data, folder: Path) -> list[str]:
    """Write all plots into ``folder``; returns the files' names in the page's order."""
    require_matplotlib()
    names = []
    for gates in data["gates"]:
        names.append(f"heads-{gates['name']}.png")
        _heat_map(gates, folder / names[-1])
    names.append("sorted.png")
    _sorted_curve(data, folder / names[-1])
    if any(n for row in data["needles"] for _, n in row["by_length"].values()):
        names.append("needles.png")
        _needle_curve(data, folder / names[-1])
    return names


def _heat_map(gates: Data, path: Path) -> None:
    """Layers to the right, heads upwards; dark is a retrieval head."""
    import matplotlib.pyplot as plt

    layers, heads = len(gates["values"]), len(gates["values"][0])
    size = (max(4.0, 0.25 * layers + 1.5), max(1.6, 0.25 * heads + 1.2))
    figure, axis = plt.subplots(figsize=size, layout="constrained")
    columns = [list(column) for column in zip(*gates["values"], strict=True)]
    shown = axis.imshow(columns, cmap="Greys", vmin=0, vmax=1, aspect="auto", origin="lower")
    axis.set(xlabel="layer", ylabel="KV head", title=f"gates: {gates['name']}")
    axis.yaxis.get_major_locator().set_params(integer=True)
    figure.colorbar(shown)
    _save(figure, path)


def _sorted_curve(data: Data, path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(5, 3.2), layout="constrained")
    for gates in data["gates"]:
        values = sorted((value for row in gates["values"] for value in row), reverse=True)
        share = [100 * (i + 1) / len(values) for i in range(len(values))]
        axis.plot(share, values, drawstyle="steps-pre", label=gates["name"])
    axis.set(xlabel="heads, highest gate first (%)", ylabel="gate", xlim=(0, 100), ylim=(0, 1.02))
    axis.legend()
    _save(figure, path)


def _needle_curve(data: Data, path: Path) -> None:
    """Of all lengths together, what share of the full cache's passkeys is found."""
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(5, 3.2), layout="constrained")
    for name in dict.fromkeys(row["name"] for row in data["needles"]):
        points = [(0.0, 100.0)]
        for row in data["needles"]:
            found, tried = (sum(part) for part in zip(*row["by_length"].values(), strict=True))
            if row["name"] == name and tried:
                points.append((100 * row["sparsity"], 100 * found / tried))
        axis.plot(*zip(*points, strict=True), marker="o", label=name)
    axis.set(xlabel="streaming heads (%)", ylabel="passkeys of the full cache's (%)")
    axis.set(xlim=(0, 100), ylim=(-2, 102))
    axis.legend()
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    import matplotlib.pyplot as plt

    figure.savefig(path, dpi=150)
    plt.close(figure)
