"""The dialects of config.json: what a layer keeps, as each family says it, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_kv.planner.config import read_model
from sglang_kv.planner.model import Attention, Latent, Model
from sglang_kv.planner.units import PlanError

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 256,
}
QWEN2 = {**LLAMA, "model_type": "qwen2", "sliding_window": 64, "max_window_layers": 3}
LINEAR = {
    **LLAMA,
    "model_type": "qwen3_next",
    "head_dim": 64,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
}
MAMBA = {
    **LLAMA,
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "M-M*",
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "ssm_state_size": 16,
    "n_groups": 2,
    "conv_kernel": 4,
}
GRANITE = {
    **LLAMA,
    "model_type": "granitemoehybrid",
    "layer_types": ["mamba", "attention", "mamba", "mamba"],
    "mamba_n_heads": 64,
    "mamba_d_head": "auto",
    "mamba_expand": 2,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 256,
}
MLA = {
    **LLAMA,
    "model_type": "deepseek_v3",
    "num_key_value_heads": 8,
    "q_lora_rank": 96,
    "kv_lora_rank": 48,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
}


def read(config: Any, **more: Any) -> Model:
    return read_model({**config, **more}, "m") if isinstance(config, dict) else config


def windows(model: Model) -> list[int | None]:
    return [layer.window for layer in model.caches if isinstance(layer, Attention)]


def heads(model: Model) -> tuple[str, int, int]:
    layer = model.caches[0]
    assert isinstance(layer, Attention)
    return layer.kind, layer.kv_heads, layer.head_dim


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        (LLAMA, ("GQA", 2, 32)),
        ({**LLAMA, "num_key_value_heads": None}, ("MHA", 8, 32)),
        ({**LLAMA, "num_key_value_heads": 1}, ("MQA", 1, 32)),
        # Explicit, and not hidden / heads: Qwen3, Gemma, Mistral-Nemo
        ({**LLAMA, "head_dim": 128}, ("GQA", 2, 128)),
        ({**LLAMA, "head_dim": None}, ("GQA", 2, 32)),
        ({"model_type": "gpt2", "n_layer": 4, "n_head": 8, "n_embd": 256}, ("MHA", 8, 32)),
        (
            {
                "model_type": "falcon",
                "num_hidden_layers": 32,
                "num_attention_heads": 71,
                "hidden_size": 4544,
                "multi_query": True,
                "new_decoder_architecture": False,
            },
            ("MQA", 1, 64),
        ),
        (
            {
                "model_type": "falcon",
                "num_hidden_layers": 60,
                "num_attention_heads": 128,
                "num_kv_heads": 8,
                "hidden_size": 8192,
                "multi_query": True,
                "new_decoder_architecture": True,
            },
            ("GQA", 8, 64),
        ),
        (
            {
                "model_type": "chatglm",
                "num_layers": 28,
                "num_attention_heads": 32,
                "hidden_size": 4096,
                "kv_channels": 128,
                "multi_query_attention": True,
                "multi_query_group_num": 2,
            },
            ("GQA", 2, 128),
        ),
    ],
)
def test_heads(config: dict[str, Any], wanted: tuple[str, int, int]) -> None:
    assert heads(read(config)) == wanted


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        (LLAMA, [None] * 4),
        # Qwen2.5 names a window, and does not use it
        ({**QWEN2, "use_sliding_window": False}, [None] * 4),
        ({**QWEN2, "use_sliding_window": True}, [None, None, None, 64]),
        ({**LLAMA, "model_type": "mistral", "sliding_window": 64}, [64] * 4),
        ({**LLAMA, "model_type": "mistral", "sliding_window": None}, [None] * 4),
        ({**LLAMA, "model_type": "gemma2"}, [4096, None, 4096, None]),
        (
            {**LLAMA, "model_type": "gemma3_text", "num_hidden_layers": 7, "sliding_window": 64},
            [64, 64, 64, 64, 64, None, 64],
        ),
        (
            {**LLAMA, "model_type": "gemma3_text", "sliding_window_pattern": 2},
            [4096, None, 4096, None],
        ),
        ({**LLAMA, "model_type": "gpt_oss"}, [128, None, 128, None]),
        ({**LLAMA, "model_type": "cohere2"}, [4096, 4096, 4096, None]),
        (
            {
                **LLAMA,
                "model_type": "exaone4",
                "sliding_window": 64,
                "sliding_window_pattern": "LLLG",
            },
            [64, 64, 64, None],
        ),
        (
            {
                **LLAMA,
                "layer_types": ["full_attention", "sliding_attention"] * 2,
                "sliding_window": 64,
            },
            [None, 64, None, 64],
        ),
        (
            {
                **LLAMA,
                "model_type": "llama4_text",
                "attention_chunk_size": 64,
                "no_rope_layer_interval": 4,
            },
            [64, 64, 64, None],
        ),
    ],
)
def test_windows(config: dict[str, Any], wanted: list[int | None]) -> None:
    assert windows(read(config)) == wanted


def test_a_nested_language_model() -> None:
    text = {k: v for k, v in LLAMA.items() if k != "num_attention_heads"}
    text |= {"model_type": "gemma3_text", "head_dim": 128, "sliding_window": 64}
    found = read_model(
        {
            "model_type": "gemma3",
            "text_config": text,
            "vision_config": {},
            "torch_dtype": "float16",
        },
        "m",
    )
    assert heads(found)[1:] == (2, 128)
    assert found.dtype == "fp16"
    assert found.model_type == "gemma3_text"


def test_an_omni_model_s_language_model() -> None:
    """Qwen3-Omni keeps it two levels down."""
    found = read_model({"model_type": "omni", "thinker_config": {"text_config": LLAMA}}, "m")
    assert heads(found) == ("GQA", 2, 32)
    assert found.model_type == "llama"


def test_families_fill_in_what_they_leave_out() -> None:
    """Gemma 3 12B's config.json names no head_dim, and Gemma 3 4B's not even heads."""
    text = {"model_type": "gemma3_text", "num_hidden_layers": 34, "hidden_size": 2560}
    assert heads(read(text)) == ("GQA", 4, 256)


def test_a_latent() -> None:
    found = read(MLA)
    assert found.caches == (Latent(48, 16, 8 * (48 + 32), 8),) * 4
    assert found.caches[0].values == 64


def test_linear_attention() -> None:
    """Every fourth layer keeps KV; the others a 16 x 32 matrix per value head."""
    found = read(LINEAR)
    assert len(found.full) == 1
    assert len(found.states) == 3
    assert found.states[0].matrix(1) == 4 * 16 * 32
    assert found.states[0].convolution(1) == 3 * (2 * 2 * 16 + 4 * 32)
    types = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
    assert len(read(LINEAR, layer_types=types).full) == 2


def test_mamba_2() -> None:
    found = read(MAMBA)
    assert (found.num_layers, len(found.full), len(found.states)) == (4, 1, 2)
    assert found.states[0].matrix(1) == 4 * 8 * 16
    assert found.states[0].convolution(1) == 3 * (4 * 8 + 2 * 2 * 16)
    granite = read(GRANITE)
    assert (len(granite.full), len(granite.states)) == (1, 3)
    assert granite.states[0].matrix(1) == 512 * 16
    # One group, which both devices need.
    assert granite.states[0].convolution(2) == 3 * (256 + 2 * 16)


@pytest.mark.parametrize(
    ("config", "full", "states"),
    [
        ({**GRANITE, "model_type": "bamba", "layer_types": None, "attn_layer_indices": [1]}, 1, 3),
        ({**GRANITE, "model_type": "falcon_h1", "layer_types": None}, 4, 4),
        (
            {
                **LLAMA,
                "model_type": "jamba",
                "num_hidden_layers": 8,
                "mamba_expand": 2,
                "mamba_d_state": 16,
                "mamba_d_conv": 4,
            },
            1,
            7,
        ),
        (
            {
                **GRANITE,
                "model_type": "zamba2",
                "layer_types": None,
                "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
                "attention_head_dim": 64,
            },
            2,
            4,
        ),
    ],
)
def test_other_hybrids(config: dict[str, Any], full: int, states: int) -> None:
    found = read(config)
    assert (len(found.full), len(found.states)) == (full, states)


def test_layers_that_share_kv() -> None:
    """Gemma 3n: the last layers keep nothing of their own."""
    found = read(LLAMA, num_kv_shared_layers=1)
    assert (found.num_layers, len(found.caches)) == (4, 3)


def test_the_state_s_dtype_is_the_config_s() -> None:
    assert read(LINEAR).state_dtype == "fp32"
    assert read(LINEAR, mamba_ssm_dtype="bfloat16").state_dtype == "bf16"


def test_quantized_weights() -> None:
    assert read(LLAMA).weight_dtype is None
    assert read(LLAMA, quantization_config={"quant_method": "fp8"}).weight_dtype == "fp8"
    assert read(LLAMA, quantization_config={"quant_method": "mxfp4"}).weight_dtype == "unknown"


# Refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ([], "expected a JSON object, got list"),
        ({}, "model_type is missing"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "t5 is an encoder-decoder"),
        ({**LLAMA, "model_type": "bert"}, "bert is an encoder, which keeps no KV"),
        ({**MLA, "model_type": "longcat_flash"}, "longcat_flash has two attention blocks per la"),
        ({"model_type": "new"}, "num_hidden_layers is missing"),
        ({**LLAMA, "model_type": ["llama"]}, r"model_type: expected a name, got \"\['llama'\]"),
        ({**LLAMA, "model_type": ""}, "model_type: expected a name, got ''"),
        ({**LLAMA, "model_type": "mamba2"}, "mamba2 has no attention layer, so no KV to plan"),
        ({**MLA, "sliding_window": 64}, "kv_lora_rank: MLA in sliding layers is not supported"),
        ({**LLAMA, "num_attention_heads": None}, "num_attention_heads is missing"),
        ({**LLAMA, "hidden_size": None}, "hidden_size is missing"),
        ({**LLAMA, "hidden_size": 250}, "head_dim is missing, and hidden_size 250 is no multiple"),
        ({**LLAMA, "num_hidden_layers": 0}, "num_hidden_layers: must be at least 1, got 0"),
        ({**LLAMA, "num_hidden_layers": 10**6}, "num_hidden_layers: 1000000 are more than any"),
        ({**LLAMA, "num_hidden_layers": 10**12}, "num_hidden_layers: 1000000000000 is absurd"),
        ({**LLAMA, "num_hidden_layers": -4}, "num_hidden_layers: must be at least 1, got -4"),
        ({**LLAMA, "num_hidden_layers": "4"}, "num_hidden_layers: expected a number, got 4"),
        ({**LLAMA, "num_hidden_layers": True}, "num_hidden_layers: expected a number, got True"),
        ({**LLAMA, "num_key_value_heads": 3}, "num_key_value_heads: 8 query heads cannot share 3"),
        ({**LLAMA, "torch_dtype": "int3"}, "torch_dtype: unknown dtype 'int3'"),
        ({**LLAMA, "layer_types": ["full_attention"]}, "layer_types has 1 layers, .* says 4"),
        ({**LLAMA, "layer_types": "full"}, "layer_types: expected a list of names"),
        ({**LLAMA, "layer_types": ["odd_attention"] * 4}, "layer_types: unknown kind 'odd_attent"),
        (
            {**MAMBA, "hybrid_override_pattern": "MX*-"},
            "hybrid_override_pattern: unknown layer 'X'",
        ),
        ({**MAMBA, "hybrid_override_pattern": "M-M-"}, "nemotron_h has no attention layer"),
        ({**MAMBA, "ssm_state_size": None}, "ssm_state_size is missing"),
        ({**LINEAR, "linear_key_head_dim": None}, "linear_key_head_dim is missing"),
        ({**MLA, "qk_rope_head_dim": None}, "qk_rope_head_dim is missing"),
        (
            {**LLAMA, "layer_types": ["sliding_attention"] * 4},
            "sliding_window is missing, and layers have a window",
        ),
        ({**LLAMA, "num_kv_shared_layers": 4}, "num_kv_shared_layers: not below 4 layers"),
        (
            {**LLAMA, "sliding_window": 8, "sliding_window_pattern": "ab"},
            "sliding_window_pattern: cannot read",
        ),
    ],
)
def test_broken_configs(config: Any, message: str) -> None:
    with pytest.raises(PlanError, match=f"^m: config.json: {message}") as caught:
        read_model(config, "m")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "more",
    [
        {"ssm_state_size": 16},  # a state, and nothing says in which layers
        {"conv_L_cache": 3},  # LFM2
        {"linear_attn_config": {"kda_layers": [1]}},  # Kimi Linear
        {"index_topk": 2048},  # an indexer with keys of its own
        {"kv_lora_rank": None, "compress_ratios": [4]},
        {"attn_config": {"kv_n_heads": 8}},  # DBRX, MPT
        {"num_global_key_value_heads": 4},  # Gemma 4
        {"swa_head_dim": 192},  # MiMo: other heads in windows
        {"num_key_value_heads": None, "block_configs": [{}]},  # Llama-Nemotron: heads per layer
        {"attn_type_list": [0, 0, 0, 1]},  # MiniMax-Text-01: lightning attention
        {"num_attention_groups": 1},  # Step-3
        {"use_cla": True, "cla_share_factor": 2},  # Hunyuan: two layers share KV
    ],
)
def test_what_is_not_understood_is_refused(more: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match=r"the planner does not know what .* does to the cache"):
        read(LLAMA, **more)


def test_a_list_of_nothing_but_softmax_is_understood() -> None:
    assert len(read(LLAMA, model_type="minimax_m2", attn_type_list=[1] * 4).full) == 4


def test_a_new_name_for_a_plain_model_is_no_obstacle() -> None:
    assert heads(read(LLAMA, model_type="brand_new")) == ("GQA", 2, 32)
