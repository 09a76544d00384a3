"""What the kernels share: 8-bit floats to the bit, and ranges as the C++ kernels have them."""

import itertools

import pytest
import torch
import triton
import triton.language as tl

from sglang_kv.kernels import attention
from sglang_kv.kernels.triton.numbers import narrow, widen
from sglang_kv.kernels.triton.streams import find_tile, visible_ranges

FORMATS = {3: torch.float8_e4m3fn, 2: torch.float8_e5m2}


@triton.jit
def widen_all(x_ptr, out_ptr, FP8: tl.constexpr):
    at = tl.arange(0, 256)
    tl.store(out_ptr + at, widen(tl.load(x_ptr + at), tl.float32, FP8))


@triton.jit
def narrow_all(x_ptr, out_ptr, COUNT: tl.constexpr, FP8: tl.constexpr):
    at = tl.arange(0, COUNT)
    tl.store(out_ptr + at, narrow(tl.load(x_ptr + at), tl.uint8, FP8))


@triton.jit
def ranges_of(out_ptr, gap, num_sinks, window_left, layer_left, PAGE_SIZE: tl.constexpr):
    index = tl.arange(0, 64)
    begin, stop, window = visible_ranges(index, gap, num_sinks, window_left, layer_left, PAGE_SIZE)
    tl.store(out_ptr + index * 3, begin)
    tl.store(out_ptr + index * 3 + 1, stop)
    tl.store(out_ptr + index * 3 + 2, window)


@triton.jit
def find_tiles(indptr_ptr, out_ptr, batch, TILE: tl.constexpr):
    tile = tl.program_id(0)
    request, part = find_tile(tile, indptr_ptr, batch, TILE)
    tl.store(out_ptr + tile * 2, request)
    tl.store(out_ptr + tile * 2 + 1, part)


@pytest.mark.parametrize("mantissa", FORMATS)
def test_every_8_bit_float_is_read(mantissa: int) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    out = torch.empty(256)
    widen_all[(1,)](codes, out, FP8=mantissa)
    torch.testing.assert_close(
        out, codes.view(FORMATS[mantissa]).float(), equal_nan=True, rtol=0, atol=0
    )


@pytest.mark.parametrize("mantissa", FORMATS)
def test_rounding_to_8_bit_floats(mantissa: int) -> None:
    """Every value, the middle between neighbours and what is beside it, and random numbers."""
    dtype = FORMATS[mantissa]
    values = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    values = values[values.isfinite()].sort().values
    middles = (values[1:] + values[:-1]) / 2
    inf = torch.full_like(middles, torch.inf)
    x = torch.cat(
        (values, middles, middles.nextafter(inf), middles.nextafter(-inf), torch.randn(999))
    )
    x = torch.nn.functional.pad(x, (0, 2048 - len(x)))
    out = torch.empty(2048, dtype=torch.uint8)
    narrow_all[(1,)](x, out, COUNT=2048, FP8=mantissa)
    assert torch.equal(out, x.to(dtype).view(torch.uint8))
    x = torch.tensor([1e9, -torch.inf, torch.nan, 0.0])
    out = torch.empty(4, dtype=torch.uint8)
    narrow_all[(1,)](x, out, COUNT=4, FP8=mantissa)
    top = torch.finfo(dtype).max
    assert out.view(dtype).float()[:2].tolist() == [top, -top]
    assert out.view(dtype).float()[2].isnan()


@pytest.mark.parametrize("page_size", [1, 16])
def test_ranges_are_those_of_the_cpu_kernels(page_size: int) -> None:
    """Which are tested against masks; every index from 0 to 63."""
    policies = itertools.product((0, 32), (0, 4, 16), (-1, 0, 20), (-1, 30))
    for gap, num_sinks, window_left, layer_window_left in policies:
        out = torch.empty(64, 3, dtype=torch.int32)
        ranges_of[(1,)](out, gap, num_sinks, window_left, layer_window_left, PAGE_SIZE=page_size)
        for index, (begin, stop, window) in enumerate(out.tolist()):
            found = [*range(begin, stop), *range(window, index + 1)]
            sinks, recent = attention.visible_ranges(
                index,
                gap=gap,
                num_sinks=num_sinks,
                window_left=window_left,
                page_size=page_size,
                layer_window_left=layer_window_left,
            )
            assert found == [*sinks, *recent]
            assert (stop > begin) == (len(sinks) > 0)


def test_tiles_of_many_requests() -> None:
    """More than the 128 that are looked at together; some without a row."""
    counts = torch.randint(0, 50, (150,))
    counts[::7] = 0
    indptr = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    tiles = int(indptr[-1]) // 32 + 150
    out = torch.empty(tiles, 2, dtype=torch.int32)
    find_tiles[(tiles,)](indptr, out, 150, TILE=32)
    rows = [
        (request, part * 32 + i)
        for request, part in out.tolist()
        for i in range(32)
        if part * 32 + i < counts[request]
    ]
    assert rows == [(b, row) for b in range(150) for row in range(counts[b])]
