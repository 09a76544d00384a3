"""A model from its config.json. What is not understood is refused, never guessed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_kv.planner.fields import Fields
from sglang_kv.planner.layers import FAMILY_DEFAULTS, layer_kinds
from sglang_kv.planner.model import Attention, Kind, Latent, Model, State
from sglang_kv.planner.units import DTYPES, STATE_DTYPES, PlanError, parse_dtype
from sglang_kv.planner.weights import count_parameters, quantized_dtype

#: Where multimodal models keep the language model.
_NESTED = ("thinker_config", "text_config", "llm_config", "language_config")
#: Models whose layers are not what num_hidden_layers counts, or that keep nothing from token to
#: token, although their fields look like any other's.
_REFUSED = {
    "longcat_flash": "has two attention blocks per layer, which is not supported",
    "mimo_v2_flash": "has other heads in its windows, which is not supported",
    "hrm_text": "runs its layers more than once, which is not supported",
    **dict.fromkeys(
        ("bert", "roberta", "xlm-roberta", "camembert", "electra", "deberta-v2", "modernbert"),
        "is an encoder, which keeps no KV",
    ),
    **dict.fromkeys(
        ("mamba", "mamba2", "falcon_mamba", "rwkv"), "has no attention layer, so no KV to plan"
    ),
}
#: Mamba of the first kind: a state per channel, not per head.
_MAMBA_1 = ("jamba",)


def read_model(config: Any, name: str, *, parameters: int | None = None) -> Model:
    """The model that ``config`` (the object in config.json) describes.

    Args:
        config: the object.
        name: for messages and tables.
        parameters: how many there are, where the config does not tell.

    Raises:
        PlanError: a field is missing, contradicts another, or is not understood.
    """
    source = f"{name}: config.json"
    if not isinstance(config, Mapping):
        raise PlanError(f"{source}: expected a JSON object, got {type(config).__name__}")
    notes = []
    inner = _language_model(config)
    if inner is not config:
        notes.append("of a multimodal model, the language model")
    model_type = inner.get("model_type") or config.get("model_type")
    if model_type is None:
        raise PlanError(f"{source}: model_type is missing")
    if not isinstance(model_type, str) or not 0 < len(model_type) <= 64:
        raise PlanError(f"{source}: model_type: expected a name, got {str(model_type)[:40]!r}")
    if config.get("is_encoder_decoder"):
        raise PlanError(f"{source}: {model_type} is an encoder-decoder, which is not supported")
    if model_type in _REFUSED:
        raise PlanError(f"{source}: {model_type} {_REFUSED[model_type]}")
    fields = Fields(inner, source, FAMILY_DEFAULTS.get(model_type, {}))
    kinds = layer_kinds(fields, model_type)
    kinds, shared = _without_shared(fields, kinds)
    if shared:
        notes.append(f"the last {shared} layers share the KV of earlier ones")
    caches = _caches(fields, model_type, kinds)
    states = _states(fields, model_type, kinds)
    state_dtype = _state_dtype(fields)
    overlooked = fields.overlooked()
    if overlooked:
        raise PlanError(
            f"{source}: {model_type}: the planner does not know what {overlooked[0]} does to the "
            "cache, and does not guess"
        )
    quantized = config.get("quantization_config") or inner.get("quantization_config")
    dtype = fields.text("torch_dtype", "dtype") or config.get("torch_dtype") or config.get("dtype")
    return Model(
        name=name,
        model_type=model_type,
        num_layers=len(kinds) + shared,
        caches=caches,
        states=states,
        dtype=parse_dtype(str(dtype or "bf16"), f"{source}: torch_dtype", tuple(DTYPES)),
        state_dtype=state_dtype,
        context=fields.optional_count(
            "max_position_embeddings", "n_positions", "max_sequence_length", "seq_length", "n_ctx"
        ),
        parameters=parameters or count_parameters(fields, model_type, inner is not config),
        weight_dtype=quantized_dtype(quantized),
        notes=tuple(notes),
    )


def _language_model(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What is nested the deepest: Omni models keep it two levels down."""
    for key in _NESTED:
        if isinstance(config.get(key), Mapping):
            return _language_model(config[key])
    return config


def _without_shared(fields: Fields, kinds: list[Kind]) -> tuple[list[Kind], int]:
    """Gemma 3n: the last layers read what earlier ones keep."""
    shared = fields.optional_count("num_kv_shared_layers", least=0) or 0
    if shared >= len(kinds):
        raise PlanError(f"{fields.source}: num_kv_shared_layers: not below {len(kinds)} layers")
    return kinds[: len(kinds) - shared], shared


