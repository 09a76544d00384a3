"""A server on a GPU, dense and compressed, beside stock SGLang: random weights, no download.

A part of `scripts/gpu_check.py`. The model has the shape of Llama-3.2-1B; its answers mean nothing,
and its attention moves as many bytes as the real one's.
"""

from __future__ import annotations

import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from sglang_kv.benchmarks.server import Server, generate_body

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "vocab_size": 32000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ARMS: dict[str, list[str]] = {
    "stock": ["--attention-backend", "flashinfer"],
    "none": ["--kv-compression", "none"],
    "snapkv": ["--kv-compression", "snapkv", "--kv-compression-config", '{"budget": 1024}'],
}
REQUESTS, PROMPT, NEW_TOKENS = 16, 16000, 128


def compare(folder: Path, seconds: float) -> dict[str, Any]:
    """Output tokens per second of each arm, for as many arms as there is time for."""
    model = folder / "llama-3.2-1b-random"
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text(json.dumps(CONFIG, indent=1))
    deadline = time.monotonic() + seconds
    found: dict[str, Any] = {}
    for arm, flags in ARMS.items():
        left = deadline - time.monotonic()
        if left < 75:
            found[arm] = {"skipped": f"{left:.0f} s left"}
            continue
        found[arm] = _measure(model, flags, left, folder / f"server-{arm}.log")
    return found


def _measure(model: Path, flags: list[str], seconds: float, log: Path) -> dict[str, Any]:
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 32000) for _ in range(PROMPT)] for _ in range(REQUESTS)]
    common = ["--load-format", "dummy", "--skip-tokenizer-init", "--context-length", "32768"]
    common += ["--max-running-requests", "32", "--cuda-graph-max-bs", "32"]
    server = Server(model, *common, *flags, device="cuda", start_timeout_s=seconds - 20)
    try:
        _ask(server, prompts[:2], 8)  # builds and captures what is built late
        server.flush()
        begin = time.monotonic()
        _ask(server, prompts, 1)
        prefill = time.monotonic() - begin
        begin = time.monotonic()
        answers = _ask(server, prompts, NEW_TOKENS)  # on the cached prompts, where they are kept
        whole = time.monotonic() - begin
        report = answers[0]["meta_info"].get("kv_compression", {})
        lines = [line for line in server.log.splitlines() if "sglang-kv: attention" in line]
    finally:
        log.write_text(server.log)
        server.stop()
    return {
        "prefill_tok_s": round(REQUESTS * PROMPT / prefill),
        "output_tok_s": round(REQUESTS * NEW_TOKENS / whole),
        "kept_tokens": report.get("kept_tokens"),
        "path": lines[:1],
    }


def _ask(server: Server, prompts: list[list[int]], new_tokens: int) -> list[Any]:
    bodies = [generate_body(p, max_new_tokens=new_tokens, ignore_eos=True) for p in prompts]
    with ThreadPoolExecutor(len(bodies)) as clients:
        return list(clients.map(lambda body: server.post("/generate", body, 120), bodies))
