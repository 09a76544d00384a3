"""From tensors to kernel arguments, with a ValueError that names what does not fit.

Shapes, strides, dtypes and devices are checked; what lies on the device is not read: lengths, page
ids and slots are whoever wrote them responsible for.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_kv.kernels.layout import HEAD_DIMS, PAGE_SIZES, PagedStreams
from sglang_kv.kernels.triton.launch import architecture

MAX_GROUP = 16
#: 8-bit floats, and how many bits of mantissa they have.
FP8_FORMATS = {torch.float8_e4m3fn: 3, torch.float8_e5m2: 2}
_NUMBERS = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
}


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def require_ints(tensor: Tensor, name: str, ndim: int, device: torch.device) -> None:
    """int32, contiguous, on `device`."""
    require(tensor.dim() == ndim, f"{name} must have {ndim} dimensions, not {tensor.dim()}")
    require(tensor.dtype == torch.int32, f"{name} must be int32")
    require(tensor.is_contiguous(), f"{name} must be contiguous")
    require_device(tensor, name, device)


def require_device(tensor: Tensor, name: str, device: torch.device) -> None:
    require(tensor.device == device, f"{name} is on {tensor.device}, the pages are on {device}")


def require_rows(tensor: Tensor, name: str, pages: Tensor, heads: int | None = None) -> None:
    """A float tensor [tokens, heads, head_dim] with contiguous rows."""
    require(tensor.dim() == 3, f"{name} must have 3 dimensions, not {tensor.dim()}")
    require(tensor.dtype in _NUMBERS, f"{name} must be bfloat16, float16 or float32")
    require(
        tensor.shape[2] == pages.shape[3],
        f"{name} has head_dim {tensor.shape[2]}, the pages have {pages.shape[3]}",
    )
    require(
        heads is None or tensor.shape[1] == heads,
        f"{name} has {tensor.shape[1]} heads, expected {heads}",
    )
    require(tensor.stride(2) == 1, f"{name} must be contiguous in its last dimension")
    require_device(tensor, name, pages.device)


def require_pages(pages: Tensor) -> None:
    """A pool as `layout.allocate_pages` makes it."""
    require(pages.dim() == 4, f"pages must have 4 dimensions, not {pages.dim()}")
    require(pages.shape[1] == 2, "pages must be [num_pages, 2, page_size, head_dim]")
    require(pages.shape[0] > 0, "pages must hold at least one page")
    require(
        pages.stride(3) == 1 and pages.stride(2) == pages.shape[3],
        "pages must hold contiguous tokens; allocate it with allocate_pages",
    )
    require(
        pages.shape[2] in PAGE_SIZES,
        f"pages have page_size {pages.shape[2]}, expected one of {PAGE_SIZES}",
    )


def require_streams(
    streams: PagedStreams, layer: int, qo_indptr: Tensor | None, num_tokens: int
) -> None:
    """Streams of a batch that has `num_tokens` new tokens, one each without `qo_indptr`."""
    pages, table, desc = streams.pages, streams.table, streams.desc
    require_pages(pages)
    require(
        pages.dtype in _NUMBERS or pages.dtype in FP8_FORMATS,
        "pages must be bfloat16, float16, float32, float8_e4m3fn or float8_e5m2",
    )
    require(
        streams.head_dim in HEAD_DIMS,
        f"pages have head_dim {streams.head_dim}, expected one of {HEAD_DIMS}",
    )
    require_ints(table, "table", 4, pages.device)
    require_ints(desc, "desc", 4, pages.device)
    require_ints(streams.slots, "slots", 1, pages.device)
    require(
        desc.shape == (*table.shape[:3], 4),
        "desc must be [slots, layers, kv_heads, 4] with table's first dimensions",
    )
    require(0 <= layer < table.shape[1], f"layer is {layer}, table has {table.shape[1]}")
    batch = len(streams.slots)
    if qo_indptr is None:
        require(
            num_tokens == batch,
            f"there are {num_tokens} tokens and {batch} slots; without qo_indptr it is one each",
        )
    else:
        require_ints(qo_indptr, "qo_indptr", 1, pages.device)
        require(
            len(qo_indptr) == batch + 1, f"qo_indptr has {len(qo_indptr)} entries for {batch} slots"
        )


def group_of(q: Tensor, streams: PagedStreams) -> int:
    """How many query heads share a KV head."""
    heads, kv_heads = q.shape[1], streams.num_kv_heads
    require(
        heads % kv_heads == 0 and heads // kv_heads <= MAX_GROUP,
        f"q has {heads} heads for {kv_heads} KV heads; at most {MAX_GROUP} may share one",
    )
    return heads // kv_heads


def scale_arguments(
    sm_scale: float, k_scale: float, logits_soft_cap: float, v_scale: float = 1.0
) -> dict[str, Any]:
    """Factors as `numbers.to_logits` takes them."""
    require(sm_scale > 0, f"sm_scale must be positive, not {sm_scale}")
    require(k_scale > 0, f"k_scale must be positive, not {k_scale}")
    require(v_scale > 0, f"v_scale must be positive, not {v_scale}")
    require(logits_soft_cap >= 0, f"logits_soft_cap must not be negative, it is {logits_soft_cap}")
    scale, log2e = sm_scale * k_scale, math.log2(math.e)
    if logits_soft_cap == 0:
        return {"score_scale": scale * log2e, "soft_cap": 0.0, "SOFT_CAP": False}
    return {
        "score_scale": 2 * log2e * scale / logits_soft_cap,
        "soft_cap": logits_soft_cap * log2e,
        "SOFT_CAP": True,
    }


def stream_arguments(streams: PagedStreams, layer: int) -> dict[str, Any]:
    """What tells a kernel where streams lie."""
    return {
        "table_ptr": streams.table,
        "desc_ptr": streams.desc,
        "slots_ptr": streams.slots,
        "layer": layer,
        "num_layers": streams.table.shape[1],
        "num_kv_heads": streams.num_kv_heads,
        "max_pages": streams.table.shape[3],
        "PAGE_SIZE": streams.page_size,
    }


def row_arguments(pages: Tensor) -> dict[str, Any]:
    """The head dimension, and the power of two that a block of it takes."""
    head_dim = pages.shape[3]
    return {"HEAD_DIM": head_dim, "BLOCK_D": triton.next_power_of_2(head_dim)}


def product_dtype(q: Tensor, pages: Tensor) -> torch.dtype:
    """What attention multiplies in: the dtype of `q` for 8-bit KV, else what holds both."""
    if pages.dtype in FP8_FORMATS:
        return q.dtype
    return torch.promote_types(q.dtype, pages.dtype)


def read_arguments(q: Tensor, pages: Tensor) -> dict[str, Any]:
    """The pool as attention reads it, and the dtype that it multiplies in."""
    fp8 = FP8_FORMATS.get(pages.dtype, 0)
    by_bits = bool(fp8) and architecture(pages.device) < 89
    return {
        "pages_ptr": pages.view(torch.uint8) if by_bits else pages,
        "page_stride": pages.stride(0),
        "DTYPE": _NUMBERS[product_dtype(q, pages)],
        "FP8": fp8 if by_bits else 0,
    }


def write_arguments(pages: Tensor) -> dict[str, Any]:
    """The pool as kernels write it: 8-bit floats as their bits."""
    fp8 = FP8_FORMATS.get(pages.dtype, 0)
    return {
        "pages_ptr": pages.view(torch.uint8) if fp8 else pages,
        "page_stride": pages.stride(0),
        "FP8": fp8,
    }