def _caches(fields: Fields, model_type: str, kinds: list[Kind]) -> tuple[Attention | Latent, ...]:
    if not any(kind in ("full", "sliding", "chunked", "both") for kind in kinds):
        raise PlanError(f"{fields.source}: {model_type} has no attention layer, so no KV to plan")
    query = fields.count("num_attention_heads", "n_head", "n_heads")
    latent = fields.optional_count("kv_lora_rank")
    value = fields.optional_count("v_head_dim")
    found: list[Attention | Latent] = []
    if latent is not None:
        rope = fields.count("qk_rope_head_dim", least=0)
        nope = fields.count("qk_nope_head_dim", least=0)
        plain = query * (nope + rope + (value or nope))
        fields.get("num_key_value_heads", "head_dim")  # these say nothing with MLA
        other = next((kind for kind in kinds if kind in ("sliding", "chunked", "both")), None)
        if other is not None:
            raise PlanError(
                f"{fields.source}: kv_lora_rank: MLA in {other} layers is not supported"
            )
        return tuple(Latent(latent, rope, plain, query) for kind in kinds if kind == "full")
    heads = _kv_heads(fields, model_type, query)
    if query % heads:
        raise PlanError(
            f"{fields.source}: num_key_value_heads: {query} query heads cannot share {heads}"
        )
    head_dim = _head_dim(fields, query)
    window = fields.optional_count("sliding_window", "sliding_window_size", least=0)
    chunk = fields.optional_count("attention_chunk_size")
    for kind in kinds:
        if kind in ("full", "both"):
            found.append(Attention(heads, head_dim, value or head_dim, query))
        elif kind in ("sliding", "chunked"):
            size = chunk if kind == "chunked" else window
            if not size:
                name = "attention_chunk_size" if kind == "chunked" else "sliding_window"
                raise PlanError(f"{fields.source}: {name} is missing, and layers have a window")
            found.append(Attention(heads, head_dim, value or head_dim, query, size))
    return tuple(found)


def _kv_heads(fields: Fields, model_type: str, query: int) -> int:
    if model_type == "falcon":
        new, multi = fields.flag("new_decoder_architecture"), fields.flag("multi_query")
        if multi and not new:
            fields.get("num_kv_heads")  # there, and not in use
            return 1
    if model_type == "chatglm" and fields.flag("multi_query_attention"):
        return fields.count("multi_query_group_num")
    if model_type == "gpt_bigcode" and fields.flag("multi_query") is not False:
        fields.get("num_key_value_heads")
        return 1
    return fields.optional_count("num_key_value_heads", "num_kv_heads", "n_head_kv") or query


def _head_dim(fields: Fields, query: int) -> int:
    # Explicit where it is not hidden / heads, as in Qwen3, Gemma and Mistral-Nemo.
    explicit = fields.optional_count("head_dim", "attention_head_dim", "kv_channels")
    if explicit is not None:
        return explicit
    hidden = fields.count("hidden_size", "n_embd", "d_model")
    if hidden % query:
        raise PlanError(
            f"{fields.source}: head_dim is missing, and hidden_size {hidden} is no multiple of "
            f"{query} heads"
        )
    return hidden // query


def _states(fields: Fields, model_type: str, kinds: list[Kind]) -> tuple[State, ...]:
    linear, mamba = kinds.count("linear"), kinds.count("mamba") + kinds.count("both")
    states: list[State] = []
    if linear:
        values, keys = fields.count("linear_num_value_heads"), fields.count("linear_num_key_heads")
        key_dim = fields.count("linear_key_head_dim")
        value_dim = fields.count("linear_value_head_dim")
        steps = fields.count("linear_conv_kernel_dim") - 1
        one = State(values, key_dim * value_dim, values * value_dim, keys, 2 * key_dim, steps)
        states += [one] * linear
    if mamba:
        states += [_mamba_1(fields) if model_type in _MAMBA_1 else _mamba_2(fields)] * mamba
    return tuple(states)


def _mamba_1(fields: Fields) -> State:
    inner = fields.count("mamba_expand") * fields.count("hidden_size")
    steps = fields.count("mamba_d_conv") - 1
    fields.get("mamba_dt_rank")
    return State(inner, fields.count("mamba_d_state"), inner, 0, 0, steps)


def _mamba_2(fields: Fields) -> State:
    heads = fields.count("mamba_num_heads", "mamba_n_heads", "n_mamba_heads")
    size = fields.get("mamba_head_dim", "mamba_d_head", "mamba_headdim")
    expand = fields.optional_count("mamba_expand", "expand")
    fields.get("mamba_d_ssm")
    if size in (None, "auto"):
        if expand is None:
            raise PlanError(f"{fields.source}: mamba_head_dim is missing")
        inner = expand * fields.count("hidden_size")
        if inner % heads:
            raise PlanError(
                f"{fields.source}: mamba_head_dim is missing, and {inner} channels are no multiple "
                f"of {heads} heads"
            )
        size = inner // heads
    else:
        size = fields.count("mamba_head_dim", "mamba_d_head", "mamba_headdim")
    state = fields.count("ssm_state_size", "mamba_d_state")
    groups = fields.count("n_groups", "mamba_n_groups", "mamba_ngroups")
    steps = fields.count("conv_kernel", "mamba_d_conv") - 1
    return State(heads, size * state, heads * size, groups, 2 * state, steps)


def _state_dtype(fields: Fields) -> str:
    name = fields.text("mamba_ssm_dtype", "mamba_ssm_cache_dtype")
    return parse_dtype(name or "fp32", f"{fields.source}: mamba_ssm_dtype", STATE_DTYPES)
