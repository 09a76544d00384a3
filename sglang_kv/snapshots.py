"""Where a windowed request ended, kept for the next turn of its session.

Under streamingllm and duoattention, tokens beyond sinks and window have KV of their own from the
second layer on: it is no prefix that other policies could share, and its pages in the middle are
gone. What can be kept is the state of all streams at one position. A snapshot holds that: the
pages of each stream, their lengths, and how far positions have moved down. It is valid for the same
policy after the very same tokens, and only at its end.

In the tree a snapshot hangs at the end of a node, under its policy's namespace. The nodes on the
way have ids, so that locks, evictions and the leak check work as for any prefix, and no memory.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from sglang_kv.compression import WindowPlan
from sglang_kv.compression.plan import Counts
from sglang_kv.namespaces import under_policy
from sglang_kv.pool import Pages
from sglang_kv.radix.key import Key
from sglang_kv.request import RequestState
from sglang_kv.streams import GAP, KV_LEN

if TYPE_CHECKING:
    from sglang_kv.owner import PrefixNode
    from sglang_kv.prefix_cache import HeadPageRadixCache


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The streams of a request at ``length`` tokens, whole pages all of them.

    Args:
        pages: the page lists of all streams, end to end; one reference each.
        counts: pages of each stream, ``[layers, kv_heads]``.
        desc: (kv_len, gap, num_sinks, window_left) of each stream.
        offset: what its logical positions are ahead of those the model was told.
    """

    length: int
    pages: Pages
    counts: Counts
    desc: NDArray[np.int32]
    offset: int


class SnapshotStore:
    """The snapshots of one prefix tree."""

    def __init__(self, cache: HeadPageRadixCache):
        self.cache = cache
        self.ledger = cache.ledger
        self.of_node: dict[PrefixNode, Snapshot] = {}

    def clear(self) -> None:
        """Everything was flushed, the pool too."""
        self.of_node.clear()
        self.ledger.pool.forget_held()

    def idle_pages(self) -> int:
        """Pages that snapshots hold and nobody else does."""
        return self.ledger.pool.num_idle

    # -- taking --

    def take(self, state: RequestState, ids: array[int]) -> None:
        """Keep where a finished request ended: at the last whole page of ``ids``, its tokens.

        Of a session's earlier ends, the one before stays, for a turn that is asked anew, and so
        does one that other sessions have gone on from.
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
        assert state.namespace is not None
        own = under_policy(state.namespace, state.policy, thinned=state.need is not None)
        key = Key.of(ids[:length], own)
        names = self._names(key)
        if names is None:
            return
        counts = desc[:, :, KV_LEN].astype(np.int64) // size
        table = self.ledger.streams.table[state.slot]
        pages = table[np.arange(table.shape[2]) < counts[..., None]]
        snapshot = Snapshot(length, pages, counts, desc, state.offset)
        # Worth what an unmeasured prompt is; whoever goes on from it adds to that.
        done = self.cache.tree.insert_snapshot(key, names, snapshot, prior=1.0)
        earlier = [node for node in done.node.path()[:-1] if node.snapshot is not None]
        self.cache.owner.stats.reason = "superseded"
        for node in earlier[:-1]:
            if not node.readers and len(node.children) < 2:  # else others go on from it, too
                self.cache.tree.drop(node)

    def _names(self, key: Key) -> torch.Tensor | None:
        """Ids for the tokens that the tree has none for; they never get memory of their own.

        int64 ``[tokens of the key]``, of which the known ones are left out; None: too few are left.
        """
        tree, allocator = self.cache.tree, self.cache.token_to_kv_pool_allocator
        length = len(key.tokens)
        missing = length - tree.known(key) - allocator.available_size()
        if missing > 0:
            # What is freed within a group comes free at its end: nothing would be won.
            if missing > self.cache.evictable_size() or allocator.free_group is not None:
                return None
            self.cache.evict(EvictParams(num_tokens=missing))
        known = tree.known(key)  # some of them may just have gone
        if length - known > allocator.available_size():
            return None
        names = torch.zeros(length, dtype=torch.int64)
        if known < length:
            names[known:] = allocator.alloc(length - known)
        return names

    def stored(self, node: PrefixNode) -> None:
        """The tree has taken a snapshot: from now on it holds its pages."""
        snapshot = node.snapshot
        assert isinstance(snapshot, Snapshot)
        self.ledger.pool.hold(snapshot.pages)
        self.of_node[node] = snapshot

    def forget(self, node: PrefixNode) -> None:
        """The tree gives a snapshot up."""
        snapshot = self.of_node.pop(node)
        self.ledger.pool.let_go(snapshot.pages)

    # -- going on from one --

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
        return None if state.reader_node is None else state.reader_node.snapshot

    def copies_ahead(self, state: RequestState, node: PrefixNode, length: int) -> int:
        """Pages that a prefill from ``node`` to ``length`` tokens takes besides: keys that it turns
        are the snapshot's, too, and have to be copied."""
        snapshot: Snapshot | None = node.snapshot
        trained = self.ledger.trained_length
        if snapshot is None or trained is None or not state.cache_positions:
            return 0
        return len(snapshot.pages) if length - snapshot.offset > trained else 0

    def drop_of(self, state: RequestState) -> bool:
        """Give up the snapshot that a request would go on from; False: there is none."""
        node = state.reader_node
        if node is None or node.snapshot is None:
            return False
        self.cache.set_reader(state, None)
        if node.readers:
            return False
        self.cache.owner.stats.reason = "memory"
        self.cache.tree.drop(node)
        return True

    def check(self) -> None:
        """Raise unless these are the tree's snapshots and their references add up (for tests)."""
        found = {node for node in self.cache.tree.nodes() if node.snapshot is not None}
        assert found == set(self.of_node), "snapshots are lost, or were not forgotten"
        held = np.zeros_like(self.ledger.pool.held)
        for snapshot in self.of_node.values():
            np.add.at(held, snapshot.pages, 1)
        assert (held == self.ledger.pool.held).all(), "pages of snapshots are counted wrongly"


def resumable(plan: Any) -> bool:
    """Whether a request's end is a place to go on from: its window moves and nothing else does."""
    return isinstance(plan, WindowPlan) and plan.fold_at is None and not plan.dense_first_chunk
