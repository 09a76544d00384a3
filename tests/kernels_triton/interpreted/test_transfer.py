"""append and gather: bit-identical to the reference, and nothing else in the pool is touched."""

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sglang_kv.kernels import reference
from sglang_kv.kernels.layout import FP8_DTYPES, PagedStreams, allocate_pages
from sglang_kv.kernels.triton import transfer

MakeStreams = Callable[..., PagedStreams]


def bits(pages: Tensor) -> Tensor:
    """Comparable even where pages are NaN."""
    dtype = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[pages.itemsize]
    return pages.contiguous().view(dtype)


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "page_size", "head_dim"),
    [
        (torch.bfloat16, torch.bfloat16, 16, 64),
        (torch.float16, torch.float32, 1, 80),
        (torch.float32, torch.bfloat16, 32, 96),
        (torch.bfloat16, torch.float8_e4m3fn, 16, 128),
        (torch.float32, torch.float8_e5m2, 16, 256),
    ],
)
def test_append(
    make_streams: MakeStreams,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    page_size: int,
    head_dim: int,
) -> None:
    """With rows that lie apart, an empty stream, a prompt's whole and its end."""
    streams = make_streams(
        [[50, 35], 1, 0, 40],
        num_kv_heads=2,
        num_layers=2,
        page_size=page_size,
        head_dim=head_dim,
        dtype=kv_dtype,
    )
    pages = allocate_pages(len(streams.pages), page_size, head_dim, kv_dtype)
    expected = replace(streams, pages=pages.copy_(streams.pages))
    for counts in (None, [34, 1, 1, 0]):
        indptr = None
        if counts is not None:
            indptr = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
        total = 4 if counts is None else sum(counts)
        k, v = (100 * torch.randn(total, 4, head_dim)).to(dtype).split(2, dim=1)
        scales = {"k_scale": 0.25, "v_scale": 0.5} if kv_dtype in FP8_DTYPES else {}
        transfer.append(k, v, indptr, streams, 1, **scales)
        reference.append(k, v, indptr, expected, 1, **scales)
        assert torch.equal(bits(streams.pages), bits(expected.pages))


@pytest.mark.parametrize(
    ("dtype", "index_dtype", "page_size", "head_dim"),
    [
        (torch.bfloat16, torch.int32, 16, 80),
        (torch.float32, torch.int64, 1, 64),
        (torch.float8_e4m3fn, torch.int64, 32, 96),
    ],
)
def test_gather(
    dtype: torch.dtype, index_dtype: torch.dtype, page_size: int, head_dim: int
) -> None:
    """Into other pages, in any order; in place, forward; and a stream that keeps nothing."""
    pages = allocate_pages(200, page_size, head_dim, dtype)
    pages.copy_(torch.randn(pages.shape))
    expected = allocate_pages(200, page_size, head_dim, dtype).copy_(pages)
    ids = torch.randperm(200)
    moved = 40 * page_size
    some = torch.randperm(moved).sort().values[: min(moved, 70)]
    ascending = torch.randperm(moved)[: min(moved, 70)].sort().values
    pages_of = -(-70 // page_size)
    lists: list[Tensor] = []
    for values in (
        [ids[:40], ids[40:41], ids[41:41], ids[60:100]],
        [some.flip(0), torch.tensor([0]), torch.tensor([]), ascending],
        [ids[100 : 100 + pages_of], ids[190:192], ids[192:192], ids[60 : 60 + min(pages_of, 40)]],
    ):
        lengths = [len(v) for v in values]
        lists.append(torch.tensor([0, *itertools.accumulate(lengths)]).to(index_dtype))
        lists.append(torch.cat(values).to(index_dtype))
    transfer.gather(pages, *lists)
    reference.gather(expected, *lists)
    assert torch.equal(bits(pages), bits(expected))


def test_what_does_not_fit_is_refused(make_streams: MakeStreams) -> None:
    streams = make_streams([20, 5], num_kv_heads=2)
    good = torch.zeros(2, 2, 64)
    for message, k, v in (
        ("k has 4 heads", torch.zeros(2, 4, 64), good),
        ("v has 1 tokens", good, torch.zeros(1, 2, 64)),
        ("slots", torch.zeros(3, 2, 64), torch.zeros(3, 2, 64)),
    ):
        with pytest.raises(ValueError, match=message):
            transfer.append(k, v, None, streams, 0)
    one = torch.tensor([0, 1])
    with pytest.raises(ValueError, match="keep_indptr has 3 entries"):
        transfer.gather(streams.pages, one, one, torch.tensor([0, 1, 1]), one, one, one)
    with pytest.raises(ValueError, match="dst_indices must be int32 or int64"):
        transfer.gather(streams.pages, one, one, one, one, one, one.float())
