"""What a request must hold once some of its tokens are computed: exact, from its plan alone."""

from __future__ import annotations

import numpy as np

from sglang_kv.compression import FoldPlan, Plan, WindowPlan


def held_pages(plan: Plan, prompt: int, length: int, last: int | None = None) -> int | None:
    """Head pages that a request with ``length`` computed tokens holds; None: scores decide.

    Args:
        plan: what its policy does to it.
        prompt: tokens of its prompt.
        length: tokens computed, of its prompt and its answer.
        last: position at which the policy was applied last; None: after the prompt, in decode
            before each new token.
    """
    if last is None:
        last = length if length <= prompt else length - 1
    size, streams = plan.geometry.page_size, plan.geometry.num_streams
    dense = -(-length // size)
    if isinstance(plan, WindowPlan):
        if last < (plan.fold_at or 0):
            return dense * streams
        gone = plan.window.first_page(last, size) - plan.window.sink_pages(size)
        return dense * streams - max(0, gone) * plan.num_windowed
    if not isinstance(plan, FoldPlan):
        return dense * streams
    assert plan.fold_at is not None
    if last < plan.fold_at:
        return dense * streams
    if plan.adaptive and last > plan.fold_at:
        return None
    return int((-(-stream_lengths(plan, length, last) // size)).sum())


def stream_lengths(plan: FoldPlan, length: int, last: int) -> np.ndarray:
    """Tokens in each stream after all folds up to position ``last``."""
    assert plan.kept is not None
    assert plan.fold_at is not None
    at = plan.fold_at
    lengths = plan.target(at, np.full_like(plan.kept, at))
    while plan.interval is not None and at + plan.interval <= last:
        at += plan.interval
        lengths = plan.target(at, lengths + plan.interval)
    return lengths + (length - at)


def kept_tokens(plan: Plan, prompt: int, length: int, last: int | None = None) -> int:
    """Tokens of a request's streams, mean: those that folds have left it, or, with a window, those
    that the next query sees. Arguments as in `held_pages`."""
    if isinstance(plan, WindowPlan):
        if length < (plan.fold_at or 0):
            return length
        sinks, recent = plan.window
        seen = sum(p < sinks or length - p <= recent for p in range(length))
        streams, windowed = plan.geometry.num_streams, plan.num_windowed
        return round((seen * windowed + length * (streams - windowed)) / streams)
    if not isinstance(plan, FoldPlan):
        return length
    assert plan.fold_at is not None
    if last is None:
        last = length if length <= prompt else length - 1
    if last < plan.fold_at:
        return length
    return round(float(stream_lengths(plan, length, last).mean()))


def dropped_tokens(plan: Plan, prompt: int, length: int) -> float:
    """Tokens that were dropped by then, mean over the streams."""
    last = length if length <= prompt else length - 1
    streams = plan.geometry.num_streams
    if isinstance(plan, FoldPlan):
        assert plan.fold_at is not None
        if last < plan.fold_at:
            return 0.0
        return length - float(stream_lengths(plan, length, last).mean())
    held = held_pages(plan, prompt, length)
    assert held is not None
    size = plan.geometry.page_size
    return (-(-length // size) * streams - held) * size / streams
