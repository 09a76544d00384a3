"""The prefix tree over two ledgers: what is locked and what is read are different things.

SGLang locks a request's whole prompt path until the request ends, and never evicts what is
locked. Those ledger locks stay. Beside them the tree counts *physical readers*: dense
requests that read its head pages. A node without readers may be emptied though it is
locked: it turns *hollow*, its ids stay, matching stops there, and the next request that
inserts over it gives its pages (`PhysicalLedger.adopt`).
"""

from __future__ import annotations

import heapq
from collections.abc import Container
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams, MatchResult
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey, TreeNode

from sglang_kv.request import RequestState
from sglang_kv.snapshots import SnapshotLeaf, SnapshotStore
from sglang_kv.state import PhysicalLedger


class HeadPageRadixCache(RadixCache):
    """SGLang's Python `RadixCache` with physical readers, hollow nodes and publish limits."""

    def __init__(self, params: Any, ledger: PhysicalLedger):
        self.ledger = ledger
        self._readers: dict[TreeNode, int] = {}
        self._hollow: set[TreeNode] = set()
        self._idle_tokens = 0  # resident, and read by nobody
        self.snapshots = SnapshotStore(self)
        super().__init__(params)
        ledger.tree = self
        announce = self.kv_events.record_remove
        # What was never stored is not removed: to others, its tokens are the dense prefix.
        self.kv_events.record_remove = lambda node, *args: (
            None if isinstance(node, SnapshotLeaf) else announce(node, *args)
        )

    def reset(self) -> None:
        self._readers.clear()
        self._hollow.clear()
        self._idle_tokens = 0
        self.snapshots.clear()
        super().reset()

    # -- matching and publishing --

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """As SGLang's, but no deeper than the request's policy may share."""
        state: RequestState | None = getattr(params.req, "sglang_kv", None)
        limit = state.match_limit() if state is not None else None
        plain = params
        if limit is not None and len(params.key) > limit:
            plain = MatchPrefixParams(
                key=params.key[:limit], cow_mamba=params.cow_mamba, req=params.req
            )
        match = super().match_prefix(plain)
        if state is None or self.disable:
            return match
        node = self.snapshots.find(state, params.key, longer_than=match.device_prefix_len)
        if node is None:
            return match
        return MatchResult(
            device_prefix_len=len(node.key),
            last_device_node=node,
            last_host_node=node,
            best_match_node=node,
        )

    def _match_prefix_helper(
        self, node: TreeNode, key: RadixKey
    ) -> tuple[list[torch.Tensor], TreeNode]:
        values, last = super()._match_prefix_helper(node, key)
        if not self._hollow:
            return values, last
        path = self._path(last)
        for depth, step in enumerate(path):
            if step in self._hollow:
                return values[:depth], step.parent
        return values, last

    def checkpoint(self, req: Any, *, up_to: int) -> None:
        """Take over what the request may publish, then let go of what it no longer reads."""
        state: RequestState = req.sglang_kv
        if self.disable:
            self.ledger.settle(state)
            return
        limit = state.publish_limit()
        if limit is not None:
            up_to = min(up_to, limit)
        before, free = int(req.kv.cache_protected_len), self.ledger.pool.num_free
        if up_to // self.page_size * self.page_size > before:
            super().checkpoint(req, up_to=up_to)
            if not state.private:
                after = int(req.kv.cache_protected_len)
                self.ledger.remap(state, before // self.page_size, after // self.page_size)
        if not state.private:
            self.set_reader(state, req.last_node)
        self.ledger.settle(state)
        # Duplicates went back to the pool; whoever is still prefilling may need as many again.
        state.taken_pages -= self.ledger.pool.num_free - free

    def _insert_helper(
        self,
        node: TreeNode,
        key: RadixKey,
        value: torch.Tensor,
        priority: int = 0,
        inserted_len: int = 0,
    ) -> tuple[int, TreeNode]:
        if self._hollow:
            self._adopt(key, value)
        known, last = super()._insert_helper(node, key, value, priority, inserted_len)
        self._idle_tokens += len(key) - known
        return known, last

    def _adopt(self, key: RadixKey, value: torch.Tensor) -> None:
        """Fill the hollow nodes on ``key``'s path from the newcomer's token pages."""
        node, done = self.root_node, 0
        while done < len(key):
            rest = key[done:]
            child = node.children.get(rest.child_key(self.page_size))
            if child is None:
                return
            matched = child.key.match(rest, page_size=self.page_size)
            if matched == 0:
                return
            whole = matched == len(child.key)
            if child in self._hollow:
                if not whole:
                    child = self._split_node(child.key, child, matched)
                donor = self._token_pages(value[done : done + matched])
                self.ledger.adopt(self._token_pages(child.value), donor)
                self._hollow.discard(child)
                self._idle_tokens += matched if child not in self._readers else 0
            if not whole:
                return
            node, done = child, done + matched

    def _split_node(self, key: RadixKey, child: TreeNode, split_len: int) -> TreeNode:
        upper = super()._split_node(key, child, split_len)
        if child in self._readers:
            self._readers[upper] = self._readers[child]
        if child in self._hollow:
            self._hollow.add(upper)
        return upper

    def _delete_leaf(self, node: TreeNode) -> None:
        assert node not in self._readers, "a node that a request reads was deleted"
        if isinstance(node, SnapshotLeaf):
            self.snapshots.forget(node)
            self.snapshots.unlink(node)
            return
        super()._delete_leaf(node)
        if node in self._hollow:
            self._hollow.discard(node)
        else:
            self._idle_tokens -= len(node.key)

    # -- physical readers --

    def set_reader(self, state: RequestState, node: TreeNode | None) -> None:
        """``state`` reads the path down to ``node`` (None: nothing) and no other any more."""
        if self.disable or state.reader_node is node:
            return
        # Count the new path first: what both share never drops to zero.
        if node is not None:
            for step in self._path(node):
                count = self._readers.get(step, 0)
                self._readers[step] = count + 1
                if count == 0 and self._holds_pages(step):
                    self._idle_tokens -= len(step.key)
        if state.reader_node is not None:
            for step in self._path(state.reader_node):
                self._readers[step] -= 1
                if self._readers[step] == 0:
                    del self._readers[step]
                    if self._holds_pages(step):
                        self._idle_tokens += len(step.key)
        state.reader_node = node

    def _holds_pages(self, node: TreeNode) -> bool:
        """Whether the node's ids have memory: they have not if it was emptied, or is a snapshot."""
        return node not in self._hollow and not isinstance(node, SnapshotLeaf)

    @property
    def read_nodes(self) -> Container[TreeNode]:
        """Nodes that some request reads."""
        return self._readers

    def pages_of_others(self, state: RequestState) -> int:
        """Leading token pages of ``state`` that another request reads through the tree."""
        if state.reader_node is None:
            return 0
        shared = (n for n in self._path(state.reader_node) if self._readers.get(n, 0) > 1)
        return sum(len(node.key) for node in shared) // self.page_size

    # -- where sessions go on --

    def remember(self, state: RequestState) -> None:
        """A request is about to leave: if it has come to its end, the next turn may go on there."""
        req = state.req
        if (
            self.ledger.publishes(state)
            and req.finished()
            and not isinstance(req.finished_reason, FINISH_ABORT)
        ):
            self.snapshots.take(state, req.origin_input_ids + req.output_ids)

    def idle_pages(self) -> int:
        """Head pages that nobody reads through the tree (some may be shared with a private
        request, and would not be freed by emptying their node)."""
        of_nodes = self._idle_tokens // self.page_size * self.ledger.num_streams
        return of_nodes + self.snapshots.idle_pages()

    def evict_pages(self, want_free: int) -> bool:
        """Empty nodes that nobody reads, deepest and least recently used first, until
        ``want_free`` head pages are free. Emptying a node may free no page, hence the loop.
        """
        pool = self.ledger.pool
        if pool.num_free >= want_free:
            return True
        if self.disable:
            return False
        candidates = [n for n in self._nodes() if self._can_empty(n)]
        candidates += [n for n in self.snapshots.of_node if n not in self._readers]
        heap = [(n.last_access_time, n.id, n) for n in candidates]
        heapq.heapify(heap)
        while heap and pool.num_free < want_free:
            _, _, node = heapq.heappop(heap)
            if node in self.snapshots.of_node:
                self.snapshots.drop(node)
                continue
            parent = node.parent
            self._empty(node)
            if parent is not self.root_node and self._can_empty(parent):
                heapq.heappush(heap, (parent.last_access_time, parent.id, parent))
        return pool.num_free >= want_free

    def _can_empty(self, node: TreeNode) -> bool:
        return (
            node not in self._readers
            and node not in self._hollow
            and all(child in self._hollow for child in node.children.values())
        )

    def _empty(self, node: TreeNode) -> None:
        if node.lock_ref == 0 and not node.children:
            # Nobody needs its ids either: out of both ledgers.
            self.token_to_kv_pool_allocator.free_segment(node.value, start_pos=0)
            self._delete_leaf(node)
        else:
            self.ledger.release_token_pages(self._token_pages(node.value))
            self._hollow.add(node)
            self._idle_tokens -= len(node.key)
        self.kv_events.record_remove(node)

    def check(self) -> None:
        """Raise unless the counts agree with a walk over all nodes (for tests)."""
        idle = sum(
            len(node.key)
            for node in self._nodes()
            if node not in self._readers and node not in self._hollow
        )
        assert idle == self._idle_tokens, f"{self._idle_tokens} idle tokens counted, {idle} found"
        for node in self._hollow:
            assert node not in self._readers, "a request reads an emptied node"
            assert all(c in self._hollow for c in node.children.values()), "resident under hollow"

    # -- walking --

    def _path(self, node: TreeNode) -> list[TreeNode]:
        """Nodes from below the root down to ``node``."""
        path = []
        while node is not self.root_node:
            path.append(node)
            node = node.parent
        path.reverse()
        return path

    def _nodes(self) -> list[TreeNode]:
        found, stack = [], list(self.root_node.children.values())
        while stack:
            node = stack.pop()
            found.append(node)
            stack.extend(node.children.values())
        return found

    def _token_pages(self, ids: torch.Tensor) -> NDArray[np.int64]:
        return ids[:: self.page_size].cpu().numpy().astype(np.int64) // self.page_size
