"""What does each eviction order hit at equal memory, and what could be hit at most?

    python benchmarks/prefix_replay.py [--workloads shared_system_prompts ...] [--requests 600]

No server and no model: traces of seven kinds go through the tree (`radix.replay`). Five are
`radix.workloads`, two have the shape of public traces (`radix.shapes`). `rag` and `tool_agent` were
held out when the order was tuned. One JSON line per workload and size of memory: hit tokens for
every order and for the offline optimum. And what thinning does where every second request is a
`duoattention` request that takes thinned prefixes (the others are dense and fill the tree): the
prefix tokens that lie in memory, and hits, of all and of either kind of request, with prefixes
whole, thinned in their turn, and thinned before any is emptied.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from sglang_kv.benchmarks.common import record
from sglang_kv.radix.node import Thin
from sglang_kv.radix.optimum import optimum
from sglang_kv.radix.orders import ORDERS
from sglang_kv.radix.replay import PrefillOwner, replay
from sglang_kv.radix.shapes import conversation, tool_agent
from sglang_kv.radix.trace import Request
from sglang_kv.radix.workloads import agents, chats, rag, rewritten, shared_system_prompts

SMALL = (32_768, 65_536, 131_072, 262_144)
LARGE = (131_072, 262_144, 524_288, 1_048_576)
#: Generator and tokens of memory; Mooncake's requests are longer.
WORKLOADS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "shared_system_prompts": (shared_system_prompts, SMALL),
    "agents": (agents, SMALL),
    "rag": (rag, SMALL),
    "chats": (chats, SMALL),
    "rewritten": (rewritten, SMALL),
    "conversation": (conversation, LARGE),
    "tool_agent": (tool_agent, LARGE),
}
HELD_OUT = ("rag", "tool_agent")
#: What `duoattention` keeps of a streaming head by default, with half of the heads streaming.
SINKS, RECENT, RETRIEVAL = 64, 256, 0.5


def thinning(short: bool = False) -> PrefillOwner:
    thin = Thin("half", frozenset(), sinks=SINKS, recent=RECENT)
    return PrefillOwner(thin=thin, short=short, retrieval_share=RETRIEVAL)


def measure(requests: Sequence[Request], memory: int) -> dict[str, Any]:
    done = {order: replay(requests, memory, order).hit_tokens for order in ORDERS}
    half = partial(replay, requests, memory, "importance", publish_every=2)
    arms = {
        "whole": half(),
        "thinned": half(owner=thinning()),
        "thinned first": half(owner=thinning(short=True), thin_first=True),
    }
    return {
        "hit_tokens": {**done, "optimum": optimum(requests, memory)},
        "duoattention": {
            name: {
                "resident_tokens": one.resident_tokens,
                "hit_tokens": one.hit_tokens,
                "hit_tokens_by_kind": {
                    "dense": one.hit_tokens - one.duoattention_hit_tokens,
                    "duoattention": one.duoattention_hit_tokens,
                },
                "thinnings": one.thinnings,
            }
            for name, one in arms.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--out", type=Path, help="instead of benchmarks/results/prefix_replay.jsonl"
    )
    args = parser.parse_args()
    for name in args.workloads:
        generate, sizes = WORKLOADS[name]
        requests = generate(args.seed, requests=args.requests)
        for memory in sizes:
            row = {
                "arm": f"{name} {memory}",
                "workload": name,
                "held_out": name in HELD_OUT,
                "memory_tokens": memory,
                "requests": len(requests),
                "prompt_tokens": sum(request.prompt_tokens for request in requests),
                "seed": args.seed,
                **measure(requests, memory),
            }
            record("prefix_replay", row, path=args.out)


if __name__ == "__main__":
    main()
