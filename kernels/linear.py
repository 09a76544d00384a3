"""Products with bf16 weights on CPUs whose matrix library has none (x86 without AVX-512)."""

import functools

import torch
from torch import Tensor

from sglang_kv.kernels.jit import load_kernels

_FEW_ROWS = 32  # from here on, products in fp32 win over reading the weight once
_COLUMNS_AT_ONCE = 16384  # of a widened weight: a vocabulary's would be gigabytes


@functools.cache
def library_has_bf16() -> bool:
    """Whether torch's own bf16 products are fast here: oneDNN has them for this CPU."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())  # noqa: SLF001


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias`, added up in fp32.

    - `x`: bf16 [rows, size], size a multiple of 16
    - `weight`: bf16 [outputs, size], contiguous; `bias`: bf16 [outputs]

    Returns bf16 [rows, outputs]. Raises ValueError, naming the argument.
    """
    rows, outputs = len(x), len(weight)
    out = torch.empty((rows, outputs), dtype=torch.bfloat16)
    if rows == 0:
        return out
    if rows < _FEW_ROWS:
        load_kernels().linear(x.contiguous(), weight, bias, out, torch.get_num_threads())
        return out
    wide = x.float()
    for begin in range(0, outputs, _COLUMNS_AT_ONCE):
        part = slice(begin, begin + _COLUMNS_AT_ONCE)
        product = torch.nn.functional.linear(
            wide, weight[part].float(), None if bias is None else bias[part].float()
        )
        out[:, part] = product
    return out
