"""What a plot shows: its series and its axes; no drawing."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass

#: (x, y, low, high); low and high are None where there is no interval.
Point = tuple[float | str, float, float | None, float | None]


@dataclass(frozen=True)
class Series:
    """One line, set of bars or set of points."""

    label: str
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Figure:
    """A plot. ``kind``: ``points`` (each labelled), ``lines`` or ``bars``."""

    name: str
    title: str
    x: str
    y: str
    kind: str
    series: tuple[Series, ...]
    note: str = ""
    log: bool = False  # the y axis

    @property
    def digest(self) -> str:
        """Of everything that is drawn: a file that carries another one is out of date."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]


def best(points: list[tuple[float, float]]) -> list[bool]:
    """Which points no other one beats: at least as much y for at most as much x (Pareto)."""
    return [not any((a, b) != (x, y) and a <= x and b >= y for a, b in points) for x, y in points]
