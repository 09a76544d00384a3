"""kvpress on given token ids: answers, decode speed and memory. Started by peers.py, in the
environment that has kvpress.

    PYTHON peers_kvpress.py JOB.json RESULT.json

A job: ``{"model", "dtype", "threads", "press", "answers": [...], "speed": {...} or null}``. It
imports nothing of this project, which is not installed there.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import statistics
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import kvpress
import torch
from transformers import AutoModelForCausalLM, DynamicCache


def make_press(job: dict[str, Any], length: int) -> Any:
    """The job's press, told the ratio with which it keeps exactly ``kept`` of ``length`` tokens.

    A press is told the share that it removes, and rounds down what is left.
    """
    if job["press"] is None:
        return None
    options = dict(job["press"])
    kind, share = getattr(kvpress, options.pop("class")), options.pop("keep_ratio", None)
    if share is not None:
        kept = int(share * length)
        options["compression_ratio"] = 1 - (kept + 0.5) / length
    return kind(**options)


def cache_bytes(cache: Any) -> int:
    return sum(
        tensor.numel() * tensor.element_size()
        for layer in cache.layers
        for tensor in (layer.keys, layer.values)
    )


class Engine:
    """A model with a cache that a press has compressed."""

    def __init__(self, job: dict[str, Any]):
        self.job = job
        eager = job["press"] is not None and job["press"]["class"] == "ObservedAttentionPress"
        self.model = AutoModelForCausalLM.from_pretrained(
            job["model"],
            dtype=getattr(torch, job["dtype"]),
            # The one press that reads the attention weights needs them to exist.
            attn_implementation="eager" if eager else "sdpa",
        ).eval()

    def prefill(self, ids: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """First new token of each prompt, [batch, 1], and the compressed cache."""
        cache = DynamicCache()
        press = make_press(self.job, ids.shape[1])
        with press(self.model) if press else contextlib.nullcontext():
            logits = self.model(input_ids=ids, past_key_values=cache, logits_to_keep=1).logits
        return logits[:, -1].argmax(-1, keepdim=True), cache

    def step(self, token: torch.Tensor, cache: Any, position: int) -> torch.Tensor:
        """The next token after ``token``, which stands at ``position`` of the whole sequence."""
        at = torch.full_like(token, position)
        logits = self.model(input_ids=token, past_key_values=cache, position_ids=at).logits
        return logits[:, -1].argmax(-1, keepdim=True)

    def answer(self, prompt: list[int], most: int) -> list[int]:
        ends = self.model.generation_config.eos_token_id
        ends = {ends} if isinstance(ends, int) else set(ends or ())
        token, cache = self.prefill(torch.tensor([prompt]))
        ids = [int(token)]
        while len(ids) < most and ids[-1] not in ends:
            token = self.step(token, cache, len(prompt) + len(ids) - 1)
            ids.append(int(token))
        return ids

    def speed(self, prompts: list[list[int]], steps: int) -> dict[str, Any]:
        """A batch of prompts of equal length, decoded together."""
        self.answer(prompts[0][:64], 4)  # warms up
        ids, length = torch.tensor(prompts), len(prompts[0])
        start = time.perf_counter()
        token, cache = self.prefill(ids)
        times = [time.perf_counter()]
        for step in range(steps - 1):
            token = self.step(token, cache, length + step)
            times.append(time.perf_counter())
        step_s = statistics.median(b - a for a, b in itertools.pairwise(times))
        return {
            "step_ms": round(step_s * 1e3, 2),
            "decode_tok_s": round(len(prompts) / step_s, 2),
            "prefill_tok_s": round(ids.numel() / (times[0] - start), 1),
            "kv_bytes": cache_bytes(cache),
            "kv_dtype": self.job["dtype"],
            "peak_rss_bytes": peak_rss_bytes(),
        }


def peak_rss_bytes() -> int:
    match = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(match[1]) * 1024 if match else 0


@torch.inference_mode()
def run(job: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(job["threads"])
    engine = Engine(job)
    done: dict[str, Any] = {
        "versions": {name: version(name) for name in ("kvpress", "transformers", "torch")}
    }
    if job["speed"]:
        done["speed"] = engine.speed(**job["speed"])
    done["answers"] = []
    for n, case in enumerate(job["answers"]):
        ids = engine.answer(case["prompt_ids"], case["max_new_tokens"])
        done["answers"].append({"id": case["id"], "output_ids": ids})
        print(f"{n + 1}/{len(job['answers'])}", file=sys.stderr)
    return done


def main() -> None:
    job, result = map(Path, sys.argv[1:])
    result.write_text(json.dumps(run(json.loads(job.read_text()))))


if __name__ == "__main__":
    main()
