"""Extend on the device: the newest queries of every request against their streams, in tiles.

A row of a tile is one query of one head of the group, so no group size wastes rows but the few that
do not fill a whole query. Blocks of keys come in ascending order whatever the tile, and one that a
row does not see adds an exact zero: how a prompt is cut into chunks changes no order of additions.
FlashAttention-2, Dao 2023.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,no-any-return,untyped-decorator,misc"

import triton
import triton.language as tl

from sglang_kv.kernels.triton.numbers import dot, round_to, to_logits, widen
from sglang_kv.kernels.triton.streams import (
    block_start,
    blocks_in_sight,
    find_stream,
    find_tile,
    lower_bounds,
    token_offsets,
    visible_ranges,
)


@triton.jit
def attend_block(
    start,
    row_sum,
    row_max,
    acc,
    q,
    sink_q,
    pages_ptr,
    page_list,
    page_stride,
    kv_stride,
    kv_len,
    query_index,
    sinks_begin,
    sinks_stop,
    window_begin,
    score_scale,
    soft_cap,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    FP8: tl.constexpr,
    MASKED: tl.constexpr,
    OWN_SINK_Q: tl.constexpr,
):
    """One block of keys: the online softmax goes on by it. Without `MASKED` every row sees all."""
    index = start + tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_D)
    in_row = dims < HEAD_DIM
    in_stream = index < kv_len
    offsets = token_offsets(page_list, index, in_stream, page_stride, PAGE_SIZE, HEAD_DIM)
    k = tl.load(
        pages_ptr + offsets[None, :] + dims[:, None],
        mask=in_stream[None, :] & in_row[:, None],
        other=0.0,
    )
    k = widen(k, q.dtype, FP8)
    logits = to_logits(dot(q, k), SOFT_CAP, score_scale, soft_cap)
    if MASKED:
        key = index[None, :]
        is_sink = (key >= sinks_begin[:, None]) & (key < sinks_stop[:, None])
        visible = is_sink | ((key >= window_begin[:, None]) & (key <= query_index[:, None]))
        if OWN_SINK_Q:
            of_sinks = to_logits(dot(sink_q, k), SOFT_CAP, score_scale, soft_cap)
            logits = tl.where(is_sink, of_sinks, logits)
        logits = tl.where(visible, logits, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(logits, 1))
    decay = tl.exp2(row_max - new_max)
    weights = tl.exp2(logits - new_max[:, None])
    row_sum = row_sum * decay + tl.sum(weights, 1)
    v = tl.load(
        pages_ptr + offsets[:, None] + kv_stride + dims[None, :],
        mask=in_stream[:, None] & in_row[None, :],
        other=0.0,
    )
    v = widen(v, q.dtype, FP8)
    acc = acc * decay[:, None] + dot(round_to(weights, q.dtype), v)
    return row_sum, new_max, acc


@triton.jit(
    do_not_specialize=[
        "batch",
        "layer",
        "num_layers",
        "num_kv_heads",
        "max_pages",
        "layer_window_left",
    ]
)
def attend_tile(
    q_ptr,
    sink_q_ptr,
    out_ptr,
    lse_ptr,
    qo_indptr_ptr,
    pages_ptr,
    table_ptr,
    desc_ptr,
    slots_ptr,
    q_stride_n,
    q_stride_h,
    sink_q_stride_n,
    sink_q_stride_h,
    out_stride_n,
    out_stride_h,
    page_stride,
    kv_stride,
    batch,
    layer,
    num_layers,
    num_kv_heads,
    max_pages,
    layer_window_left,
    score_scale,
    soft_cap,
    v_scale,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    DTYPE: tl.constexpr,
    FP8: tl.constexpr,
    OWN_SINK_Q: tl.constexpr,
    STORE_LSE: tl.constexpr,
):
    """Grid [tiles, kv_heads]. The last tiles come first: they have the most keys to see."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    QUERIES: tl.constexpr = BLOCK_M // GROUP
    request, tile = find_tile(tile, qo_indptr_ptr, batch, QUERIES)
    first_row = tl.load(qo_indptr_ptr + request)
    num_queries = tl.load(qo_indptr_ptr + request + 1) - first_row
    first_query = tile * QUERIES
    if first_query >= num_queries:
        return
    page_list, kv_len, gap, num_sinks, window_left = find_stream(
        table_ptr, desc_ptr, slots_ptr, request, kv_head, layer, num_layers, num_kv_heads, max_pages
    )
    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    query = first_query + rows // GROUP
    row_valid = (rows < QUERIES * GROUP) & (query < num_queries)
    head = kv_head * GROUP + rows % GROUP
    token = (first_row + query).to(tl.int64)
    in_row = row_valid[:, None] & (dims < HEAD_DIM)[None, :]
    q = tl.load(
        q_ptr + (token * q_stride_n + head * q_stride_h)[:, None] + dims[None, :],
        mask=in_row,
        other=0.0,
    ).to(DTYPE)
    sink_q = q
    if OWN_SINK_Q:
        sink_q = tl.load(
            sink_q_ptr
            + (token * sink_q_stride_n + head * sink_q_stride_h)[:, None]
            + dims[None, :],
            mask=in_row,
            other=0.0,
        ).to(DTYPE)

    first_index = kv_len - num_queries + first_query
    stop = kv_len - num_queries + tl.minimum(first_query + QUERIES, num_queries)
    stop = tl.where(kv_len > 0, stop, 0)
    query_index = kv_len - num_queries + query
    sinks_begin, sinks_stop, window_begin = visible_ranges(
        query_index, gap, num_sinks, window_left, layer_window_left, PAGE_SIZE
    )
    sinks_at, sink_blocks, window_at, blocks = blocks_in_sight(
        first_index, stop, gap, num_sinks, window_left, layer_window_left, PAGE_SIZE, BLOCK_N
    )
    # Of the window's blocks, those that the last query sees whole, and the first one as well.
    _, last_begin, _ = lower_bounds(
        stop - 1, gap, num_sinks, window_left, layer_window_left, PAGE_SIZE
    )
    whole_from = tl.maximum(last_begin + BLOCK_N - 1, 0) // BLOCK_N * BLOCK_N
    whole_to = (first_index + 1) // BLOCK_N * BLOCK_N
    first_whole = sink_blocks + tl.maximum(whole_from - window_at, 0) // BLOCK_N
    first_whole = tl.minimum(first_whole, blocks)
    last_whole = sink_blocks + tl.maximum(whole_to - window_at, 0) // BLOCK_N
    last_whole = tl.minimum(tl.maximum(last_whole, first_whole), blocks)

    row_max = tl.full([BLOCK_M], -1e30, tl.float32)  # finite: -inf less -inf would be a NaN
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    rest = (
        q,
        sink_q,
        pages_ptr,
        page_list,
        page_stride,
        kv_stride,
        kv_len,
        query_index,
        sinks_begin,
        sinks_stop,
        window_begin,
        score_scale,
        soft_cap,
    )
    for block in range(0, first_whole):
        start = block_start(block, sinks_at, sink_blocks, window_at, BLOCK_N)
        row_sum, row_max, acc = attend_block(
            start,
            row_sum,
            row_max,
            acc,
            *rest,
            HEAD_DIM,
            BLOCK_D,
            BLOCK_N,
            PAGE_SIZE,
            SOFT_CAP,
            FP8,
            True,
            OWN_SINK_Q,
        )
    for block in range(first_whole, last_whole):
        start = block_start(block, sinks_at, sink_blocks, window_at, BLOCK_N)
        row_sum, row_max, acc = attend_block(
            start,
            row_sum,
            row_max,
            acc,
            *rest,
            HEAD_DIM,
            BLOCK_D,
            BLOCK_N,
            PAGE_SIZE,
            SOFT_CAP,
            FP8,
            False,
            False,
        )
    for block in range(last_whole, blocks):
        start = block_start(block, sinks_at, sink_blocks, window_at, BLOCK_N)
        row_sum, row_max, acc = attend_block(
            start,
            row_sum,
            row_max,
            acc,
            *rest,
            HEAD_DIM,
            BLOCK_D,
            BLOCK_N,
            PAGE_SIZE,
            SOFT_CAP,
            FP8,
            True,
            OWN_SINK_Q,
        )

    inverse = tl.where(row_sum > 0, v_scale / row_sum, 0.0)
    tl.store(
        out_ptr + (token * out_stride_n + head * out_stride_h)[:, None] + dims[None, :],
        round_to(acc * inverse[:, None], out_ptr.dtype.element_ty),
        mask=in_row,
    )
    if STORE_LSE:
        lse = tl.where(row_sum > 0, row_max + tl.log2(row_sum), float("-inf"))
        tl.store(lse_ptr + token * (num_kv_heads * GROUP) + head, lse, mask=row_valid)
