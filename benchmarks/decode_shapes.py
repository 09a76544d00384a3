"""What makes a decode step longer: the context, and how pages are cut.

    python benchmarks/decode_shapes.py --model MODEL

Two sweeps with the requests, the timing and the fields of `decode_speed`, on one server per page
size, with no stock SGLang beside:

- `none` and StreamingLLM's window at growing contexts: one reads all, the other what it keeps;
- a quarter of a prompt kept by SnapKV token by token (scattered, copied together at the fold) and
  by whole pages (where they lie), in pages of 16 and of 32 tokens, beside `none`.

One JSON line per point in results/decode_shapes.jsonl.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sglang_kv.benchmarks.common import read_bandwidth_gb_s, record
from sglang_kv.benchmarks.decode_speed import measure, run_batch
from sglang_kv.benchmarks.methods import NONE, Policy
from sglang_kv.benchmarks.server import Server

CONTEXTS = (1000, 2000, 4000, 8000)
PAGE_SIZES = (16, 32)
QUARTER: Policy = {"method": "snapkv", "keep_ratio": 0.25}
BY_CONTEXT: dict[str, Policy] = {"none": NONE, "streamingllm": {"method": "streamingllm"}}
BY_PAGE: dict[str, Policy] = {
    "none": NONE,
    "snapkv by token": QUARTER,
    "snapkv by page": {**QUARTER, "granularity": "page"},
}


def points(page_size: int, contexts: tuple[int, ...], cut: int) -> dict[tuple[str, int], Policy]:
    """What a server with this page size measures: arm and context, each once."""
    found = {(arm, cut): policy for arm, policy in BY_PAGE.items()}
    if page_size == PAGE_SIZES[0]:
        found |= {(arm, n): policy for n in contexts for arm, policy in BY_CONTEXT.items()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--contexts", default=",".join(map(str, CONTEXTS)), help="comma-separated")
    parser.add_argument("--cut", type=int, default=4000, help="context of the page arms")
    parser.add_argument("--steps", type=int, default=48, help="decoded tokens per request")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--out", type=Path, help="instead of benchmarks/results/decode_shapes.jsonl"
    )
    args = parser.parse_args()
    for flag, least in (("batch", 1), ("cut", 1), ("steps", 2)):
        if getattr(args, flag) < least:
            parser.error(f"--{flag}: must be at least {least}, got {getattr(args, flag)}")
    parts = args.contexts.split(",")
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        parser.error(f"--contexts: must be whole numbers above 0, got {args.contexts!r}")
    contexts = tuple(map(int, parts))
    bandwidth = read_bandwidth_gb_s()
    longest = max(args.cut, *contexts)
    pool = args.batch * (longest + args.steps + 64) + 4096
    flags = ["--max-total-tokens", str(pool), "--max-running-requests", str(max(8, args.batch))]
    flags += ["--chunked-prefill-size", "4096", "--disable-radix-cache", "--kv-compression", "none"]
    for page_size in PAGE_SIZES:
        with Server(args.model, *flags, "--page-size", str(page_size)) as server:
            run_batch(server, [[5] * 64] * 2, NONE, 8)  # first calls build and warm up
            for (arm, context), policy in points(page_size, contexts, args.cut).items():
                found: dict[str, Any] = measure(
                    server, args.batch, context, args.steps, policy, args.seed
                )
                row = {
                    "arm": f"{arm}, {context} tokens, pages of {page_size}",
                    "name": arm,
                    "policy": policy,
                    "batch": args.batch,
                    "context": context,
                    "page_size": page_size,
                    **found,
                    "read_gb_s": round(bandwidth, 1),
                    "model": Path(args.model).name,
                    "seed": args.seed,
                }
                record("decode_shapes", row, path=args.out)


if __name__ == "__main__":
    main()
