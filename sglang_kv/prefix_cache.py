"""SGLang's prefix cache over two ledgers: what is locked and what is read are different things.

SGLang locks a request's whole prompt path until the request ends, and never evicts what is
locked. Those ledger locks stay. Beside them the tree (`sglang_kv/radix`) counts *physical
readers*: dense requests that read its head pages. A node without readers may be emptied though it
is locked: it turns *hollow*, its ids stay, matching stops there, and the next request that inserts
over it gives its pages (`PhysicalLedger.adopt`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams, MatchResult

from sglang_kv.namespaces import Sharing, under_policy
from sglang_kv.owner import LedgerOwner, PrefixNode
from sglang_kv.prefix_ids import IdLedger
from sglang_kv.radix.dump import as_json, as_text
from sglang_kv.radix.importance import HALF_LIFE
from sglang_kv.radix.key import Key, Namespace
from sglang_kv.radix.tree import RadixTree
from sglang_kv.request import RequestState
from sglang_kv.snapshots import SnapshotStore, resumable
from sglang_kv.state import PhysicalLedger, PrefixStats
from sglang_kv.thinning import Thinner
from sglang_kv.tree_events import TreeEvents
from sglang_kv.worth import page_worth

#: Nodes that ``/server_info`` shows.
SHOWN = 100


class HeadPageRadixCache(IdLedger):
    """SGLang's `BasePrefixCache` on the importance-weighted tree.

    Args:
        params: SGLang's `CacheInitParams`; ``eviction_policy`` is one of `radix.orders.ORDERS`.
        ledger: the physical ledger.
        sharing: who may share.
        crossover: see `LedgerOwner`.
        thinner: see `LedgerOwner`.
    """

    def __init__(
        self,
        params: Any,
        ledger: PhysicalLedger,
        *,
        sharing: Sharing | None = None,
        crossover: float = 32_768.0,
        thinner: Thinner | None = None,
    ):
        self.disable = params.disable
        self.req_to_token_pool = params.req_to_token_pool
        self.token_to_kv_pool_allocator = params.token_to_kv_pool_allocator
        self.page_size = params.page_size
        self.ledger = ledger
        self.sharing = Sharing() if sharing is None else sharing
        self.snapshots = SnapshotStore(self)
        self.events = TreeEvents.of(params)
        self.kv_events = self.events.recorder
        self.thinner = thinner
        self.owner = LedgerOwner(
            ledger,
            params.token_to_kv_pool_allocator,
            self.snapshots,
            self.events,
            crossover,
            thinner,
        )
        tokens = ledger.pool.num_pages // ledger.num_streams * ledger.page_size
        self.tree: RadixTree[torch.Tensor] = RadixTree(
            params.page_size,
            owner=self.owner,
            order_name=params.eviction_policy.lower(),
            half_life=HALF_LIFE * max(1, tokens),
            thin_first=thinner is not None,
        )
        if params.enable_metrics:
            self.init_metrics_collector()
        ledger.tree = self
        self.reset()

    def reset(self) -> None:
        """Everything was flushed, the pool too."""
        self.tree.reset()
        self.snapshots.clear()
        self.events.cleared()

    # -- matching and publishing --

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """The longest prefix that the request may take; a request of nobody's takes nothing."""
        key = params.key
        state: RequestState | None = getattr(params.req, "sglang_kv", None)
        if self.disable or state is None:
            return self._result(0, self.tree.root)
        namespace = self._enter(state)
        if namespace is None:
            return self._result(0, self.tree.root)
        limit, dense = len(key), state.match_limit()
        plain_key = Key.of(key.token_ids, namespace)
        most = limit if dense is None else min(dense, limit)
        need = state.need if self.thinner is not None else None
        if need is not None:
            most = limit  # what full attention computed serves it anywhere
        if resumable(state.plan):
            name = under_policy(namespace, state.policy, thinned=state.need is not None)
            own = plain_key._replace(namespace=name)
            if self.tree.peek(own, limit=limit) > self.tree.peek(plain_key, limit=most, need=need):
                plain_key, most, need = own, limit, None
        found = self.tree.match(plain_key, limit=most, need=need)
        return self._result(found.length, found.node)

    def _enter(self, state: RequestState) -> Namespace | None:
        """The namespace of a request that is about to be computed, from its beginning on."""
        if state.row < 0:  # between chunks it stays where it was
            state.namespace = self.sharing.namespace_of(state.req, state.tenant)
            if state.namespace is None:
                state.req.skip_radix_cache_insert = True
        return state.namespace

    def _is_current(self, state: RequestState) -> bool:
        """Whether nothing was flushed that the request's prefixes belong to."""
        return state.namespace == self.sharing.namespace_of(state.req, state.tenant)

    def _result(self, length: int, node: PrefixNode) -> MatchResult:
        return MatchResult(length, node, node, node)

    def checkpoint(self, req: Any, *, up_to: int, **_: Any) -> None:
        """Take over what the request may publish, then let go of what it no longer reads."""
        state: RequestState = req.sglang_kv
        if self.disable or state.namespace is None or not self._is_current(state):
            self.ledger.settle(state)
            return
        limit, computed = state.publish_limit(), up_to
        if limit is not None:
            up_to = min(up_to, limit)
        before, free = int(req.kv.cache_protected_len), self.ledger.pool.num_free
        whole = up_to // self.page_size * self.page_size
        if whole > before:
            self._publish(state, before, whole)
            if not state.private:
                self.ledger.remap(state, before // self.page_size, whole // self.page_size)
        if computed >= len(req.origin_input_ids):
            self._credit(state)
        if not state.private:
            self.set_reader(state, req.last_node)
        self.ledger.settle(state)
        # Duplicates went back to the pool; whoever is still prefilling may need as many again.
        state.taken_pages -= self.ledger.pool.num_free - free

    def _publish(self, state: RequestState, before: int, end: int) -> None:
        """Tokens ``before .. end`` of a request become the tree's, and its row names the tree's."""
        req = state.req
        row = self.req_to_token_pool.req_to_token[req.kv.req_pool_idx, :end]
        values = row.to(torch.int64, copy=True)
        key = Key.of(req.full_untruncated_fill_ids[:end], state.namespace)
        # Nobody has looked at an answer yet: an even share. Prompts are credited at their end.
        done = self.tree.insert(key, values, prior=1.0 if state.credited else 0.0)
        if state.goes_on is None:
            state.goes_on = done.goes_on
        prompt = len(req.origin_input_ids)
        if self.page_size <= prompt < end:
            # Split where the prompt ends, so that the answer can go without it.
            self.tree.insert(key._replace(tokens=key.tokens[:prompt]), values)
        self.token_to_kv_pool_allocator.free_segment(row[before : done.known], start_pos=before)
        ids = self.path_device_indices(done.node)
        self.req_to_token_pool.write((req.kv.req_pool_idx, slice(before, end)), ids[before:])
        req.kv.cache_protected_len = end
        self.unlock(req.lock)
        req.lock = self.lock(done.node)
        req.last_node = done.node

    def _credit(self, state: RequestState) -> None:
        """Once, at its prompt's end: the request has used the path down to its node."""
        if state.credited:
            return
        state.credited = True
        node = state.req.last_node
        worth = page_worth(state.mass, self.page_size, node.end // self.page_size, state.window)
        state.mass = None
        goes_on = bool(state.goes_on) or node.snapshot is not None
        self.tree.credit(node, worth, goes_on=goes_on)

    # -- physical readers --

    def set_reader(self, state: RequestState, node: PrefixNode | None) -> None:
        """``state`` reads the path down to ``node`` (None: nothing) and no other any more."""
        if self.disable or state.reader_node is node:
            return
        # The new path first: what both share is read all the time.
        if node is not None:
            self.tree.read(node)
        if state.reader_node is not None:
            self.tree.unread(state.reader_node)
        state.reader_node = node

    def pages_of_others(self, state: RequestState) -> int:
        """Leading token pages of ``state`` that another request reads through the tree."""
        if state.reader_node is None:
            return 0
        return sum(len(n) for n in state.reader_node.path() if n.readers > 1) // self.page_size

    # -- where sessions go on --

    def resume(self, state: RequestState) -> None:
        """A request that matched a snapshot, or more of a prefix than its method would share,
        begins with the streams of that."""
        self.snapshots.resume(state)
        if self.thinner is not None:
            self.thinner.resume(state)

    def remember(self, state: RequestState) -> None:
        """A request is about to leave: if it has come to its end, the next turn may go on there."""
        req = state.req
        if (
            self.ledger.publishes(state)
            and state.namespace is not None
            and self._is_current(state)
            and req.finished()
            and not isinstance(req.finished_reason, FINISH_ABORT)
        ):
            self.snapshots.take(state, req.origin_input_ids + req.output_ids)

    def left(self, state: RequestState) -> None:
        """A request has left: what was flushed while it read it goes now."""
        if state.namespace is not None and not self._is_current(state):
            self._flush(lambda name: name._replace(policy=None) == state.namespace)

    # -- memory --

    def idle_pages(self) -> int:
        """Head pages that nobody reads through the tree (some may be shared with a private
        request, and would not be freed by emptying their node)."""
        of_nodes = self.tree.idle_bytes - self.tree.idle_snapshot_bytes
        return of_nodes // self.ledger.page_bytes + self.snapshots.idle_pages()

    def evict_pages(self, want_free: int) -> bool:
        """Take memory from nodes that nobody reads, the least worth first, until ``want_free``
        head pages are free. A step may free no page, hence the loop."""
        pool = self.ledger.pool
        if self.disable:
            return pool.num_free >= want_free
        self.owner.stats.reason = "memory"
        while pool.num_free < want_free and self.tree.evict_one() is not None:
            pass
        return pool.num_free >= want_free

    def admitted(self, state: RequestState) -> None:
        """A request was given a row, for the first time."""
        self.owner.stats.admitted(state.policy.name, int(state.req.prefix_len), state.known_tokens)

    def stats(self) -> PrefixStats:
        """What became of prefixes since start."""
        stats = self.owner.stats
        return PrefixStats(
            dict(stats.hit_tokens),
            dict(stats.prompt_tokens),
            dict(stats.given_up),
            stats.spread(self.tree),
        )

    # -- flushing --

    def flush_tenant(self, tenant: str) -> None:
        """Forget a tenant's prefixes; what a request still reads serves nobody any more."""
        self.sharing.start_anew(tenant)
        self._flush(lambda namespace: self.sharing.is_of(namespace, tenant))

    def weights_changed(self) -> None:
        """Forget what other weights computed; what a request still reads serves nobody any more."""
        self.sharing.weights += 1
        self._flush(lambda namespace: True)

    def _flush(self, which: Callable[[Namespace], bool]) -> None:
        self.owner.stats.reason = "flush"
        self.tree.flush({name for name in self.tree.namespaces() if which(name)})

    def pretty_print(self) -> None:
        """SGLang asks for this when it has run out of memory."""
        print(as_text(as_json(self.tree)))

    def dump(self) -> dict[str, Any]:
        """The tree's most important nodes, for ``/server_info``."""
        return as_json(self.tree, most=SHOWN)

    def check(self) -> None:
        """Raise unless the tree's books agree with a walk over all nodes (for tests)."""
        self.tree.check()
        self.snapshots.check()
