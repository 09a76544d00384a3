"""What does the eviction order of the prefix tree buy, through a server?

    python benchmarks/prefix_orders.py --model MODEL [--orders importance lru lfu slru]

The first workload of the replayer, scaled down to the demo model on a CPU: tenants with a system
prompt each, and documents that are asked about once (`prefix_text.tenants`). One server per order,
the same requests one after another, the same pool, too small for all system prompts and the
documents between them. A line per order: prompt tokens that came from the tree, by the answers and
by the server's metrics, and the time to the first token.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sglang_kv.benchmarks.common import record
from sglang_kv.benchmarks.prefix_text import Traffic, tenants
from sglang_kv.benchmarks.server import Server, generate_body
from sglang_kv.radix.replay import replay
from sglang_kv.radix.trace import Request

PAGE = 16
ORDERS = ("importance", "lru", "lfu", "slru", "cost")


def ask(server: Server, prompt: list[int], salt: str) -> tuple[int, float]:
    """Tokens of the prompt that were cached, and seconds until the first token."""
    begin = time.perf_counter()
    body = generate_body(prompt, max_new_tokens=1, ignore_eos=True)
    first, cached = 0.0, 0
    for event in server.stream("/generate", {**body, "extra_key": salt}):
        first = first or time.perf_counter() - begin
        cached = int(event["meta_info"]["cached_tokens"])
    return cached, first


def replayed(traffic: Traffic, pool: int, order: str) -> int:
    """What the replayer says of the same requests, without attention and answers."""
    trace = [Request(traffic.request(turn)[0], (), turn.namespace) for turn in traffic.turns]
    return replay(trace, pool, order, page_size=PAGE).hit_tokens


def measure(traffic: Traffic, order: str, args: argparse.Namespace) -> dict[str, Any]:
    flags = ["--max-total-tokens", str(args.pool), "--page-size", str(PAGE)]
    flags += ["--radix-eviction-policy", order, "--max-running-requests", "1"]
    flags += ["--context-length", str(args.context), "--chunked-prefill-size", str(args.context)]
    flags += ["--kv-compression", "none", "--enable-metrics"]
    cached, seconds = [], []
    with Server(args.model, *flags) as server:
        ask(server, [5] * 64, "warm-up")
        server.flush()
        counted = server.metric("sglang_kv:prefix_hit_tokens_total")
        for turn in traffic.turns:
            found, first = ask(server, traffic.prompt(turn), str(turn.namespace.tenant))
            cached.append(found)
            seconds.append(first)
        time.sleep(args.metrics_every)
        counted = server.metric("sglang_kv:prefix_hit_tokens_total") - counted
        evicted = server.metric("sglang_kv:prefix_evicted_tokens_total")
    prompts = [len(traffic.prompt(turn)) for turn in traffic.turns]
    return {
        "arm": order,
        "requests": len(prompts),
        "prompt_tokens": sum(prompts),
        "pool_tokens": args.pool,
        "hit_tokens": sum(cached),
        "hit_tokens_by_metrics": round(counted),
        "hit_rate": round(sum(cached) / sum(prompts), 4),
        "evicted_tokens": round(evicted),
        "ttft_mean_s": round(statistics.mean(seconds), 3),
        "ttft_p50_s": round(statistics.median(seconds), 3),
        "seconds": round(sum(seconds), 1),
        "replayed_hit_tokens": replayed(traffic, args.pool, order),
        "model": Path(args.model).name,
        "seed": args.seed,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--orders", nargs="+", choices=ORDERS, default=list(ORDERS[:4]))
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--tenants", type=int, default=8)
    parser.add_argument("--pool", type=int, default=3072, help="tokens of KV memory")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--metrics-every", type=float, default=3.0, help="seconds until counted")
    parser.add_argument(
        "--out", type=Path, help="instead of benchmarks/results/prefix_orders.jsonl"
    )
    args = parser.parse_args()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    encode: Callable[[str], list[int]] = lambda text: tokenizer(text)["input_ids"]  # noqa: E731
    traffic = tenants(encode, args.seed, requests=args.requests, count=args.tenants)
    longest = max(len(traffic.prompt(turn)) for turn in traffic.turns)
    if longest >= min(args.context, args.pool):
        parser.error(f"--context and --pool must hold the longest prompt, {longest} tokens")
    for order in args.orders:
        record("prefix_orders", measure(traffic, order, args), path=args.out)


if __name__ == "__main__":
    main()
