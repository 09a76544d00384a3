"""Who goes first: pure functions from a node to a key; the least key is evicted first.

A key must depend on the node alone and not on the time of asking, so that a heap stays valid while
time passes. Equal keys are settled by the node's id.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from sglang_kv.radix.importance import Decay
from sglang_kv.radix.node import Node

#: Half-lives by which a prefix that several readers went on from outlives what only one ever used:
#: with `importance.HALF_LIFE`, eight times the memory.
SHARED = 128.0

OrderKey = tuple[float, ...]
Order = Callable[[Node[Any]], OrderKey]


def lru(node: Node[Any]) -> OrderKey:
    """Least recently used."""
    return (node.last_access,)


def lfu(node: Node[Any]) -> OrderKey:
    """Least frequently used, then least recently."""
    return (node.hits, node.last_access)


def slru(node: Node[Any]) -> OrderKey:
    """Segmented LRU: what only one request ever used goes before what was used again."""
    return (node.hits > 1, node.last_access)


def importance(node: Node[Any], decay: Decay) -> OrderKey:
    """Least decayed importance x recompute cost per byte, then least recently used.

    Where several readers have gone on from a node in different ways, it counts 2**`SHARED` times:
    a document that is read once draws as much attention as any other, and only its second reader
    tells that there will be a third. The credit fades like the rest.
    """
    if node.bytes <= 0 or node.cost <= 0:
        return (math.inf if node.cost > 0 else -math.inf, node.last_access)
    shared = SHARED if node.forked else 0.0
    return (decay.rank(node) + shared + math.log2(node.cost / node.bytes), node.last_access)


def cost(node: Node[Any]) -> OrderKey:
    """Least cost to compute again per byte: what importance has to be better than."""
    return (node.cost / node.bytes if node.bytes > 0 else math.inf, node.last_access)


ORDERS = ("importance", "lru", "lfu", "slru", "cost")


def order(name: str, decay: Decay) -> Order:
    """The order called ``name``. Raises ValueError for one that is not in `ORDERS`."""
    if name == "importance":
        return lambda node: importance(node, decay)
    plain: dict[str, Order] = {"lru": lru, "lfu": lfu, "slru": slru, "cost": cost}
    if name not in plain:
        raise ValueError(f"unknown eviction order {name!r}; known: {', '.join(ORDERS)}")
    return plain[name]
