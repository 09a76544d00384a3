"""Queries and cached keys turned back, against complex numbers in fp32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sglang_kv.kernels import reference, rotate
from sglang_kv.kernels.layout import FP8_DTYPES, allocate_pages

pytestmark = pytest.mark.usefixtures("isa")
BOTH_STYLES = pytest.mark.parametrize("is_neox_style", [True, False])


def table(rotary_dim: int) -> Tensor:
    """Cosines and negated sines of 50 distances."""
    angles = torch.arange(50)[:, None] / 100 ** (torch.arange(0, rotary_dim, 2) / rotary_dim)
    return torch.cat((angles.cos(), -angles.sin()), -1)


@BOTH_STYLES
@pytest.mark.parametrize(("rotary_dim", "dtype"), [(64, torch.bfloat16), (24, torch.float32)])
def test_queries(rotary_dim: int, dtype: torch.dtype, is_neox_style: bool) -> None:
    rows = torch.randn(3, 8, 64).to(dtype)
    before, q = rows.clone(), rows[:, 2:7]
    distances, cos_sin = torch.tensor([0, 49, 7]), table(rotary_dim)
    out = rotate.turned_queries(q, distances, cos_sin, is_neox_style=is_neox_style)
    expected = reference.turned(q, cos_sin[distances][:, None], is_neox_style)
    rtol = 2**-7 if dtype == torch.bfloat16 else 0
    torch.testing.assert_close(out, expected.to(dtype), atol=1e-6, rtol=rtol)
    assert torch.equal(out[..., rotary_dim:], q[..., rotary_dim:])
    assert torch.equal(rows, before)


@BOTH_STYLES
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (80, 32), (64, 24)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, *FP8_DTYPES])
def test_keys_of_pages(
    dtype: torch.dtype, head_dim: int, rotary_dim: int, is_neox_style: bool
) -> None:
    """Each within half a unit of the last place, from subnormal numbers to some beyond 8 bits,
    which become the largest; and nothing else in the pool is touched."""
    pages = allocate_pages(6, 16, head_dim, dtype)
    size = 1.0 if dtype not in FP8_DTYPES else torch.finfo(dtype).max
    spread = torch.exp2(torch.linspace(-24, 8, 16 * head_dim)).clamp(max=1).view(16, head_dim)
    pages.copy_(size * (0.9 * torch.randn(pages.shape)).clamp(-1, 1) * spread)
    before = pages.float().clone()
    cos_sin = table(rotary_dim)
    ids = torch.tensor([[4], [1]])
    rotate.turn_keys(pages, ids, 13, cos_sin, is_neox_style=is_neox_style)
    expected = before.clone()
    expected[[1, 4], 0] = reference.turned(before[[1, 4], 0], cos_sin[13], is_neox_style)
    # Beside half a unit, what fp32 loses of a pair.
    assert (reference.beyond_rounding(pages, expected) <= 1e-6 * size * spread).all()
    if dtype in FP8_DTYPES:
        assert expected.abs().max() > size
        assert pages.float().abs().max() == size
        nearest = reference.as_stored(expected, 1.0, dtype).float()
        assert ((pages.float() != nearest).sum() <= 2).item(), "only what lies in the middle may"
    others = [0, 2, 3, 5]
    assert torch.equal(pages.float()[others], before[others])
    assert torch.equal(pages.float()[:, 1], before[:, 1])


@pytest.mark.parametrize("dtype", FP8_DTYPES)
def test_a_key_that_is_no_number_stays_one_of_its_pair(dtype: torch.dtype) -> None:
    pages = allocate_pages(1, 1, 64, dtype)
    pages.copy_(torch.ones(pages.shape))
    pages.view(torch.uint8)[0, 0, 0, 3] = 0x7F
    rotate.turn_keys(pages, torch.tensor([0]), 1, table(64))
    assert pages[0, 0, 0].float().isnan().nonzero().flatten().tolist() == [3, 35]


def test_errors_name_the_argument() -> None:
    pages, q, cos_sin = allocate_pages(2, 16, 64, torch.bfloat16), torch.zeros(2, 3, 64), table(64)
    one = torch.tensor([0])
    for distance in (50, -1):
        with pytest.raises(ValueError, match=f"distance is {distance}, cos_sin_cache has 50"):
            rotate.turn_keys(pages, one, distance, cos_sin)
    with pytest.raises(ValueError, match=r"distances is \[1\], there are 2 rows"):
        rotate.turned_queries(q, one, cos_sin)
    with pytest.raises(ValueError, match="cos_sin_cache has width 80"):
        rotate.turned_queries(q, torch.tensor([0, 1]), torch.zeros(4, 80))
    for style in (True, False):
        with pytest.raises(ValueError, match=r"positions\[1\]|distances are not all"):
            rotate.turned_queries(q, torch.tensor([0, 50]), cos_sin, is_neox_style=style)
