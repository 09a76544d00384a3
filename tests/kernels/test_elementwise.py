"""Norm, rotary embedding and activation against plain torch in fp32."""

from __future__ import annotations

import pytest
import torch

from sglang_kv.kernels import elementwise

pytestmark = pytest.mark.usefixtures("isa")
DTYPES = [torch.float32, torch.bfloat16]


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal but for the rounding of the result's own dtype."""
    exact = got.dtype == torch.float32
    torch.testing.assert_close(
        got.float(), want, atol=1e-6 if exact else 1e-4, rtol=2e-6 if exact else 2**-8
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(1, 16), (3, 576), (130, 1024)])
def test_rmsnorm(dtype: torch.dtype, rows: int, size: int) -> None:
    wide = torch.randn(rows, size + 48).to(dtype)
    x, weight = wide[:, 16 : size + 16], torch.randn(size).to(dtype)
    for residual in (None, torch.randn(rows, size).to(dtype)):
        total = x.float() if residual is None else x.float() + residual.float()
        want = total * (total.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.float()
        before = x.clone()
        close(elementwise.rmsnorm(x, weight, 1e-5, residual), want)
        assert torch.equal(x, before)
        if residual is not None:
            assert torch.equal(residual, total.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "head_dim", "rotary_dim"), [(3, 64, 64), (1, 128, 64)])
def test_rope(dtype: torch.dtype, heads: int, head_dim: int, rotary_dim: int) -> None:
    cache, positions = torch.randn(50, rotary_dim), torch.tensor([49, 0, 7, 7])
    wide = torch.randn(4, heads * head_dim + 16).to(dtype)
    x = wide[:, :-16]
    cos, sin = cache[positions].chunk(2, -1)
    split = (
        x.float().view(4, heads, head_dim)
        if x.is_contiguous()
        else x.float().unflatten(-1, (heads, head_dim))
    )
    low, high = split[..., :rotary_dim].chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    want = torch.cat([low * cos - high * sin, high * cos + low * sin, split[..., rotary_dim:]], -1)
    beside = wide[:, -16:].clone()
    elementwise.apply_rope(x, positions, cache, head_dim)
    close(x.unflatten(-1, (heads, head_dim)), want)
    assert torch.equal(wide[:, -16:], beside)


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_and_mul(dtype: torch.dtype) -> None:
    x = torch.randn(5, 96).to(dtype)
    x[0, :4] = torch.tensor([-100.0, 100.0, 0.0, -1e4])
    gate, up = x.float().chunk(2, -1)
    close(elementwise.silu_and_mul(x), torch.nn.functional.silu(gate) * up)


def test_errors_name_the_argument() -> None:
    x, weight = torch.randn(2, 32), torch.randn(32)
    with pytest.raises(ValueError, match="weight"):
        elementwise.rmsnorm(x, weight[:16], 1e-5)
    with pytest.raises(ValueError, match="residual"):
        elementwise.rmsnorm(x, weight, 1e-5, torch.randn(3, 32))
    with pytest.raises(ValueError, match="x has rows of 24"):
        elementwise.rmsnorm(torch.randn(2, 24), torch.randn(24), 1e-5)
    with pytest.raises(ValueError, match="positions"):
        elementwise.apply_rope(x, torch.tensor([0, 9]), torch.randn(9, 32), 32)
    with pytest.raises(ValueError, match="bfloat16 or float32"):
        elementwise.silu_and_mul(torch.randn(2, 32, dtype=torch.float16))
