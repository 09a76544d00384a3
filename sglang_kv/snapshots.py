"""Where a windowed request ended, kept for the next turn of its session.

Under streamingllm and duoattention, tokens beyond sinks and window have KV of their own from the
second layer on: it is no prefix that other policies could share, and its pages in the middle are
gone. What can be kept is the state of all streams at one position. A snapshot holds that: the
pages of each stream, their lengths, and how far positions have moved down. It is valid for the same
policy after the very same tokens, and only at its end.

To SGLang a snapshot is a leaf of the prefix tree with ids for all its tokens, which is not among
the root's children: no other key leads to it.
"""

from __future__ import annotations

import json
import time
from array import array
from bisect import insort
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.radix_cache import RadixKey, TreeNode

from sglang_kv.compression import WindowPlan
from sglang_kv.compression.plan import Counts
from sglang_kv.pool import Pages
from sglang_kv.request import RequestState
from sglang_kv.streams import GAP, KV_LEN

if TYPE_CHECKING:
    from sglang_kv.prefix_cache import HeadPageRadixCache

#: Who may resume: namespace, salt, method and parameters.
Identity = tuple[Any, Any, str, str]


class SnapshotLeaf(TreeNode):
    """SGLang's view of a snapshot."""


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The streams of a request at ``length`` tokens, whole pages all of them.

    Args:
        raw: the tokens that were computed, as bytes.
        pages: the page lists of all streams, end to end; one reference each.
        counts: pages of each stream, ``[layers, kv_heads]``.
        desc: (kv_len, gap, num_sinks, window_left) of each stream.
        offset: what its logical positions are ahead of those the model was told.
    """

    identity: Identity
    raw: bytes
    length: int
    pages: Pages
    counts: Counts
    desc: NDArray[np.int32]
    offset: int


class SnapshotStore:
    """The snapshots of one prefix tree."""

    def __init__(self, tree: HeadPageRadixCache):
        self.tree = tree
        self.ledger = tree.ledger
        self.of_node: dict[SnapshotLeaf, Snapshot] = {}
        #: The longest first, so that the first hit of a search is the best.
        self._by_identity: dict[Identity, list[SnapshotLeaf]] = {}
        #: References that snapshots hold, by page.
        self.refs: NDArray[np.int32] = np.zeros_like(self.ledger.pool.refs)

    def clear(self) -> None:
        """Everything was flushed, the pool too."""
        self.of_node.clear()
        self._by_identity.clear()
        self.refs[:] = 0

    def idle_pages(self) -> int:
        """Pages that snapshots hold and nobody else does."""
        if not self.of_node:
            return 0
        return int(((self.refs > 0) & (self.refs == self.ledger.pool.refs)).sum())

    # -- taking --

    def take(self, state: RequestState, ids: array[int]) -> None:
        """Keep where a finished request ended: at the last whole page of ``ids``, its tokens.

        Of a session's earlier ends, the one before stays, for a turn that is asked anew.
        """
        plan, size = state.plan, self.ledger.page_size
        # The last token is out: SGLang may have written another one than was computed.
        length = min(state.length, len(ids) - 1) // size * size
        if not (state.private and resumable(plan)) or length == 0:
            return
        desc = self.ledger.streams.desc[state.slot].copy()
        desc[:, :, KV_LEN] -= state.length - length
        assert isinstance(plan, WindowPlan)
        behind = plan.window.first_page(length - state.offset, size) - plan.window.sink_pages(size)
        if (desc[:, :, GAP] > behind * size).any() or (desc[:, :, KV_LEN] <= 0).any():
            return  # its window has moved on
        identity, raw = identity_of(state), ids[:length].tobytes()
        earlier = [n for n in self._by_identity.get(identity, ()) if self._begins(raw, n)]
        if earlier and self.of_node[earlier[0]].length == length:
            return
        for node in earlier[1:]:
            if node not in self.tree.read_nodes:
                self.drop(node)
        names = self._names(length)
        if names is None:
            return
        counts = desc[:, :, KV_LEN].astype(np.int64) // size
        table = self.ledger.streams.table[state.slot]
        pages = table[np.arange(table.shape[2]) < counts[..., None]]
        self.ledger.pool.share(pages)
        np.add.at(self.refs, pages, 1)
        node = self._leaf(ids[:length], names)
        self.of_node[node] = Snapshot(identity, raw, length, pages, counts, desc, state.offset)
        others = self._by_identity.setdefault(identity, [])
        insort(others, node, key=lambda n: -self.of_node[n].length)

    def _begins(self, raw: bytes, node: SnapshotLeaf) -> bool:
        return raw.startswith(self.of_node[node].raw)

    def _names(self, count: int) -> torch.Tensor | None:
        """Ids of the virtual ledger for as many tokens; they never get memory of their own."""
        allocator = self.tree.token_to_kv_pool_allocator
        missing = count - allocator.available_size()
        if missing > 0:
            # What is freed within a group comes free at its end: nothing would be won.
            if missing > self.tree.evictable_size() or allocator.free_group is not None:
                return None
            self.tree.evict(EvictParams(num_tokens=missing))
        names: torch.Tensor | None = allocator.alloc(count)
        return names

    def _leaf(self, tokens: array[int], names: torch.Tensor) -> SnapshotLeaf:
        node = SnapshotLeaf()
        node.parent = self.tree.root_node
        node.key, node.value = RadixKey(tokens), names
        self.tree.evictable_size_ += len(tokens)
        self.tree.evictable_leaves.add(node)
        return node

    # -- finding, and going on from one --

    def find(self, state: RequestState, key: RadixKey, longer_than: int) -> SnapshotLeaf | None:
        """The longest snapshot from which a request with these tokens may go on."""
        if not self.of_node or not resumable(state.plan):
            return None
        nodes = self._by_identity.get(identity_of(state))
        if not nodes:
            return None
        raw = key.token_ids[: len(key)].tobytes()
        for node in nodes:
            if self.of_node[node].length <= longer_than:
                return None
            if self._begins(raw, node):
                node.last_access_time = time.monotonic()
                return node
        return None

    def resume(self, state: RequestState) -> None:
        """A request that matched a snapshot begins with its streams."""
        snapshot = self._read_by(state)
        if snapshot is None:
            return
        streams, slot = self.ledger.streams, state.slot
        streams.fit(int(snapshot.counts.max()))
        table = streams.table[slot]
        table[np.arange(table.shape[2]) < snapshot.counts[..., None]] = snapshot.pages
        streams.touch(slot, 0, int(snapshot.counts.max()))
        streams.desc[slot] = snapshot.desc
        streams.offset[slot] = state.offset = snapshot.offset
        state.counts = snapshot.counts.copy()
        self.ledger.pool.share(snapshot.pages)
        state.private = True
        state.length = state.folded_at = snapshot.length
        self.ledger.forget_reader(state)

    def _read_by(self, state: RequestState) -> Snapshot | None:
        """The snapshot that a request is about to go on from."""
        node = state.reader_node
        return self.of_node.get(node) if isinstance(node, SnapshotLeaf) else None

    def copies_ahead(self, state: RequestState, node: TreeNode, length: int) -> int:
        """Pages that a prefill from ``node`` to ``length`` tokens takes besides: keys that it turns
        are the snapshot's, too, and have to be copied."""
        snapshot = self.of_node.get(node) if isinstance(node, SnapshotLeaf) else None
        trained = self.ledger.trained_length
        if snapshot is None or trained is None or not state.cache_positions:
            return 0
        return len(snapshot.pages) if length - snapshot.offset > trained else 0

    # -- letting go --

    def drop_of(self, state: RequestState) -> bool:
        """Give up the snapshot that a request would go on from; False: there is none."""
        node = state.reader_node
        if not isinstance(node, SnapshotLeaf) or node not in self.of_node:
            return False
        self.tree.set_reader(state, None)
        self.drop(node)
        return True

    def drop(self, node: SnapshotLeaf) -> None:
        """Give up a snapshot's pages, and its ids unless a request has them in its row."""
        self.forget(node)
        if node.lock_ref == 0:
            self.tree.token_to_kv_pool_allocator.free_segment(node.value, start_pos=0)
            self.unlink(node)

    def forget(self, node: SnapshotLeaf) -> None:
        """Give up a snapshot's pages, if it still is one."""
        snapshot = self.of_node.pop(node, None)
        if snapshot is None:
            return
        others = self._by_identity[snapshot.identity]
        others.remove(node)
        if not others:
            del self._by_identity[snapshot.identity]
        np.subtract.at(self.refs, snapshot.pages, 1)
        self.ledger.pool.release(snapshot.pages)

    def unlink(self, node: SnapshotLeaf) -> None:
        """Out of SGLang's books; its ids are free already."""
        self.tree.evictable_size_ -= len(node.key)
        self.tree.evictable_leaves.discard(node)


def resumable(plan: Any) -> bool:
    """Whether a request's end is a place to go on from: its window moves and nothing else does."""
    return isinstance(plan, WindowPlan) and plan.fold_at is None and not plan.dense_first_chunk


def identity_of(state: RequestState) -> Identity:
    req, policy = state.req, state.policy
    parameters = json.dumps(policy.parameters, sort_keys=True, default=str)
    return (req.extra_key, req.cache_salt, policy.name, parameters)
