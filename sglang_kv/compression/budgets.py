"""Exact budgets: tokens or whole pages, split over layers and heads. No tensors.

What plans need of the score-based methods' arithmetic lives here, apart from `scoring`, so that
memory can be planned where there is no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

GRANULARITIES = ("token", "page")
SHARES = ("head", "layer")


@dataclass(frozen=True)
class Units:
    """What a prompt's budget is counted in: its tokens, or whole pages of ``per`` tokens."""

    budget: int
    window: int  # what the window takes of it
    most: int  # what the prompt has
    num_tokens: int
    per: int = 1
    by_reference: bool = False

    @classmethod
    def of(
        cls, budget: int, window: int, num_tokens: int, page_size: int | None, by_reference: bool
    ) -> Units:
        """``page_size`` None: in tokens. ``by_reference``: the prompt's own pages are kept, of
        which the window may touch one more than it fills; else tokens fill pages of their own."""
        if page_size is None:
            return cls(min(budget, num_tokens), min(window, num_tokens), num_tokens, num_tokens)
        most = -(-num_tokens // page_size)
        first = max(0, num_tokens - window) // page_size
        held = most - first if by_reference else min(most, -(-window // page_size))
        budget = min(most, max(budget // page_size, held))
        return cls(budget, held, most, num_tokens, page_size, by_reference)

    def tokens(self, units: int) -> int:
        """Tokens that so many units hold."""
        if self.by_reference:
            return page_tokens(units, self.num_tokens, self.per)
        return min(self.num_tokens, units * self.per)


def page_tokens(pages: int, num_tokens: int, page_size: int) -> int:
    """Tokens that ``pages`` pages hold when one of them is the last of ``num_tokens`` tokens."""
    return min(num_tokens, max(0, pages * page_size - -num_tokens % page_size))


def touched_pages(recent: int, page_size: int) -> int:
    """Most pages that the newest ``recent`` tokens of a stream can lie in."""
    return -(-(recent - 1) // page_size) + 1 if recent > 0 else 0


def later_limit(budget: int, recent: int, per: int) -> int:
    """Tokens that a fold in decode leaves at most: ``budget``, in whole units of ``per`` tokens
    that the newest ``recent`` ones have room in, wherever in a unit they begin."""
    return max(budget // per, touched_pages(recent, per)) * per


def least_pages(equal: int, held: int, head_floor: float) -> int:
    """Pages that a head keeps at least where a layer's pages are shared out by scores.

    ``equal``: an equal share; ``held``: what the newest tokens need anyway.
    """
    return min(max(1, round(head_floor * equal), held), equal)


def largest_remainder(shares: Sequence[float], total: int) -> list[int]:
    """Integers near ``shares`` whose sum is ``total`` exactly; ties go to the lower index.

    ``shares`` must not be negative, and must sum to about ``total``.
    """
    # A share that is a whole number but for rounding must not lose one to another.
    whole = [int(share + 1e-9) for share in shares]
    order = sorted(range(len(whole)), key=lambda i: (whole[i] - shares[i], i))
    for i in order[: total - sum(whole)]:
        whole[i] += 1
    return whole


def clamp_shares(shares: Sequence[float], low: float, high: float) -> list[float]:
    """Clamp to ``[low, high]``, and hand what was cut off or lent to the others in equal parts.

    The sum stays what it was, as far as the bounds allow.
    """
    total = min(max(sum(shares), low * len(shares)), high * len(shares))
    result = list(shares)
    for _ in range(2 * len(result) + 1):
        result = [min(max(x, low), high) for x in result]
        missing = total - sum(result)
        if abs(missing) < 1e-9 * max(1.0, total):
            break
        open_ = [i for i, x in enumerate(result) if (x < high if missing > 0 else x > low)]
        for i in open_:
            result[i] += missing / len(open_)
    return result


def fill_shares(weights: Sequence[float], total: float, high: float) -> list[float]:
    """``total`` in proportion to ``weights``, nobody above ``high``; the rest in proportion again.

    Weights may be zero: those get what is left when all others are full, in equal parts.
    """
    result = [0.0] * len(weights)
    rest = min(total, high * len(weights))
    open_ = [i for i, weight in enumerate(weights) if weight > 0]
    while open_:
        scale = rest / sum(weights[i] for i in open_)
        full = [i for i in open_ if weights[i] * scale >= high]
        for i in full or open_:
            result[i] = high if full else weights[i] * scale
            rest -= result[i]
        if not full:
            return result
        open_ = [i for i in open_ if i not in full]
    others = [i for i, weight in enumerate(weights) if weight <= 0]
    for i in others:
        result[i] = rest / len(others)
    return result
