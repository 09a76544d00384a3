"""A rough estimate of head scores, without passkeys: how far back a head looks on average.

The mean query and the mean key of a head, before the rotary embedding, are put at positions 0 to
499: what is left is where the head looks by position alone. Its score is the mean of the last
query's cumulative attention, near 1 for a head that looks far back. kvpress scores heads for its
DuoAttention press this way (https://github.com/NVIDIA/kvpress); here it is a cross-check.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from sglang_kv.calibration.attention import UnsupportedModelError, attention, full, shape
from sglang_kv.calibration.passkey import Passkey
from sglang_kv.calibration.training_free import Array, Sums, group_heads

#: Positions over which the attention is laid out.
POSITIONS = 500


def calibrate(
    model: Any,
    samples: Iterable[Passkey],
    *,
    sums: Sums | None = None,
    after_sample: Callable[[Sums], None] = lambda sums: None,
) -> Array:
    """Gates [layers, kv_heads] of ``model``; arguments as for `training_free.calibrate`."""
    _, heads, kv_heads = shape(model.config)
    for sample in samples:
        means = mean_heads(model, sample)
        sums = sums or Sums(np.zeros(means.shape, np.float64))
        sums.total += means
        sums.done += 1
        after_sample(sums)
    if sums is None:
        raise ValueError("calibration needs at least one sample")
    mean = torch.from_numpy(sums.mean())
    return group_heads(looks_back(model, mean[:, :heads], mean[:, heads:]), kv_heads, "mean")


def mean_heads(model: Any, sample: Passkey) -> Array:
    """Mean queries, then mean keys of a sample, not rotated: [layers, heads + kv_heads, dim]."""
    layers, _, _ = shape(model.config)
    found: list[torch.Tensor] = [torch.empty(0)] * layers
    cos, sin = rotation(model, len(sample.ids))
    rotate = _rotate(model)

    def attend(
        layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        # Turned the other way, by the model's own function; `_rotate` has checked the scale.
        back_q, back_k = rotate(q[None].float(), k[None].float(), cos, -sin)
        found[layer] = torch.cat([back_q[0].mean(1), back_k[0].mean(1)]).cpu()
        return full(layer, q, k, v, scaling)

    ids = torch.tensor([sample.ids], device=model.device)
    with torch.inference_mode(), attention(model, attend):
        model.base_model(ids, use_cache=False)
    return np.asarray(torch.stack(found).numpy(), np.float32)


def looks_back(model: Any, queries: torch.Tensor, keys: torch.Tensor) -> Array:
    """Scores [layers, heads] of mean queries [layers, heads, dim] and keys [.., kv_heads, dim]."""
    cos, sin = (part.cpu() for part in rotation(model, POSITIONS))
    q = queries[:, :, None].expand(-1, -1, POSITIONS, -1)
    k = keys.repeat_interleave(queries.shape[1] // keys.shape[1], 1)[:, :, None].expand_as(q)
    q, k = _rotate(model)(q, k, cos, sin)
    logits = torch.einsum("lhd,lhpd->lhp", q[:, :, -1], k) * q.shape[-1] ** -0.5
    return np.asarray(logits.softmax(-1).cumsum(-1).mean(-1).numpy(), np.float32)


def rotation(model: Any, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [1, tokens, dim] of a model's rotary embedding, fp32."""
    embed = getattr(model.base_model, "rotary_emb", None)
    if embed is None:
        raise UnsupportedModelError(f"{model.config.model_type}: no rotary embedding to take back")
    positions = torch.arange(tokens, device=model.device)[None]
    like = torch.empty(0, dtype=torch.float32, device=model.device)
    cos, sin = embed(like, positions)
    if not torch.allclose(cos.square() + sin.square(), torch.ones_like(cos), atol=1e-3):
        raise UnsupportedModelError(f"{model.config.model_type}: its rotary embedding also scales")
    return cos, sin


def _rotate(model: Any) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    module = sys.modules[type(model).__module__]
    rotate = getattr(module, "apply_rotary_pos_emb", None)
    if rotate is None:
        raise UnsupportedModelError(f"{model.config.model_type}: no rotary embedding to take back")
    found: Callable[..., tuple[torch.Tensor, torch.Tensor]] = rotate
    return found
