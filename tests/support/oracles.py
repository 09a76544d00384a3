"""What the papers say a method keeps: plain torch, fp32, one head and one step at a time.

Slow on purpose, and shares no code with `sglang_kv`. Positions come back sorted, one list per
KV head. Queries and keys are after RoPE, `[heads, tokens, head_dim]`; the query heads of one KV
head are adjacent.
"""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from torch import Tensor


def causal_attention(q: Tensor, k: Tensor, seen: Tensor) -> Tensor:
    """Softmax weights `[queries, keys]` of one head; row i sees the first `seen[i]` keys."""
    logits = q.float() @ k.float().T / math.sqrt(q.shape[-1])
    hidden = torch.arange(k.shape[0]) >= seen[:, None]
    return torch.softmax(logits.masked_fill(hidden, -math.inf), dim=-1)


def best(scores: Tensor, count: int) -> list[int]:
    """Positions of the `count` highest scores, sorted; of equals, the lower position first."""
    order = torch.sort(scores, descending=True, stable=True).indices
    return sorted(order[:count].tolist())


def pool(scores: Tensor, kernel_size: int, pooling: str) -> Tensor:
    """Average (zero padding counted) or maximum over `kernel_size` neighbours, stride 1."""
    if kernel_size % 2 == 0:
        raise ValueError(f"an even kernel ({kernel_size}) shifts every score")
    padding = {"avg": 0.0, "max": -math.inf}[pooling]
    edge = scores.new_full((kernel_size // 2,), padding)
    neighbours = torch.cat([edge, scores, edge]).unfold(0, kernel_size, 1)
    return neighbours.mean(-1) if pooling == "avg" else neighbours.amax(-1)


def snapkv_scores(q: Tensor, k: Tensor, window: int, kernel_size: int, pooling: str) -> Tensor:
    """Scores `[kv_heads, tokens - window]` of all tokens before the window.

    Args:
        q: at least the last `window` queries.
    """
    tokens, group = k.shape[1], q.shape[0] // k.shape[0]
    seen = torch.arange(tokens - window, tokens) + 1
    rows = []
    for head, keys in enumerate(k):
        members = q[head * group : (head + 1) * group, -window:]
        received = [causal_attention(member, keys, seen).mean(0) for member in members]
        scores = torch.stack(received).mean(0)[: tokens - window]
        rows.append(pool(scores, kernel_size, pooling))
    return torch.stack(rows)


def snapkv_kept(
    q: Tensor, k: Tensor, window: int, kernel_size: int, pooling: str, budget: int
) -> list[list[int]]:
    """SnapKV: the window and, per KV head, the `budget - window` tokens it attends to most."""
    tokens = k.shape[1]
    if budget < window:
        raise ValueError(f"a budget of {budget} has no room for a window of {window}")
    if budget >= tokens:
        return [list(range(tokens)) for _ in k]
    scores = snapkv_scores(q, k, window, kernel_size, pooling)
    recent = list(range(tokens - window, tokens))
    return [best(row, budget - window) + recent for row in scores]


def h2o_kept(
    q: Tensor, k: Tensor, heavy: int, recent: int, norm: str, steps: list[int]
) -> list[list[list[int]]]:
    """H2O's `real_drop` loop: what is kept after each forward, `[step][kv_head]`.

    A token's score is the attention it has received from all queries of its KV head's group
    since it was computed, and leaves with it.

    Args:
        norm: `sum` (the paper), or `mean`: divided by how many positions could see the token.
        steps: tokens of each forward: the prompt (or its chunks), then ones.
    """
    if recent < 1:
        raise ValueError("a step's own token is recent: recent must be at least 1")
    if norm not in ("sum", "mean"):
        raise ValueError(norm)
    group = q.shape[0] // k.shape[0]
    cached: list[list[int]] = [[] for _ in k]
    mass = [torch.zeros(0) for _ in k]
    history = []
    start = 0
    for new in steps:
        end = start + new
        for head, keys in enumerate(k):
            old = len(cached[head])
            held = [*cached[head], *range(start, end)]
            seen = torch.arange(old, old + new) + 1
            received = torch.zeros(len(held))
            for member in q[head * group : (head + 1) * group, start:end]:
                received += causal_attention(member, keys[held], seen).sum(0)
            received[:old] += mass[head]
            keep = list(range(len(held)))
            if len(held) > heavy + recent:
                rank = received
                if norm == "mean":
                    rank = received / (end - torch.tensor(held))
                old_enough = len(held) - recent
                keep = best(rank[:old_enough], heavy) + keep[old_enough:]
            cached[head] = [held[i] for i in keep]
            mass[head] = received[keep]
        history.append([list(positions) for positions in cached])
        start = end
    return history


def pyramid_budgets(
    layers: int,
    target: Fraction | int,
    *,
    beta: Fraction | int | None = None,
    delta: Fraction | int | None = None,
    most: Fraction | int | None = None,
) -> list[Fraction]:
    """PyramidKV's line before any rounding: `B_base + delta * (N - 1 - l) / (N - 1)`.

    Its mean is `target`, exactly. Whether that counts the window is up to the caller.

    Args:
        beta: the last layer gets `target / beta`; the paper's parameter.
        delta: or, instead, what the first layer gets more than the last.
        most: what the first layer gets at most; the last one is raised to make up for it.
    """
    target = Fraction(target)
    if beta is not None and delta is None:
        base = target / Fraction(beta)
    elif delta is not None and beta is None:
        base = target - Fraction(delta) / 2
    else:
        raise ValueError("give either beta or delta")
    if most is not None:
        base = max(base, 2 * target - Fraction(most))
    gradient = 2 * (target - base)
    if layers == 1:
        return [target]
    return [base + gradient * Fraction(layers - 1 - i, layers - 1) for i in range(layers)]
