"""The one rule by which a claim holds, is open, or does not hold."""

from __future__ import annotations

from collections.abc import Sequence

HOLDS, FAILS = "holds", "does not hold"

#: Figures and verdict of a claim; None while there are no lines.
Found = tuple[str, str] | None


def verdict(interval: Sequence[float] | None, stated: float, n: str) -> str:
    """Whether a value is at least what was stated, by its 95 % interval.

    Args:
        interval: of the measured value. None, or one without width, says only that nothing was
            seen to vary in so few cases: it decides nothing.
        stated: the least value that the claim gives.
        n: what was counted, for a claim that is left open.
    """
    if interval is None or interval[0] == interval[1]:
        return f"open: not decided with {n}"
    if interval[0] >= stated:
        return HOLDS
    return f"open: not decided with {n}" if interval[1] >= stated else FAILS


def at_most(interval: Sequence[float] | None, stated: float, n: str) -> str:
    """The same for a value that is at most what was stated."""
    turned = None if interval is None else [-interval[1], -interval[0]]
    return verdict(turned, -stated, n)


def within(ratio: float, share: float) -> bool:
    """Whether a ratio of two measurements is 1 but for a share."""
    return abs(ratio - 1) <= share


def listed(numbers: Sequence[int]) -> str:
    """Several numbers as a sentence has them: "1,024, 2,048 and 4,096"."""
    *others, final = (f"{n:,}" for n in numbers)
    return f"{', '.join(others)} and {final}" if others else final


def percent(interval: Sequence[float] | None) -> str:
    """An interval of a share, in percent."""
    return "-" if interval is None else f"{interval[0]:.0%} - {interval[1]:.0%}"
