"""What the prefix tree did, in tokens: hits by policy, evictions by reason, importance."""

from __future__ import annotations

import time
from collections import Counter
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from sglang_kv.owner import PrefixNode
    from sglang_kv.radix.tree import RadixTree

#: Upper bounds of importance per token, whose unit is the mean of a prompt, all read once.
BOUNDS = (0.01, 0.1, 0.3, 1.0, 3.0, 10.0, 100.0, float("inf"))
#: Nodes that its distribution is taken of at most, and the share of the time that this may take.
SAMPLE = 1000
WALKING = 0.01


class TreeStats:
    """Counters since start. ``reason`` is why the tree is giving something up at the moment."""

    def __init__(self) -> None:
        self.reason = "memory"
        #: Prompt tokens that came from the tree, and all of them, by method, once per request.
        self.hit_tokens: Counter[str] = Counter()
        self.prompt_tokens: Counter[str] = Counter()
        #: Tokens by ``step/reason``: thin, empty, remove or snapshot; memory, ids,
        #: flush or superseded (an end that its session has left behind).
        self.given_up: Counter[str] = Counter()
        self._spread: dict[str, int] = {}
        self._walk_again = 0.0

    def admitted(self, method: str, hit: int, prompt: int) -> None:
        self.hit_tokens[method] += hit
        self.prompt_tokens[method] += prompt

    def gave_up(self, step: str, tokens: int) -> None:
        self.given_up[f"{step}/{self.reason}"] += tokens

    def spread(self, tree: RadixTree[Any]) -> dict[str, int]:
        """`importance_spread`, some seconds old in a large tree."""
        start = time.monotonic()
        if start >= self._walk_again:
            self._spread = importance_spread(tree)
            end = time.monotonic()
            self._walk_again = end + max(1.0, (end - start) / WALKING)
        return self._spread


def importance_spread(tree: RadixTree[Any]) -> dict[str, int]:
    """Tokens with memory by the importance of their page now, up to each of `BOUNDS`.

    Of the first `SAMPLE` nodes that a walk comes to. A page counts once, under the first bound that
    is not below it; bounds are written as Prometheus writes them.
    """
    counts = np.zeros(len(BOUNDS), dtype=np.int64)
    for node in islice(tree.nodes(), SAMPLE):
        if node.holds_memory:
            counts += _by_bound(tree, node)
    return {_name(bound): int(count) for bound, count in zip(BOUNDS, counts, strict=True)}


def _name(bound: float) -> str:
    return "+Inf" if bound == float("inf") else str(bound)


def _by_bound(tree: RadixTree[Any], node: PrefixNode) -> Any:
    places = np.searchsorted(np.array(BOUNDS), tree.decay.at(node, tree.clock))
    return np.bincount(places, minlength=len(BOUNDS)) * tree.page_size
