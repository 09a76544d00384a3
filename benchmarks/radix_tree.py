"""What does the prefix tree cost: match and insert of a long prompt, and evicting a page?

    python benchmarks/radix_tree.py [--out FILE]

Trees of 10 to 100,000 nodes; prompts of 32,000 tokens of which the tree knows half. Every cost is
the median of single operations. No torch, no server.
"""

from __future__ import annotations

import argparse
import statistics
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from sglang_kv.benchmarks.common import record
from sglang_kv.radix.importance import profile
from sglang_kv.radix.key import Key, Namespace
from sglang_kv.radix.tree import RadixTree

PAGE = 16
PROMPT = 32_000


def filled(nodes: int) -> RadixTree[range]:
    """A tree of ``nodes`` nodes: runs of ten pages, half of them below others."""
    tree: RadixTree[range] = RadixTree(PAGE, half_life=1e6)
    rng = np.random.default_rng(0)
    made = 0
    while tree.num_nodes < nodes:
        tokens = np.arange(320, dtype=np.int64) + (made // 4) * 1_000
        tokens[160:] += (made % 4) * 10_000_000_000  # four continuations of one beginning
        key = Key.of(tokens, Namespace(tenant=f"t{made % 16 // 4}"))
        node = tree.insert(key, range(320)).node
        tree.credit(node, rng.random(20))
        made += 1
    return tree


class Clock:
    """Milliseconds of single operations, by name."""

    def __init__(self) -> None:
        self.took_ms: dict[str, list[float]] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.took_ms.setdefault(name, []).append((time.perf_counter() - start) * 1e3)

    def median(self, name: str) -> float:
        return round(statistics.median(self.took_ms[name]), 4)


def measure(nodes: int, repeats: int) -> dict[str, Any]:
    tree = filled(nodes)
    total = tree.num_nodes
    density = np.random.default_rng(1).random(PROMPT // PAGE)
    clock = Clock()
    for index in range(repeats):
        first = 10**12 * (index + 1)
        ids = array("q", range(first, first + PROMPT))
        tree.insert(Key.of(ids[: PROMPT // 2]), range(PROMPT // 2))
        # The key comes as SGLang has it; making one of it is part of the cost.
        with clock("match_and_insert"):
            with clock("match"):
                tree.match(Key.of(ids))
            with clock("insert"):
                done = tree.insert(Key.of(ids), range(PROMPT))
        with clock("profile"):
            worth = profile(density)
        with clock("credit"):
            tree.credit(done.node, worth)
    for _ in range(min(1000, total // 2)):
        with clock("evict_node"):
            tree.evict_one()
    tree.check()
    # The worst shape there is: a path of one-page nodes.
    comb = np.arange(PROMPT, dtype=np.int64)
    for end in range(PAGE, PROMPT, PAGE):
        tree.insert(Key.of(comb[:end], Namespace(tenant="comb")), range(end))
    for _ in range(3):
        with clock("match_path_of_pages"):
            tree.match(Key.of(comb, Namespace(tenant="comb")))
    return {
        "nodes": total,
        "prompt_tokens": PROMPT,
        "page_size": PAGE,
        **{f"{name}_ms": clock.median(name) for name in clock.took_ms},
        "match_and_insert_worst_ms": round(max(clock.took_ms["match_and_insert"]), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=[10, 100, 1_000, 10_000, 100_000])
    parser.add_argument("--repeats", type=int, default=31)
    parser.add_argument("--out", type=Path, help="instead of benchmarks/results/radix_tree.jsonl")
    args = parser.parse_args()
    if min(args.repeats, *args.nodes) < 1:
        parser.error("--nodes, --repeats: must be at least 1")
    for nodes in args.nodes:
        record("radix_tree", measure(nodes, args.repeats), path=args.out)


if __name__ == "__main__":
    main()
