"""SGLang's norms, rotary embedding and activation on a CPU without AMX, one kernel each.

There they are chains of tensor operations, which for a decode step of a few tokens cost more than
the products between them. On CPUs for which torch's matrix library has no bf16, products with bf16
weights go through `kernels.linear` as well. Only while compression is on, and only where the kernel
computes what the layer would; everything else goes SGLang's way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sglang_kv import runtime
from sglang_kv.kernels import elementwise
from sglang_kv.kernels.linear import library_has_bf16, linear

_DTYPES = (torch.bfloat16, torch.float32)


def _fits(*tensors: torch.Tensor) -> bool:
    first = tensors[0]
    return first.dtype in _DTYPES and all(
        t.device.type == "cpu" and t.dtype == first.dtype and t.stride(-1) == 1 for t in tensors
    )


def rms_norm(
    original: Callable[..., Any],
    norm: Any,
    x: torch.Tensor,
    residual: torch.Tensor | None = None,
    post_residual_addition: torch.Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    plain = not (
        norm.variance_size_override
        or norm.cast_x_before_out_mul
        or norm.fp32_residual
        or norm.override_orig_dtype
        or post_residual_addition is not None
    )
    weight = norm.weight.data
    given = (x, weight) if residual is None else (x, weight, residual)
    if (
        runtime.current() is None
        or not plain
        or x.dim() != 2
        or x.shape[-1] != norm.hidden_size
        or x.shape[-1] % 16
        or not _fits(*given)
    ):
        return original(norm, x, residual, post_residual_addition, *args, **kwargs)
    out = elementwise.rmsnorm(x, weight, norm.variance_epsilon, residual)
    return out if residual is None else (out, residual)


def rotary(
    original: Callable[..., Any],
    rope: Any,
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    offsets: torch.Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    cache = rope.cos_sin_cache
    if (
        runtime.current() is None
        or offsets is not None
        or args
        or any(value is not None for value in kwargs.values())
        or not rope.is_neox_style
        or hasattr(rope, "sin_cos_cache")
        or cache.shape[-1] != rope.rotary_dim
        or rope.rotary_dim % 32
        or query.dim() != 2
        or key.dim() != 2
        or positions.dim() != 1
        or positions.dtype != torch.int64
        or not _fits(query, key)
    ):
        return original(rope, positions, query, key, offsets, *args, **kwargs)
    # On a CPU SGLang rounds its angles to the model's dtype: the same ones are used here, widened
    # once and kept. Only here, so that a server without compression makes no copy.
    wide = rope.cos_sin_cache_as(torch.float32)
    for heads in (query, key):
        elementwise.apply_rope(heads, positions, wide, rope.head_size)
    return query, key


def silu_and_mul(original: Callable[..., Any], layer: Any, x: torch.Tensor) -> Any:
    if runtime.current() is None or x.dim() != 2 or x.shape[-1] % 32 or not _fits(x):
        return original(layer, x)
    return elementwise.silu_and_mul(x)


def _linear_fits(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    tensors = (x, weight) if bias is None else (x, weight, bias)
    return (
        runtime.current() is not None
        and all(t.dtype == torch.bfloat16 and t.device.type == "cpu" for t in tensors)
        and weight.dim() == 2
        and weight.is_contiguous()
        and weight.shape[1] % 16 == 0
    )


def unquantized(
    original: Callable[..., Any],
    method: Any,
    layer: Any,
    x: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> Any:
    weight = layer.weight.data
    if not _linear_fits(x, weight, bias):
        return original(method, layer, x, bias)
    return linear(x.reshape(-1, x.shape[-1]), weight, bias).view(*x.shape[:-1], len(weight))


def lm_head(
    original: Callable[..., Any],
    processor: Any,
    hidden_states: torch.Tensor,
    head: Any,
    embedding_bias: torch.Tensor | None = None,
    **kwargs: Any,
) -> Any:
    weight = getattr(head, "weight", None)
    plain = not (
        processor.use_fp32_lm_head
        or processor.rl_on_policy_target is not None
        or hasattr(head, "set_lora")
        or embedding_bias is not None
        or any(value is not None for value in kwargs.values())
    )
    if not plain or weight is None or not _linear_fits(hidden_states, weight.data, None):
        return original(processor, hidden_states, head, embedding_bias, **kwargs)
    return linear(hidden_states, weight.data)


HOOKS: list[tuple[str, Callable[..., Any], str]] = [
    ("sglang.srt.layers.layernorm.RMSNorm.forward_native", rms_norm, "AROUND"),
    (
        "sglang.srt.layers.rotary_embedding.base.RotaryEmbedding.forward_native",
        rotary,
        "AROUND",
    ),
    ("sglang.srt.layers.activation.SiluAndMul.forward_native", silu_and_mul, "AROUND"),
]

if not library_has_bf16():  # elsewhere not even the call around each layer
    HOOKS += [
        (
            "sglang.srt.layers.quantization.unquant.UnquantizedLinearMethod.apply",
            unquantized,
            "AROUND",
        ),
        ("sglang.srt.layers.logits_processor.LogitsProcessor._compute_lm_head", lm_head, "AROUND"),
    ]
