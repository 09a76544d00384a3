"""Rotary embedding moved on: of queries that have been rotated already, and of cached keys.

With cosines and negated sines these turn back; `sglang_kv.rotary` says why.
"""

import torch
from torch import Tensor

from sglang_kv.kernels.elementwise import apply_rope
from sglang_kv.kernels.layout import FP8_DTYPES


def turned_queries(
    q: Tensor, distances: Tensor, cos_sin_cache: Tensor, *, is_neox_style: bool = True
) -> Tensor:
    """Queries, each turned by its own distance: a new tensor.

    - `q`: bf16 or fp32 [tokens, num_heads, head_dim]; any strides
    - `distances`: int64 [tokens], rows of `cos_sin_cache`
    - `cos_sin_cache`: fp32 [positions, rotary_dim], cosines before sines; rotary_dim even, at most
      `head_dim`; dimensions beyond it stay
    - `is_neox_style`: the first half of the rotated dimensions goes with the second; else
      neighbours go together

    Raises ValueError, naming the argument.
    """
    out = q.clone(memory_format=torch.contiguous_format)
    _turn(out, distances, cos_sin_cache, is_neox_style)
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

    - `pages`: the pool, of bf16 or fp32, or of 8-bit floats. These are turned in fp32, and rounded
      as `append` does: what is too large becomes the largest number
    - `page_ids`: int32 or int64, any shape, no two the same; not checked
    - `distance`: a row of `cos_sin_cache`

    `cos_sin_cache`, `is_neox_style` and the errors are those of `turned_queries`. Keys that are
    stored divided by a scale are turned as they are: a rotation takes no notice of it.
    """
    if not 0 <= distance < len(cos_sin_cache):
        raise ValueError(f"distance is {distance}, cos_sin_cache has {len(cos_sin_cache)} rows")
    ids = page_ids.reshape(-1).long()
    keys = pages[ids, 0]
    of_8_bits = pages.dtype in FP8_DTYPES
    turned = keys.float() if of_8_bits else keys
    rows = turned.view(-1, 1, pages.shape[3])
    distances = torch.full((len(rows),), distance, dtype=torch.int64)
    _turn(rows, distances, cos_sin_cache, is_neox_style)
    if of_8_bits:
        largest = torch.finfo(pages.dtype).max
        turned = turned.clamp(-largest, largest)
    pages[ids, 0] = turned.to(pages.dtype)


def _turn(heads: Tensor, distances: Tensor, cos_sin_cache: Tensor, is_neox_style: bool) -> None:
    """`heads`, contiguous [rows, num_heads, head_dim], in place."""
    rows, _, head_dim = heads.shape
    width = cos_sin_cache.shape[1]
    if distances.shape != (rows,):
        raise ValueError(f"distances is {list(distances.shape)}, there are {rows} rows")
    if not 0 < width <= head_dim or width % 2:
        raise ValueError(
            f"cos_sin_cache has width {width}, expected an even number up to {head_dim}"
        )
    if is_neox_style and width % 32 == 0:  # what the C++ kernel takes
        apply_rope(heads.view(rows, -1), distances, cos_sin_cache, head_dim)
        return
    if rows and not 0 <= int(distances.min()) <= int(distances.max()) < len(cos_sin_cache):
        raise ValueError(f"distances are not all rows of cos_sin_cache, 0 to {len(cos_sin_cache)}")
    cos, sin = cos_sin_cache[distances].unsqueeze(1).chunk(2, dim=-1)
    turned = heads[..., :width].float()
    if is_neox_style:
        a, b = turned.chunk(2, dim=-1)
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    else:
        a, b = turned[..., ::2], turned[..., 1::2]
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    heads[..., :width] = turned.to(heads.dtype)
