"""Norms, rotary embedding and activation: one pass over each row."""

import torch
from torch import Tensor

from sglang_kv.kernels.jit import load_kernels


def rmsnorm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight`; with `residual`, of their sum, which it becomes.

    - `x`, `residual`: bf16 or fp32 [rows, size], size a multiple of 16; rows at any stride
    - `weight`: [size], the dtype of `x`

    Sums and products are fp32. Returns a new tensor. Raises ValueError, naming the argument.
    """
    out = torch.empty(x.shape, dtype=x.dtype)
    load_kernels().rmsnorm(x, residual, weight, out, eps, torch.get_num_threads())
    return out


def apply_rope(x: Tensor, positions: Tensor, cos_sin_cache: Tensor, head_dim: int) -> None:
    """Rotate every head of `x` in place, the first half of its dimensions against the second.

    - `x`: bf16 or fp32 [rows, heads * head_dim]; rows at any stride
    - `positions`: int64 [rows]
    - `cos_sin_cache`: fp32 [positions, rotary_dim], cosines before sines; rotary_dim a multiple of
      32, at most `head_dim`; dimensions beyond it stay

    Raises ValueError, naming the argument.
    """
    load_kernels().rope(x, positions, cos_sin_cache, head_dim, torch.get_num_threads())


def silu_and_mul(x: Tensor) -> Tensor:
    """`silu(x[:, :size]) * x[:, size:]`, for bf16 or fp32 `x` [rows, 2 * size], size a multiple of
    16. Returns a new tensor. Raises ValueError, naming the argument."""
    out = torch.empty((x.shape[0], x.shape[1] // 2), dtype=x.dtype)
    load_kernels().silu_and_mul(x, out, torch.get_num_threads())
    return out
