"""The attention that each key received, on the device."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,no-any-return,untyped-decorator,misc"

import triton
import triton.language as tl

from sglang_kv.kernels.triton.numbers import dot, to_logits, widen
from sglang_kv.kernels.triton.streams import (
    blocks_in_sight,
    find_stream,
    token_offsets,
    visible_ranges,
)


@triton.jit(
    do_not_specialize=[
        "layer",
        "num_layers",
        "num_kv_heads",
        "max_pages",
        "layer_window_left",
        "width",
    ]
)
def add_columns(
    q_ptr,
    qo_indptr_ptr,
    first_query_ptr,
    lse_ptr,
    scores_ptr,
    score_slots_ptr,
    pages_ptr,
    table_ptr,
    desc_ptr,
    slots_ptr,
    q_stride_n,
    q_stride_h,
    page_stride,
    layer,
    num_layers,
    num_kv_heads,
    max_pages,
    layer_window_left,
    width,
    score_scale,
    soft_cap,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    DTYPE: tl.constexpr,
    FP8: tl.constexpr,
    HAS_INDPTR: tl.constexpr,
):
    """Grid [blocks of keys, kv_heads, batch]. A block's keys are read once, for all queries."""
    start = tl.program_id(0) * BLOCK_N
    kv_head = tl.program_id(1)
    request = tl.program_id(2)
    score_slot = tl.load(score_slots_ptr + request).to(tl.int64)
    if score_slot < 0:
        return
    page_list, kv_len, gap, num_sinks, window_left = find_stream(
        table_ptr, desc_ptr, slots_ptr, request, kv_head, layer, num_layers, num_kv_heads, max_pages
    )
    first_row = request
    num_queries = 1
    if HAS_INDPTR:
        first_row = tl.load(qo_indptr_ptr + request)
        num_queries = tl.load(qo_indptr_ptr + request + 1) - first_row
    first_query = tl.load(first_query_ptr + request)
    # Counted from the stream's first token, so that a chunk that ends with a tile sums as none.
    first_index = tl.maximum(kv_len - num_queries + first_query, start)
    _, _, window_at, _ = blocks_in_sight(
        first_index, kv_len, gap, num_sinks, window_left, layer_window_left, PAGE_SIZE, BLOCK_N
    )
    hidden = (start < window_at) & (start >= num_sinks)
    if (first_index >= kv_len) | hidden:
        return
    QUERIES: tl.constexpr = BLOCK_M // GROUP
    index = start + tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_D)
    rows = tl.arange(0, BLOCK_M)
    in_stream = index < kv_len
    in_row = dims < HEAD_DIM
    offsets = token_offsets(page_list, index, in_stream, page_stride, PAGE_SIZE, HEAD_DIM)
    k = tl.load(
        pages_ptr + offsets[None, :] + dims[:, None],
        mask=in_stream[None, :] & in_row[:, None],
        other=0.0,
    )
    k = widen(k, DTYPE, FP8)
    row = ((score_slot * num_layers + layer) * num_kv_heads + kv_head) * width
    sums = tl.load(scores_ptr + row + index, mask=in_stream, other=0.0)
    head = kv_head * GROUP + rows % GROUP
    for tile in range(first_index // QUERIES, (kv_len + QUERIES - 1) // QUERIES):
        query_index = tile * QUERIES + rows // GROUP
        counted = (rows < QUERIES * GROUP) & (query_index >= first_index) & (query_index < kv_len)
        token = (first_row + query_index - (kv_len - num_queries)).to(tl.int64)
        q = tl.load(
            q_ptr + (token * q_stride_n + head * q_stride_h)[:, None] + dims[None, :],
            mask=counted[:, None] & in_row[None, :],
            other=0.0,
        ).to(DTYPE)
        lse = tl.load(
            lse_ptr + token * (num_kv_heads * GROUP) + head, mask=counted, other=float("-inf")
        )
        sinks_begin, sinks_stop, window_begin = visible_ranges(
            query_index, gap, num_sinks, window_left, layer_window_left, PAGE_SIZE
        )
        key = index[None, :]
        visible = (key >= sinks_begin[:, None]) & (key < sinks_stop[:, None])
        visible |= (key >= window_begin[:, None]) & (key <= query_index[:, None])
        visible &= (lse > float("-inf"))[:, None]
        logits = to_logits(dot(q, k), SOFT_CAP, score_scale, soft_cap)
        less = tl.where(lse > float("-inf"), lse, 0.0)
        weights = tl.where(visible, tl.exp2(logits - less[:, None]), 0.0)
        sums += tl.sum(weights, 0)
    tl.store(scores_ptr + row + index, sums, mask=in_stream)


@triton.jit(
    do_not_specialize=[
        "layer",
        "num_layers",
        "num_kv_heads",
        "max_pages",
        "layer_window_left",
        "width",
    ]
)
def add_kept_logits(
    logits_ptr,
    lse_ptr,
    scores_ptr,
    score_slots_ptr,
    table_ptr,
    desc_ptr,
    slots_ptr,
    layer,
    num_layers,
    num_kv_heads,
    max_pages,
    layer_window_left,
    width,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
):
    """Grid [blocks of keys, kv_heads, batch]. Decode's scores, from the logits that it left."""
    start = tl.program_id(0) * BLOCK_N
    kv_head = tl.program_id(1)
    request = tl.program_id(2)
    score_slot = tl.load(score_slots_ptr + request).to(tl.int64)
    if score_slot < 0:
        return
    _, kv_len, gap, num_sinks, window_left = find_stream(
        table_ptr, desc_ptr, slots_ptr, request, kv_head, layer, num_layers, num_kv_heads, max_pages
    )
    if start >= kv_len:
        return
    sinks_begin, sinks_stop, window_begin = visible_ranges(
        kv_len - 1, gap, num_sinks, window_left, layer_window_left, PAGE_SIZE
    )
    index = start + tl.arange(0, BLOCK_N)
    visible = (index >= sinks_begin) & (index < sinks_stop)
    visible |= (index >= window_begin) & (index < kv_len)
    row = ((score_slot * num_layers + layer) * num_kv_heads + kv_head) * width
    sums = tl.load(scores_ptr + row + index, mask=visible, other=0.0)
    for member in range(0, GROUP):
        head = kv_head * GROUP + member
        lse = tl.load(lse_ptr + request * (num_kv_heads * GROUP) + head)
        logits = tl.load(
            logits_ptr + (score_slot * num_kv_heads * GROUP + head) * width + index,
            mask=visible,
            other=float("-inf"),
        )
        sums += tl.exp2(logits - lse)
    tl.store(scores_ptr + row + index, sums, mask=visible)
