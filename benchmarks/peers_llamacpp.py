"""llama.cpp on given token ids: decode speed and memory. Started by peers.py, in its environment.

    PYTHON peers_llamacpp.py JOB.json RESULT.json

A job: ``{"gguf", "prompts": [[id, ...], ...], "steps", "threads", "chunk"}``, prompts of equal
length. It imports nothing of this project, which is not installed there.
"""

from __future__ import annotations

import itertools
import json
import logging
import re
import statistics
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np


def fill(batch: Any, tokens: list[tuple[int, int, int, bool]]) -> Any:
    """Put (token, position, sequence, whether its logits are wanted) into a batch."""
    for i, (token, position, sequence, logits) in enumerate(tokens):
        batch.token[i], batch.pos[i] = token, position
        batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        batch.logits[i] = logits
    batch.n_tokens = len(tokens)
    return batch


def decode(context: Any, batch: Any) -> None:
    status = llama_cpp.llama_decode(context, batch)
    if status:
        raise RuntimeError(f"llama_decode: {status}")


def best(context: Any, index: int, vocabulary: int) -> int:
    """The most likely token after the batch's token ``index``."""
    logits = llama_cpp.llama_get_logits_ith(context, index)
    return int(np.ctypeslib.as_array(logits, (vocabulary,)).argmax())


def open_model(job: dict[str, Any]) -> tuple[Any, Any, int]:
    """Context and model for all prompts at once; tokens in the vocabulary."""
    sequences, length = len(job["prompts"]), len(job["prompts"][0])
    logging.getLogger("llama-cpp-python").setLevel(logging.ERROR)  # else each tensor has lines
    llama_cpp.llama_backend_init()
    options = llama_cpp.llama_model_default_params()
    options.n_gpu_layers = 0
    model = llama_cpp.llama_model_load_from_file(job["gguf"].encode(), options)
    if not model:
        raise RuntimeError(f"llama.cpp cannot load {job['gguf']}")
    settings = llama_cpp.llama_context_default_params()
    each = -(-(length + job["steps"] + 1) // 256) * 256
    settings.n_ctx, settings.n_seq_max = sequences * each, sequences
    settings.n_batch = max(job["chunk"], sequences)
    settings.n_ubatch = min(512, settings.n_batch)
    settings.n_threads = settings.n_threads_batch = job["threads"]
    context = llama_cpp.llama_init_from_model(model, settings)
    if not context:
        raise RuntimeError("llama.cpp cannot make such a context")
    vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    return context, model, vocabulary


def run(job: dict[str, Any]) -> dict[str, Any]:
    prompts, chunk = job["prompts"], job["chunk"]
    length, sequences = len(prompts[0]), len(prompts)
    context, model, vocabulary = open_model(job)
    room = max(chunk, sequences)
    batch = llama_cpp.llama_batch_init(room, 0, 1)

    small = min(room, 32)
    decode(context, fill(batch, [(5, i, 0, i == small - 1) for i in range(small)]))  # warms up
    llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)

    start = time.perf_counter()
    newest = []
    for sequence, prompt in enumerate(prompts):
        for at in range(0, length, chunk):
            part = prompt[at : at + chunk]
            last = at + len(part) == length
            decode(
                context,
                fill(
                    batch,
                    [
                        (token, at + i, sequence, last and i == len(part) - 1)
                        for i, token in enumerate(part)
                    ],
                ),
            )
        newest.append(best(context, -1, vocabulary))
    prefill_s = time.perf_counter() - start

    outputs, times = [[token] for token in newest], [time.perf_counter()]
    for step in range(job["steps"] - 1):
        decode(context, fill(batch, [(t, length + step, s, True) for s, t in enumerate(newest)]))
        newest = [best(context, sequence, vocabulary) for sequence in range(sequences)]
        times.append(time.perf_counter())
        for output, token in zip(outputs, newest, strict=True):
            output.append(token)
    step_s = statistics.median(b - a for a, b in itertools.pairwise(times))

    layers = llama_cpp.llama_model_n_layer(model)
    width = llama_cpp.llama_model_n_head_kv(model) * (
        llama_cpp.llama_model_n_embd(model) // llama_cpp.llama_model_n_head(model)
    )
    held = length + job["steps"] - 1
    system = llama_cpp.llama_print_system_info()
    return {
        "step_ms": round(step_s * 1e3, 2),
        "decode_tok_s": round(sequences / step_s, 2),
        "prefill_tok_s": round(sequences * length / prefill_s, 1),
        "kv_bytes": sequences * held * layers * width * 2 * 2,  # K and V, both f16
        "kv_dtype": "f16",
        "peak_rss_bytes": peak_rss_bytes(),
        "output_ids": outputs,
        "versions": {"llama-cpp-python": version("llama-cpp-python")},
        "build": system.decode() if isinstance(system, bytes) else str(system),
    }


def peak_rss_bytes() -> int:
    match = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(match[1]) * 1024 if match else 0


def main() -> None:
    job, result = map(Path, sys.argv[1:])
    result.write_text(json.dumps(run(json.loads(job.read_text()))))


if __name__ == "__main__":
    main()
