"""What the score-based methods share: pooling, exact budgets, and the choice of tokens or pages.

Pure functions. A score is the attention that a token received, per KV head; the highest stay, and
ties go to the lower position, so that a choice never depends on a sort's whim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d, max_pool1d, pad

from sglang_kv.compression.base import Candidates

GRANULARITIES = ("token", "page")
SHARES = ("head", "layer")


def pool_scores(scores: Tensor, kernel_size: int, pooling: str) -> Tensor:
    """1-D pooling over tokens, the same shape out. ``scores``: fp32 ``[..., tokens]``, none < 0.

    As in SnapKV's code: stride 1, zeros around both ends, which the average counts. An even kernel
    would shift everything by half a token, and is refused where policies are parsed.
    """
    if kernel_size == 1 or scores.numel() == 0:
        return scores
    flat = scores.reshape(-1, 1, scores.shape[-1])
    pool = avg_pool1d if pooling == "avg" else max_pool1d
    return pool(flat, kernel_size, 1, kernel_size // 2).view(scores.shape)


def top_mask(scores: Tensor, counts: Tensor) -> Tensor:
    """The ``counts[...]`` highest of each row of ``scores``; ties go to the lower index.

    ``scores``: ``[..., n]``; -inf is never chosen while anything else is left. ``counts``: int64
    ``[...]``, at most n. Returns bool ``[..., n]`` with exactly ``counts`` true per row.
    """
    most = int(counts.max()) if counts.numel() else 0
    if most == 0:
        return torch.zeros_like(scores, dtype=torch.bool)
    best = torch.topk(scores, most, dim=-1).values
    least = best.gather(-1, (counts - 1).clamp(min=0)[..., None])
    above, equal = scores > least, scores == least
    missing = counts[..., None] - above.sum(-1, keepdim=True)
    chosen = above | (equal & (equal.cumsum(-1) <= missing))
    return chosen & (counts > 0)[..., None]


def keep_tokens(scores: Tensor, lengths: Tensor, kept: Tensor, recent: int) -> Tensor:
    """The newest ``recent`` tokens of each stream, and the best others, ``kept`` in all.

    Shapes as in `Compressor.choose`.
    """
    index = torch.arange(scores.shape[-1])
    edge = (lengths - recent).clamp(min=0)[..., None]
    newest = (index >= edge) & (index < lengths[..., None])
    others = scores.masked_fill(index >= edge, -torch.inf)
    return newest | top_mask(others, (kept - recent).clamp(min=0))


def page_scores(scores: Tensor, page_size: int) -> Tensor:
    """``Score(Block_k)``: the sum of its tokens' scores. ``[..., tokens]`` to ``[..., pages]``.

    The last page may be partly filled.
    """
    tokens = scores.shape[-1]
    padded = pad(scores, (0, -tokens % page_size))
    return padded.view(*scores.shape[:-1], -1, page_size).sum(-1)


def keep_pages(
    scores: Tensor, lengths: Tensor, kept: Tensor, recent: int, page_size: int
) -> Tensor:
    """Whole pages: those that hold the newest ``recent`` tokens, and the best others.

    ``kept`` counts tokens; it must be what whole pages hold (`page_tokens`). Returns tokens.
    """
    totals = page_scores(scores, page_size)
    index = torch.arange(totals.shape[-1])
    last = (lengths - 1).div(page_size, rounding_mode="floor")[..., None]
    edge = (lengths - recent).clamp(min=0).div(page_size, rounding_mode="floor")[..., None]
    newest = (index >= edge) & (index <= last)
    others = totals.masked_fill(index >= edge, -torch.inf)
    pages = (kept + page_size - 1).div(page_size, rounding_mode="floor")
    chosen = newest | top_mask(others, (pages - newest.sum(-1)).clamp(min=0))
    tokens = chosen.repeat_interleave(page_size, -1)[..., : scores.shape[-1]]
    return tokens & (torch.arange(scores.shape[-1]) < lengths[..., None])


def choose_ranked(
    scores: Tensor,
    tokens: Candidates,
    *,
    recent: int,
    by_page: bool,
    share: str,
    head_floor: float | None = None,
) -> Tensor:
    """The newest ``recent`` tokens and the best-scored others: tokens or pages, per head, by a
    layer's heads together (``share="layer"``: scores summed, weighted by the heads' gates), or
    with a layer's pages split among its heads by their scores (``head_floor``).
    """
    lengths, kept = tokens.lengths, tokens.kept
    if share == "layer":
        together = (scores * tokens.weights[..., None]).sum(-2, keepdim=True)
        scores = together.expand_as(scores)
    if head_floor is not None:
        kept = adaptive_kept(scores, tokens, recent, by_page, head_floor)
    if by_page:
        return keep_pages(scores, lengths, kept, recent, tokens.page_size)
    return keep_tokens(scores, lengths, kept, recent)


def adaptive_kept(
    scores: Tensor, tokens: Candidates, recent: int, by_page: bool, head_floor: float
) -> Tensor:
    """AdaKV's split of a layer's budget among its heads, in whole pages: each head's share of the
    best tokens of all heads together, above a floor that every head keeps.

    Feng et al., 2024 (https://arxiv.org/abs/2407.11550). The page total per layer does not change.
    """
    size = tokens.page_size
    others = (tokens.kept - recent).clamp(min=0)
    index = torch.arange(scores.shape[-1])
    ranked = scores.masked_fill(index >= (tokens.lengths - recent)[..., None], -torch.inf)
    best = top_mask(ranked.flatten(1), others.sum(-1)).view(ranked.shape)
    wins = best.sum(-1).tolist()  # of each head, [layers][kv_heads]
    kept = tokens.kept.clone()
    for layer, lengths in enumerate(tokens.lengths.tolist()):
        had = [-(-int(n) // size) for n in tokens.kept[layer]]
        held = -(-recent // size)  # pages that the newest tokens need anyway
        if by_page:
            held = max(-(-int(n) // size) - int(n - recent) // size for n in lengths)
        low = min(max(1, round(head_floor * min(had)), held), min(had))
        total, spare = sum(had), sum(had) - low * len(had)
        won = max(1, sum(wins[layer]))
        shares = [low + spare * w / won for w in wins[layer]]
        high = min(-(-int(n) // size) for n in lengths)  # at a prompt's fold they are all alike
        pages = largest_remainder(clamp_shares(shares, low, max(low, high)), total)
        for head, count in enumerate(pages):
            length = int(lengths[head])
            held = page_tokens(count, length, size) if by_page else min(length, count * size)
            kept[layer, head] = held
    return kept


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
