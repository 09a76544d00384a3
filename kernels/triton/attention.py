"""Attention of new tokens to their streams, on a GPU: the ops of `kernels.attention`.

Nothing is planned and nothing is read back: grids follow from shapes, and lengths and page lists
are read by the kernels. A call can be captured in a CUDA graph; replays see streams as they are
then, as long as they fit into the same table.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from sglang_kv.kernels.layout import PagedStreams
from sglang_kv.kernels.triton import checks
from sglang_kv.kernels.triton.checks import require
from sglang_kv.kernels.triton.decode_kernel import attend_split
from sglang_kv.kernels.triton.extend_kernel import attend_tile
from sglang_kv.kernels.triton.launch import architecture, launch
from sglang_kv.kernels.triton.merge_kernel import merge_splits
from sglang_kv.kernels.triton.scores import add_decode_scores, require_scores

#: How decode cuts a stream: into splits of at least so many blocks, at most so many splits.
MIN_BLOCKS, MAX_SPLITS = 4, 128


def decode(
    q: Tensor,
    streams: PagedStreams,
    layer: int,
    *,
    sm_scale: float,
    sink_q: Tensor | None = None,
    logits_soft_cap: float = 0.0,
    layer_window_left: int = -1,
    out: Tensor | None = None,
    return_lse: bool = False,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    scores: Tensor | None = None,
    score_slots: Tensor | None = None,
) -> Any:
    """`kernels.attention.decode` on a GPU; `q` and the pages may also be fp16, the pages 8-bit.

    - `k_scale`, `v_scale`: what the pages hold times these are the keys and values
    - `scores`, `score_slots`: as `kernels.scores.column_sums` takes them; the weights of every
      query are added to them, as `column_sums` after this call would add them, without reading the
      keys again. Both or neither

    Returns `out`, or with `return_lse` (out, lse). A result does not depend on the rest of the
    batch, to the bit. Lengths, page ids and slots are not checked.

    Raises ValueError, naming the argument, for shapes, strides, dtypes and devices.
    """
    checks.require_streams(streams, layer, None, len(q))
    arguments, out = _shared_arguments(
        q, streams, layer, sink_q, out, sm_scale, k_scale, v_scale, logits_soft_cap
    )
    block_n = _decode_block(streams)
    batch, num_qo_heads, head_dim = q.shape
    capacity = -(-streams.table.shape[3] * streams.page_size // block_n)
    max_splits = min(-(-capacity // MIN_BLOCKS), MAX_SPLITS)
    part = q.new_empty((batch, num_qo_heads, max_splits, head_dim), dtype=torch.float32)
    part_lse = q.new_empty((batch, num_qo_heads, max_splits), dtype=torch.float32)
    require((scores is None) == (score_slots is None), "scores and score_slots: both or neither")
    lse, logits, width = part_lse, part_lse, 0
    if return_lse or scores is not None:
        lse = q.new_empty((batch, num_qo_heads), dtype=torch.float32)
    if scores is not None and score_slots is not None:
        require_scores(streams, scores, score_slots)
        width = scores.shape[3]
        logits = q.new_empty((len(scores), num_qo_heads, width), dtype=torch.float32)
    splits: dict[str, Any] = {
        "lse_ptr": lse,
        "part_ptr": part,
        "part_lse_ptr": part_lse,
        "max_splits": max_splits,
        "layer_window_left": layer_window_left,
        "BLOCK_N": block_n,
        "MIN_BLOCKS": MIN_BLOCKS,
        "MAX_SPLITS": MAX_SPLITS,
        "STORE_LSE": lse is not part_lse,
    }
    launch(
        attend_split,
        (max_splits, streams.num_kv_heads, batch),
        **arguments,
        **splits,
        logits_ptr=logits,
        score_slots_ptr=streams.slots if score_slots is None else score_slots,
        logits_width=width,
        KEEP_LOGITS=scores is not None,
        num_warps=4,
        num_stages=3 if head_dim <= 128 and streams.pages.itemsize <= 2 else 2,
    )
    if max_splits > 1:
        merged = ("out_ptr", "out_stride_n", "out_stride_h", "v_scale", "GROUP")
        launch(
            merge_splits,
            (num_qo_heads, batch),
            **{name: arguments[name] for name in merged},
            **checks.stream_arguments(streams, layer),
            **checks.row_arguments(streams.pages),
            **splits,
            num_warps=4,
        )
    if scores is not None and score_slots is not None:
        add_decode_scores(logits, lse, streams, layer, scores, score_slots, layer_window_left)
    return (out, lse) if return_lse else out


def extend(
    q: Tensor,
    qo_indptr: Tensor,
    streams: PagedStreams,
    layer: int,
    *,
    sm_scale: float,
    sink_q: Tensor | None = None,
    logits_soft_cap: float = 0.0,
    layer_window_left: int = -1,
    out: Tensor | None = None,
    return_lse: bool = False,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Any:
    """`kernels.attention.extend` on a GPU; `q` and the pages may also be fp16, the pages 8-bit.

    `k_scale`, `v_scale`, what is returned and what is raised are as for `decode`. Every row takes
    its keys in the same order, however a prompt is cut into chunks.
    """
    checks.require_streams(streams, layer, qo_indptr, len(q))
    arguments, out = _shared_arguments(
        q, streams, layer, sink_q, out, sm_scale, k_scale, v_scale, logits_soft_cap
    )
    block_m, block_n, num_warps, num_stages = _extend_tile(q, streams)
    queries = block_m // arguments["GROUP"]
    batch = len(streams.slots)
    lse = out
    if return_lse:
        lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    launch(
        attend_tile,
        (len(q) // queries + batch, streams.num_kv_heads),
        **arguments,
        lse_ptr=lse,
        qo_indptr_ptr=qo_indptr,
        batch=batch,
        layer_window_left=layer_window_left,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        STORE_LSE=return_lse,
        num_warps=num_warps,
        num_stages=num_stages,
    )
    return (out, lse) if return_lse else out


def _shared_arguments(
    q: Tensor,
    streams: PagedStreams,
    layer: int,
    sink_q: Tensor | None,
    out: Tensor | None,
    sm_scale: float,
    k_scale: float,
    v_scale: float,
    logits_soft_cap: float,
) -> tuple[dict[str, Any], Tensor]:
    """What both kernels take, and the result's memory."""
    pages = streams.pages
    checks.require_rows(q, "q", pages)
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    for name, tensor in (("sink_q", sink_q), ("out", out)):
        if tensor is None:
            continue
        checks.require_rows(tensor, name, pages, q.shape[1])
        require(len(tensor) == len(q), f"{name} has {len(tensor)} tokens, q has {len(q)}")
    require(sink_q is None or sink_q.dtype == q.dtype, "sink_q must have the dtype of q")
    sinks = q if sink_q is None else sink_q
    arguments = {
        "q_ptr": q,
        "sink_q_ptr": sinks,
        "out_ptr": out,
        "q_stride_n": q.stride(0),
        "q_stride_h": q.stride(1),
        "sink_q_stride_n": sinks.stride(0),
        "sink_q_stride_h": sinks.stride(1),
        "out_stride_n": out.stride(0),
        "out_stride_h": out.stride(1),
        "kv_stride": pages.stride(1),
        "v_scale": v_scale,
        "GROUP": checks.group_of(q, streams),
        "OWN_SINK_Q": sink_q is not None,
        **checks.stream_arguments(streams, layer),
        **checks.row_arguments(pages),
        **checks.read_arguments(q, pages),
        **checks.scale_arguments(sm_scale, k_scale, logits_soft_cap, v_scale),
    }
    return arguments, out


def _decode_block(streams: PagedStreams) -> int:
    """Keys per block of decode: 32 KB of K and V in 16 bits, 16 KB in 8 bits.

    Several programs share a multiprocessor, so that is enough to keep its memory busy; more costs
    the registers that let them share it.
    """
    return int(2**14 // (2 * triton.next_power_of_2(streams.head_dim)))


def _extend_tile(q: Tensor, streams: PagedStreams) -> tuple[int, int, int, int]:
    """Rows and keys of a tile of extend, warps and stages: the most that spill no registers."""
    wide = streams.head_dim > 128
    if checks.product_dtype(q, streams.pages) == torch.float32:
        return (32, 16, 4, 1) if wide else (32, 32, 4, 1)
    if wide:
        return 64, 32, 8, 2
    # Before sm_90 products read registers, not shared memory.
    return (128, 64, 8, 2) if architecture(q.device) >= 90 else (128, 32, 8, 2)
