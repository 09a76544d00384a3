"""The memory side of the tree: who may lose what, in which order, and what is left.

Two things are counted apart. **Locks** keep a node's *ids* (SGLang's ``lock_ref``: a running
request has them in its row), **readers** keep its *memory*. A node without readers may lose its
memory, in steps:

    resident --thin--> thinned --empty--> hollow --remove--> gone
        \\________________empty_______________/

and leaves the tree at once if it is an unlocked leaf. Memory goes from the leaves upward: a node is
thinned only when nothing under it is resident, emptied only when everything under it is hollow.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Generic, NamedTuple

import numpy as np

from sglang_kv.radix.heap import LazyHeap
from sglang_kv.radix.importance import Decay
from sglang_kv.radix.key import Namespace
from sglang_kv.radix.node import Node, State, Thin, V
from sglang_kv.radix.orders import Order, OrderKey, order
from sglang_kv.radix.owner import Owner


class Eviction(NamedTuple):
    """One step: ``thin``, ``empty`` (ids stay), ``remove`` or ``snapshot`` (dropped, ids stay)."""

    node: Node[Any]
    step: str
    freed_bytes: int


class Books(Generic[V]):
    """Counters, candidates and eviction of a `RadixTree`, which adds keys to it."""

    def __init__(
        self,
        page_size: int = 1,
        *,
        owner: Owner[V] | None = None,
        order_name: str = "importance",
        half_life: float = float("inf"),
        thin_first: bool = False,
    ):
        if page_size <= 0:
            raise ValueError(f"page_size must be positive, got {page_size}")
        self.page_size = page_size
        self.owner: Owner[V] = Owner() if owner is None else owner
        self.decay = Decay(half_life)
        self.order_name = order_name
        self.thin_first = thin_first
        self.order: Order = order(order_name, self.decay)
        self.clock = 0  #: tokens stored so far: what importance ages by
        self.accesses = 0  #: grows with every access: what recency is told by
        self._next_id = 0
        self.reset()

    def reset(self) -> None:
        """Forget every node, without telling the owner. Clock and ids go on."""
        empty: Any = ()
        no_density = np.zeros(0)
        no_tokens = np.zeros(0, dtype=np.int64)
        self.root: Node[V] = Node(
            self._new_id(), None, Namespace(), no_tokens, empty, no_density, self.clock
        )
        self.num_nodes = 0
        self.used_bytes = 0
        self.idle_bytes = 0  #: part of ``used_bytes`` that nobody reads
        self.idle_snapshot_bytes = 0  #: part of ``idle_bytes`` that snapshots weigh
        self.evictable_tokens = 0  #: ids of unlocked nodes
        self.protected_tokens = 0  #: ids of locked nodes
        self.memory: LazyHeap[V] = LazyHeap()  #: nodes that may lose memory
        self.leaves: LazyHeap[V] = LazyHeap()  #: nodes that may lose their ids

    # -- making room --

    def evict(self, num_bytes: int) -> int:
        """Free at least ``num_bytes`` if that can be done; return how many were freed."""
        freed = 0
        while freed < num_bytes and (step := self.evict_one()) is not None:
            freed += step.freed_bytes
        return freed

    def evict_one(self) -> Eviction | None:
        """The next step of eviction; None if nothing may go. O(log n).

        A step may free nothing (an owner's pages may be shared), so callers that count otherwise
        than `Owner.weigh` call this until they have what they need.
        """
        node = self.memory.peek()
        if node is None:
            return None
        if node.state is State.RESIDENT:
            plan = self.owner.plan_thin(node)
            if plan is not None:
                freed = self.thin(node, plan)
                return Eviction(node, "thin", freed)
        return self._give_up(node)

    def drop(self, node: Node[V]) -> Eviction:
        """Give up one node's memory out of turn, and its ids where nobody needs them.

        Raises ValueError if the node may not lose memory now: it has none, somebody reads it, or
        what lies under it has some.
        """
        if self.memory_key(node) is None or (node.snapshot is None and node.kept_children):
            raise ValueError(f"{node} cannot be dropped: it is read, or not the last with memory")
        return self._give_up(node)

    def evict_tokens(self, num_tokens: int) -> int:
        """Give up the ids of at least ``num_tokens`` tokens if that can be done, what holds no
        memory first; return how many. Ids and memory of a node go together here."""
        freed = 0
        while freed < num_tokens and (node := self.leaves.peek()) is not None:
            freed += len(node)
            self._remove(node)
        return freed

    def thin(self, node: Node[V], plan: Thin) -> int:
        """Thin a resident node; return the bytes that this frees (0 if it gained nothing).

        Raises ValueError if somebody reads the node, it is not resident, or a child is.
        """
        if node.state is not State.RESIDENT or node.readers or node.resident_children:
            raise ValueError(f"{node} cannot be thinned: it is read, or not the last resident")
        before = node.bytes
        node.thin = plan
        self._set_state(node, State.THINNED)
        self.owner.thinned(node)
        self._reweigh(node)
        self._refresh(node)
        return before - node.bytes

    def flush(self, namespaces: set[Namespace]) -> int:
        """Remove all of these namespaces that is neither locked nor read, empty what is not read;
        return how many tokens with memory are left because a request is reading them."""
        found = [n for n in self.nodes() if n.namespace in namespaces]
        left = 0
        for node in reversed(found):  # children come after their parents
            if node.readers:
                left += len(node) if node.holds_memory else 0
            elif node.lock_ref == 0 and not node.children:
                self._remove(node)
            elif node.holds_memory and (node.snapshot is not None or node.kept_children == 0):
                self._empty(node)
        return left

    # -- looking --

    def nodes(self) -> Iterator[Node[V]]:
        """All nodes but the root, parents before their children."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def memory_key(self, node: Node[V]) -> OrderKey | None:
        """Place of a node among those that may lose memory; None if it may not."""
        if node.parent is None or node.readers or not node.holds_memory:
            return None
        if node.state is not State.HOLLOW and node.kept_children:
            if node.state is not State.RESIDENT or node.resident_children:
                return None
            if self.owner.plan_thin(node) is None:
                return None
        # The upper half of a thinned node serves nobody once the lower half has gone.
        useless = not node.ends_window and not node.kept_children
        thins = self.thin_first and node.state is State.RESIDENT
        thins = thins and self.owner.plan_thin(node) is not None
        return (not useless, not thins, *self.order(node))

    def leaf_key(self, node: Node[V]) -> OrderKey | None:
        """Place of a node among those that may lose their ids; None if it may not."""
        if node.parent is None or node.children or node.lock_ref or node.readers:
            return None
        return (node.holds_memory, *self.order(node))

    # -- keeping the books --

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id

    def _refresh(self, node: Node[V]) -> None:
        """Something about ``node`` has changed that may matter to eviction."""
        for heap, key in (
            (self.memory, self.memory_key(node)),
            (self.leaves, self.leaf_key(node)),
        ):
            if key is None:
                heap.discard(node)
            else:
                heap.put(node, key)

    def _reweigh(self, node: Node[V]) -> None:
        weight = self.owner.weigh(node)
        self.used_bytes += weight - node.bytes
        if node.readers == 0:
            self._count_idle(node, weight - node.bytes)
        node.bytes = weight
        node.cost = self.owner.cost(node)

    def _count_idle(self, node: Node[V], num_bytes: int) -> None:
        """So many more bytes of ``node`` are read by nobody."""
        self.idle_bytes += num_bytes
        if node.namespace.policy is not None:  # there nothing but a snapshot has memory
            self.idle_snapshot_bytes += num_bytes

    def _set_state(self, node: Node[V], state: State) -> None:
        parent = node.parent
        assert parent is not None
        was, node.state = node.state, state
        parent.resident_children += (state is State.RESIDENT) - (was is State.RESIDENT)
        parent.kept_children += (state is not State.HOLLOW) - (was is not State.HOLLOW)
        if state is not State.THINNED:
            node.thin = None
            node.ends_window = True
        self._refresh(parent)

    def _give_up(self, node: Node[V]) -> Eviction:
        snapshot, freed = node.snapshot is not None, node.bytes
        if node.lock_ref == 0 and not node.children:
            self._remove(node)
            return Eviction(node, "remove", freed)
        self._empty(node)
        return Eviction(node, "snapshot" if snapshot else "empty", freed)

    def _empty(self, node: Node[V]) -> None:
        self.owner.emptied(node)
        node.snapshot = None
        self._set_state(node, State.HOLLOW)
        self._reweigh(node)
        self._refresh(node)

    def _remove(self, node: Node[V]) -> None:
        """A leaf without locks and readers leaves the tree."""
        parent = node.parent
        assert parent is not None
        assert self.leaf_key(node) is not None, f"{node} is in use"
        self.owner.removed(node)
        del parent.children[self._child_key(parent, node.namespace, node.tokens)]
        parent.resident_children -= node.state is State.RESIDENT
        parent.kept_children -= node.state is not State.HOLLOW
        self.used_bytes -= node.bytes
        self._count_idle(node, -node.bytes)
        self.evictable_tokens -= len(node)
        self.num_nodes -= 1
        self.memory.discard(node)
        self.leaves.discard(node)
        node.parent = None
        self._refresh(parent)

    def _child_key(self, parent: Node[V], namespace: Namespace, tokens: Any) -> Any:
        """Where a child that begins with ``tokens`` hangs. Namespaces part at the root."""
        page: bytes = tokens[: self.page_size].tobytes()
        return (namespace, page) if parent is self.root else page
