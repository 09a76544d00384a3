"""Decode on the device: the newest query of every request against its streams, split by length.

A stream's blocks of keys are dealt to at most MAX_SPLITS programs by the stream's own length, which
the programs read themselves. So there is no plan to make on the host, a captured graph stays right
while streams grow, and neighbours change no bit of a result. FlashDecoding, Dao et al. 2023.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,no-any-return,untyped-decorator,misc"

import triton
import triton.language as tl

from sglang_kv.kernels.triton.numbers import dot, round_to, to_logits, widen
from sglang_kv.kernels.triton.streams import (
    block_start,
    blocks_in_sight,
    find_stream,
    split_of,
    token_offsets,
    visible_ranges,
)


@triton.jit
def attend_keys(
    start,
    row_sum,
    row_max,
    acc,
    q,
    sink_q,
    logits_ptr,
    row_valid,
    pages_ptr,
    page_list,
    page_stride,
    kv_stride,
    kv_len,
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
    KEEP_LOGITS: tl.constexpr,
    OWN_SINK_Q: tl.constexpr,
):
    """One block of keys: the online softmax goes on by it."""
    index = start + tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_D)
    in_stream = index < kv_len
    offsets = token_offsets(page_list, index, in_stream, page_stride, PAGE_SIZE, HEAD_DIM)
    in_row = dims < HEAD_DIM
    k = tl.load(
        pages_ptr + offsets[None, :] + dims[:, None],
        mask=in_stream[None, :] & in_row[:, None],
        other=0.0,
    )
    k = widen(k, q.dtype, FP8)
    logits = to_logits(dot(q, k), SOFT_CAP, score_scale, soft_cap)
    is_sink = (index >= sinks_begin) & (index < sinks_stop)
    visible = is_sink | ((index >= window_begin) & in_stream)
    if KEEP_LOGITS:
        tl.store(
            logits_ptr[:, None] + index[None, :], logits, mask=row_valid[:, None] & visible[None, :]
        )
    if OWN_SINK_Q:
        of_sinks = to_logits(dot(sink_q, k), SOFT_CAP, score_scale, soft_cap)
        logits = tl.where(is_sink[None, :], of_sinks, logits)
    logits = tl.where(visible[None, :], logits, float("-inf"))
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
        "layer",
        "num_layers",
        "num_kv_heads",
        "max_pages",
        "max_splits",
        "layer_window_left",
        "logits_width",
    ]
)
def attend_split(
    q_ptr,
    sink_q_ptr,
    out_ptr,
    lse_ptr,
    part_ptr,
    part_lse_ptr,
    logits_ptr,
    score_slots_ptr,
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
    layer,
    num_layers,
    num_kv_heads,
    max_pages,
    max_splits,
    layer_window_left,
    logits_width,
    score_scale,
    soft_cap,
    v_scale,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    MIN_BLOCKS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    DTYPE: tl.constexpr,
    FP8: tl.constexpr,
    OWN_SINK_Q: tl.constexpr,
    KEEP_LOGITS: tl.constexpr,
    STORE_LSE: tl.constexpr,
):
    """Grid [splits, kv_heads, batch]. A stream's only split writes the result, others a part."""
    split = tl.program_id(0)
    kv_head = tl.program_id(1)
    request = tl.program_id(2)
    page_list, kv_len, gap, num_sinks, window_left = find_stream(
        table_ptr, desc_ptr, slots_ptr, request, kv_head, layer, num_layers, num_kv_heads, max_pages
    )
    sinks_at, sink_blocks, window_at, blocks = blocks_in_sight(
        kv_len - 1, kv_len, gap, num_sinks, window_left, layer_window_left, PAGE_SIZE, BLOCK_N
    )
    per_split, num_splits = split_of(blocks, MIN_BLOCKS, MAX_SPLITS)
    if split >= tl.maximum(num_splits, 1):  # an empty stream still has a result
        return
    sinks_begin, sinks_stop, window_begin = visible_ranges(
        kv_len - 1, gap, num_sinks, window_left, layer_window_left, PAGE_SIZE
    )
    rows = tl.arange(0, 16)  # the least that a tensor core takes
    dims = tl.arange(0, BLOCK_D)
    row_valid = rows < GROUP
    in_row = row_valid[:, None] & (dims < HEAD_DIM)[None, :]
    head = kv_head * GROUP + rows
    token = request.to(tl.int64)
    q = tl.load(
        q_ptr + token * q_stride_n + head[:, None] * q_stride_h + dims[None, :],
        mask=in_row,
        other=0.0,
    ).to(DTYPE)
    sink_q = q
    if OWN_SINK_Q:
        sink_q = tl.load(
            sink_q_ptr + token * sink_q_stride_n + head[:, None] * sink_q_stride_h + dims[None, :],
            mask=in_row,
            other=0.0,
        ).to(DTYPE)
    logits_rows = logits_ptr + head.to(tl.int64) * logits_width
    keep_rows = row_valid
    if KEEP_LOGITS:
        score_slot = tl.load(score_slots_ptr + request).to(tl.int64)
        logits_rows += tl.maximum(score_slot, 0) * num_kv_heads * GROUP * logits_width
        keep_rows = row_valid & (score_slot >= 0)

    row_max = tl.full([16], -1e30, tl.float32)  # finite: -inf less -inf would be a NaN
    row_sum = tl.zeros([16], tl.float32)
    acc = tl.zeros([16, BLOCK_D], tl.float32)
    rest = (
        q,
        sink_q,
        logits_rows,
        keep_rows,
        pages_ptr,
        page_list,
        page_stride,
        kv_stride,
        kv_len,
        sinks_begin,
        sinks_stop,
        window_begin,
        score_scale,
        soft_cap,
    )
    first = split * per_split
    last = tl.minimum(first + per_split, blocks)
    if OWN_SINK_Q:
        for block in range(first, tl.minimum(last, sink_blocks)):
            start = block_start(block, sinks_at, sink_blocks, window_at, BLOCK_N)
            row_sum, row_max, acc = attend_keys(
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
                KEEP_LOGITS,
                True,
            )
        first = tl.maximum(first, tl.minimum(last, sink_blocks))
    for block in range(first, last):
        start = block_start(block, sinks_at, sink_blocks, window_at, BLOCK_N)
        row_sum, row_max, acc = attend_keys(
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
            KEEP_LOGITS,
            False,
        )

    inverse = tl.where(row_sum > 0, 1.0 / row_sum, 0.0)
    lse = tl.where(row_sum > 0, row_max + tl.log2(row_sum), float("-inf"))
    result = acc * inverse[:, None]
    num_heads = num_kv_heads * GROUP
    if num_splits <= 1:
        result *= v_scale
        tl.store(
            out_ptr + token * out_stride_n + head[:, None] * out_stride_h + dims[None, :],
            round_to(result, out_ptr.dtype.element_ty),
            mask=in_row,
        )
        if STORE_LSE:
            tl.store(lse_ptr + token * num_heads + head, lse, mask=row_valid)
    else:
        part = (token * num_heads + head) * max_splits + split
        tl.store(part_ptr + part[:, None] * HEAD_DIM + dims[None, :], result, mask=in_row)
        tl.store(part_lse_ptr + part, lse, mask=row_valid)
