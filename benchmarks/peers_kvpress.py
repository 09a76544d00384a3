"""kvpress on given token ids: answers, kept tokens, speed and memory. Started by peers.py, in the
environment that has kvpress.

    PYTHON peers_kvpress.py JOB.json RESULT.json

A job: ``{"model", "dtype", "threads", "presses": {arm: press or null}, "answers": [...],
"tensors": {"folder", "arms"} or null, "speed": {...} or null}``. It imports nothing of this
project, which is not installed there.

The presses of a prompt share one dense prefill: a press acts behind a layer's attention, on what
that layer has put into the cache, and changes nothing that later layers see. So each press's own
hook is called with what one prefill has left. `Engine.check` holds that against prefills with the
press in place, to the bit.
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
import numpy as np
import torch
from kvpress.utils import get_prerope_query_states
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.models.llama.modeling_llama import rotate_half

EAGER = "ObservedAttentionPress"  # the one that reads attention weights
CHECKED = 128  # tokens with which the shared prefill is checked


def make_press(spec: dict[str, Any] | None, length: int) -> Any:
    """The press, told the ratio with which it keeps exactly ``keep_ratio`` of ``length`` tokens.

    A press is told the share that it removes, and rounds down what is left, PyramidKV's to the
    nearest. DuoAttention's is given its streaming heads, ``streaming``: ``[layers][kv_heads]``.
    """
    if spec is None:
        return None
    options = dict(spec)
    kind, share = getattr(kvpress, options.pop("class")), options.pop("keep_ratio", None)
    heads = {key: options.pop(key) for key in ("streaming", "sink", "recent") if key in options}
    if share is not None:
        kept = int(share * length) + (0 if spec["class"] == "PyramidKVPress" else 0.5)
        options["compression_ratio"] = 1 - kept / length
    press = kind(**options)
    if heads:
        press.sink_size, press.recent_size = heads["sink"], heads["recent"]
        press.streaming_mask = torch.tensor(heads["streaming"])
        press.post_init_from_model = lambda model: None  # would look for another pattern
    return press


def cache_bytes(cache: Any) -> int:
    return sum(
        tensor.numel() * tensor.element_size()
        for layer in cache.layers
        for tensor in (layer.keys, layer.values)
    )


class Dense:
    """A prompt's dense cache, and the calls that presses hook into."""

    def __init__(self, ids: torch.Tensor, first: torch.Tensor, cache: Any, calls: list[Any]):
        self.ids, self.first, self.cache, self.calls = ids, first, cache, calls

    def compressed(self, press: Any) -> Any:
        """What ``press`` makes of the cache."""
        cache = DynamicCache()
        for module, kwargs in self.calls:
            layer = self.cache.layers[module.layer_idx]
            cache.update(layer.keys, layer.values, module.layer_idx)
            if press is not None:
                press.forward_hook(module, [], {**kwargs, "past_key_values": cache}, (None, None))
        return cache

    def kept(self, press: Any) -> list[torch.Tensor]:
        """Positions that ``press`` keeps, of each layer int32 ``[kv_heads, kept]``, sorted."""
        found = []
        for module, kwargs in self.calls:
            keys = self.cache.layers[module.layer_idx].keys
            # It compresses values as it does keys: these are the positions.
            places = torch.arange(keys.shape[2]).float()[None, None, :, None].expand_as(keys)
            inputs = (module, kwargs["hidden_states"], keys, places, None, kwargs)
            _, places = press.compress(*inputs)
            found.append(places[0, :, :, 0].sort(-1).values.int())
        return found

    def queries(self, window: int) -> torch.Tensor:
        """The last queries as kvpress makes them: ``[layers, heads, window, head_dim]``."""
        found = []
        for module, kwargs in self.calls:
            q = get_prerope_query_states(module, kwargs["hidden_states"][:, -window:])
            cos, sin = (part[:, None, -window:] for part in kwargs["position_embeddings"])
            found.append((q * cos + rotate_half(q) * sin)[0])
        return torch.stack(found)


