"""How many parameters a model has, where its config tells."""

from __future__ import annotations

from typing import Any

from sglang_kv.planner.fields import Fields

#: Dense models whose blocks are attention and a gated MLP, and nothing else.
_PLAIN = ("llama", "mistral", "qwen2", "qwen3")


def count_parameters(fields: Fields, model_type: str, nested: bool) -> int | None:
    """Parameters of a plain dense model; None for others, whose cards have to say it."""
    if model_type not in _PLAIN or nested:
        return None
    sizes = [
        fields.optional_count(name) for name in ("hidden_size", "intermediate_size", "vocab_size")
    ]
    layers = fields.optional_count("num_hidden_layers")
    if layers is None or None in sizes:
        return None
    hidden, inner, vocabulary = (size or 0 for size in sizes)
    query = fields.count("num_attention_heads")
    heads = fields.optional_count("num_key_value_heads") or query
    size = fields.optional_count("head_dim") or hidden // query
    attention = hidden * size * (2 * query + 2 * heads)
    if model_type == "qwen2":  # biases of Q, K and V
        attention += size * (query + 2 * heads)
    if model_type == "qwen3":  # norms of Q and K
        attention += 2 * size
    block = attention + 3 * hidden * inner + 2 * hidden
    embeddings = vocabulary * hidden * (1 if fields.flag("tie_word_embeddings") else 2)
    return embeddings + layers * block + hidden


def quantized_dtype(quantization: Any) -> str | None:
    """The dtype of weights that are quantized as a whole; ``unknown`` where a part of them is.

    None: not quantized.
    """
    if not quantization:
        return None
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    return "fp8" if method == "fp8" else "unknown"
