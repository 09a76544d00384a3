"""The fewest tokens that a plan leaves any stream, for ``--kv-compression-min-keep``."""

from __future__ import annotations

from math import gcd
from typing import NamedTuple

import numpy as np

from sglang_kv.compression.plan import Counts, FoldPlan, Geometry, Mask, Plan, WindowPlan


class Least(NamedTuple):
    """Of a request's streams, the one that is left the fewest tokens."""

    tokens: int
    layer: int
    head: int  # of the model
    in_decode: bool  # by a fold after the prompt's


def least_kept(plan: Plan) -> Least | None:
    """What is left of the stream that loses most; None: nothing is ever dropped.

    A stream that keeps the whole prompt does not count, however short that is. Folds in decode
    count whether the answer comes to them or not.
    """
    if isinstance(plan, WindowPlan):
        shape = (plan.geometry.num_layers, plan.geometry.num_kv_heads)
        windowed = np.ones(shape, dtype=bool) if plan.windowed is None else plan.windowed
        tokens = plan.window.num_sinks + plan.window.window_left
        return _least(plan.geometry, np.full(shape, tokens), windowed, False)
    if not isinstance(plan, FoldPlan):
        return None
    assert plan.kept is not None and plan.fold_at is not None  # noqa: PT018
    left = plan.kept if plan.floor is None else plan.floor
    found = [_least(plan.geometry, left, plan.kept < plan.fold_at, False)]
    if plan.limit is not None:
        everywhere = np.ones_like(plan.limit, dtype=bool)
        found.append(_least(plan.geometry, _left_in_decode(plan), everywhere, True))
    return min((least for least in found if least is not None), key=lambda least: least.tokens)


def _left_in_decode(plan: FoldPlan) -> Counts:
    """Fewest tokens of each stream right after a fold in decode that cuts it."""
    assert plan.kept is not None and plan.limit is not None and plan.interval  # noqa: PT018
    if not plan.by_page:
        return plan.limit
    # The last page is as full as it is: at every fold of a stream the same, or by turns.
    size = plan.geometry.page_size
    turns = [
        plan.limit - -(plan.kept + turn * plan.interval) % size
        for turn in range(1, size // gcd(plan.interval, size) + 1)
    ]
    least: Counts = np.min(turns, axis=0)
    return least


def _least(geometry: Geometry, tokens: Counts, cut: Mask, in_decode: bool) -> Least | None:
    if not cut.any():
        return None
    layer, head = np.unravel_index(
        np.argmin(np.where(cut, tokens, np.iinfo(np.int64).max)), cut.shape
    )
    return Least(
        int(tokens[layer, head]), int(layer), int(head) + (geometry.heads.start or 0), in_decode
    )
