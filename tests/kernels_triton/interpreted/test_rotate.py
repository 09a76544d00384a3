"""Rotary embedding against complex numbers, in fp32."""

import pytest
import torch
from torch import Tensor

from sglang_kv.kernels import reference
from sglang_kv.kernels.layout import allocate_pages
from sglang_kv.kernels.triton import rotate


def table(rotary_dim: int, sign: float = 1.0) -> Tensor:
    """Cosines and sines of 50 positions; with sign -1 they turn back."""
    angles = torch.arange(50)[:, None] / 100 ** (torch.arange(0, rotary_dim, 2) / rotary_dim)
    return torch.cat((angles.cos(), sign * angles.sin()), -1)


@pytest.mark.parametrize("is_neox_style", [True, False])
@pytest.mark.parametrize(("rotary_dim", "dtype"), [(64, torch.bfloat16), (24, torch.float32)])
def test_queries(rotary_dim: int, dtype: torch.dtype, is_neox_style: bool) -> None:
    """Rows that lie apart, and dimensions that are not rotated."""
    rows = torch.randn(3, 8, 64).to(dtype)
    before, q = rows.clone(), rows[:, 2:7]
    distances, cos_sin = torch.tensor([0, 49, 7]), table(rotary_dim)
    out = rotate.turned_queries(q, distances.int(), cos_sin, is_neox_style=is_neox_style)
    expected = reference.turned(q, cos_sin[distances][:, None], is_neox_style).to(dtype)
    torch.testing.assert_close(out, expected, atol=1e-6, rtol=2**-7 if dtype.itemsize == 2 else 0)
    assert torch.equal(out[..., rotary_dim:], q[..., rotary_dim:])
    assert torch.equal(rows, before)


@pytest.mark.parametrize(("scale", "is_neox_style"), [(1.0, True), (1e-3, False), (0.9, True)])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
)
def test_keys_of_pages(dtype: torch.dtype, scale: float, is_neox_style: bool) -> None:
    """Within half a unit of the last place; what turns too large for 8 bits is the largest."""
    largest = torch.finfo(dtype).max if dtype.itemsize == 1 and scale == 0.9 else 1.0
    pages = allocate_pages(6, 16, 80, dtype)
    values = scale * torch.randn(pages.shape)
    pages.copy_(values if largest == 1 else largest * values.clamp(-1, 1))
    before = pages.float().clone()
    cos_sin = table(64, sign=-1.0)
    rotate.turn_keys(pages, torch.tensor([[4], [1]]), 13, cos_sin, is_neox_style=is_neox_style)
    expected = before.clone()
    expected[[1, 4], 0] = reference.turned(before[[1, 4], 0], cos_sin[13], is_neox_style)
    assert (reference.beyond_rounding(pages, expected) <= 1e-6 * largest).all()
    assert (pages.float().abs().max() == largest) == (largest > 1)
    others = [0, 2, 3, 5]
    assert torch.equal(pages.float()[others], before[others])
    assert torch.equal(pages.float()[:, 1], before[:, 1])


def test_what_does_not_fit_is_refused() -> None:
    q, positions, cos_sin = torch.zeros(2, 3, 64), torch.zeros(2).int(), table(64)
    for message, arguments in (
        ("distances is", (q, positions[:1], cos_sin)),
        ("distances must be int32 or int64", (q, positions.float(), cos_sin)),
        ("cos_sin_cache has width 80", (q, positions, torch.zeros(4, 80))),
        ("cos_sin_cache must be float32", (q, positions, cos_sin.double())),
    ):
        with pytest.raises(ValueError, match=message):
            rotate.turned_queries(*arguments)
    pages = allocate_pages(2, 16, 64, torch.bfloat16)
    with pytest.raises(ValueError, match="distance is 50, cos_sin_cache has 50 rows"):
        rotate.turn_keys(pages, positions, 50, cos_sin)
