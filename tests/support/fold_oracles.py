"""Which tokens folds keep, from the papers and from what this project adds to them: by page, in
decode, and with a layer's budget split among its heads.

Plain loops in fp32 and fractions, as `oracles`; no code is shared with `sglang_kv`. What stays of a
stream is given by index: tokens that are held, oldest first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction

import torch
from oracles import best, causal_attention, pyramid_budgets
from torch import Tensor

#: ``(position, held positions per head, attention received per head)`` to indices that stay.
Select = Callable[[int, list[list[int]], list[Tensor]], list[list[int]]]


def fold_history(
    q: Tensor,
    k: Tensor,
    select: Select,
    *,
    fold_at: int,
    total: int,
    score_from: int,
    interval: int | None = None,
) -> list[tuple[int, list[list[int]]]]:
    """One layer, token by token: the positions that each fold leaves, of folds that drop any.

    The prompt is dense up to `fold_at`. From then on a token attends to what is left, adds to the
    scores of what it sees, and every `interval` tokens there is a fold before the next is computed.

    Args:
        q, k: ``[heads, tokens, head_dim]``, at least `total` tokens.
        score_from: first position whose query is scored.
    """
    group = q.shape[0] // k.shape[0]
    held = [list(range(fold_at)) for _ in k]
    mass = []
    for head, keys in enumerate(k):
        received = torch.zeros(fold_at)
        for member in q[head * group : (head + 1) * group, score_from:fold_at]:
            seen = torch.arange(score_from, fold_at) + 1
            received += causal_attention(member, keys[:fold_at], seen).sum(0)
        mass.append(received)
    history = []
    for now in range(fold_at, total):
        past = now - fold_at
        if past == 0 or (interval is not None and past % interval == 0):
            picked = select(now, held, mass)
            if any(len(some) < len(all_) for some, all_ in zip(picked, held, strict=True)):
                held = [[h[i] for i in some] for h, some in zip(held, picked, strict=True)]
                mass = [m[some] for m, some in zip(mass, picked, strict=True)]
                history.append((now, [list(positions) for positions in held]))
        for head, keys in enumerate(k):
            held[head].append(now)
            received = torch.cat([mass[head], torch.zeros(1)])
            seen = torch.tensor([len(held[head])])
            for member in q[head * group : (head + 1) * group, now : now + 1]:
                received += causal_attention(member, keys[held[head]], seen)[0]
            mass[head] = received
    return history


# -- what stays of one stream --


def by_token(scores: Tensor, recent: int, count: int) -> list[int]:
    """The `recent` newest of all tokens, and the best others: `count` in all, if there are."""
    length = len(scores)
    if length <= count:
        return list(range(length))
    edge = max(0, length - recent)
    return best(scores[:edge], count - recent) + list(range(edge, length))


def by_page(scores: Tensor, recent: int, pages: int, page_size: int) -> list[int]:
    """The pages that hold the newest, and the others with the highest sums: `pages` in all, or as
    many as the newest lie in."""
    length = len(scores)
    have = math.ceil(length / page_size)
    first = max(0, length - recent) // page_size
    sums = torch.tensor(
        [float(scores[p * page_size : (p + 1) * page_size].sum()) for p in range(first)]
    )
    chosen = [*best(sums, max(0, pages - (have - first))), *range(first, have)]
    return [i for p in chosen for i in range(p * page_size, min(length, (p + 1) * page_size))]


def most_touched(recent: int, page_size: int) -> int:
    """Pages that the newest tokens may lie in, wherever in a page the newest stands."""
    return max(
        (end - 1) // page_size - (end - recent) // page_size + 1
        for end in range(recent, recent + page_size)
    )


# -- budgets --


def rounded(shares: Sequence[Fraction], total: int) -> list[int]:
    """Whole numbers of sum `total`: what is left goes to the largest remainders, then the lower."""
    whole = [math.floor(share) for share in shares]
    order = sorted(range(len(shares)), key=lambda i: (whole[i] - shares[i], i))
    for i in order[: total - sum(whole)]:
        whole[i] += 1
    return whole


def within(shares: Sequence[Fraction], low: Fraction, high: Fraction) -> list[Fraction]:
    """Shares between two bounds; what is cut off or lent, the others bear in equal parts."""
    total = sum(shares)
    result = list(shares)
    while True:
        result = [min(max(share, low), high) for share in result]
        missing = total - sum(result)
        free = [i for i, x in enumerate(result) if (x < high if missing > 0 else x > low)]
        if missing == 0 or not free:
            return result
        for i in free:
            result[i] += missing / len(free)


def pyramid_counts(
    layers: int, budget: int, window: int, most: int, beta: Fraction | int
) -> list[int]:
    """PyramidKV's line in whole tokens (or pages), window included, none above `most`."""
    mean = budget - window
    line = pyramid_budgets(layers, mean, beta=beta)
    line = within(line, Fraction(0), Fraction(most - window))
    return [window + n for n in rounded(line, layers * mean)]


def adaptive_pages(
    scores: list[Tensor], recent: int, budget: int, floor: float, page_size: int, whole: bool
) -> list[int]:
    """AdaKV: pages of each head of a layer, whose sum is as if each had `budget` tokens' pages.

    A head's share is how many of the best tokens of all heads together are its own, above a
    `floor` of an equal share. `whole`: pages of the prompt stay as they are, of which the newest
    tokens may touch one more than they fill.
    """
    length, heads = len(scores[0]), len(scores)
    most = math.ceil(length / page_size)
    newest = math.ceil(recent / page_size)
    if whole:
        newest = most - (length - recent) // page_size
    equal = min(most, max(budget // page_size, newest))
    tokens = min(length, equal * page_size)
    if whole:
        tokens = min(length, equal * page_size - -length % page_size)
    rated = torch.cat([score[: length - recent] for score in scores])
    winners = best(rated, heads * max(0, tokens - recent))
    won = [sum(i // (length - recent) == head for i in winners) for head in range(heads)]
    low = min(max(1, round(floor * equal), newest), equal)
    spare = heads * (equal - low)
    shares = [low + Fraction(spare * n, max(1, sum(won))) for n in won]
    return rounded(within(shares, Fraction(low), Fraction(max(low, most))), heads * equal)
