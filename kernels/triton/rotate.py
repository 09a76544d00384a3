"""Rotary embedding moved on, on a GPU: the ops of `kernels.rotate`."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from sglang_kv.kernels.triton import checks
from sglang_kv.kernels.triton.checks import require
from sglang_kv.kernels.triton.launch import launch
from sglang_kv.kernels.triton.rotate_kernels import rotate_rows, turn_page


def turned_queries(
    q: Tensor, distances: Tensor, cos_sin_cache: Tensor, *, is_neox_style: bool = True
) -> Tensor:
    """Queries, each turned by its own distance: a new tensor.

    - `q`: bf16, fp16 or fp32 [tokens, num_heads, head_dim]; any strides but the last
    - `distances`: int32 or int64 [tokens], rows of `cos_sin_cache`; not checked
    - `cos_sin_cache`: fp32 [positions, rotary_dim], cosines before sines; rotary_dim even, at most
      `head_dim`; dimensions beyond it stay
    - `is_neox_style`: the first half of the rotated dimensions goes with the second; else
      neighbours go together

    Raises ValueError, naming the argument.
    """
    require(q.dim() == 3, f"q must have 3 dimensions, not {q.dim()}")
    require(q.stride(2) == 1, "q must be contiguous in its last dimension")
    rows, num_heads, head_dim = q.shape
    _require_float(_is_float(q), "q")
    _require_positions(distances, "distances", q.device)
    require(distances.shape == (rows,), f"distances is {list(distances.shape)}, q has {rows} rows")
    rotary_dim = _rotary_dim(cos_sin_cache, head_dim, q.device)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    pairs = triton.next_power_of_2(rotary_dim // 2)
    heads = min(triton.next_power_of_2(num_heads), max(1024 // pairs, 1))
    launch(
        rotate_rows,
        (rows, -(-num_heads // heads)),
        x_ptr=q,
        out_ptr=out,
        positions_ptr=distances.contiguous(),
        cos_sin_ptr=cos_sin_cache,
        x_stride_n=q.stride(0),
        x_stride_h=q.stride(1),
        out_stride_n=out.stride(0),
        out_stride_h=out.stride(1),
        num_heads=num_heads,
        HEAD_DIM=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim),
        ROTARY_DIM=rotary_dim,
        BLOCK_PAIRS=pairs,
        HEADS=heads,
        NEOX=is_neox_style,
        num_warps=4,
    )
    return out


def turn_keys(
    pages: Tensor,
    page_ids: Tensor,
    distance: int,
    cos_sin_cache: Tensor,
    *,
    is_neox_style: bool = True,
) -> None:
    """Turn the keys of whole pages by one distance, in place.

    - `pages`: the pool, of bf16, fp16, fp32 or 8-bit floats, which are rounded as `append` does
    - `page_ids`: int32 or int64, any shape, no two the same; not checked
    - `distance`: a row of `cos_sin_cache`

    `cos_sin_cache`, `is_neox_style` and the errors are those of `turned_queries`.
    """
    checks.require_pages(pages)
    _require_float(pages.dtype in checks.FP8_FORMATS or _is_float(pages), "pages")
    _require_positions(page_ids, "page_ids", pages.device)
    rotary_dim = _rotary_dim(cos_sin_cache, pages.shape[3], pages.device)
    require(
        0 <= distance < len(cos_sin_cache),
        f"distance is {distance}, cos_sin_cache has {len(cos_sin_cache)} rows",
    )
    written = checks.write_arguments(pages)
    launch(
        turn_page,
        (page_ids.numel(),),
        page_ids_ptr=page_ids.contiguous(),
        cos_sin_ptr=cos_sin_cache,
        distance=distance,
        HEAD_DIM=pages.shape[3],
        ROTARY_DIM=rotary_dim,
        BLOCK_PAIRS=triton.next_power_of_2(rotary_dim // 2),
        PAGE_SIZE=pages.shape[2],
        NEOX=is_neox_style,
        **written,
        num_warps=4,
    )


def _is_float(tensor: Tensor) -> bool:
    return tensor.dtype in (torch.bfloat16, torch.float16, torch.float32)


def _require_float(condition: bool, name: str) -> None:
    require(condition, f"{name} must be bfloat16, float16 or float32")


def _require_positions(tensor: Tensor, name: str, device: torch.device) -> None:
    require(tensor.dtype in (torch.int32, torch.int64), f"{name} must be int32 or int64")
    require(tensor.device == device, f"{name} is on {tensor.device}, expected {device}")


def _rotary_dim(cos_sin_cache: Tensor, head_dim: int, device: torch.device) -> int:
    """Checks the table, and how many dimensions of a head it rotates."""
    name = "cos_sin_cache"
    require(cos_sin_cache.dim() == 2, f"{name} must have 2 dimensions, not {cos_sin_cache.dim()}")
    require(cos_sin_cache.dtype == torch.float32, f"{name} must be float32")
    require(cos_sin_cache.is_contiguous(), f"{name} must be contiguous")
    require(
        cos_sin_cache.device == device, f"{name} is on {cos_sin_cache.device}, expected {device}"
    )
    width = cos_sin_cache.shape[1]
    require(
        0 < width <= head_dim and width % 2 == 0,
        f"{name} has width {width}, expected an even number up to {head_dim}",
    )
    return width
