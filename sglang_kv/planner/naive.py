"""What the formula everybody knows would have said, and why it differs."""

from __future__ import annotations

from typing import NamedTuple

from sglang_kv.planner.model import Attention, Model
from sglang_kv.planner.units import element_bytes, show_tokens


class Naive(NamedTuple):
    """``2 x layers x kv_heads x head_dim x tokens x bytes``, every layer counted as attention."""

    token: int
    request: int
    formula: str
    reasons: tuple[str, ...]


def naive(model: Model, kv_dtype: str, tokens: int) -> Naive:
    """The naive figure for one request of ``tokens`` tokens, over all devices."""
    layers, first = model.num_layers, model.caches[0]
    if isinstance(first, Attention):
        values = first.values
        shape = f"{first.kv_heads} x {first.head_dim}"
    else:
        values = first.plain
        shape = f"{values // 2} (K and V of all heads)"
    token = layers * element_bytes(values, kv_dtype)
    size = f"{element_bytes(16, kv_dtype) / 16:g}"
    formula = f"2 x {layers} layers x {shape} x {tokens:,} tokens x {size} bytes"
    return Naive(token, token * tokens, formula, tuple(_reasons(model, tokens)))


def _reasons(model: Model, tokens: int) -> list[str]:
    found = []
    layers = model.num_layers
    without = layers - len(model.caches)
    if model.states and without:
        what = "recurrent: a fixed state, nothing per token"
        recurrent = min(len(model.states), without)
        found.append(f"{recurrent} of {layers} layers are {what}")
        without -= recurrent
    if without:
        found.append(f"{without} of {layers} layers keep no KV of their own")
    if model.sliding and model.sliding[0].window is not None:
        window = model.sliding[0].window
        if window < tokens:
            found.append(
                f"{len(model.sliding)} of {layers} layers keep the newest {show_tokens(window)} "
                "tokens only"
            )
    if model.latent:
        latent = model.latent[0]
        found.append(
            f"MLA keeps one latent of {latent.values} values per token and layer, "
            f"in place of {latent.plain:,}"
        )
    return found
