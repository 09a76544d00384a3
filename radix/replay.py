"""What each eviction order would have hit: a trace through a tree of fixed memory.

One request at a time: it matches, holds what it matched, evicts until its prompt and its answer
fit, stores both, and credits its path with the importance that the trace gives. The last token of
a prompt is always computed, as a server has to.

    python -m sglang_kv.radix.replay TRACE.jsonl --memory 100000
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from sglang_kv.radix.importance import HALF_LIFE, profile
from sglang_kv.radix.node import Node, State, Thin
from sglang_kv.radix.optimum import optimum
from sglang_kv.radix.orders import ORDERS
from sglang_kv.radix.owner import Owner
from sglang_kv.radix.trace import Request, read_trace
from sglang_kv.radix.tree import RadixTree

SIGNALS = ("trace", "uniform", "shuffled")


class PrefillOwner(Owner[range]):
    """A token costs bytes, and computing it again costs more the later it stands.

    Args:
        crossover: position at which attention costs as much as all the rest of a token (about
            30,000 in an 8B model of 32 layers with 4,096 channels).
        thin: what nodes may be thinned to; None: never.
        short: nodes are thinned, too, that give up little or nothing, since what lies above one can
            only be thinned after it.
        retrieval_share: of the streams, those that keep every token of a thinned node.
        token_bytes: bytes of one token in all streams.
    """

    def __init__(
        self,
        *,
        crossover: float = 32_768.0,
        thin: Thin | None = None,
        short: bool = False,
        retrieval_share: float = 0.5,
        token_bytes: int = 64,
    ):
        self.crossover = crossover
        self.thin = thin
        self.short = short
        self.retrieval_share = retrieval_share
        self.token_bytes = token_bytes
        self.thinnings = 0

    def weigh(self, node: Node[range]) -> int:
        if node.state is State.HOLLOW:
            return 0
        if node.thin is None:
            return self.token_bytes * len(node)
        kept = max(0, min(len(node), node.thin.sinks - node.start))
        kept += min(len(node), node.thin.recent)  # the upper half of a split: at most as much
        kept = min(kept, len(node))
        share = self.retrieval_share
        return round(self.token_bytes * (share * len(node) + (1 - share) * kept))

    def cost(self, node: Node[range]) -> float:
        return len(node) * (1.0 + (node.start + len(node) / 2) / self.crossover)

    def plan_thin(self, node: Node[range]) -> Thin | None:
        thin = self.thin
        worth_it = thin is not None and (self.short or len(node) > 2 * thin.recent)
        return thin if worth_it else None

    def thinned(self, node: Node[range]) -> None:
        self.thinnings += 1


@dataclass(frozen=True)
class Replayed:
    """What came of one replay. Tokens; ``resident_tokens`` is the mean over the second half, and
    ``duoattention_hit_tokens`` the part of ``hit_tokens`` of requests that store nothing."""

    order: str
    requests: int
    prompt_tokens: int
    hit_tokens: int
    duoattention_hit_tokens: int
    resident_tokens: int
    thinnings: int

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / max(1, self.prompt_tokens)


def replay(
    requests: Sequence[Request],
    memory_tokens: int,
    order: str,
    *,
    page_size: int = 16,
    half_life: float = HALF_LIFE,
    owner: PrefillOwner | None = None,
    thin_first: bool = False,
    publish_every: int = 1,
) -> Replayed:
    """Run ``requests`` through a tree that holds ``memory_tokens`` dense tokens.

    A request that does not fit into the empty memory is served without the tree: no hit, nothing
    stored. With an owner that thins, requests may use thinned nodes; what one computes behind such
    a node is not what full attention gives, so it is not stored.

    Args:
        thin_first: see `RadixTree`.
        publish_every: every so many requests one is dense: it stores what it computes and takes no
            thinned nodes. The others are `duoattention` requests: they take thinned nodes if the
            owner thins, and what they compute is their own. 1: all store.
    """
    owner = PrefillOwner() if owner is None else owner
    tree: RadixTree[range] = RadixTree(
        page_size,
        owner=owner,
        order_name=order,
        half_life=half_life * memory_tokens,
        thin_first=thin_first,
    )
    capacity = memory_tokens * owner.token_bytes
    prompt_tokens = hits = duoattention_hits = resident = 0
    for index, request in enumerate(requests):
        key, length = request.key(), request.prompt_tokens
        prompt_tokens += length
        whole = len(key.tokens) // page_size * page_size
        if whole > memory_tokens:
            continue
        publishes = index % publish_every == 0
        need = None if publishes and publish_every > 1 else owner.thin
        match = tree.match(key, limit=length - 1, need=need)
        hits += match.length
        duoattention_hits += 0 if publishes else match.length
        tree.lock(match.node)
        tree.read(match.node)
        if publishes:  # with room for all of it: what is thinned on its way is filled again
            tree.evict(tree.used_bytes + (whole - match.length) * owner.token_bytes - capacity)
        worth = None if request.importance is None else profile(request.importance)
        if not publishes or match.node.state is State.THINNED:
            tree.credit(match.node, worth)
        else:
            done = tree.insert(key._replace(tokens=key.tokens[:length]), range(length))
            tree.credit(done.node, worth, goes_on=done.goes_on)
            # Nobody has looked at the answer yet: an even share, as for all that was not measured.
            tree.insert(key, range(len(key.tokens)), prior=0.0 if worth is None else 1.0)
        tree.unread(match.node)
        tree.unlock(match.node)
        assert tree.used_bytes <= capacity, "a request did not fit into what was freed for it"
        if index >= len(requests) // 2:
            resident += sum(len(node) for node in tree.nodes() if node.holds_memory)
    return Replayed(
        order,
        len(requests),
        prompt_tokens,
        hits,
        duoattention_hits,
        resident // max(1, len(requests) - len(requests) // 2),
        owner.thinnings,
    )


def with_signal(requests: Iterable[Request], signal: str, seed: int = 0) -> list[Request]:
    """The trace with another importance, for ablations.

    ``trace``: as it is. ``uniform``: every page of a prompt the same, so that only who reads, when
    and how often remains. ``shuffled``: a prompt's own values in random places.
    """
    if signal not in SIGNALS:
        raise ValueError(f"unknown signal {signal!r}; known: {', '.join(SIGNALS)}")
    rng = np.random.default_rng(seed)
    changed = []
    for request in requests:
        density = request.importance
        if density is not None and len(density):
            if signal == "uniform":
                density = np.full_like(density, density.mean())
            elif signal == "shuffled":
                density = rng.permutation(density)
        changed.append(replace(request, importance=density))
    return changed


def compare(
    requests: Sequence[Request], memory_tokens: int, *, page_size: int = 16
) -> list[dict[str, Any]]:
    """A row per order, importance with each signal, and the offline optimum as a bound."""
    rows: list[dict[str, Any]] = []
    runs = [(name, "trace") for name in ORDERS]
    runs += [("importance", signal) for signal in SIGNALS[1:]]
    for order, signal in runs:
        trace = with_signal(requests, signal) if order == "importance" else requests
        done = replay(trace, memory_tokens, order, page_size=page_size)
        name = order if signal == "trace" else f"{order}-{signal}"
        rows.append(
            {"order": name, "hit_tokens": done.hit_tokens, "hit_rate": round(done.hit_rate, 4)}
        )
    best = optimum(requests, memory_tokens, page_size=page_size)
    total = sum(request.prompt_tokens for request in requests)
    bound = {"order": "optimum", "hit_tokens": best, "hit_rate": round(best / max(1, total), 4)}
    return [*rows, bound]


def main(argv: Sequence[str] | None = None) -> None:
    """Print `compare`'s rows, one JSON object per line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("trace", type=Path, help="JSON lines, see sglang_kv/radix/trace.py")
    parser.add_argument("--memory", type=int, required=True, help="tokens that fit")
    parser.add_argument("--page-size", type=int, default=16)
    args = parser.parse_args(argv)
    for row in compare(list(read_trace(args.trace)), args.memory, page_size=args.page_size):
        print(json.dumps(row))


if __name__ == "__main__":
    main()
