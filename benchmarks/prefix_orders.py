"""What does the eviction order of the prefix tree buy, through a server?

    python benchmarks/prefix_orders.py --model MODEL [--orders importance lru lfu slru]
    python benchmarks/prefix_orders.py --model MODEL --orders stock importance \\
        --traffic tenants agents --pool 40000

Workloads of the replayer, scaled down to the demo model on a CPU (`prefix_text`): by default
tenants with a system prompt each, and documents that are asked about once. One server per order,
all running; each request goes to every one of them in turn, one at a time. The same pool; the
default is too small for all system prompts and the documents between them. `stock` is SGLang
without the plugin, its tree and its attention: with memory for all, plain requests hit as much in
either tree. A line per order: prompt tokens that came from the tree, by the answers and by the
server's metrics, and the time to the first token.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sglang_kv.benchmarks.common import record
from sglang_kv.benchmarks.prefix_text import TEXTS, Traffic
from sglang_kv.benchmarks.server import Server, generate_body
from sglang_kv.benchmarks.watch import Metrics
from sglang_kv.radix.orders import ORDERS
from sglang_kv.radix.replay import replay
from sglang_kv.radix.trace import Request

PAGE = 16
STOCK = "stock"


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
    """What the replayer says of the same requests, without answers, all prompts read evenly."""
    trace = []
    for turn in traffic.turns:
        prompt = traffic.request(turn)[0]
        even = np.ones(sum(count for _, count in prompt) // PAGE)
        trace.append(Request(prompt, (), turn.namespace, even))
    return replay(trace, pool, order, page_size=PAGE).hit_tokens


def flags_of(order: str, args: argparse.Namespace) -> list[str]:
    flags = ["--max-total-tokens", str(args.pool), "--page-size", str(PAGE)]
    # The others wait while one is asked; awake, each would take a core.
    flags += ["--max-running-requests", "1", "--enable-metrics", "--sleep-on-idle"]
    flags += ["--context-length", str(args.context), "--chunked-prefill-size", str(args.context)]
    if order == STOCK:
        return [*flags, "--attention-backend", "torch_native"]
    return [*flags, "--kv-compression", "none", "--radix-eviction-policy", order]


def by_metrics(server: Server) -> dict[str, float]:
    """Hit and evicted tokens that the server itself counted so far."""
    names = {"hit": "prefix_hit_tokens_total", "evicted": "prefix_evicted_tokens_total"}
    metrics = Metrics.of(server)  # a counter with labels has no line before it first counts
    return {key: metrics.total(f"sglang_kv:{name}") for key, name in names.items()}


def start(order: str, args: argparse.Namespace, stack: ExitStack) -> Server:
    """A warm server with that order, and with the tree that belongs to it."""
    server = stack.enter_context(Server(args.model, *flags_of(order, args)))
    if (order == STOCK) == ("impl=HeadPageRadixCache" in server.log):
        raise RuntimeError(f"{order}: the server runs another tree than it was asked for")
    ask(server, [5] * 64, "warm-up")
    return server


def measure(
    traffic: Traffic, servers: dict[str, Server], args: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """A row per server. Each request goes to all of them, one after another, each first in its
    turn: the machine's slow and fast moments are the same for all."""
    orders = list(servers)
    cached: dict[str, list[int]] = {order: [] for order in orders}
    seconds: dict[str, list[float]] = {order: [] for order in orders}
    before: dict[str, dict[str, float]] = {}
    for order, server in servers.items():
        server.flush()
        if order != STOCK:
            before[order] = by_metrics(server)
    for index, turn in enumerate(traffic.turns):
        at = index % len(orders)
        for order in orders[at:] + orders[:at]:
            prompt, tenant = traffic.prompt(turn), str(turn.namespace.tenant)
            found, first = ask(servers[order], prompt, tenant)
            cached[order].append(found)
            seconds[order].append(first)
    time.sleep(args.metrics_every)
    prompts = [len(traffic.prompt(turn)) for turn in traffic.turns]
    for order, server in servers.items():
        counted = {}
        if order != STOCK:
            counted = {key: n - before[order][key] for key, n in by_metrics(server).items()}
        took = sum(seconds[order])
        yield {
            "arm": f"{order}, {traffic.name}, {args.pool}",
            "order": order,
            "traffic": traffic.name,
            "requests": len(prompts),
            "prompt_tokens": sum(prompts),
            "pool_tokens": args.pool,
            "hit_tokens": sum(cached[order]),
            "hit_tokens_by_metrics": round(counted["hit"]) if counted else None,
            "hit_rate": round(sum(cached[order]) / sum(prompts), 4),
            "evicted_tokens": round(counted["evicted"]) if counted else None,
            "ttft_mean_s": round(statistics.mean(seconds[order]), 3),
            "ttft_p50_s": round(statistics.median(seconds[order]), 3),
            "ttft_to_lru": round(took / sum(seconds["lru"]), 3) if "lru" in seconds else None,
            "replayed_evenly": None if order == STOCK else replayed(traffic, args.pool, order),
            "model": Path(args.model).name,
            "seed": args.seed,
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--orders", nargs="+", choices=(STOCK, *ORDERS), default=list(ORDERS[:4]))
    parser.add_argument("--traffic", nargs="+", choices=list(TEXTS), default=["tenants"])
    parser.add_argument("--requests", type=int, default=60, help="of each traffic")
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
    found = [TEXTS[name][0](encode, args.seed, requests=args.requests) for name in args.traffic]
    longest = max(len(traffic.prompt(turn)) for traffic in found for turn in traffic.turns)
    if longest >= min(args.context, args.pool):
        parser.error(f"--context and --pool must hold the longest prompt, {longest} tokens")
    with ExitStack() as stack:
        servers = {order: start(order, args, stack) for order in dict.fromkeys(args.orders)}
        for traffic in found:
            for row in measure(traffic, servers, args):
                record("prefix_orders", row, path=args.out)


if __name__ == "__main__":
    main()
