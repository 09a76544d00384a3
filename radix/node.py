"""A node of the tree: a run of pages, its memory, and who holds on to it."""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from sglang_kv.radix.key import Namespace, Tokens


class Sliceable(Sized, Protocol):
    """One item per token (ids, a tensor, a range): a split cuts it."""

    def __getitem__(self, item: slice, /) -> Any: ...


V = TypeVar("V", bound=Sliceable)


class State(IntEnum):
    """What memory a node has. It never falls on the way down from the root."""

    RESIDENT = 0  #: all of its tokens in all streams: serves at every page
    THINNED = 1  #: streaming heads have only sinks and the last window: serves at its end
    HOLLOW = 2  #: ids and no memory: serves nobody, unless a snapshot hangs at its end


@dataclass(frozen=True)
class Thin:
    """What a thinned node kept, or what a request needs of one.

    Args:
        gates_id: the gates by which heads were told apart.
        retrieval: (layer, KV head) of the heads that keep every token.
        sinks: first tokens of the sequence that the other heads keep.
        recent: last tokens before the node's end that the other heads keep.
    """

    gates_id: str
    retrieval: frozenset[tuple[int, int]]
    sinks: int
    recent: int

    def covers(self, need: Thin) -> bool:
        """Whether memory thinned to this serves a request that needs ``need``."""
        return (
            self.gates_id == need.gates_id
            and self.retrieval >= need.retrieval
            and self.sinks >= need.sinks
            and self.recent >= need.recent
        )


class Node(Generic[V]):
    """Tokens ``start .. end`` of every key that leads through it. Read it; `RadixTree` writes it.

    Args:
        id: counts up in order of creation and breaks ties.
        tokens: ``[n]`` int64, whole pages.
        value: the owner's, one item per token.
        density: importance of each page, ``[n / page_size]``, per token, at time ``stamp``.
    """

    __slots__ = (
        "bytes",
        "children",
        "cost",
        "density",
        "ends_window",
        "forked",
        "hits",
        "id",
        "kept_children",
        "last_access",
        "lock_ref",
        "namespace",
        "parent",
        "readers",
        "resident_children",
        "snapshot",
        "stamp",
        "start",
        "state",
        "thin",
        "tokens",
        "value",
    )

    def __init__(
        self,
        id: int,
        parent: Node[V] | None,
        namespace: Namespace,
        tokens: Tokens,
        value: V,
        density: NDArray[np.float64],
        stamp: int,
    ):
        self.id = id
        self.parent = parent
        self.children: dict[Any, Node[V]] = {}
        self.namespace = namespace
        self.tokens = tokens
        self.start: int = 0 if parent is None else parent.end
        self.value = value
        self.state = State.RESIDENT
        self.thin: Thin | None = None
        self.ends_window = True  # False for the upper half of a thinned node: a miss
        self.snapshot: Any | None = None
        self.bytes = 0
        self.cost = 0.0
        self.lock_ref = 0
        self.readers = 0
        self.forked = False  # keys went on in several ways, here or below
        self.resident_children = 0
        self.kept_children = 0  # resident or thinned
        self.hits = 0
        self.last_access = 0
        self.density = density
        self.stamp = stamp

    def __len__(self) -> int:
        return len(self.tokens)

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"<Node {self.id} [{self.start}, {self.end}) {self.state.name.lower()}>"

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def holds_memory(self) -> bool:
        return self.state is not State.HOLLOW or self.snapshot is not None

    def serves_at_end(self, need: Thin | None) -> bool:
        """Whether a walk that came here by nodes that served may take this one whole."""
        if self.state is State.RESIDENT:
            return True
        if self.state is not State.THINNED or need is None:
            return False
        assert self.thin is not None
        return self.thin.covers(need)

    def path(self) -> list[Node[V]]:
        """Nodes from below the root down to this one."""
        steps: list[Node[V]] = []
        node = self
        while node.parent is not None:
            steps.append(node)
            node = node.parent
        steps.reverse()
        return steps
