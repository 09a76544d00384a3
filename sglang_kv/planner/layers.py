"""Which layer is of which kind, as the many dialects of config.json say it."""

from __future__ import annotations

from sglang_kv.planner.fields import Fields
from sglang_kv.planner.model import Kind
from sglang_kv.planner.units import PlanError

#: What families leave out of config.json and their config classes fill in (Transformers 5).
_QWEN_HYBRID: dict[str, object] = {"full_attention_interval": 4}
FAMILY_DEFAULTS: dict[str, dict[str, object]] = {
    "gemma2": {"sliding_window_pattern": 2, "sliding_window": 4096, "head_dim": 256},
    "gemma3_text": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "max_position_embeddings": 131072,
    },
    "cohere2": {"sliding_window_pattern": 4, "sliding_window": 4096},
    "gpt_oss": {"sliding_window_pattern": 2, "sliding_window": 128, "head_dim": 64},
    "olmo3": {"sliding_window_pattern": 4},
    "llama4_text": {"no_rope_layer_interval": 4, "attention_chunk_size": 8192},
    "qwen3_next": _QWEN_HYBRID,
    "qwen3_5_text": _QWEN_HYBRID,
    "qwen3_5_moe_text": _QWEN_HYBRID,
    "jamba": {"attn_layer_period": 8, "attn_layer_offset": 4},
}

#: Deeper than any model; what is beyond it is a broken file.
MOST_LAYERS = 10_000
_TYPES: dict[str, Kind] = {
    "full_attention": "full",
    "attention": "full",
    "sliding_attention": "sliding",
    "chunked_attention": "chunked",
    "mamba": "mamba",
    "mamba2": "mamba",
    "hybrid": "both",
    "mlp": "none",
    "moe": "none",
}
_PATTERN: dict[str, Kind] = {"M": "mamba", "*": "full", "-": "none", "E": "none"}


def layer_kinds(fields: Fields, model_type: str) -> list[Kind]:
    """One kind per layer.

    Raises:
        PlanError: the config contradicts itself, or names a kind that is unknown.
    """
    pattern = fields.text("hybrid_override_pattern")
    types = fields.names("layer_types", "layers_block_type")
    count = fields.optional_count("num_hidden_layers", "n_layer", "n_layers", "num_layers")
    if count is not None and count > MOST_LAYERS:
        raise PlanError(f"{fields.source}: num_hidden_layers: {count} are more than any model has")
    kinds = fields.values.get("attn_type_list")
    if isinstance(kinds, list) and kinds == [1] * len(kinds):
        fields.get("attn_type_list")  # MiniMax: all of them softmax; 0 is lightning attention
    if pattern:
        return _checked(fields, count, "hybrid_override_pattern", _from_pattern(fields, pattern))
    if types is not None:
        # A list of types says all that these say, too.
        fields.get("full_attention_interval", "attn_layer_indices", "attn_layer_period")
        fields.get("attn_layer_offset", "use_sliding_window", "sliding_window_pattern")
        fields.get("_sliding_window_pattern", "interleaved_sliding_window")
        return _checked(fields, count, "layer_types", [_kind(fields, name) for name in types])
    if count is None:
        raise PlanError(f"{fields.source}: num_hidden_layers is missing")
    return _by_rule(fields, model_type, count)


def _from_pattern(fields: Fields, pattern: str) -> list[Kind]:
    unknown = set(pattern) - set(_PATTERN)
    if unknown:
        raise PlanError(
            f"{fields.source}: hybrid_override_pattern: unknown layer {min(unknown)!r} "
            f"(known: {' '.join(_PATTERN)})"
        )
    return [_PATTERN[letter] for letter in pattern]


def _kind(fields: Fields, name: str) -> Kind:
    if name == "linear_attention":
        # Gated DeltaNet has fields of its own; elsewhere Transformers calls Mamba layers so.
        return "linear" if fields.get("linear_num_value_heads") is not None else "mamba"
    if name not in _TYPES:
        known = ", ".join([*_TYPES, "linear_attention"])
        raise PlanError(f"{fields.source}: layer_types: unknown kind {name!r} (known: {known})")
    return _TYPES[name]


def _checked(fields: Fields, count: int | None, name: str, kinds: list[Kind]) -> list[Kind]:
    if not kinds or (count is not None and count != len(kinds)):
        raise PlanError(
            f"{fields.source}: {name} has {len(kinds)} layers, num_hidden_layers says {count}"
        )
    return kinds


def _by_rule(fields: Fields, model_type: str, count: int) -> list[Kind]:
    if fields.get("linear_num_value_heads") is not None:
        interval = fields.count("full_attention_interval")
        return ["linear" if (i + 1) % interval else "full" for i in range(count)]
    attention = fields.indices("attn_layer_indices")
    if model_type == "falcon_h1":  # attention and Mamba side by side in every layer
        return ["both"] * count
    if attention is not None:
        if not all(0 <= i < count for i in attention):
            raise PlanError(f"{fields.source}: attn_layer_indices: not all below {count}")
        return ["full" if i in attention else "mamba" for i in range(count)]
    period = fields.optional_count("attn_layer_period")
    if period is not None:
        offset = fields.count("attn_layer_offset", least=0)
        return ["full" if i % period == offset else "mamba" for i in range(count)]
    return _windows(fields, count)


def _windows(fields: Fields, count: int) -> list[Kind]:
    """Layers of a model without recurrent ones: which of them have a window."""
    if fields.optional_count("attention_chunk_size") is not None:
        interval = fields.count("no_rope_layer_interval")  # Llama 4
        return ["chunked" if (i + 1) % interval else "full" for i in range(count)]
    windowed = fields.get("sliding_window") is not None
    use = fields.flag("use_sliding_window")
    every = fields.get("sliding_window_pattern", "_sliding_window_pattern")
    first = fields.optional_count("max_window_layers", least=0)
    if not windowed or use is False:  # Qwen2.5 names a window and does not use it
        return ["full"] * count
    if use and first is not None:
        return ["sliding" if i >= first else "full" for i in range(count)]
    if isinstance(every, str) and every and set(every) <= {"L", "G"}:  # EXAONE: LLLG
        return ["sliding" if every[i % len(every)] == "L" else "full" for i in range(count)]
    if isinstance(every, int) and not isinstance(every, bool) and every > 0:
        return ["sliding" if (i + 1) % every else "full" for i in range(count)]
    if every is not None:
        raise PlanError(f"{fields.source}: sliding_window_pattern: cannot read {str(every)[:40]!r}")
    return ["sliding"] * count
