"""What does it cost to learn what a prompt is worth: the window pass beside the prefill?

    python benchmarks/window_pass.py [--tokens 4000] [--queries 16]

The last queries' attention is summed once per prompt, in its last chunk (where that is shorter, of
the queries that it has), whose attention then has to tell its log-sum-exp, too. Both are timed
against what a prefill cannot do without: the attention of all chunks, and the products with the
weights of a Llama-like model, as the server multiplies. The prefill of a server takes longer, so
the share is an upper bound.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sglang_kv.benchmarks.common import record
from sglang_kv.kernels.attention import extend
from sglang_kv.kernels.layout import PagedStreams, allocate_pages
from sglang_kv.kernels.linear import library_has_bf16, linear
from sglang_kv.kernels.scores import column_sums
from sglang_kv.worth import QUERIES


def streams_of(tokens: int, args: argparse.Namespace) -> PagedStreams:
    """One layer of one request."""
    per_stream = -(-tokens // args.page_size)
    pages = allocate_pages(
        args.kv_heads * per_stream, args.page_size, args.head_dim, torch.bfloat16
    )
    pages.normal_()
    table = torch.arange(args.kv_heads * per_stream, dtype=torch.int32)
    desc = torch.zeros(1, 1, args.kv_heads, 4, dtype=torch.int32)
    desc[..., 0], desc[..., 3] = tokens, -1
    slots = torch.zeros(1, dtype=torch.int32)
    return PagedStreams(pages, table.view(1, 1, args.kv_heads, per_stream), desc, slots)


def seconds(call: Callable[[], Any], rounds: int) -> float:
    call()
    took = []
    for _ in range(rounds):
        begin = time.perf_counter()
        call()
        took.append(time.perf_counter() - begin)
    return statistics.median(took)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    heads, scale = args.group * args.kv_heads, args.head_dim**-0.5
    attention = 0.0
    for end in range(args.chunk, args.tokens + args.chunk, args.chunk):
        end = min(end, args.tokens)
        count = end - (end - 1) // args.chunk * args.chunk
        q = torch.randn(count, heads, args.head_dim).bfloat16()
        indptr = torch.tensor([0, count], dtype=torch.int32)
        streams = streams_of(end, args)
        attention += seconds(partial(extend, q, indptr, streams, 0, sm_scale=scale), 1)

    def last_chunk() -> Any:
        return extend(q, indptr, streams, 0, sm_scale=scale, return_lse=True)

    lse = last_chunk()[1]
    scores = torch.zeros(1, 1, args.kv_heads, -(-args.tokens // args.page_size) * args.page_size)
    scored = min(args.queries, count)
    first = torch.tensor([count - scored], dtype=torch.int32)
    slots = torch.zeros(1, dtype=torch.int32)

    def window() -> None:
        column_sums(q, indptr, first, lse, streams, 0, scores, slots, sm_scale=scale)

    hidden, width = heads * args.head_dim, (heads + 2 * args.kv_heads) * args.head_dim
    shapes = [(width, hidden), (hidden, hidden), *[(args.intermediate, hidden)] * 3]
    weights = [torch.randn(shape).bfloat16() for shape in shapes]
    tokens = torch.randn(args.tokens, hidden).bfloat16()
    multiply = torch.nn.functional.linear if library_has_bf16() else linear
    products = seconds(lambda: [multiply(tokens, weight) for weight in weights], 1)
    window_s, lse_s = seconds(window, args.rounds), seconds(last_chunk, args.rounds)
    without = seconds(partial(extend, q, indptr, streams, 0, sm_scale=scale), args.rounds)
    more_s = window_s + max(0.0, lse_s - without)
    prefill = (attention + products) * args.layers
    return {
        "tokens": args.tokens,
        "queries": scored,
        "chunk": args.chunk,
        "threads": torch.get_num_threads(),
        "window_ms": round(window_s * args.layers * 1e3, 2),
        "lse_ms": round((lse_s - without) * args.layers * 1e3, 2),
        "attention_ms": round(attention * args.layers * 1e3, 1),
        "products_ms": round(products * args.layers * 1e3, 1),
        "share_of_prefill": round(more_s * args.layers / prefill, 5),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--queries", type=int, default=QUERIES)
    parser.add_argument("--chunk", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--group", type=int, default=3, help="query heads per KV head")
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--intermediate", type=int, default=1536)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, help="instead of benchmarks/results/window_pass.jsonl")
    args = parser.parse_args()
    for name, value in vars(args).items():
        if isinstance(value, int) and value < 1:
            parser.error(f"--{name.replace('_', '-')}: must be at least 1, got {value}")
    record("window_pass", measure(args), path=args.out)


if __name__ == "__main__":
    main()
