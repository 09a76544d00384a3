"""How near to the memory's limit is the decode kernel?

    python benchmarks/decode_kernel.py

One layer at a time, as a decode step calls it, over pages in random order: 8 requests of 4,000
tokens, and one of 8,000, whose streams have to be split to occupy all cores. Keys and values are
counted as read once; the limit is this machine's measured read bandwidth, and layers enough are
walked through that no cache holds them. A line per set of instructions that the CPU has.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sglang_kv.benchmarks.common import PlainReads, record
from sglang_kv.kernels import jit
from sglang_kv.kernels.attention import decode
from sglang_kv.kernels.layout import PagedStreams, allocate_pages

SHAPES = ((8, 4000), (1, 8000))
WALKED_BYTES = 256e6
WALKS = 4  # about as many bytes as are read plainly in turn


def random_streams(batch: int, tokens: int, layers: int, args: argparse.Namespace) -> PagedStreams:
    """Full streams whose pages lie anywhere in the pool."""
    per_stream = -(-tokens // args.page_size)
    count = batch * layers * args.kv_heads * per_stream
    pages = allocate_pages(count, args.page_size, args.head_dim, torch.bfloat16)
    pages.normal_()
    table = torch.randperm(count).int().view(batch, layers, args.kv_heads, per_stream)
    desc = torch.zeros(batch, layers, args.kv_heads, 4, dtype=torch.int32)
    desc[..., 0], desc[..., 3] = tokens, -1
    return PagedStreams(pages, table.contiguous(), desc, torch.arange(batch, dtype=torch.int32))


def measure(batch: int, tokens: int, args: argparse.Namespace) -> dict[str, float]:
    """Medians of kernel and plain reads in turn, so that a slow moment of the machine hits both."""
    kv_bytes = batch * tokens * args.kv_heads * args.head_dim * 2 * 2
    layers = max(2, round(WALKED_BYTES / kv_bytes))
    streams = random_streams(batch, tokens, layers, args)
    q = torch.randn(batch, args.group * args.kv_heads, args.head_dim).bfloat16()
    out = torch.empty_like(q)
    rounds: list[float] = []
    reads: list[float] = []
    with contextlib.closing(PlainReads()) as plain:
        deadline = time.perf_counter() + args.seconds
        while time.perf_counter() < deadline or len(rounds) < 5:
            begin = time.perf_counter()
            for _ in range(WALKS):
                for layer in range(layers):
                    decode(q, streams, layer, sm_scale=args.head_dim**-0.5, out=out)
            rounds.append((time.perf_counter() - begin) / layers / WALKS)
            reads.append(plain.seconds())
    call_s, read_s = statistics.median(rounds), statistics.median(reads)
    speed, limit = kv_bytes / call_s / 1e9, PlainReads.BYTES / read_s / 1e9
    return {
        "call_us": round(call_s * 1e6, 1),
        "kv_gb_s": round(speed, 2),
        "rounds": len(rounds),
        "read_gb_s": round(limit, 2),
        "read_best_gb_s": round(PlainReads.BYTES / min(reads) / 1e9, 2),
        "share_of_limit": round(speed / limit, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--group", type=int, default=3, help="query heads per KV head")
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=5, help="per shape")
    args = parser.parse_args()
    for isa in ("native", "plain") if jit.has_avx512() else ("native",):  # else the same code
        with_isa(isa)
        for batch, tokens in SHAPES:
            row: dict[str, Any] = {
                "arm": f"{isa}, {batch} x {tokens}",
                "vector_bits": 512 if isa == "native" and jit.has_avx512() else 256,
                "group": args.group,
                "kv_heads": args.kv_heads,
                "head_dim": args.head_dim,
                "page_size": args.page_size,
                "threads": torch.get_num_threads(),
                **measure(batch, tokens, args),
            }
            record("decode_kernel", row)


def with_isa(isa: str) -> None:
    os.environ["SGLANG_KV_CPU_ISA"] = isa
    jit.load_kernels.cache_clear()


if __name__ == "__main__":
    main()
