"""What a page was worth to the requests that read it.

Importance is a *density*: attention mass per token that a page received from the last queries of a
prompt (the observation window), summed over heads with the gates as weights. Three steps lead from
attention to what the tree keeps:

1. `page_density`: mass per token of each page, without sinks and window;
2. `profile`: in units of the prompt's mean, and never rising along the prompt: a prefix cache uses
   no page without all pages before it, so what a page is worth is a bound on what follows it. The
   mass of a rise is shared among the pages on both sides of it;
3. `Decay`: each request adds its profile to the pages on its path. A request that only goes on
   where an earlier one had ended is the same reader once more, and adds nothing it added before.

Old mass decays with the tree's clock by a common half-life, so

    worth(t) = mass * 2^-((t - stamp) / half_life)

keeps the order of any two pages for good, and ``log2(mass) + stamp / half_life`` names a place in
that order which does not change as time passes. No sweep over the tree is ever needed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sglang_kv.radix.node import Node

#: Importance counts half after a sixteenth of the memory has been filled anew. With longer ones,
#: what drew more attention outlives conversations whose next turn is still to come.
HALF_LIFE = 1 / 16


@dataclass(frozen=True)
class Decay:
    """Exponential decay by a logical clock.

    Args:
        half_life: ticks after which mass counts half. A tick is a token stored, so this is traffic:
            a few times the tokens that memory holds. ``math.inf``: mass never fades.
    """

    half_life: float = math.inf

    def __post_init__(self) -> None:
        if not self.half_life > 0:
            raise ValueError(f"half_life must be positive, got {self.half_life}")

    def add(self, node: Node[Any], density: NDArray[np.float64], now: int) -> None:
        """Add ``density`` ``[pages of the node]`` at time ``now`` to what has decayed so far."""
        node.density = self.at(node, now) + density
        node.stamp = now

    def refresh(self, node: Node[Any], density: NDArray[np.float64], now: int) -> None:
        """Raise what has decayed so far to ``density``: the same reader came once more."""
        node.density = np.maximum(self.at(node, now), density)
        node.stamp = now

    def at(self, node: Node[Any], now: int) -> NDArray[np.float64]:
        """The node's densities at time ``now``. ``[pages]``"""
        faded: NDArray[np.float64] = node.density * 2.0 ** (-(now - node.stamp) / self.half_life)
        return faded

    def rank(self, node: Node[Any]) -> float:
        """Place of the node's mean density in an order that time does not change; log2."""
        mean = float(node.density.mean())
        return math.log2(mean) + node.stamp / self.half_life if mean > 0.0 else -math.inf


def page_density(
    mass: ArrayLike, page_size: int, *, sinks: int = 0, window: int = 0
) -> NDArray[np.float64]:
    """Mass per token of each whole page, without the tokens that every prompt attends to.

    The first ``sinks`` and the last ``window`` tokens draw mass by where they stand, not by what
    they say. They are left out; a page that consists of nothing else was not measured, and gets
    the mean of those that were, so that it is neither first nor last to go.

    Args:
        mass: attention that each token received, ``[tokens]``, not negative.

    Returns:
        ``[tokens // page_size]`` float64.
    """
    per_token = np.array(mass, dtype=np.float64)
    if per_token.ndim != 1 or page_size <= 0 or sinks < 0 or window < 0:
        raise ValueError(f"bad shape {per_token.shape}, page size, sinks or window")
    if not (np.isfinite(per_token).all() and (per_token >= 0).all()):
        raise ValueError("attention mass must be finite and not negative")
    measured = np.ones(len(per_token), dtype=bool)
    measured[:sinks] = False
    measured[max(0, len(per_token) - window) :] = False
    per_token[~measured] = 0.0
    whole = len(per_token) // page_size * page_size
    counts = measured[:whole].reshape(-1, page_size).sum(axis=1)
    sums = per_token[:whole].reshape(-1, page_size).sum(axis=1)
    mean = float(sums.sum()) / max(1, int(counts.sum()))
    return np.where(counts > 0, sums / np.maximum(counts, 1), mean)


def profile(density: ArrayLike) -> NDArray[np.float64]:
    """What a request's pages are worth to it: ``density`` in units of its mean, never rising.

    The closest non-increasing sequence in the sense of least squares (isotonic regression, by
    pooling neighbours); the sum stays. Of no mass at all, every page is worth 1.

    Args:
        density: of each page, ``[pages]``, finite and not negative.
    """
    values = np.asarray(density, dtype=np.float64)
    mean = float(values.mean()) if len(values) else 0.0
    if not mean > 0.0:
        return np.ones(len(values))
    sums: list[float] = []
    counts: list[int] = []
    for value in (values / mean).tolist():
        total, count = value, 1
        while sums and sums[-1] * count <= total * counts[-1]:
            total += sums.pop()
            count += counts.pop()
        sums.append(total)
        counts.append(count)
    return np.repeat(np.array(sums) / np.array(counts), counts)
