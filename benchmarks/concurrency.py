"""How many long requests run at once in one fixed pool?

    python benchmarks/concurrency.py --pool 26000 --context 8000

The same pool in tokens for every arm; the arithmetic stands beside the measurement.
"""

from __future__ import annotations

import argparse
import random
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sglang_kv.benchmarks.common import record
from sglang_kv.benchmarks.server import Server
from sglang_kv.compression import parse_policy

ARMS: dict[str, dict[str, Any]] = {
    "none": {"method": "none"},
    "streamingllm": {"method": "streamingllm", "sinks": 4, "recent": 1020},
}


def predicted(policy: dict[str, Any], pool: int, context: int, new: int, chunk: int) -> int:
    """Requests that fit, the newest one still at its prefill peak."""
    parsed, page = parse_policy(policy), 16
    steady = parsed.steady_pages(context + new, page)
    published = (parsed.dense_prefix or 0) // page
    peak = max(parsed.peak_pages(context, page, chunk, published=published), steady)
    return (pool // page - peak) // steady + 1


def measure(server: Server, policy: dict[str, Any], count: int, context: int, new: int) -> int:
    """Most requests seen running at once while ``count`` are served."""
    rng = random.Random(0)
    prompts = [[rng.randrange(100, 40000) for _ in range(context)] for _ in range(count)]
    threads = [
        threading.Thread(
            target=server.generate,
            args=(prompt, policy),
            kwargs={"max_new_tokens": new, "ignore_eos": True},
        )
        for prompt in prompts
    ]
    for thread in threads:
        thread.start()
    most = 0
    while any(thread.is_alive() for thread in threads):
        most = max(most, int(server.metric("sglang_kv:running_requests")))
        time.sleep(0.2)
    return most


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--pool", type=int, default=26000)
    parser.add_argument("--context", type=int, default=8000)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--chunk", type=int, default=4096)
    parser.add_argument("--requests", type=int, default=24)
    args = parser.parse_args()
    flags = ["--max-total-tokens", str(args.pool), "--chunked-prefill-size", str(args.chunk)]
    flags += ["--max-running-requests", "64", "--enable-metrics", "--kv-compression", "none"]
    base: int | None = None
    for arm, policy in ARMS.items():
        count = 6 if arm == "none" else args.requests
        with Server(args.model, *flags) as server:
            most = measure(server, policy, count, args.context, args.new_tokens)
        base = base or most
        record(
            "concurrency",
            {
                "arm": arm,
                "pool_tokens": args.pool,
                "context": args.context,
                "running_at_once": most,
                "predicted": predicted(
                    policy, args.pool, args.context, args.new_tokens, args.chunk
                ),
                "ratio_to_none": round(most / base, 2),
            },
        )


if __name__ == "__main__":
    main()
