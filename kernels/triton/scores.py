"""Attention that each key received, on a GPU: the op of `kernels.scores`."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_kv.kernels.layout import PagedStreams
from sglang_kv.kernels.triton import checks
from sglang_kv.kernels.triton.checks import require
from sglang_kv.kernels.triton.launch import launch
from sglang_kv.kernels.triton.score_kernels import add_columns, add_kept_logits


def column_sums(
    q: Tensor,
    qo_indptr: Tensor | None,
    first_query: Tensor,
    lse: Tensor,
    streams: PagedStreams,
    layer: int,
    scores: Tensor,
    score_slots: Tensor,
    *,
    sm_scale: float,
    logits_soft_cap: float = 0.0,
    layer_window_left: int = -1,
    k_scale: float = 1.0,
) -> None:
    """`kernels.scores.column_sums` on a GPU; `q` and the pages may also be fp16, the pages 8-bit.

    - `k_scale`: what the pages hold times this are the keys

    A result does not depend on the rest of the batch, to the bit. How a prompt is cut into chunks
    changes the order of additions, unless each chunk ends where a tile of queries does. Lengths,
    page ids and slots are not checked, nor that `scores` is as wide as streams are long.

    Raises ValueError, naming the argument, for shapes, strides, dtypes and devices.
    """
    checks.require_streams(streams, layer, qo_indptr, len(q))
    checks.require_rows(q, "q", streams.pages)
    group = checks.group_of(q, streams)
    device, batch = streams.pages.device, len(streams.slots)
    checks.require_ints(first_query, "first_query", 1, device)
    require(
        len(first_query) == batch, f"first_query has {len(first_query)} entries for {batch} slots"
    )
    require(lse.dim() == 2, f"lse must have 2 dimensions, not {lse.dim()}")
    require(lse.dtype == torch.float32, "lse must be float32")
    require(lse.is_contiguous(), "lse must be contiguous")
    require(
        lse.shape == q.shape[:2],
        f"lse is {list(lse.shape)}, q has {len(q)} tokens of {q.shape[1]} heads",
    )
    checks.require_device(lse, "lse", device)
    require_scores(streams, scores, score_slots)
    exact = checks.product_dtype(q, streams.pages) == torch.float32
    block_n = 32 if exact else 64
    launch(
        add_columns,
        (-(-_longest(streams, scores) // block_n), streams.num_kv_heads, batch),
        q_ptr=q,
        qo_indptr_ptr=streams.slots if qo_indptr is None else qo_indptr,
        first_query_ptr=first_query,
        lse_ptr=lse,
        scores_ptr=scores,
        score_slots_ptr=score_slots,
        q_stride_n=q.stride(0),
        q_stride_h=q.stride(1),
        layer_window_left=layer_window_left,
        width=scores.shape[3],
        GROUP=group,
        BLOCK_M=32 if exact else 64,
        BLOCK_N=block_n,
        HAS_INDPTR=qo_indptr is not None,
        **checks.stream_arguments(streams, layer),
        **checks.row_arguments(streams.pages),
        **checks.read_arguments(q, streams.pages),
        **checks.scale_arguments(sm_scale, k_scale, logits_soft_cap),
        num_warps=4,
        num_stages=1 if exact else 2,
    )


def add_decode_scores(
    logits: Tensor,
    lse: Tensor,
    streams: PagedStreams,
    layer: int,
    scores: Tensor,
    score_slots: Tensor,
    layer_window_left: int,
) -> None:
    """Add 2^(logit - lse) of every request's query to `scores`.

    - `logits`: fp32 [score_slots, num_qo_heads, width], base 2, written where a key is visible
    - `lse`: fp32 [batch, num_qo_heads]
    """
    block_n = 256
    launch(
        add_kept_logits,
        (-(-_longest(streams, scores) // block_n), streams.num_kv_heads, len(streams.slots)),
        logits_ptr=logits,
        lse_ptr=lse,
        scores_ptr=scores,
        score_slots_ptr=score_slots,
        layer_window_left=layer_window_left,
        width=scores.shape[3],
        GROUP=logits.shape[1] // streams.num_kv_heads,
        BLOCK_N=block_n,
        **checks.stream_arguments(streams, layer),
        num_warps=4,
    )


def require_scores(streams: PagedStreams, scores: Tensor, score_slots: Tensor) -> None:
    """Raise ValueError unless `scores` and `score_slots` are of these streams."""
    device, batch = streams.pages.device, len(streams.slots)
    require(scores.dim() == 4, f"scores must have 4 dimensions, not {scores.dim()}")
    require(scores.dtype == torch.float32, "scores must be float32")
    require(scores.is_contiguous(), "scores must be contiguous")
    checks.require_device(scores, "scores", device)
    layers, heads = streams.table.shape[1:3]
    require(
        scores.shape[1:3] == (layers, heads),
        f"scores has {scores.shape[1]} layers of {scores.shape[2]} heads, table has {layers} of "
        f"{heads}",
    )
    checks.require_ints(score_slots, "score_slots", 1, device)
    require(
        len(score_slots) == batch, f"score_slots has {len(score_slots)} entries for {batch} slots"
    )


def _longest(streams: PagedStreams, scores: Tensor) -> int:
    """No stream that is scored holds more tokens."""
    return min(scores.shape[3], streams.table.shape[3] * streams.page_size)