class Engine:
    """A model with a cache that a press has compressed."""

    def __init__(self, job: dict[str, Any]):
        self.job = job
        self.eager = any(press and press["class"] == EAGER for press in job["presses"].values())
        self.model = AutoModelForCausalLM.from_pretrained(
            job["model"],
            dtype=getattr(torch, job["dtype"]),
            attn_implementation="eager" if self.eager else "sdpa",
        ).eval()
        self.attention = [layer.self_attn for layer in self.model.model.layers]
        ends = self.model.generation_config.eos_token_id
        self.ends = {ends} if isinstance(ends, int) else set(ends or ())

    def prefill(self, ids: torch.Tensor, press: Any) -> tuple[torch.Tensor, Any]:
        """First new token of each prompt, [batch, 1], and the cache, compressed on the way."""
        cache = DynamicCache()
        with press(self.model) if press else contextlib.nullcontext():
            logits = self.model(input_ids=ids, past_key_values=cache, logits_to_keep=1).logits
        return logits[:, -1].argmax(-1, keepdim=True), cache

    def dense(self, ids: torch.Tensor) -> Dense:
        calls: list[Any] = []

        def keep(module: Any, _args: Any, kwargs: dict[str, Any], _output: Any) -> None:
            calls.append((module, kwargs))

        hooks = [a.register_forward_hook(keep, with_kwargs=True) for a in self.attention]
        try:
            return Dense(ids, *self.prefill(ids, None), calls)
        finally:
            for hook in hooks:
                hook.remove()

    def check(self, ids: torch.Tensor) -> None:
        """The shared prefill gives each press's own cache, bit for bit.

        Raises:
            AssertionError: naming the arm with which it does not.
        """
        dense = self.dense(ids)
        for arm, spec in self.job["presses"].items():
            press = make_press(spec, ids.shape[1])
            _, own = self.prefill(ids, press)
            for a, b in zip(own.layers, dense.compressed(press).layers, strict=True):
                assert torch.equal(a.keys, b.keys), arm
                assert torch.equal(a.values, b.values), arm

    def step(self, token: torch.Tensor, cache: Any, position: int) -> torch.Tensor:
        """The next token after ``token``, which stands at ``position`` of the whole sequence."""
        at = torch.full_like(token, position)
        logits = self.model(input_ids=token, past_key_values=cache, position_ids=at).logits
        return logits[:, -1].argmax(-1, keepdim=True)

    def decode(self, token: torch.Tensor, cache: Any, length: int, most: int) -> list[list[int]]:
        """Up to ``most`` ids of each row, the end included; ``token`` is their first, [rows, 1]."""
        rows = [token]
        while len(rows) < most and not self.all_ended(rows):
            token = self.step(token, cache, length + len(rows) - 1)
            rows.append(token)
        found = []
        for ids in torch.cat(rows, 1).tolist():
            ended = next((n for n, token in enumerate(ids) if token in self.ends), len(ids))
            found.append(ids[: ended + 1])
        return found

    def all_ended(self, rows: list[torch.Tensor]) -> bool:
        return all(self.ends & set(ids) for ids in torch.cat(rows, 1).tolist())

    def answers(self, dense: Dense, most: int) -> dict[str, list[int]]:
        """Each arm's answer. Caches of the same shape decode together."""
        found: dict[str, list[int]] = {}
        together: dict[tuple[int, ...], list[tuple[str, Any]]] = {}
        length = dense.ids.shape[1]
        for arm, spec in self.job["presses"].items():
            cache = dense.compressed(make_press(spec, length))
            # A press that masks leaves its mask on the model.
            if any(getattr(a, "masked_key_indices", None) for a in self.attention):
                found[arm] = self.decode(dense.first, cache, length, most)[0]
                for attention in self.attention:
                    attention.masked_key_indices = None
            else:
                shape = tuple(layer.keys.shape[2] for layer in cache.layers)
                together.setdefault(shape, []).append((arm, cache))
        for group in together.values():
            cache = DynamicCache()
            for layers in zip(*(cache.layers for _, cache in group), strict=True):
                parts = ([layer.keys for layer in layers], [layer.values for layer in layers])
                cache.update(*map(torch.cat, parts), len(cache.layers))
            first = dense.first.expand(len(group), 1)
            said = self.decode(first, cache, length, most)
            found |= dict(zip((arm for arm, _ in group), said, strict=True))
        return found

    def case(self, case: dict[str, Any], check: bool) -> dict[str, list[int]]:
        """Each arm's answer to one prompt, its tensors written."""
        ids, most = torch.tensor([case["prompt_ids"]]), case["max_new_tokens"]
        if self.eager:
            return self.answers_alone(ids, most)
        if check:
            self.check(ids[:, :CHECKED])
        dense, tensors = self.dense(ids), self.job["tensors"]
        if tensors:
            path = Path(tensors["folder"], f"{case['id']}.npz")
            self.write_tensors(dense, path, tensors["arms"])
        return self.answers(dense, most)

    def answers_alone(self, ids: torch.Tensor, most: int) -> dict[str, list[int]]:
        """Each arm's answer, with a prefill of its own: attention weights are large."""
        found = {}
        for arm, spec in self.job["presses"].items():
            token, cache = self.prefill(ids, make_press(spec, ids.shape[1]))
            found[arm] = self.decode(token, cache, ids.shape[1], most)[0]
        return found

    def write_tensors(self, dense: Dense, path: Path, arms: list[str]) -> None:
        """Keys, last queries, and what the presses of ``arms`` keep of them, for our own code."""
        parts = {"k": torch.cat([layer.keys for layer in dense.cache.layers])}
        for arm in arms:
            press = make_press(self.job["presses"][arm], dense.ids.shape[1])
            window = press.window_size
            parts[f"q {window}"] = dense.queries(window)
            for number, kept in enumerate(dense.kept(press)):
                parts[f"kept {number} {arm}"] = kept
        arrays: dict[str, Any] = {name: part.numpy() for name, part in parts.items()}
        np.savez(path, **arrays)

    def speed(self, prompts: list[list[int]], steps: int) -> dict[str, Any]:
        """A batch of prompts of equal length, decoded together, with the job's one press."""
        (spec,) = self.job["presses"].values()
        ids, length = torch.tensor(prompts), len(prompts[0])
        token, cache = self.prefill(ids[:1, :256], make_press(spec, min(256, length)))
        self.decode(token, cache, min(256, length), 4)  # warms up
        start = time.perf_counter()
        token, cache = self.prefill(ids, make_press(spec, length))
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
def run(job: dict[str, Any], so_far: Path) -> dict[str, Any]:
    """The job's result. Answers are added to ``so_far`` as they come, and not made again."""
    torch.set_num_threads(job["threads"])
    engine = Engine(job)
    done: dict[str, Any] = {
        "versions": {name: version(name) for name in ("kvpress", "transformers", "torch")}
    }
    if job["speed"]:
        done["speed"] = engine.speed(**job["speed"])
    lines = so_far.read_text().splitlines(keepends=True) if so_far.exists() else []
    whole = [line for line in lines if line.endswith("\n")]  # a kill may cut the last one
    so_far.write_text("".join(whole))
    known = {line["id"]: line for line in map(json.loads, whole)}
    for n, case in enumerate(job["answers"]):
        if case["id"] not in known:
            known[case["id"]] = {"id": case["id"], "arms": engine.case(case, check=not known)}
            with so_far.open("a") as file:
                file.write(json.dumps(known[case["id"]]) + "\n")
        print(f"{n + 1}/{len(job['answers'])}", file=sys.stderr, flush=True)
    done["answers"] = [
        {"id": case["id"], "arm": arm, "output_ids": said}
        for case in job["answers"]
        for arm, said in known[case["id"]]["arms"].items()
    ]
    return done


def main() -> None:
    job, result = map(Path, sys.argv[1:])
    found = run(json.loads(job.read_text()), result.with_suffix(".part"))
    result.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
