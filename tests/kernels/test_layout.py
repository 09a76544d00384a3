import itertools

import pytest
import torch

from sglang_kv.kernels.layout import (
    ALIGNMENT_BYTES,
    HEAD_DIMS,
    PAGE_SIZES,
    PagedStreams,
    allocate_pages,
)

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_k_and_v_is_aligned(dtype: torch.dtype) -> None:
    for page_size, head_dim in itertools.product(PAGE_SIZES, HEAD_DIMS):
        pages = allocate_pages(3, page_size, head_dim, dtype)
        assert pages.shape == (3, 2, page_size, head_dim)
        for page, kv in itertools.product(range(3), range(2)):
            assert pages[page, kv].data_ptr() % ALIGNMENT_BYTES == 0
            assert pages[page, kv].is_contiguous()


def test_pages_do_not_overlap() -> None:
    pages = allocate_pages(3, 1, 80, torch.bfloat16)
    pages.copy_(torch.arange(6).view(3, 2, 1, 1).expand_as(pages))
    assert pages[..., 0, 0].tolist() == [[0, 1], [2, 3], [4, 5]]
    assert (pages == pages[..., :1]).all()


def test_a_pool_may_pass_the_range_of_32_bit_offsets() -> None:
    """Only the pages that are touched are committed."""
    pages = allocate_pages(2**20 + 1, 16, 128, torch.bfloat16)
    assert pages.numel() > 2**32
    pages[-1] = 1.0
    assert pages[-1].float().sum() == 2 * 16 * 128


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("num_pages", (0, 16, 64)), ("page_size", (1, 8, 64)), ("head_dim", (1, 16, 65))],
)
def test_bad_geometry_is_named(name: str, arguments: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match=name):
        allocate_pages(*arguments, torch.bfloat16)


def test_streams_know_their_geometry() -> None:
    streams = PagedStreams(
        allocate_pages(4, 16, 80, torch.float32),
        torch.zeros(1, 2, 3, 4, dtype=torch.int32),
        torch.zeros(1, 2, 3, 4, dtype=torch.int32),
        torch.zeros(1, dtype=torch.int32),
    )
    assert (streams.page_size, streams.head_dim, streams.num_kv_heads) == (16, 80, 3)
