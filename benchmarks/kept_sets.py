"""Which tokens our code keeps of queries and keys that another implementation chose from.

The same tensors go through the path that the engine takes: keys into head pages, attention of the
last queries, column sums (the compiled kernels), the policy's `choose`. Where two sets differ, the
exchanged tokens are scored again in fp64: how close they are says whether rounding decided.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sglang_kv.compression.base import Candidates, Compressor
from sglang_kv.compression.scoring import pool_scores
from sglang_kv.kernels.attention import extend
from sglang_kv.kernels.layout import PagedStreams, allocate_pages
from sglang_kv.kernels.scores import column_sums
from sglang_kv.kernels.transfer import append

PAGE = 16
#: fp32 sums of a few hundred weights agree to about this share.
ROUNDING = 1e-5


def paged(keys: Tensor) -> PagedStreams:
    """One request's keys in head pages; values are zeros. ``keys``: fp32 [layers, heads, n, dim]"""
    layers, heads, tokens, dim = keys.shape
    count = -(-tokens // PAGE)
    pages = allocate_pages(layers * heads * count, PAGE, dim, keys.dtype)
    table = torch.arange(layers * heads * count, dtype=torch.int32)
    desc = torch.tensor([tokens, 0, 0, -1], dtype=torch.int32)
    streams = PagedStreams(
        pages,
        table.view(1, layers, heads, count),
        desc.expand(1, layers, heads, 4).contiguous(),
        torch.zeros(1, dtype=torch.int32),
    )
    rows = torch.tensor([0, tokens], dtype=torch.int32)
    for layer in range(layers):
        k = keys[layer].transpose(0, 1).contiguous()
        append(k, torch.zeros_like(k), rows, streams, layer)
    return streams


def window_scores(queries: Tensor, streams: PagedStreams) -> Tensor:
    """Attention that each token received from the last queries: fp32 ``[layers, heads, tokens]``.

    ``queries``: fp32 ``[layers, query_heads, window, dim]``.
    """
    layers, _, window, dim = queries.shape
    width = int(streams.desc[0, 0, 0, 0])
    scores = torch.zeros(1, layers, streams.num_kv_heads, width)
    rows = torch.tensor([0, window], dtype=torch.int32)
    zero = torch.zeros(1, dtype=torch.int32)
    for layer in range(layers):
        q, scale = queries[layer].transpose(0, 1).contiguous(), dim**-0.5
        _, lse = extend(q, rows, streams, layer, sm_scale=scale, return_lse=True)
        column_sums(q, rows, zero, lse, streams, layer, scores, zero, sm_scale=scale)
    return scores[0]


def choose(policy: Compressor, scores: Tensor, kept: Tensor, window: int) -> Tensor:
    """What ``policy`` keeps, bool as ``scores``. ``kept``: int64 ``[layers, heads]``"""
    tokens = scores.shape[-1]
    return policy.choose(
        Candidates(
            scores=scores,
            lengths=torch.full(scores.shape[:2], tokens),
            kept=kept,
            positions=None,
            num_tokens=tokens,
            score_from=tokens - window,
            page_size=PAGE,
            weights=torch.ones(scores.shape[:2]),
        )
    )


def exact_scores(queries: Tensor, keys: Tensor, kernel_size: int, pooling: str) -> Tensor:
    """One stream's pooled scores in fp64, of all tokens before the window.

    ``queries``: ``[group, window, dim]``, ``keys``: ``[tokens, dim]``.
    """
    window, tokens = queries.shape[1], len(keys)
    logits = queries.double() @ keys.double().T * keys.shape[-1] ** -0.5
    later = torch.ones(window, tokens, dtype=torch.bool).triu(tokens - window + 1)
    weights = logits.masked_fill(later, -torch.inf).softmax(-1)
    return pool_scores(weights.sum((0, 1))[: tokens - window], kernel_size, pooling)


def compare(
    policy: Compressor,
    arrays: Mapping[str, NDArray[Any]],
    arm: str,
    budget: NDArray[np.int64] | None,
) -> dict[str, Any]:
    """Our sets beside the other's, of one prompt.

    Args:
        policy: with ``window``, ``kernel_size`` and ``pooling``.
        arrays: ``k`` ``[layers, heads, tokens, dim]``, ``q WINDOW`` ``[layers, query_heads,
            window, dim]``, and of each layer ``kept LAYER ARM`` ``[heads, kept]``, sorted.
        arm: which kept sets.
        budget: tokens that the policy's own plan keeps, ``[layers, heads]``; None: as many as
            the other keeps.

    Returns:
        Counts of ``sets`` and those ``equal``, of ``tokens`` kept and those ``exchanged``, sets
        whose exchange is ``rounding``, and ``gap``, the largest relative difference of the fp64
        scores of tokens exchanged.
    """
    parameters = policy.parameters
    keys = torch.from_numpy(arrays["k"])
    queries = torch.from_numpy(arrays[f"q {parameters['window']}"])
    theirs = [arrays[f"kept {layer} {arm}"] for layer in range(len(keys))]
    sizes = np.array([[kept.shape[1]] * kept.shape[0] for kept in theirs], dtype=np.int64)
    scores = window_scores(queries, paged(keys))
    kept = torch.from_numpy(sizes if budget is None else budget)
    ours = choose(policy, scores, kept, parameters["window"])
    found = {"sets": 0, "equal": 0, "rounding": 0, "tokens": 0, "exchanged": 0, "gap": 0.0}
    group = queries.shape[1] // keys.shape[1]
    for layer, head in np.ndindex(*sizes.shape):
        mine = set(ours[layer, head].nonzero()[:, 0].tolist())
        other = set(theirs[layer][head].tolist())
        found["sets"] += 1
        found["tokens"] += len(other)
        if mine == other:
            found["equal"] += 1
            continue
        q = queries[layer, head * group : (head + 1) * group]
        exact = exact_scores(q, keys[layer, head], parameters["kernel_size"], parameters["pooling"])
        gap = exchange_gap(exact, sorted(mine - other), sorted(other - mine))
        found["exchanged"] += len(mine - other)
        found["rounding"] += gap <= ROUNDING
        found["gap"] = max(found["gap"], gap)
    return found


def exchange_gap(exact: Tensor, mine: Sequence[int], other: Sequence[int]) -> float:
    """Relative spread of the scores of tokens that only one of two sets has.

    Infinite for sets of different sizes, or where a token of the window is missing in one.
    """
    if len(mine) != len(other) or max([*mine, *other]) >= len(exact):
        return float("inf")
    values = exact[[*mine, *other]]
    return float((values.max() - values.min()) / values.max())


def total(counts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of several prompts: sums, the largest gap, and in how many prompts every set is equal."""
    keys = ("sets", "equal", "rounding", "tokens", "exchanged")
    summed: dict[str, Any] = {key: sum(c[key] for c in counts) for key in keys}
    return {
        "prompts": len(counts),
        "equal_prompts": sum(c["equal"] == c["sets"] for c in counts),
        **summed,
        "gap": max((c["gap"] for c in counts), default=0.0),
    }
