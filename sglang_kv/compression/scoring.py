"""What the score-based methods share: pooling, and the choice of tokens or pages.

Pure functions. A score is the attention that a token received, per KV head; the highest stay, and
ties go to the lower position, so that a choice never depends on a sort's whim.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d, max_pool1d, pad

from sglang_kv.compression.base import Candidates
from sglang_kv.compression.budgets import (
    clamp_shares,
    largest_remainder,
    least_pages,
    page_tokens,
)


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
        low = least_pages(min(had), held, head_floor)
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
