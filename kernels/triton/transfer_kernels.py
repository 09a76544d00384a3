"""Moving tokens on the device."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,no-any-return,untyped-decorator,misc"

import triton
import triton.language as tl

from sglang_kv.kernels.triton.numbers import narrow
from sglang_kv.kernels.triton.streams import find_stream, find_tile


@triton.jit(do_not_specialize=["batch", "layer", "num_layers", "num_kv_heads", "max_pages"])
def append_tile(
    k_ptr,
    v_ptr,
    qo_indptr_ptr,
    pages_ptr,
    table_ptr,
    desc_ptr,
    slots_ptr,
    k_stride_n,
    k_stride_h,
    v_stride_n,
    v_stride_h,
    page_stride,
    kv_stride,
    batch,
    layer,
    num_layers,
    num_kv_heads,
    max_pages,
    k_factor,
    v_factor,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TOKENS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    FP8: tl.constexpr,
    HAS_INDPTR: tl.constexpr,
):
    """Grid [tiles, kv_heads]."""
    request = tl.program_id(0)
    kv_head = tl.program_id(1)
    first_token = 0
    first_row = request
    num_tokens = 1
    if HAS_INDPTR:
        request, tile = find_tile(request, qo_indptr_ptr, batch, TOKENS)
        first_row = tl.load(qo_indptr_ptr + request)
        num_tokens = tl.load(qo_indptr_ptr + request + 1) - first_row
        first_token = tile * TOKENS
    page_list, kv_len, _, _, _ = find_stream(
        table_ptr, desc_ptr, slots_ptr, request, kv_head, layer, num_layers, num_kv_heads, max_pages
    )
    token = first_token + tl.arange(0, TOKENS)
    index = kv_len - num_tokens + token
    exists = (token < num_tokens) & (index >= 0) & (kv_len > 0)
    dims = tl.arange(0, BLOCK_D)
    mask = exists[:, None] & (dims < HEAD_DIM)[None, :]
    row = (first_row + token).to(tl.int64)
    k = tl.load(
        k_ptr + (row * k_stride_n + kv_head * k_stride_h)[:, None] + dims[None, :],
        mask=mask,
        other=0.0,
    )
    v = tl.load(
        v_ptr + (row * v_stride_n + kv_head * v_stride_h)[:, None] + dims[None, :],
        mask=mask,
        other=0.0,
    )
    page = tl.load(page_list + index // PAGE_SIZE, mask=exists, other=0).to(tl.int64)
    to = pages_ptr + (page * page_stride + index % PAGE_SIZE * HEAD_DIM)[:, None] + dims[None, :]
    dtype: tl.constexpr = pages_ptr.dtype.element_ty
    tl.store(to, narrow(k.to(tl.float32) * k_factor, dtype, FP8), mask=mask)
    tl.store(to + kv_stride, narrow(v.to(tl.float32) * v_factor, dtype, FP8), mask=mask)


@triton.jit
def gather_stream(
    pages_ptr,
    src_indptr_ptr,
    src_indices_ptr,
    keep_indptr_ptr,
    keep_indices_ptr,
    dst_indptr_ptr,
    dst_indices_ptr,
    page_stride,
    kv_stride,
    ROW: tl.constexpr,
    BLOCK_ROW: tl.constexpr,
    TOKENS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
):
    """Grid [streams, programs, 2]: of a stream's K or V, every `programs`-th tile.

    Compaction in place has one program do all tiles, in order: kept tokens move forward, so what a
    tile overwrites was read by it or an earlier one.
    """
    stream = tl.program_id(0)
    program = tl.program_id(1)
    kv = tl.program_id(2)
    first_keep = tl.load(keep_indptr_ptr + stream).to(tl.int64)
    num_kept = (tl.load(keep_indptr_ptr + stream + 1) - first_keep).to(tl.int32)
    if num_kept <= 0:
        return
    src = src_indices_ptr + tl.load(src_indptr_ptr + stream).to(tl.int64)
    dst = dst_indices_ptr + tl.load(dst_indptr_ptr + stream).to(tl.int64)
    step = tl.num_programs(1)
    if tl.load(src) == tl.load(dst):
        if program > 0:
            return
        step = 1
    words = tl.arange(0, BLOCK_ROW)
    base = pages_ptr + kv * kv_stride
    for tile in range(program, (num_kept + TOKENS - 1) // TOKENS, step):
        kept = tile * TOKENS + tl.arange(0, TOKENS)
        exists = kept < num_kept
        index = tl.load(keep_indices_ptr + first_keep + kept, mask=exists, other=0)
        from_page = tl.load(src + index // PAGE_SIZE, mask=exists, other=0).to(tl.int64)
        to_page = tl.load(dst + kept // PAGE_SIZE, mask=exists, other=0).to(tl.int64)
        read = from_page * page_stride + index % PAGE_SIZE * ROW
        write = to_page * page_stride + kept % PAGE_SIZE * ROW
        mask = exists[:, None] & (words < ROW)[None, :]
        moved = tl.load(base + read[:, None] + words[None, :], mask=mask, other=0)
        tl.debug_barrier()  # all of a tile is read before any of it is written
        tl.store(base + write[:, None] + words[None, :], moved, mask=mask)
