"""What moves and turns keys and values on a GPU, against the reference: append, gather, rotate.

A part of `scripts/gpu_check.py`, of the Triton path alone. What is moved has to be right to the
bit; what is turned, as near to the exact result as its dtype allows.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sglang_kv.benchmarks import gpu_streams
from sglang_kv.benchmarks.gpu_streams import Finding, Where, findings, on_cpu, random_streams
from sglang_kv.kernels import reference
from sglang_kv.kernels.layout import FP8_DTYPES, PagedStreams, allocate_pages

KV_HEADS, LAYERS = 2, 2
LENS, COUNTS = (40, 17, 1, 300, 0), (5, 17, 1, 130, 0)
FEW_LENS, FEW_COUNTS = (40, 17, 1, 0), (5, 17, 1, 0)
HALF, (E4M3, E5M2) = torch.float16, FP8_DTYPES
#: head_dim, tokens of a page, dtype of the pages (None: the device's own).
APPENDED = ((128, 16, None), (80, 1, HALF), (96, 32, E4M3), (256, 16, E5M2))
GATHERED = ((128, 16, None), (80, 1, HALF), (96, 32, E4M3))
#: Dtype, dimensions that are turned of how many, whether halves go together.
TURNED = ((None, 128, 128, True), (HALF, 24, 80, False), (torch.float32, 64, 64, False))
TURNED_KEYS = ((None, 128), (HALF, 64), (E4M3, 64), (E5M2, 80))
#: Beyond the nearest number of a dtype, of numbers of size one, for sums in another order.
ROUNDING = 1e-5


def check_moves(where: Where) -> Iterator[list[Finding]]:
    """`append` of chunks and of single tokens, and `gather`: every bit of the pool."""
    for head_dim, page_size, dtype in APPENDED:
        shape = _shape(head_dim, page_size, dtype)
        for decode in (True, False):
            name = f"triton append {'decode ' if decode else ''}{shape}"
            check = functools.partial(_append, where, head_dim, page_size, dtype, decode)
            yield findings(name, check)
    for head_dim, page_size, dtype in GATHERED:
        name = f"triton gather {_shape(head_dim, page_size, dtype)}"
        yield findings(name, functools.partial(_gather, where, head_dim, page_size, dtype))


def _append(
    where: Where, head_dim: int, page_size: int, dtype: torch.dtype | None, decode: bool
) -> Iterator[tuple[str, float, float]]:
    lens, counts = (FEW_LENS, FEW_COUNTS) if where.small else (LENS, COUNTS)
    streams = _streams(where, lens, head_dim, page_size, dtype)
    plain = on_cpu(streams)
    new = (1,) * len(lens) if decode else counts
    # Some values are too large for e4m3; the scales are exact.
    k, v = 100 * where.randn(2, sum(new), KV_HEADS, head_dim)
    narrow = streams.pages.dtype in FP8_DTYPES
    scales = {"k_scale": 0.5, "v_scale": 2.0**-2} if narrow else {}
    indptr = None if decode else [0, *itertools.accumulate(new)]
    given = None if indptr is None else where.ints(indptr)
    gpu_streams.triton("transfer").append(k, v, given, streams, 1, **scales)
    host = None if indptr is None else torch.tensor(indptr)
    reference.append(k.cpu(), v.cpu(), host, plain, 1, **scales)
    yield "", different_bits(streams.pages, plain.pages), 0.0


def _gather(
    where: Where, head_dim: int, page_size: int, dtype: torch.dtype | None
) -> Iterator[tuple[str, float, float]]:
    lens = FEW_LENS if where.small else LENS
    streams = _streams(where, lens, head_dim, page_size, dtype)
    plain = on_cpu(streams)
    lists = gather_lists(streams, lens)
    gpu_streams.triton("transfer").gather(streams.pages, *(t.to(where.device) for t in lists))
    reference.gather(plain.pages, *lists)
    yield "", different_bits(streams.pages, plain.pages), 0.0


def _streams(
    where: Where,
    lens: tuple[int, ...],
    head_dim: int,
    page_size: int,
    dtype: torch.dtype | None,
) -> PagedStreams:
    shape: dict[str, Any] = {"head_dim": head_dim, "page_size": page_size, "dtype": dtype}
    return random_streams(where, lens, layers=LAYERS, kv_heads=KV_HEADS, **shape)


def _shape(head_dim: int, page_size: int, dtype: torch.dtype | None) -> str:
    shape = f"head_dim {head_dim} page {page_size}"
    return shape if dtype is None else f"{shape} {str(dtype).removeprefix('torch.')}"


def gather_lists(streams: PagedStreams, lens: tuple[int, ...]) -> list[Tensor]:
    """Every third token of each stream of layer 0, to the front of its own pages."""
    table, size = streams.table[:, 0].cpu().long(), streams.page_size
    lists: list[list[Tensor]] = [[], [], []]
    for i, length in enumerate(lens):
        for head in range(streams.num_kv_heads):
            keep = torch.arange(0, length, 3)
            pages = table[i, head]
            lists[0].append(pages[: -(-length // size)])
            lists[1].append(keep)
            lists[2].append(pages[: -(-len(keep) // size)])
    found: list[Tensor] = []
    for parts in lists:
        ends = np.cumsum([0, *(len(part) for part in parts)])
        found += [torch.from_numpy(ends), torch.cat(parts)]
    return found


def different_bits(found: Tensor, expected: Tensor) -> float:
    """How many numbers are not the same to the bit."""
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[found.itemsize]
    bits = (t.cpu().contiguous().view(integer) for t in (found, expected))
    return float(torch.ne(*bits).sum())


# -- rotary embedding --


def check_rotate(where: Where) -> Iterator[list[Finding]]:
    """`turned_queries` and `turn_keys`, by a table that turns forth or back."""
    for dtype, rotary_dim, head_dim, halves in TURNED:
        kind = "halves" if halves else "neighbours"
        name = f"triton rotate {kind} {rotary_dim} of {head_dim} {_name(dtype)}".rstrip()
        check = functools.partial(_rotate_rows, where, dtype, rotary_dim, head_dim, halves)
        yield findings(name, check)
    for (dtype, head_dim), halves in zip(TURNED_KEYS, itertools.cycle((True, False))):
        name = f"triton turn_keys head_dim {head_dim} {_name(dtype)}".rstrip()
        yield findings(name, functools.partial(_turn_keys, where, dtype, head_dim, halves))


def _name(dtype: torch.dtype | None) -> str:
    return "" if dtype is None else str(dtype).removeprefix("torch.")


def _rotate_rows(
    where: Where, dtype: torch.dtype | None, rotary_dim: int, head_dim: int, halves: bool
) -> Iterator[tuple[str, float, float]]:
    rows, heads = (3, 5) if where.small else (33, 7)
    x = where.randn(rows, heads, head_dim, dtype=dtype)
    table, positions = angles(rotary_dim), torch.arange(rows) * 5 % 50
    exact = reference.turned(x.cpu(), table[positions][:, None], halves)
    given = (positions.to(where.device), table.to(where.device))
    style = {"is_neox_style": halves}
    turned_queries = gpu_streams.triton("rotate").turned_queries
    yield "", worse(turned_queries(x, *given, **style), exact), ROUNDING


def _turn_keys(
    where: Where, dtype: torch.dtype | None, head_dim: int, halves: bool
) -> Iterator[tuple[str, float, float]]:
    pages = allocate_pages(6, 16, head_dim, dtype or where.dtype, where.device)
    pages.copy_(where.randn(*pages.shape).to(pages.dtype))
    before, table = pages.cpu(), angles(64, sign=-1.0)
    exact = before.float()
    exact[[1, 4], 0] = reference.turned(before[[1, 4], 0], table[13], halves)
    ids = torch.tensor([[4], [1]], device=where.device)
    turn = gpu_streams.triton("rotate").turn_keys
    turn(pages, ids, 13, table.to(where.device), is_neox_style=halves)
    yield "", worse(pages, exact), ROUNDING


def angles(rotary_dim: int, sign: float = 1.0) -> Tensor:
    """Cosines and sines of 50 positions; with sign -1 they turn back."""
    turns = torch.arange(50)[:, None] / 100 ** (torch.arange(0, rotary_dim, 2) / rotary_dim)
    return torch.cat((turns.cos(), sign * turns.sin()), -1)


def worse(found: Tensor, exact: Tensor) -> float:
    """How much farther from `exact` (fp32) the result is than the nearest of its dtype would be."""
    nearest = reference.as_stored(exact, 1.0, found.dtype).float()
    error = (found.cpu().float() - exact).abs()
    return float((error - (nearest - exact).abs()).max())
