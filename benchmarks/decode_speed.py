"""How fast is a decode step, beside stock SGLang, with the same flags?

    python benchmarks/decode_speed.py --batch 8 --context 4000

Each arm is a server of its own: stock SGLang (`torch_native`), then sglang-kv with `none` and with
each method at a quarter of the prompt. Requests have different prompts, so nothing is shared. Only
the steps in which all requests decode together are timed; the prefill before them holds the fold.
One JSON line per arm, and the ratio to the bytes that the step must read over the measured read
bandwidth.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sglang_kv.benchmarks.common import read_bandwidth_gb_s, record
from sglang_kv.benchmarks.methods import NONE, PAGE, arms, geometry_of, plan_of
from sglang_kv.benchmarks.server import Server, generate_body

STOCK = "stock"


def run_batch(
    server: Server, prompts: list[list[int]], policy: dict[str, Any] | None, new_tokens: int
) -> tuple[list[list[float]], float]:
    """Token times of each request, and when the batch was sent (s)."""
    times: list[list[float]] = [[] for _ in prompts]

    def one(index: int) -> None:
        body = generate_body(prompts[index], policy, max_new_tokens=new_tokens, ignore_eos=True)
        for _ in server.stream("/generate", body, timeout_s=1800):
            times[index].append(time.perf_counter())

    threads = [threading.Thread(target=one, args=(i,)) for i in range(len(prompts))]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return times, start


def random_prompts(batch: int, context: int, seed: int) -> list[list[int]]:
    """Prompts of equal length with nothing in common, [batch, context] token ids."""
    rng = random.Random(seed)
    return [[rng.randrange(100, 40000) for _ in range(context)] for _ in range(batch)]


def measure(
    server: Server, batch: int, context: int, steps: int, policy: dict[str, Any] | None, seed: int
) -> dict[str, float]:
    times, start = run_batch(server, random_prompts(batch, context, seed), policy, steps)
    together = max(t[0] for t in times)  # the last prompt is done: all decode from here on
    end = min(t[-1] for t in times)
    inside = [[x for x in t if together <= x <= end] for t in times]
    step_s = statistics.median(b - a for t in inside for a, b in itertools.pairwise(t))
    return {
        "step_ms": round(step_s * 1e3, 2),
        "decode_tok_s": round(batch / step_s, 2),
        "prefill_tok_s": round(batch * context / (together - start), 1),
        "steps": min(len(t) for t in inside),
    }


def sizes_of(model: str) -> tuple[int, int | None]:
    """The size of a KV head, and the bytes of the weights; None where they are in no folder."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model)
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(head), sum(path.stat().st_size for path in Path(model).glob("*.safetensors")) or None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=4000)
    parser.add_argument("--steps", type=int, default=48, help="decoded tokens per request")
    parser.add_argument("--arms", help="comma-separated; default: stock and all")
    parser.add_argument(
        "--weight-bytes", type=float, help="read once per step (default: the folder's safetensors)"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    policies = arms(args.context, (4,))
    chosen = args.arms.split(",") if args.arms else [STOCK, *policies]
    for name in chosen:
        if name != STOCK and name not in policies:
            parser.error(f"--arms: {name!r} is none of {', '.join([STOCK, *policies])}")
    for flag, least in (("batch", 1), ("context", 1), ("steps", 2)):
        if getattr(args, flag) < least:
            parser.error(f"--{flag}: must be at least {least}, got {getattr(args, flag)}")
    head_dim, weight_bytes = sizes_of(args.model)
    weight_bytes = args.weight_bytes or weight_bytes
    if weight_bytes is None:
        parser.error(f"--weight-bytes: {args.model} is no folder of safetensors; give the bytes")
    bandwidth = read_bandwidth_gb_s()
    pool = args.batch * (args.context + args.steps + 64) + 4096
    flags = ["--max-total-tokens", str(pool), "--max-running-requests", str(max(8, args.batch))]
    flags += ["--chunked-prefill-size", "4096", "--page-size", "16", "--disable-radix-cache"]
    geometry = geometry_of(args.model)
    base: float | None = None
    uncompressed: float | None = None
    for arm in chosen:
        policy = policies.get(arm)
        extra = ["--kv-compression", "none"] if policy else ["--attention-backend", "torch_native"]
        with Server(args.model, *flags, *extra) as server:
            run_batch(server, [[5] * 64] * 2, policy, 8)  # first calls build and warm up
            row = measure(server, args.batch, args.context, args.steps, policy, args.seed)
            backend = "sglang_kv" if "impl=HeadPageRadixCache" in server.log else "stock"
        plan = plan_of(policy or NONE, geometry, args.context)
        # A head page: K and V of bf16.
        kv_bytes = plan.pages(args.context + args.steps // 2) * PAGE * head_dim * 4
        limit_s = (weight_bytes + args.batch * kv_bytes) / (bandwidth * 1e9)
        base = base or row["decode_tok_s"]
        if arm == "none":
            uncompressed = row["prefill_tok_s"]
        record(
            "decode_speed",
            {
                "arm": arm,
                "model": Path(args.model).name,
                "proved": backend,
                "batch": args.batch,
                "context": args.context,
                **row,
                "policy": policy,
                "prefill_time_to_none": uncompressed
                and round(uncompressed / row["prefill_tok_s"], 3),
                "ratio_to_first_arm": round(row["decode_tok_s"] / base, 2),
                "read_gb_s": round(bandwidth, 1),
                "limit_step_ms": round(limit_s * 1e3, 1),
                "share_of_limit": round(limit_s * 1e3 / row["step_ms"], 3),
                "seed": args.seed,
            },
        )


if __name__ == "__main__":
    main()
