"""Rotary embedding on the device."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,no-any-return,untyped-decorator,misc"

import triton
import triton.language as tl

from sglang_kv.kernels.triton.numbers import narrow, round_to, widen


@triton.jit
def turn_pairs(a, b, cos, sin):
    """Each pair (a, b) by the angle of its cosine and sine."""
    return a * cos - b * sin, b * cos + a * sin


@triton.jit
def pair_dims(ROTARY_DIM: tl.constexpr, BLOCK_PAIRS: tl.constexpr, NEOX: tl.constexpr):
    """Where the two numbers of each pair lie in a head: halves of it, or neighbours."""
    pair = tl.arange(0, BLOCK_PAIRS)
    if NEOX:
        return pair, pair, pair + ROTARY_DIM // 2
    return pair, 2 * pair, 2 * pair + 1


@triton.jit(do_not_specialize=["num_heads"])
def rotate_rows(
    x_ptr,
    out_ptr,
    positions_ptr,
    cos_sin_ptr,
    x_stride_n,
    x_stride_h,
    out_stride_n,
    out_stride_h,
    num_heads,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    HEADS: tl.constexpr,
    NEOX: tl.constexpr,
):
    """Grid [rows, blocks of heads]."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    exists = (head < num_heads)[:, None]
    source = x_ptr + row * x_stride_n + head[:, None] * x_stride_h
    target = out_ptr + row * out_stride_n + head[:, None] * out_stride_h
    pair, first, second = pair_dims(ROTARY_DIM, BLOCK_PAIRS, NEOX)
    in_head = pair < ROTARY_DIM // 2
    mask = exists & in_head[None, :]
    angles = cos_sin_ptr + tl.load(positions_ptr + row).to(tl.int64) * ROTARY_DIM + pair
    cos = tl.load(angles, mask=in_head, other=0.0)[None, :]
    sin = tl.load(angles + ROTARY_DIM // 2, mask=in_head, other=0.0)[None, :]
    a = tl.load(source + first[None, :], mask=mask, other=0.0).to(tl.float32)
    b = tl.load(source + second[None, :], mask=mask, other=0.0).to(tl.float32)
    a, b = turn_pairs(a, b, cos, sin)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    tl.store(target + first[None, :], round_to(a, dtype), mask=mask)
    tl.store(target + second[None, :], round_to(b, dtype), mask=mask)
    if ROTARY_DIM < HEAD_DIM:
        dims = tl.arange(0, BLOCK_D)[None, :]
        mask = exists & (dims >= ROTARY_DIM) & (dims < HEAD_DIM)
        tl.store(target + dims, tl.load(source + dims, mask=mask, other=0.0), mask=mask)


@triton.jit(do_not_specialize=["distance"])
def turn_page(
    pages_ptr,
    page_ids_ptr,
    cos_sin_ptr,
    page_stride,
    distance,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    NEOX: tl.constexpr,
    FP8: tl.constexpr,
):
    """Grid [pages]."""
    page = tl.load(page_ids_ptr + tl.program_id(0)).to(tl.int64)
    token = tl.arange(0, PAGE_SIZE)
    pair, first, second = pair_dims(ROTARY_DIM, BLOCK_PAIRS, NEOX)
    in_head = pair < ROTARY_DIM // 2
    mask = (token >= 0)[:, None] & in_head[None, :]
    angles = cos_sin_ptr + distance * ROTARY_DIM + pair
    cos = tl.load(angles, mask=in_head, other=0.0)[None, :]
    sin = tl.load(angles + ROTARY_DIM // 2, mask=in_head, other=0.0)[None, :]
    keys = pages_ptr + page * page_stride + (token * HEAD_DIM)[:, None]
    a = widen(tl.load(keys + first[None, :], mask=mask, other=0), tl.float32, FP8)
    b = widen(tl.load(keys + second[None, :], mask=mask, other=0), tl.float32, FP8)
    a, b = turn_pairs(a, b, cos, sin)
    dtype: tl.constexpr = pages_ptr.dtype.element_ty
    tl.store(keys + first[None, :], narrow(a, dtype, FP8), mask=mask)
    tl.store(keys + second[None, :], narrow(b, dtype, FP8), mask=mask)
