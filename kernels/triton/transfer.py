"""Moving tokens on a GPU: the ops of `kernels.transfer`."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from sglang_kv.kernels.layout import PagedStreams
from sglang_kv.kernels.triton import checks
from sglang_kv.kernels.triton.checks import require
from sglang_kv.kernels.triton.launch import launch
from sglang_kv.kernels.triton.transfer_kernels import append_tile, gather_stream

_APPEND_TOKENS = 16
_GATHER_TOKENS = 32
_GATHER_PROGRAMS = 16


def append(
    k: Tensor,
    v: Tensor,
    qo_indptr: Tensor | None,
    streams: PagedStreams,
    layer: int,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """`kernels.transfer.append` on a GPU; everything may also be fp16, the pages 8-bit.

    - `k_scale`, `v_scale`: keys and values are divided by these before they are stored

    8-bit floats are rounded to the nearest, and to the largest where they are too large. Lengths,
    page ids and slots are not checked.

    Raises ValueError, naming the argument, for shapes, strides, dtypes and devices.
    """
    checks.require_streams(streams, layer, qo_indptr, len(k))
    pages, heads = streams.pages, streams.num_kv_heads
    checks.require_rows(k, "k", pages, heads)
    checks.require_rows(v, "v", pages, heads)
    require(len(v) == len(k), f"v has {len(v)} tokens, k has {len(k)}")
    require(k_scale > 0, f"k_scale must be positive, not {k_scale}")
    require(v_scale > 0, f"v_scale must be positive, not {v_scale}")
    batch = len(streams.slots)
    tokens = 1 if qo_indptr is None else _APPEND_TOKENS
    tiles = batch if qo_indptr is None else len(k) // tokens + batch
    launch(
        append_tile,
        (tiles, heads),
        k_ptr=k,
        v_ptr=v,
        qo_indptr_ptr=streams.slots if qo_indptr is None else qo_indptr,
        k_stride_n=k.stride(0),
        k_stride_h=k.stride(1),
        v_stride_n=v.stride(0),
        v_stride_h=v.stride(1),
        kv_stride=pages.stride(1),
        batch=batch,
        k_factor=1 / k_scale,
        v_factor=1 / v_scale,
        TOKENS=tokens,
        HAS_INDPTR=qo_indptr is not None,
        **checks.stream_arguments(streams, layer),
        **checks.row_arguments(pages),
        **checks.write_arguments(pages),
        num_warps=1 if qo_indptr is None else 4,
    )


def gather(
    pages: Tensor,
    src_indptr: Tensor,
    src_indices: Tensor,
    keep_indptr: Tensor,
    keep_indices: Tensor,
    dst_indptr: Tensor,
    dst_indices: Tensor,
) -> None:
    """`kernels.transfer.gather` on a GPU. What the lists hold is not checked.

    Raises ValueError, naming the argument, for shapes, dtypes and devices.
    """
    checks.require_pages(pages)
    lists = {
        "src_indptr": src_indptr,
        "src_indices": src_indices,
        "keep_indptr": keep_indptr,
        "keep_indices": keep_indices,
        "dst_indptr": dst_indptr,
        "dst_indices": dst_indices,
    }
    for name, values in lists.items():
        require(values.dim() == 1, f"{name} must have 1 dimensions, not {values.dim()}")
        require(values.dtype in (torch.int32, torch.int64), f"{name} must be int32 or int64")
        require(values.is_contiguous(), f"{name} must be contiguous")
        checks.require_device(values, name, pages.device)
        same = not name.endswith("indptr") or len(values) == len(src_indptr)
        require(same, f"{name} has {len(values)} entries, src_indptr has {len(src_indptr)}")
    require(len(src_indptr) > 0, "src_indptr has 0 entries")
    pointers: dict[str, Any] = {f"{name}_ptr": values for name, values in lists.items()}
    words = pages.view(torch.int32)  # a head of any dtype is a whole number of them
    row = words.shape[3]
    programs = min(_GATHER_PROGRAMS, -(-len(keep_indices) // _GATHER_TOKENS))
    launch(
        gather_stream,
        (len(src_indptr) - 1, programs, 2),
        pages_ptr=words,
        **pointers,
        page_stride=words.stride(0),
        kv_stride=words.stride(1),
        ROW=row,
        BLOCK_ROW=triton.next_power_of_2(row),
        TOKENS=_GATHER_TOKENS,
        PAGE_SIZE=pages.shape[2],
        num_warps=4,
    )
