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


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The streams of a request at ``length`` tokens, whole pages all of them.

    Args:
        tokens: what was computed.
        pages: the page lists of all streams, end to end; one reference each.
        counts: pages of each stream, ``[layers, kv_heads]``.
        desc: (kv_len, gap, num_sinks, window_left) of each stream.
        offset: what its logical positions are ahead of those the model was told.
    """

    identity: Identity
    tokens: array[int]
    pages: Pages
    counts: Counts
    desc: NDArray[np.int32]
    offset: int

    @property
    def length(self) -> int:
        return len(self.tokens)


class SnapshotStore:
    """The snapshots of one prefix tree."""

    def __init__(self, tree: HeadPageRadixCache):
        self.tree = tree
        self.ledger = tree.ledger
        self.of_node: dict[TreeNode, Snapshot] = {}
        self._by_identity: dict[Identity, dict[TreeNode, None]] = {}
        self._leaves: set[TreeNode] = set()
        #: References that snapshots hold, by page.
        self.refs: NDArray[np.int32] = np.zeros_like(self.ledger.pool.refs)

    def clear(self) -> None:
        """Everything was flushed, the pool too."""
        self.of_node.clear()
        self._by_identity.clear()
        self._leaves.clear()
        self.refs[:] = 0

    def idle_pages(self) -> int:
        """Pages that snapshots hold and nobody else does."""
        if not self.of_node:
            return 0
        return int(((self.refs > 0) & (self.refs == self.ledger.pool.refs)).sum())

    # -- taking --

    def take(self, state: RequestState, ids: array[int]) -> None:
        """Keep where a finished request ended: at the last whole page of ``ids``, its tokens."""
        plan, size = state.plan, self.ledger.page_size
        length = min(state.length, len(ids)) // size * size
        if not (state.private and resumable(plan)) or length == 0:
            return
        desc = self.ledger.streams.desc[state.slot].copy()
        desc[:, :, KV_LEN] -= state.length - length
        assert isinstance(plan, WindowPlan)
        behind = plan.window.first_page(length - state.offset, size) - plan.window.sink_pages(size)
        if (desc[:, :, GAP] > behind * size).any() or (desc[:, :, KV_LEN] <= 0).any():
            return  # its window has moved on
        identity = identity_of(state)
        tokens = ids[:length]
        if any(self.of_node[n].tokens == tokens for n in self._by_identity.get(identity, ())):
            return
        names = self._names(length)
        if names is None:
            return
        counts = desc[:, :, KV_LEN].astype(np.int64) // size
        table = self.ledger.streams.table[state.slot]
        pages = table[np.arange(table.shape[2]) < counts[..., None]]
        self.ledger.pool.share(pages)
        np.add.at(self.refs, pages, 1)
        node = self._leaf(tokens, names)
        self.of_node[node] = Snapshot(identity, tokens, pages, counts, desc, state.offset)
        self._by_identity.setdefault(identity, {})[node] = None

    def _names(self, count: int) -> torch.Tensor | None:
        """Ids of the virtual ledger for as many tokens; they never get memory of their own."""
        allocator = self.tree.token_to_kv_pool_allocator
        if allocator.available_size() < count:
            self.tree.evict(EvictParams(num_tokens=count))
        names: torch.Tensor | None = allocator.alloc(count)
        return names

    def _leaf(self, tokens: array[int], names: torch.Tensor) -> TreeNode:
        node = TreeNode()
        node.parent = self.tree.root_node
        node.key, node.value = RadixKey(tokens), names
        self.tree.evictable_size_ += len(tokens)
        self.tree.evictable_leaves.add(node)
        self._leaves.add(node)
        return node

    # -- finding, and going on from one --

    def find(self, state: RequestState, key: RadixKey, longer_than: int) -> TreeNode | None:
        """The longest snapshot from which a request with these tokens may go on."""
        if not resumable(state.plan):
            return None
        best: TreeNode | None = None
        ids, limit = key.token_ids, len(key)
        for node in self._by_identity.get(identity_of(state), ()):
            tokens = self.of_node[node].tokens
            end = len(tokens)
            if not longer_than < end <= limit or tokens[-1] != ids[end - 1]:
                continue
            if tokens == ids[:end]:
                best, longer_than = node, end
        if best is not None:
            best.last_access_time = time.monotonic()
        return best

    def resume(self, state: RequestState) -> None:
        """A request that matched a snapshot begins with its streams."""
        node = state.reader_node
        snapshot = self.of_node.get(node) if node is not None else None
        if snapshot is None:
            return
        streams, slot = self.ledger.streams, state.slot
        streams.fit(int(snapshot.counts.max()))
        table = streams.table[slot]
        table[np.arange(table.shape[2]) < snapshot.counts[..., None]] = snapshot.pages
        streams.desc[slot] = snapshot.desc
        streams.offset[slot] = state.offset = snapshot.offset
        state.counts = snapshot.counts.copy()
        self.ledger.pool.share(snapshot.pages)
        state.private = True
        state.length = state.folded_at = snapshot.length
        self.ledger.forget_reader(state)

    # -- letting go --

    def drop(self, node: TreeNode) -> None:
        """Give up a snapshot's pages, and its ids unless a request has them in its row."""
        self.forget(node)
        if node.lock_ref == 0:
            self.tree.token_to_kv_pool_allocator.free_segment(node.value, start_pos=0)
            self.unlink(node)

    def forget(self, node: TreeNode) -> None:
        """Give up a snapshot's pages, if it still is one."""
        snapshot = self.of_node.pop(node, None)
        if snapshot is None:
            return
        others = self._by_identity[snapshot.identity]
        del others[node]
        if not others:
            del self._by_identity[snapshot.identity]
        np.subtract.at(self.refs, snapshot.pages, 1)
        self.ledger.pool.release(snapshot.pages)

    def unlink(self, node: TreeNode) -> None:
        """Out of SGLang's books; its ids are free already."""
        self.tree.evictable_size_ -= len(node.key)
        self.tree.evictable_leaves.discard(node)
        self._leaves.discard(node)

    def is_leaf(self, node: TreeNode) -> bool:
        """Whether ``node`` is or was a snapshot's."""
        return node in self._leaves

    def copies_ahead(self, state: RequestState, node: TreeNode, length: int) -> int:
        """Pages that a request that goes on from ``node`` to ``length`` tokens takes besides: keys
        that it turns are the snapshot's, too, and have to be copied."""
        snapshot, trained = self.of_node.get(node), self.ledger.trained_length
        if snapshot is None or trained is None or not state.cache_positions:
            return 0
        return len(snapshot.pages) if length - snapshot.offset > trained else 0


def resumable(plan: Any) -> bool:
    """Whether a request's end is a place to go on from: its window moves and nothing else does."""
    return isinstance(plan, WindowPlan) and plan.fold_at is None and not plan.dense_first_chunk


def identity_of(state: RequestState) -> Identity:
    req, policy = state.req, state.policy
    parameters = json.dumps(policy.parameters, sort_keys=True, default=str)
    return (req.extra_key, req.cache_salt, policy.name, parameters)
