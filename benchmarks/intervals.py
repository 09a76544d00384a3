"""Confidence intervals of scores that come in groups: several questions on one context.

Questions on one context are not independent of each other, so whole contexts are drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_kv.benchmarks.common import wilson

#: The scores of each context, by its name.
Groups = Mapping[str, Sequence[float]]

DRAWS = 2000


def draws(groups: Groups, seed: int = 0, count: int = DRAWS) -> NDArray[np.float64]:
    """Means of ``count`` samples, whole groups drawn with replacement (percentile bootstrap)."""
    sums = np.array([sum(group) for group in groups.values()], dtype=np.float64)
    sizes = np.array([len(group) for group in groups.values()], dtype=np.float64)
    picked = np.random.default_rng(seed).integers(0, len(sums), (count, len(sums)))
    means: NDArray[np.float64] = sums[picked].sum(1) / sizes[picked].sum(1)
    return means


def middle_95(samples: NDArray[np.float64]) -> list[float]:
    low, high = np.percentile(samples, (2.5, 97.5))
    return [round(float(low), 4), round(float(high), 4)]


def interval(groups: Groups) -> list[float] | None:
    """95 % interval of the mean; None for fewer than two groups.

    Wilson's for contexts that are right or wrong as a whole, where a bootstrap of all-right says
    that nothing could ever be wrong; else a bootstrap over contexts.
    """
    if len(groups) < 2:
        return None
    means = [sum(group) / len(group) for group in groups.values()]
    if set(means) <= {0.0, 1.0}:
        return wilson(round(sum(means)), len(means))
    return middle_95(draws(groups))


def interval_of_average(tasks: Sequence[Groups]) -> list[float] | None:
    """Of the mean of several tasks' means: each task is drawn from by itself."""
    if not tasks or min(len(groups) for groups in tasks) < 2:
        return None
    return middle_95(np.mean([draws(groups, seed) for seed, groups in enumerate(tasks)], axis=0))


def interval_of_difference(ours: Groups, theirs: Groups) -> list[float] | None:
    """Of the mean of ``ours`` less that of ``theirs``, paired score by score."""
    paired: dict[str, list[float]] = {
        name: [a - b for a, b in zip(group, theirs[name], strict=True)]
        for name, group in ours.items()
    }
    return middle_95(draws(paired)) if len(paired) > 1 else None


def mean(groups: Groups) -> float:
    values: list[Any] = [value for group in groups.values() for value in group]
    return float(sum(values) / len(values))
