"""Rotary embedding against complex numbers: a pair is one, turned by multiplying."""

import pytest
import torch
from torch import Tensor

from sglang_kv.kernels.layout import allocate_pages
from sglang_kv.kernels.triton import rotate


def table(rotary_dim: int, sign: float = 1.0) -> Tensor:
    """Cosines and sines of 50 positions; with sign -1 they turn back."""
    angles = torch.arange(50)[:, None] / 100 ** (torch.arange(0, rotary_dim, 2) / rotary_dim)
    return torch.cat((angles.cos(), sign * angles.sin()), -1)


def turned(heads: Tensor, cos_sin: Tensor, is_neox_style: bool) -> Tensor:
    """`heads` [..., head_dim] by one row of the table for each, in fp32."""
    width = cos_sin.shape[-1]
    by = torch.complex(*cos_sin.chunk(2, -1))
    x = heads[..., :width].float()
    if is_neox_style:
        pairs = torch.complex(*x.chunk(2, -1)) * by
        x = torch.cat((pairs.real, pairs.imag), -1)
    else:
        x = torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * by).flatten(-2)
    return torch.cat((x, heads[..., width:].float()), -1)


@pytest.mark.parametrize("is_neox_style", [True, False])
@pytest.mark.parametrize(("rotary_dim", "dtype"), [(64, torch.bfloat16), (24, torch.float32)])
def test_rows(rotary_dim: int, dtype: torch.dtype, is_neox_style: bool) -> None:
    """In place, out of place, and rows that lie apart."""
    rows = torch.randn(3, 8, 64).to(dtype)
    before, x = rows.clone(), rows[:, 2:7]
    positions, cos_sin = torch.tensor([0, 49, 7]), table(rotary_dim)
    expected = turned(x, cos_sin[positions][:, None], is_neox_style).to(dtype)
    style = {"is_neox_style": is_neox_style}
    out = rotate.turned_queries(x, positions, cos_sin, **style)
    torch.testing.assert_close(out, expected, atol=1e-6, rtol=2**-7 if dtype.itemsize == 2 else 0)
    assert torch.equal(rows, before)
    rotate.apply_rope(rows.view(3, -1)[:, 128:448], positions.int(), cos_sin, 64, **style)
    assert torch.equal(rows[:, 2:7], out)
    assert torch.equal(rows[:, :2], before[:, :2])
    assert torch.equal(rows[:, 7:], before[:, 7:])


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 1e-6), (torch.bfloat16, 2**-8), (torch.float8_e4m3fn, 2**-4)],
)
def test_keys_of_pages(dtype: torch.dtype, tolerance: float) -> None:
    pages = allocate_pages(6, 16, 80, dtype)
    pages.copy_(torch.randn(pages.shape))
    before = pages.float().clone()
    cos_sin = table(64, sign=-1.0)
    rotate.turn_keys(pages, torch.tensor([[4], [1]]), 13, cos_sin)
    expected = before.clone()
    expected[[1, 4], 0] = turned(before[[1, 4], 0], cos_sin[13], True)
    torch.testing.assert_close(pages.float(), expected, atol=0.002, rtol=tolerance)
    others = [0, 2, 3, 5]
    assert torch.equal(pages.float()[others], before[others])
    assert torch.equal(pages.float()[:, 1], before[:, 1])


def test_what_does_not_fit_is_refused() -> None:
    q, positions, cos_sin = torch.zeros(2, 3, 64), torch.zeros(2).int(), table(64)
    for message, arguments in (
        ("positions is", (q, positions[:1], cos_sin)),
        ("positions must be int32 or int64", (q, positions.float(), cos_sin)),
        ("cos_sin_cache has width 80", (q, positions, torch.zeros(4, 80))),
        ("cos_sin_cache must be float32", (q, positions, cos_sin.double())),
    ):
        with pytest.raises(ValueError, match=message):
            rotate.turned_queries(*arguments)
    pages = allocate_pages(2, 16, 64, torch.bfloat16)
    with pytest.raises(ValueError, match="distance is 50, cos_sin_cache has 50 rows"):
        rotate.turn_keys(pages, positions, 50, cos_sin)
