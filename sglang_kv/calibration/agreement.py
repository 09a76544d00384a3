"""How gates of one model compare: with each other, and with a threshold."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from sglang_kv.compression.gates import Values, retrieval_heads


def rank_correlation(first: Values, second: Values) -> float:
    """Spearman's: Pearson's of the ranks, equal values sharing the mean of theirs.

    NaN where one of the two ranks nothing.
    """
    a, b = (_ranks(values) for values in (first, second))
    a, b = a - a.mean(), b - b.mean()
    scale = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / scale if scale else float("nan")


def overlap(first: Values, second: Values, sparsity: float) -> float:
    """Share of the first's retrieval heads that are the second's too, at one sparsity."""
    a, b = (retrieval_heads(values, sparsity=sparsity) for values in (first, second))
    return float((a & b).sum() / a.sum()) if a.any() else float("nan")


def retrieval_shares(values: Values, thresholds: Iterable[float]) -> dict[float, float]:
    """Share of heads whose gate reaches each threshold."""
    return {
        threshold: float(retrieval_heads(values, threshold=threshold).mean())
        for threshold in thresholds
    }


def _ranks(values: Values) -> np.ndarray[Any, np.dtype[np.float64]]:
    flat = values.ravel()
    _, inverse, counts = np.unique(flat, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    ranks: np.ndarray[Any, np.dtype[np.float64]] = ((last - counts + last - 1) / 2)[inverse]
    return ranks
