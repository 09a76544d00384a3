"""Products with bf16 weights against fp64."""

from __future__ import annotations

import pytest
import torch

from sglang_kv.kernels.linear import linear

pytestmark = pytest.mark.usefixtures("isa")


@pytest.mark.parametrize("rows", [0, 1, 3, 4, 5, 31, 32, 70])
@pytest.mark.parametrize(("outputs", "size"), [(1, 16), (11, 48), (40, 576)])
def test_equals_fp64(rows: int, outputs: int, size: int) -> None:
    x = torch.randn(size, rows).bfloat16().t()  # columns first: any stride is taken
    weight, bias = torch.randn(outputs, size).bfloat16(), torch.randn(outputs).bfloat16()
    for shift in (None, bias):
        want = x.double() @ weight.double().t() + (0 if shift is None else shift.double())
        got = linear(x, weight, shift)
        assert got.dtype == torch.bfloat16
        torch.testing.assert_close(got.double(), want, atol=1e-4, rtol=2**-8)


def test_wide_weights_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.randn(40, 32).bfloat16(), torch.randn(50, 32).bfloat16()
    whole = linear(x, weight)
    monkeypatch.setattr("sglang_kv.kernels.linear._COLUMNS_AT_ONCE", 16)
    torch.testing.assert_close(linear(x, weight), whole)


def test_a_nan_stays_one() -> None:
    x, weight = torch.ones(2, 16).bfloat16(), torch.ones(3, 16).bfloat16()
    weight[1, 5] = float("nan")
    assert linear(x, weight).isnan().tolist() == [[False, True, False]] * 2


def test_errors_name_the_argument() -> None:
    x, weight = torch.randn(2, 32).bfloat16(), torch.randn(8, 32).bfloat16()
    with pytest.raises(ValueError, match="x has rows of 16"):
        linear(x[:, :16], weight)
    with pytest.raises(ValueError, match="weight must be bfloat16"):
        linear(x, weight.float())
    with pytest.raises(ValueError, match="weight has rows of 24"):
        linear(x[:, :24], weight[:, :24].contiguous())
    with pytest.raises(ValueError, match="bias has 4 values"):
        linear(x, weight, torch.randn(4).bfloat16())
