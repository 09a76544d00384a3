"""append and gather: bit-identical to the reference, and nothing else in the pool is touched."""

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sglang_kv.kernels import reference, transfer
from sglang_kv.kernels.layout import PagedStreams, allocate_pages

pytestmark = pytest.mark.usefixtures("isa")

MakeStreams = Callable[..., PagedStreams]


def bits(pages: Tensor) -> Tensor:
    """Comparable even where pages are NaN."""
    return pages.contiguous().view(torch.int16 if pages.itemsize == 2 else torch.int32)


def copy_of(streams: PagedStreams) -> PagedStreams:
    shape = streams.pages.shape
    pages = allocate_pages(shape[0], shape[2], shape[3], streams.pages.dtype)
    return replace(streams, pages=pages.copy_(streams.pages))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("page_size", "head_dim"), [(1, 80), (16, 64), (32, 256)])
def test_append(
    make_streams: MakeStreams,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    page_size: int,
    head_dim: int,
) -> None:
    streams = make_streams(
        [[50, 35], 1, 0, 40], page_size=page_size, head_dim=head_dim, dtype=kv_dtype, num_layers=2
    )
    expected = copy_of(streams)
    for counts in (None, [34, 1, 1, 0]):
        indptr = None
        if counts is not None:
            indptr = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
        total = 4 if counts is None else sum(counts)
        k, v = torch.randn(total, 4, head_dim).to(dtype).split(2, dim=1)  # as from one projection
        transfer.append(k, v, indptr, streams, 1)
        reference.append(k, v, indptr, expected, 1)
        assert torch.equal(bits(streams.pages), bits(expected.pages))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("page_size", [1, 16])
def test_gather(dtype: torch.dtype, index_dtype: torch.dtype, page_size: int) -> None:
    pages = allocate_pages(200, page_size, 80, dtype)
    pages.copy_(torch.randn(pages.shape))
    expected = allocate_pages(200, page_size, 80, dtype).copy_(pages)
    ids = torch.randperm(200)
    lists: list[Tensor] = []
    for values in (
        [ids[:40], ids[40:41], ids[41:41]],
        [torch.randperm(40 * page_size)[: 9 * page_size + 1], torch.tensor([0]), torch.tensor([])],
        [ids[100:110], ids[110:112], ids[112:112]],
    ):
        lengths = [len(v) for v in values]
        lists.append(torch.tensor([0, *itertools.accumulate(lengths)]).to(index_dtype))
        lists.append(torch.cat(values).to(index_dtype))
    transfer.gather(pages, *lists)
    reference.gather(expected, *lists)
    assert torch.equal(pages, expected)


def test_gather_moves_any_dtype() -> None:
    pages = allocate_pages(4, 16, 64, torch.float8_e4m3fn)
    pages.view(torch.uint8).copy_(torch.randint(256, pages.shape, dtype=torch.uint8))
    one = torch.tensor([0, 1])
    keep = torch.tensor([3, 5, 15])
    transfer.gather(
        pages, one, torch.tensor([2]), torch.tensor([0, 3]), keep, one, torch.tensor([0])
    )
    assert torch.equal(pages.view(torch.uint8)[0, :, :3], pages.view(torch.uint8)[2, :, keep])
