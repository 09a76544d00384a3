"""A Llama model's safetensors as a GGUF file, for llama.cpp to run the same weights.

    python benchmarks/gguf_model.py MODEL OUT.gguf --dtype bf16

Weights only: the file has no tokenizer, and is for programs that send token ids. Needs `gguf`
(`pip install 'sglang-kv[demo]'`).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DTYPES = ("bf16", "f16", "f32")

#: Hugging Face's names of a layer's weights, and GGUF's.
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def gguf_name(name: str) -> str:
    """GGUF's name of a tensor.

    Raises:
        ValueError: a Llama has no such tensor.
    """
    if name in NAMES:
        return NAMES[name]
    parts = name.removeprefix("model.layers.").removesuffix(".weight").split(".", 1)
    if len(parts) != 2 or not parts[0].isdecimal() or parts[1] not in LAYER_NAMES:
        raise ValueError(f"{name}: not a weight of a plain Llama")
    return f"blk.{parts[0]}.{LAYER_NAMES[parts[1]]}.weight"


def pairs_from_halves(weight: Any, num_heads: int) -> Any:
    """GGUF's row order of Q and K: its rotary turns neighbouring rows, Hugging Face's the halves.

    Args:
        weight: [num_heads * head_dim, hidden]
    """
    rows, columns = weight.shape
    halves = weight.reshape(num_heads, 2, rows // num_heads // 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns)


def read_config(folder: Path) -> dict[str, Any]:
    """A plain Llama's config.json.

    Raises:
        ValueError: it is another kind of model, or one whose rotary is scaled.
    """
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    if config["architectures"] != ["LlamaForCausalLM"]:
        raise ValueError(f"{folder}: expected a LlamaForCausalLM, got {config['architectures']}")
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if parameters.get("rope_type", "default") != "default":
        raise ValueError(f"{folder}: scaled rotary ({parameters['rope_type']}) is not supported")
    config.setdefault("rope_theta", parameters.get("rope_theta", 10000.0))
    return config


def tensors(folder: Path) -> Iterator[tuple[str, Any]]:
    """Each weight in fp32, [rows, columns] or [rows]."""
    import torch
    from safetensors.torch import load_file

    for file in sorted(folder.glob("*.safetensors")):
        for name, weight in load_file(file).items():
            yield name, weight.to(torch.float32).numpy()


def convert(folder: Path, out: Path, dtype: str = "bf16") -> Path:
    """Write the file; matrices in ``dtype``, vectors in fp32 as llama.cpp wants them.

    Raises:
        ValueError: the model is no plain Llama, or ``dtype`` is not supported.
    """
    import gguf

    if dtype not in DTYPES:
        raise ValueError(f"--dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    config = read_config(folder)
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads", heads)
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    kind = gguf.GGMLQuantizationType[dtype.upper()]
    work = out.with_suffix(".part")
    writer = gguf.GGUFWriter(work, "llama")
    writer.add_name(folder.name)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_tokenizer_model("no_vocab")
    for name, weight in tensors(folder):
        if name == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue  # llama.cpp takes the embedding where there is none
        if name.endswith("q_proj.weight"):
            weight = pairs_from_halves(weight, heads)
        elif name.endswith("k_proj.weight"):
            weight = pairs_from_halves(weight, kv_heads)
        if weight.ndim == 1:
            writer.add_tensor(gguf_name(name), weight)
        else:
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(weight, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return work.rename(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", type=Path, help="the folder of a Llama model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--dtype", default="bf16", help="of the matrices: %(default)s, f16 or f32")
    args = parser.parse_args()
    try:
        print(convert(args.model, args.out, args.dtype))
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
