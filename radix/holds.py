"""Who uses the tree: locks on ids, readers of memory, and what requests were worth to pages."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sglang_kv.radix.books import Books
from sglang_kv.radix.node import Node, V


class Holds(Books[V]):
    """The part of a `RadixTree` that needs a node and no key."""

    # -- holding on --

    def lock(self, node: Node[V]) -> int:
        """Keep the ids from the root to ``node``; return how many tokens became protected."""
        moved = 0
        for step in self._alive(node).path():
            step.lock_ref += 1
            if step.lock_ref == 1:
                moved += len(step)
                self.leaves.discard(step)
        self.evictable_tokens -= moved
        self.protected_tokens += moved
        return moved

    def unlock(self, node: Node[V]) -> int:
        """Undo one `lock`; return how many tokens became evictable."""
        path = self._alive(node).path()
        if any(step.lock_ref == 0 for step in path):
            raise ValueError(f"{node} was not locked")
        moved = 0
        for step in path:
            step.lock_ref -= 1
            if step.lock_ref == 0:
                moved += len(step)
                self._refresh(step)
        self.evictable_tokens += moved
        self.protected_tokens -= moved
        return moved

    def read(self, node: Node[V]) -> None:
        """Keep the memory from the root to ``node``, or of its snapshot alone."""
        steps = self._read_by(node)
        if any(not step.holds_memory for step in steps):
            raise ValueError(f"the path to {node} has lost memory")
        for step in steps:
            step.readers += 1
            if step.readers == 1:
                self._count_idle(step, -step.bytes)
                self._refresh(step)

    def unread(self, node: Node[V]) -> None:
        """Undo one `read` (of a move from one node to another, read the new one first)."""
        steps = self._read_by(node)
        if any(step.readers == 0 for step in steps):
            raise ValueError(f"{node} was not read")
        for step in steps:
            step.readers -= 1
            if step.readers == 0:
                self._count_idle(step, step.bytes)
                self._refresh(step)

    def _read_by(self, node: Node[V]) -> list[Node[V]]:
        return [node] if self._alive(node).snapshot is not None else node.path()

    def _alive(self, node: Node[V]) -> Node[V]:
        if node.parent is None and node is not self.root:
            raise ValueError(f"{node} has left the tree")
        return node

    # -- learning --

    def credit(
        self, node: Node[V], density: ArrayLike | None = None, *, goes_on: bool = False
    ) -> None:
        """A request has used the path to ``node``: count it, once per request, and add what its
        window pass saw.

        Args:
            density: importance per token of each page of the key, at least ``[node.end /
                page_size]``, from `importance.profile`; None: nothing was measured.
            goes_on: `Insertion.goes_on` of the request's first insert: it is the earlier reader
                once more, whose pages are refreshed instead of counted twice.
        """
        pages: NDArray[np.float64] | None = None
        if density is not None:
            pages = np.asarray(density, dtype=np.float64)
            if pages.ndim != 1 or len(pages) * self.page_size < node.end:
                raise ValueError(f"density {pages.shape} for {node.end} tokens")
            if not (np.isfinite(pages).all() and (pages >= 0).all()):
                raise ValueError("density must be finite and not negative")
        path = self._alive(node).path()
        for upper, lower in pairwise(reversed(path)):
            lower.forked |= upper.forked
        for step in path:
            step.hits += 1
            if pages is not None:
                first, last = step.start // self.page_size, step.end // self.page_size
                learn = self.decay.refresh if goes_on else self.decay.add
                learn(step, pages[first:last], self.clock)
        self._touch(path)

    def _touch(self, path: list[Node[V]]) -> None:
        self.accesses += 1
        for step in path:
            step.last_access = self.accesses
        for step in path:
            # Being used makes nobody a candidate; it moves those who are.
            if step.id in self.memory.key_of or step.id in self.leaves.key_of:
                self._refresh(step)
