"""The least of a changing set of nodes, in O(log n)."""

from __future__ import annotations

import heapq
from typing import Generic

from sglang_kv.radix.node import Node, V
from sglang_kv.radix.orders import OrderKey

#: Entries that are never worth a rebuild.
SLACK = 64


class LazyHeap(Generic[V]):
    """Nodes by key. A changed key is pushed again, and what it replaces is skipped when it
    comes to the top; the heap is rebuilt, one entry per node, once more than half of it is
    out of date or there twice (a node that was taken out and put back with the key it had).

    So ``num_entries <= most_entries`` always, and a rebuild takes away more than it leaves: what it
    costs was paid by the `put` calls since the last one.
    """

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
        self._tidy()

    def discard(self, node: Node[V]) -> None:
        """Take ``node`` out, if it is in. Amortized O(1)."""
        if self.key_of.pop(node.id, None) is not None:
            self._tidy()

    @property
    def num_entries(self) -> int:
        """Entries, those out of date too."""
        return len(self._entries)

    @property
    def most_entries(self) -> int:
        """What `num_entries` may be now."""
        return 2 * len(self.key_of) + SLACK

    def peek(self) -> Node[V] | None:
        """The least node, which stays; None of an empty heap."""
        while self._entries:
            if self._is_current(self._entries[0]):
                return self._entries[0][2]
            heapq.heappop(self._entries)
        return None

    def _tidy(self) -> None:
        if len(self._entries) > self.most_entries:
            current = {entry[1]: entry for entry in self._entries if self._is_current(entry)}
            self._entries = list(current.values())
            heapq.heapify(self._entries)

    def _is_current(self, entry: tuple[OrderKey, int, Node[V]]) -> bool:
        return self.key_of.get(entry[1]) == entry[0]
