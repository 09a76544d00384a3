"""Attention functions that take the place of a transformers model's own, for a while.

They see queries and keys after the rotary embedding. They expect one sequence without
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


class UnsupportedModelError(ValueError):
    """A model whose attention calibration cannot take apart; the message names what it has."""


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
            raise UnsupportedModelError(f"calibration knows no attention with {extra[0]}")
        if query.shape[0] != 1 or query.shape[2] != key.shape[2]:
            raise UnsupportedModelError("calibration takes one sequence at a time, without a cache")
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


def require_supported(model: Any) -> None:
    """Refuse a model whose heads cannot be told apart here, before anything long begins.

    Raises:
        UnsupportedModelError: the message names the model and what it has.
    """
    layers, heads, kv_heads = shape(model.config)
    kind = model.config.model_type
    seen: dict[int, tuple[int, int]] = {}

    def attend(
        layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        if q.shape[-1] != v.shape[-1]:
            raise UnsupportedModelError(
                f"{kind}: calibration knows no keys of {q.shape[-1]} and values of {v.shape[-1]}"
            )
        seen[layer] = (q.shape[0], k.shape[0])
        return full(layer, q, k, v, scaling)

    with torch.inference_mode(), attention(model, attend):
        model.base_model(torch.zeros(1, 2, dtype=torch.long, device=model.device), use_cache=False)
    if seen != dict.fromkeys(range(layers), (heads, kv_heads)):
        raise UnsupportedModelError(
            f"{kind}: calibration reaches {len(seen)} of its {layers} layers; the others do not "
            "take their attention from transformers' registry of attention functions"
        )


def causal(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float, **options: Any
) -> torch.Tensor:
    """Attention of [heads, tokens, dim]; causal unless ``options`` hold a mask."""
    options = options or {"is_causal": True}
    return scaled_dot_product_attention(q[None], k[None], v[None], scale=scaling, **options)[0]


def full(
    layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float
) -> torch.Tensor:
    """The model's own attention."""
    return causal(q, *_per_query_head(q, k, v), scaling)


def _per_query_head(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values once for each query head of their group."""
    group = q.shape[0] // k.shape[0]
    return k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)


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
        k, v = _per_query_head(q, k, v)
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
        k, v = _per_query_head(q, k, v)
        keep = torch.from_numpy(retrieval[layer]).repeat_interleave(group).to(q.device)
        if keep.all():
            return causal(q, k, v, scaling)
        out = torch.empty_like(q)
        if keep.any():
            out[keep] = causal(q[keep], k[keep], v[keep], scaling)
        out[~keep] = _streaming(q[~keep], k[~keep], v[~keep], scaling, sinks, recent)
        return out

    return attend


def mixed(gates: torch.Tensor, sinks: int, recent: int) -> Attend:
    """``gate * full + (1 - gate) * streaming`` in every head, differentiable in all of them.

    Args:
        gates: fp32 [layers, kv_heads].
        sinks, recent: as for `duo`.
    """

    def attend(
        layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        group = q.shape[0] // k.shape[0]
        k, v = _per_query_head(q, k, v)
        dense = causal(q, k, v, scaling)
        same = sinks + recent + 1  # the first queries have lost no key
        if q.shape[1] <= same:
            return dense
        stream = _streaming(q, k, v, scaling, sinks, recent, same)
        gate = gates[layer].repeat_interleave(group)[:, None, None]
        mix = gate * dense[:, same:].float() + (1 - gate) * stream.float()
        return torch.cat([dense[:, :same], mix.to(q.dtype)], 1)

    return attend


def _streaming(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scaling: float,
    sinks: int,
    recent: int,
    begin: int = 0,
) -> torch.Tensor:
    """Block by block over the queries from ``begin``: each block reads the sinks and one stretch
    of keys."""
    parts = []
    positions = torch.arange(k.shape[1], device=k.device)
    for start in range(begin, q.shape[1], BLOCK):
        stop = min(start + BLOCK, q.shape[1])
        first = max(0, start - recent)
        # Slices, not an index: their gradient needs no scatter.
        held = (slice(0, min(sinks, first)), slice(first, stop))
        keys = torch.cat([positions[part] for part in held])
        distance = positions[start:stop, None] - keys
        seen = (distance >= 0) & ((keys < sinks) | (distance <= recent))
        block_k, block_v = (torch.cat([x[:, part] for part in held], 1) for x in (k, v))
        parts.append(causal(q[:, start:stop], block_k, block_v, scaling, attn_mask=seen))
    return torch.cat(parts, 1)
