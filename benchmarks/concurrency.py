"""How many long requests run at once in one fixed pool?

    python benchmarks/concurrency.py --pool 34000 --context 4000 --new-tokens 64

The same pool in tokens for every arm; the arithmetic, prefill's peak in it, stands beside the
measurement. --shape-only serves random weights in the model's KV shape (`shape_model`), with the
gates that are found by the model's name: the same pages with little of the arithmetic.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sglang_kv.benchmarks.common import record
from sglang_kv.benchmarks.methods import NONE, PAGE, arms, geometry_of, plan_of
from sglang_kv.benchmarks.server import Server
from sglang_kv.benchmarks.shape_model import write_shape_model
from sglang_kv.compression import Geometry
from sglang_kv.planner.memory import plan_pages, requests_at_once

STOCK = "stock"


def predicted(
    policy: dict[str, Any], geometry: Geometry, pool: int, context: int, new: int, chunk: int
) -> int:
    """Requests that fit, the newest one still at its prefill's peak."""
    steady, peak = plan_pages(plan_of(policy, geometry, context), context, new, chunk)
    return requests_at_once(pool // PAGE * geometry.num_streams, steady, peak)


def measure(
    server: Server, gauge: str, policy: dict[str, Any] | None, count: int, context: int, new: int
) -> int:
    """Most requests seen running at once, by a metric, while ``count`` are served.

    Raises:
        HTTPError: one of them is refused.
    """
    rng = random.Random(0)
    prompts = [[rng.randrange(100, 40000) for _ in range(context)] for _ in range(count)]
    most = 0
    with ThreadPoolExecutor(count) as clients:
        options = {"max_new_tokens": new, "ignore_eos": True}
        served = [clients.submit(server.generate, ids, policy, **options) for ids in prompts]
        while not all(one.done() for one in served):
            most = max(most, int(server.metric(gauge)))
            time.sleep(0.2)
    for one in served:
        one.result()
    return most


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--pool", type=int, default=34000)
    parser.add_argument("--context", type=int, default=4000)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--chunk", type=int, default=4096)
    parser.add_argument("--arms", help="comma-separated; default: all")
    parser.add_argument("--shape-only", action="store_true", help="random weights, the same KV")
    args = parser.parse_args()
    known = [STOCK, *arms(args.context)]
    for name in args.arms.split(",") if args.arms else ():
        if name not in known:
            parser.error(f"--arms: {name!r} is none of {', '.join(known)}")
    with tempfile.TemporaryDirectory() as folder:
        served = args.model
        if args.shape_only:  # gates are found by the folder's name
            served = str(write_shape_model(args.model, Path(folder, Path(args.model).name)))
        run(served, args)


def run(model: str, args: argparse.Namespace) -> None:
    """Stock SGLang on a server of its own, all other arms on one; a line each."""
    flags = ["--max-total-tokens", str(args.pool), "--chunked-prefill-size", str(args.chunk)]
    flags += ["--max-running-requests", "128", "--enable-metrics", "--page-size", str(PAGE)]
    geometry = geometry_of(model)
    policies = arms(args.context)
    chosen = args.arms.split(",") if args.arms else [STOCK, *policies]
    fixed = {"model": Path(args.model).name, "shape_only": args.shape_only}
    fixed |= {"pool_tokens": args.pool, "context": args.context, "new_tokens": args.new_tokens}
    base: int | None = None

    def line(server: Server, arm: str, policy: dict[str, Any] | None, gauge: str) -> None:
        nonlocal base
        sizes = (args.context, args.new_tokens)
        expected = predicted(policy or NONE, geometry, args.pool, *sizes, args.chunk)
        server.flush()
        most = measure(server, gauge, policy, expected + 3, *sizes)
        base = base or most
        found = {"running_at_once": most, "predicted": expected}
        ratio = {"ratio_to_first": round(most / base, 2)}
        record("concurrency", {"arm": arm, "policy": policy, **fixed, **found, **ratio})

    if STOCK in chosen:
        with Server(model, *flags, "--attention-backend", "torch_native") as server:
            line(server, STOCK, None, "sglang:num_running_reqs")
    if ours := [arm for arm in chosen if arm != STOCK]:
        with Server(model, *flags, "--kv-compression", "none") as server:
            for arm in ours:
                line(server, arm, policies[arm], "sglang_kv:running_requests")


if __name__ == "__main__":
    main()
