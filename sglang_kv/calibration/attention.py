"""Attention functions that take the place of a transformers model's own, for a while.

They see queries and keys after the rotary embedding. They expect one sequence without
padding and without a cache, or the same sequence several times, each time with another function,
and never hold a whole attention matrix. Where there are fewer queries than keys, the queries are
those of the last tokens (`sglang_kv.calibration.prefix`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
def attention(model: Any, attend: Attend | Sequence[Attend]) -> Iterator[None]:
    """Let every attention layer of ``model`` call ``attend(layer, q, k, v, scaling)``.

    ``q`` is [heads, tokens, dim], ``k`` and ``v`` [kv_heads, tokens, dim]; the result has the
    shape of ``q``. Of several functions, each is for one row of the batch.
    """
    from transformers import AttentionInterface

    attends = [attend] if callable(attend) else list(attend)

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
        if query.shape[0] != len(attends) or query.shape[2] != key.shape[2]:
            raise UnsupportedModelError("calibration takes one sequence at a time, without a cache")
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        out = [
            one(module.layer_idx, q, k, v, scale)
            for one, q, k, v in zip(attends, query, key, value, strict=True)
        ]
        return torch.stack([row.transpose(0, 1) for row in out]), None

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


def full(
    layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float
) -> torch.Tensor:
    """The model's own attention."""
    if q.shape[1] == k.shape[1]:
        return _sdpa(q, k, v, scaling, is_causal=True)
    return _streaming(q, k, v, scaling, 0, k.shape[1])


def _sdpa(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float, **options: Any
) -> torch.Tensor:
    """Attention of the query heads of each KV head; keys and values are not copied for them."""
    grouped = q.unflatten(0, (k.shape[0], -1))
    k, v = (part[:, None].expand(-1, grouped.shape[1], -1, -1) for part in (k, v))
    return scaled_dot_product_attention(grouped, k, v, scale=scaling, **options).flatten(0, 1)


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
        keys = k.repeat_interleave(q.shape[0] // k.shape[0], 0).float()
        logits = q[:, rows.start : rows.stop].float() @ keys.transpose(1, 2) * scaling
        positions = torch.arange(k.shape[1], device=k.device)
        hidden = positions[None] > positions[rows.start : rows.stop, None]
        weights = logits.masked_fill_(hidden, -torch.inf).softmax(-1)
        mass[layer] = weights[:, :, columns.start : columns.stop].cpu().numpy()
        return full(layer, q, k, v, scaling)

    return attend


def duo(retrieval: np.ndarray[Any, np.dtype[np.bool_]], sinks: int, recent: int) -> Attend:
    """DuoAttention: heads outside ``retrieval`` [layers, kv_heads] see sinks and recent tokens.

    A streaming query at ``t`` sees ``p < sinks``, ``p >= t - recent`` and itself, in the
    prompt too.
    """

    def attend(
        layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        if retrieval[layer].all():
            return full(layer, q, k, v, scaling)
        keep = torch.from_numpy(retrieval[layer]).to(q.device)
        queries = q.unflatten(0, (k.shape[0], -1))
        out = torch.empty_like(queries)
        if keep.any():
            part = full(layer, queries[keep].flatten(0, 1), k[keep], v[keep], scaling)
            out[keep] = part.unflatten(0, (-1, out.shape[1]))
        part = _streaming(queries[~keep].flatten(0, 1), k[~keep], v[~keep], scaling, sinks, recent)
        out[~keep] = part.unflatten(0, (-1, out.shape[1]))
        return out.flatten(0, 1)

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
        dense = full(layer, q, k, v, scaling)
        # The first queries have lost no key.
        same = max(0, intact(sinks, recent) - (k.shape[1] - q.shape[1]))
        if q.shape[1] <= same:
            return dense
        stream = _streaming(q[:, same:], k, v, scaling, sinks, recent)
        gate = gates[layer].repeat_interleave(q.shape[0] // k.shape[0])[:, None, None]
        mix = gate * dense[:, same:].float() + (1 - gate) * stream.float()
        return torch.cat([dense[:, :same], mix.to(q.dtype)], 1)

    return attend


def intact(sinks: int, recent: int) -> int:
    """How many first tokens a streaming head treats as a full one does."""
    return sinks + recent + 1


def _streaming(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float, sinks: int, recent: int
) -> torch.Tensor:
    """Block by block over the queries, which are the last tokens': each block reads the sinks and
    one stretch of keys."""
    parts = []
    positions = torch.arange(k.shape[1], device=k.device)
    begin = k.shape[1] - q.shape[1]
    for start in range(begin, k.shape[1], BLOCK):
        stop = min(start + BLOCK, k.shape[1])
        first = max(0, start - recent)
        # Slices, not an index: their gradient needs no scatter.
        held = [slice(first, stop)]
        if first and sinks:
            held = [slice(0, min(sinks, first)), *held]
        keys = torch.cat([positions[part] for part in held])
        block_k, block_v = (_joined(x, held) for x in (k, v))
        distance = positions[start:stop, None] - keys
        seen = (distance >= 0) & ((keys < sinks) | (distance <= recent))
        block_q = q[:, start - begin : stop - begin]
        parts.append(_sdpa(block_q, block_k, block_v, scaling, attn_mask=seen))
    return torch.cat(parts, 1)


def _joined(x: torch.Tensor, parts: list[slice]) -> torch.Tensor:
    """Stretches of tokens of ``x`` [heads, tokens, dim], one behind the other."""
    if len(parts) == 1:
        return x[:, parts[0]]
    return torch.cat([x[:, part] for part in parts], 1)
