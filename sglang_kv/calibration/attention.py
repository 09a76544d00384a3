"""Attention functions that take the place of a transformers model's own, for a while.

Both see queries and keys after the rotary embedding. They expect one sequence without
padding and without a cache, and never hold a whole attention matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

#: Queries of a streaming head computed together.
BLOCK = 256
_NAME = "sglang_kv_calibration"
#: Keyword arguments of models whose attention is more than softmax(q k) v.
_UNSUPPORTED = ("sliding_window", "softcap", "s_aux", "position_bias")

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]


def shape(config: Any) -> tuple[int, int, int]:
    """Layers, query heads and KV heads of a model."""
    config = config.get_text_config()
    heads = config.num_attention_heads
    return (
        config.num_hidden_layers,
        heads,
        getattr(config, "num_key_value_heads", None) or heads,
    )


@contextmanager
def attention(model: Any, attend: Attend) -> Iterator[None]:
    """Let every attention layer of ``model`` call ``attend(layer, q, k, v, scaling)``.

    ``q`` is [heads, tokens, dim], ``k`` and ``v`` [kv_heads, tokens, dim]; the result has the
    shape of ``q``.
    """
    from transformers import AttentionInterface

    def forward(
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        extra = [name for name in _UNSUPPORTED if kwargs.get(name) is not None]
        if extra:
            raise NotImplementedError(f"calibration knows no attention with {extra[0]}")
        if query.shape[0] != 1 or query.shape[2] != key.shape[2]:
            raise NotImplementedError("calibration takes one sequence at a time, without a cache")
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        out = attend(module.layer_idx, query[0], key[0], value[0], scale)
        return out.transpose(0, 1)[None], None

    before = model.config._attn_implementation  # noqa: SLF001
    AttentionInterface.register(_NAME, forward)
    model.set_attn_implementation(_NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def causal(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float, **options: Any
) -> torch.Tensor:
    """Attention of [heads, tokens, dim]; causal unless ``options`` hold a mask."""
    options = options or {"is_causal": True}
    return scaled_dot_product_attention(q[None], k[None], v[None], scale=scaling, **options)[0]


def recording(mass: np.ndarray[Any, np.dtype[np.float32]], rows: range, columns: range) -> Attend:
    """Full attention that writes what ``columns`` receive from ``rows`` into ``mass``.

    Args:
        mass: [layers, heads, rows, columns], filled in place.
        rows: query positions.
        columns: key positions.
    """

    def attend(
        layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        group = q.shape[0] // k.shape[0]
        k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        logits = q[:, rows.start : rows.stop].float() @ k.float().transpose(1, 2) * scaling
        positions = torch.arange(k.shape[1], device=k.device)
        hidden = positions[None] > positions[rows.start : rows.stop, None]
        weights = logits.masked_fill_(hidden, -torch.inf).softmax(-1)
        mass[layer] = weights[:, :, columns.start : columns.stop].cpu().numpy()
        return causal(q, k, v, scaling)

    return attend


def duo(retrieval: np.ndarray[Any, np.dtype[np.bool_]], sinks: int, recent: int) -> Attend:
    """DuoAttention: heads outside ``retrieval`` [layers, kv_heads] see sinks and recent tokens.

    A streaming query at ``t`` sees ``p < sinks``, ``p >= t - recent`` and itself, in the
    prompt too.
    """

    def attend(
        layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        group = q.shape[0] // k.shape[0]
        k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        full = torch.from_numpy(retrieval[layer]).repeat_interleave(group).to(q.device)
        if full.all():
            return causal(q, k, v, scaling)
        out = torch.empty_like(q)
        if full.any():
            out[full] = causal(q[full], k[full], v[full], scaling)
        out[~full] = _streaming(q[~full], k[~full], v[~full], scaling, sinks, recent)
        return out

    return attend


def _streaming(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float, sinks: int, recent: int
) -> torch.Tensor:
    out = torch.empty_like(q)
    positions = torch.arange(k.shape[1], device=k.device)
    for start in range(0, q.shape[1], BLOCK):
        stop = min(start + BLOCK, q.shape[1])
        first = max(0, start - recent)
        keys = torch.cat([positions[: min(sinks, first)], positions[first:stop]])
        distance = positions[start:stop, None] - keys
        seen = (distance >= 0) & ((keys < sinks) | (distance <= recent))
        out[:, start:stop] = causal(
            q[:, start:stop], k[:, keys], v[:, keys], scaling, attn_mask=seen
        )
    return out
