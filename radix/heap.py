"""The least of a changing set of nodes, in O(log n)."""

from __future__ import annotations

import heapq
from typing import Generic

from sglang_kv.radix.node import Node, V
from sglang_kv.radix.orders import OrderKey


class LazyHeap(Generic[V]):
    """Nodes by key. A changed key is pushed again, and what it replaces is skipped when it
    comes to the top; the heap is rebuilt once more than half of it is out of date."""

    def __init__(self) -> None:
        self.key_of: dict[int, OrderKey] = {}
        self._entries: list[tuple[OrderKey, int, Node[V]]] = []

    def __len__(self) -> int:
        return len(self.key_of)

    def put(self, node: Node[V], key: OrderKey) -> None:
        """Add ``node``, or change its key. Amortized O(log n)."""
        if self.key_of.get(node.id) == key:
            return
        self.key_of[node.id] = key
        heapq.heappush(self._entries, (key, node.id, node))
        if len(self._entries) > 2 * len(self.key_of) + 64:
            self._entries = [entry for entry in self._entries if self._is_current(entry)]
            heapq.heapify(self._entries)

    def discard(self, node: Node[V]) -> None:
        """Take ``node`` out, if it is in. O(1)."""
        self.key_of.pop(node.id, None)

    def peek(self) -> Node[V] | None:
        """The least node, which stays; None of an empty heap."""
        while self._entries:
            if self._is_current(self._entries[0]):
                return self._entries[0][2]
            heapq.heappop(self._entries)
        return None

    def _is_current(self, entry: tuple[OrderKey, int, Node[V]]) -> bool:
        return self.key_of.get(entry[1]) == entry[0]
