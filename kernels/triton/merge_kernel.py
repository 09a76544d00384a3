"""Decode's last step on the device: the parts of a stream that was split."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,no-any-return,untyped-decorator,misc"

import triton
import triton.language as tl

from sglang_kv.kernels.triton.numbers import round_to
from sglang_kv.kernels.triton.streams import blocks_in_sight, find_stream, split_of


@triton.jit(
    do_not_specialize=[
        "layer",
        "num_layers",
        "num_kv_heads",
        "max_pages",
        "max_splits",
        "layer_window_left",
    ]
)
def merge_splits(
    out_ptr,
    lse_ptr,
    part_ptr,
    part_lse_ptr,
    table_ptr,
    desc_ptr,
    slots_ptr,
    out_stride_n,
    out_stride_h,
    layer,
    num_layers,
    num_kv_heads,
    max_pages,
    max_splits,
    layer_window_left,
    v_scale,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    MIN_BLOCKS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    STORE_LSE: tl.constexpr,
):
    """Grid [num_qo_heads, batch]. The parts of one query head, in their order."""
    head = tl.program_id(0)
    request = tl.program_id(1)
    _, kv_len, gap, num_sinks, window_left = find_stream(
        table_ptr,
        desc_ptr,
        slots_ptr,
        request,
        head // GROUP,
        layer,
        num_layers,
        num_kv_heads,
        max_pages,
    )
    _, _, _, blocks = blocks_in_sight(
        kv_len - 1, kv_len, gap, num_sinks, window_left, layer_window_left, PAGE_SIZE, BLOCK_N
    )
    _, num_splits = split_of(blocks, MIN_BLOCKS, MAX_SPLITS)
    if num_splits <= 1:
        return
    token = request.to(tl.int64)
    num_heads = num_kv_heads * GROUP
    first_part = (token * num_heads + head) * max_splits
    splits = tl.arange(0, MAX_SPLITS)
    lse = tl.load(part_lse_ptr + first_part + splits, mask=splits < num_splits, other=float("-inf"))
    largest = tl.maximum(tl.max(lse, 0), -1e30)
    total = tl.sum(tl.exp2(lse - largest), 0)
    dims = tl.arange(0, BLOCK_D)
    acc = tl.zeros([BLOCK_D], tl.float32)
    for first in range(0, num_splits, 16):
        split = first + tl.arange(0, 16)
        exists = split < num_splits
        log_weight = tl.load(part_lse_ptr + first_part + split, mask=exists, other=float("-inf"))
        part = tl.load(
            part_ptr + (first_part + split)[:, None] * HEAD_DIM + dims[None, :],
            mask=exists[:, None] & (dims < HEAD_DIM)[None, :],
            other=0.0,
        )
        acc += tl.sum(part * tl.exp2(log_weight - largest)[:, None], 0)
    inverse = tl.where(total > 0, 1.0 / total, 0.0)
    tl.store(
        out_ptr + token * out_stride_n + head * out_stride_h + dims,
        round_to(acc * inverse * v_scale, out_ptr.dtype.element_ty),
        mask=dims < HEAD_DIM,
    )
    if STORE_LSE:
        result_lse = tl.where(total > 0, largest + tl.log2(total), float("-inf"))
        tl.store(lse_ptr + token * num_heads + head, result_lse)
