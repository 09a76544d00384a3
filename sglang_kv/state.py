"""The physical ledger: which head pages each request reads, and who owns them.

SGLang's ``req_to_token`` and paged allocator stay a *virtual* ledger, one id per logical
token. This one is attached to ``ReqToTokenPool`` through its aux-cache seam and says what
memory those tokens have. Ownership, one reference each:

- a *dense* token page (id of SGLang's allocator) owns one head page per (layer, KV head),
  through ``page_table``; they are given up where the allocator frees the token page;
- a *private* request, one whose policy has dropped something, owns its page lists; they
  are given up in `PhysicalLedger.free`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from sglang_kv.compression import Compressor
from sglang_kv.pool import HeadPagePool, Pages
from sglang_kv.streams import GAP, KV_LEN, NUM_SINKS, WINDOW_LEFT, StreamTable

if TYPE_CHECKING:
    import torch


class Readers(Protocol):
    """What the ledger asks of the prefix tree."""

    disable: bool

    def set_reader(self, state: RequestState, node: Any | None) -> None: ...

    def evict_pages(self, want_free: int) -> bool: ...

    def idle_pages(self) -> int: ...


class RequestState:
    """What one request holds. Lives on SGLang's ``Req`` from intake to the end."""

    def __init__(self, req: Any, policy: Compressor, *, overridden: bool = False):
        self.req = req
        self.policy = policy
        self.overridden = overridden
        self.counted = False
        self.dropped = 0  # stream-tokens dropped, over all its lives
        self.reader_node: Any | None = None
        self.reset()
        self._last: dict[str, Any] | None = None

    def reset(self) -> None:
        """Back to holding nothing: released, or retracted and waiting to be computed again."""
        self.row = -1
        self.slot = 0
        self.length = 0  # tokens with memory, all computed by forwards already submitted
        self.num_pages = 0  # entries in each stream's list
        self.held_pages = 0  # over all streams
        self.peak_pages = 0  # promised while prefilling, else 0
        self.taken_pages = 0  # of those: taken from the pool, and not yet given back to it
        self.folded = False  # the policy has taken hold
        self.private = False
        self.awaiting_checkpoint = False  # a prefill ran whose result the tree has not seen
        self.owes_pages = False  # private, but its dense prefix is still to be published

    @property
    def known_tokens(self) -> int:
        """Prompt and output so far: what a prefill would compute now."""
        return len(self.req.origin_input_ids) + len(self.req.output_ids)

    @property
    def fold_at(self) -> int | None:
        """Where the policy takes hold; None: from the first token."""
        return self.policy.fold_position(len(self.req.origin_input_ids))

    @property
    def dense_prefix(self) -> int | None:
        """Leading tokens with full attention's KV; None: all."""
        limit, fold_at = self.policy.dense_prefix, self.fold_at
        return limit if limit is None or fold_at is None else max(limit, fold_at)

    def match_limit(self) -> int | None:
        """Tokens that may come from the prefix tree; None: no limit."""
        limit, fold_at = self.policy.dense_prefix, self.fold_at
        # A chunk has to end at the fold, so at least its last token is computed.
        return limit if limit is None or fold_at is None else max(limit, fold_at - 1)

    def publish_limit(self) -> int | None:
        """Tokens that the prefix tree may take from this request; None: no limit."""
        if self.private and not self.owes_pages:
            return int(self.req.kv.cache_protected_len)
        return self.dense_prefix

    def report(self) -> dict[str, Any] | None:
        """What was applied, for the client; after release, the last values."""
        return self._last

    def note(self, num_streams: int, page_size: int, page_bytes: int) -> None:
        """Keep the report of this moment."""
        logical = min(self.length, self.known_tokens)
        dense = -(-self.length // page_size) * num_streams
        self._last = {
            "method": self.policy.name,
            "parameters": self.policy.parameters,
            "logical_tokens": logical,
            "kept_tokens": self.policy.kept_tokens(logical),
            "freed_bytes": (dense - self.held_pages) * page_bytes,
            "kept_pages": self.held_pages,
            "kept_bytes": self.held_pages * page_bytes,
        }
        if self.overridden:
            self._last["overridden"] = True


@dataclass(frozen=True)
class LedgerStats:
    """A reading of the physical ledger. ``evictable_pages`` is part of ``used_pages``."""

    total_pages: int
    used_pages: int
    free_pages: int
    evictable_pages: int
    page_bytes: int
    page_size: int
    num_streams: int
    requests_by_policy: dict[str, int]
    requests_total: dict[str, int]
    dropped_tokens: float
    folds: int


class PhysicalLedger:
    """SGLang's aux cache: memory for every token of every running request.

    Args:
        pool: the head pages.
        num_token_pages: pages of the virtual ledger, without its padding page 0.
        page_size: tokens per page, in both ledgers.
        page_bytes: bytes of one head page, K and V.
        req_to_token: SGLang's ``[rows, context]`` int32 table.
        chunk_tokens: most prompt tokens in one forward; None without chunked prefill.
    """

    def __init__(
        self,
        pool: HeadPagePool,
        *,
        num_layers: int,
        num_kv_heads: int,
        num_token_pages: int,
        page_size: int,
        page_bytes: int,
        req_to_token: torch.Tensor,
        chunk_tokens: int | None = None,
    ):
        self.chunk_tokens = chunk_tokens
        self.pool = pool
        self.page_size = page_size
        self.page_bytes = page_bytes
        self.num_streams = num_layers * num_kv_heads
        self.dense_capacity = num_token_pages * page_size  # SGLang reads this as its capacity
        self.req_to_token = req_to_token
        self.page_table: NDArray[np.int32] = np.full(
            (num_token_pages + 1, num_layers, num_kv_heads), -1, dtype=np.int32
        )
        self.streams = StreamTable(num_layers, num_kv_heads)
        self.rows: dict[int, RequestState] = {}
        self.row_to_slot: NDArray[np.int32] = np.zeros(len(req_to_token), dtype=np.int32)
        self.prefilling: set[RequestState] = set()
        self.requests_total: Counter[str] = Counter()
        self.dropped = 0
        self.folds = 0
        self.tree: Readers | None = None

    # -- SGLang's aux-cache seam --

    def bind(self, req: Any) -> None:
        """Tie a request to the row it was just given (idempotent between chunks)."""
        state: RequestState = req.sglang_kv
        row = req.kv.req_pool_idx
        if state.row == row:
            return
        assert row not in self.rows, f"row {row} is already taken"
        state.row = row
        state.slot = self.streams.take()
        self.rows[row] = state
        self.row_to_slot[row] = state.slot
        if not state.counted:
            state.counted = True
            self.requests_total[state.policy.name] += 1

    def alloc_to_lengths(
        self, *, req_pool_indices_cpu: torch.Tensor, target_seq_lens_cpu: torch.Tensor
    ) -> None:
        """Give each row memory for its target length; admission has made sure there is."""
        pairs = zip(req_pool_indices_cpu.tolist(), target_seq_lens_cpu.tolist(), strict=True)
        for row, target in pairs:
            state = self.rows[row]
            self.trim(state, max(state.length, int(state.req.prefix_len)))
            if state.private:
                self._grow_private(state, target)
            else:
                self._grow_dense(state, target)
            state.length = target

    def free(self, row: int) -> None:
        """The request leaves its row: finished, aborted or retracted."""
        state = self.rows.pop(row)
        state.note(self.num_streams, self.page_size, self.page_bytes)
        if state.private:
            self.pool.release(self._list(state).reshape(-1))
        self._forget_reader(state)
        self.prefilling.discard(state)
        self.streams.give(state.slot)
        self.row_to_slot[row] = 0
        state.reset()

    def clear(self) -> None:
        """SGLang flushed its pools: nothing holds anything any more."""
        for state in self.rows.values():
            state.reader_node = None
            state.reset()
        self.rows.clear()
        self.prefilling.clear()
        self.row_to_slot[:] = 0
        self.streams.reset()
        self.page_table[:] = -1
        self.pool.reset()

    def reset_allocator(self) -> None:
        self.clear()

    # -- growing --

    def _take(self, state: RequestState, count: int) -> Pages:
        """``count`` fresh pages. They were promised or checked for; should a count ever be off,
        prefixes that nobody reads go before the server does."""
        if self.pool.num_free < count and self.tree is not None:
            self.tree.evict_pages(count)
        state.taken_pages += count
        return self.pool.alloc(count)

    def _grow_dense(self, state: RequestState, target: int) -> None:
        first, last = state.num_pages, -(-target // self.page_size)
        if last > first:
            self.streams.fit(last)
            token_pages = self.token_pages(state, first, last)
            heads = self.page_table[token_pages]
            fresh = heads[:, 0, 0] < 0  # the rest came with the matched prefix
            heads[fresh] = self._take(state, int(fresh.sum()) * self.num_streams).reshape(
                -1, *heads.shape[1:]
            )
            self.page_table[token_pages[fresh]] = heads[fresh]
            self.streams.table[state.slot, :, :, first:last] = heads.transpose(1, 2, 0)
            state.num_pages = last
            state.held_pages = last * self.num_streams
        self.streams.desc[state.slot, :, :, KV_LEN] = target

    def _grow_private(self, state: RequestState, target: int) -> None:
        kv_len = self.streams.desc[state.slot, :, :, KV_LEN]
        kv_len += target - state.length
        first, last = state.num_pages, -(-int(kv_len[0, 0]) // self.page_size)
        if last > first:
            self.streams.fit(last)
            pages = self._take(state, (last - first) * self.num_streams)
            shape = (*kv_len.shape, last - first)
            self.streams.table[state.slot, :, :, first:last] = pages.reshape(shape)
            state.num_pages = last
            state.held_pages = last * self.num_streams

    # -- dropping --

    def after_prefill(self, reqs: Iterable[Any]) -> bool:
        """A prefill was submitted: drop what its requests no longer need; True if pages freed.

        Later work on the same stream may overwrite the pages; this forward still reads them.
        """
        before = self.pool.num_free
        for req in reqs:
            state: RequestState | None = getattr(req, "sglang_kv", None)
            if state is None or state.row < 0:
                continue
            state.awaiting_checkpoint = True
            self.trim(state, state.length)
            if req.extend_end >= len(req.full_untruncated_fill_ids):
                state.peak_pages = 0
                self.prefilling.discard(state)
        return self.pool.num_free > before

    def trim(self, state: RequestState, position: int) -> None:
        """Drop the pages that no query from ``position`` on can see."""
        window = state.policy.window
        if window.window_left < 0 or position < (state.fold_at or 0):
            return
        desc = self.streams.desc[state.slot]
        if not state.folded:
            state.folded = True
            desc[:, :, NUM_SINKS] = window.num_sinks
            desc[:, :, WINDOW_LEFT] = window.window_left
        if state.length == 0:
            return
        sinks = window.sink_pages(self.page_size)
        gone = int(desc[0, 0, GAP]) // self.page_size
        drop = window.first_page(position, self.page_size) - sinks - gone
        if drop <= 0:
            return
        if not state.private:
            self._privatise(state)
        pages = self._list(state)
        state.taken_pages -= self.pool.release(pages[:, :, sinks : sinks + drop].reshape(-1))
        kept = pages[:, :, sinks + drop :].copy()  # source and destination overlap
        pages[:, :, sinks : sinks + kept.shape[2]] = kept
        desc[:, :, GAP] += drop * self.page_size
        desc[:, :, KV_LEN] -= drop * self.page_size
        state.num_pages -= drop
        state.held_pages = state.num_pages * self.num_streams
        dropped = drop * self.page_size * self.num_streams
        state.dropped += dropped
        self.dropped += dropped

    def _privatise(self, state: RequestState) -> None:
        """The first drop: the request takes references of its own to the pages it reads, and
        its token pages give up theirs, except those that the tree has yet to take over."""
        self.pool.share(self._list(state).reshape(-1))
        owned = int(state.req.kv.cache_protected_len) // self.page_size
        kept = owned
        if state.awaiting_checkpoint and self._publishes(state):
            limit = state.dense_prefix
            whole = state.length if limit is None else min(limit, state.length)
            kept = max(owned, whole // self.page_size)
        self.release_token_pages(self.token_pages(state, kept, state.num_pages))
        state.private = True
        state.owes_pages = kept > owned
        self.folds += 1
        if not state.owes_pages:
            self._forget_reader(state)

    def _publishes(self, state: RequestState) -> bool:
        tree = self.tree
        return tree is not None and not tree.disable and not state.req.skip_radix_cache_insert

    def settle(self, state: RequestState) -> None:
        """The tree has taken what it may: a private request reads the tree's pages no more."""
        state.awaiting_checkpoint = False
        if state.private:
            state.owes_pages = False
            self._forget_reader(state)

    def _forget_reader(self, state: RequestState) -> None:
        if state.reader_node is not None and self.tree is not None:
            self.tree.set_reader(state, None)

    # -- token pages: called by the allocator and the tree --

    def token_pages(self, state: RequestState, first: int, last: int) -> NDArray[np.int64]:
        """Virtual page ids of entries ``first .. last`` of a request's row. ``[last-first]``"""
        size = self.page_size
        ids = self.req_to_token[state.row, first * size : last * size : size]
        return ids.cpu().numpy().astype(np.int64) // size

    def release_token_pages(self, token_pages: NDArray[np.int64]) -> int:
        """Token pages give up their head pages, if they have any; return how many got free."""
        heads = self.page_table[token_pages].reshape(-1)
        freed = self.pool.release(heads[heads >= 0])
        self.page_table[token_pages] = -1
        return freed

    def adopt(self, hollow: NDArray[np.int64], donor: NDArray[np.int64]) -> None:
        """Hollow token pages take over the head pages of a newcomer's equal tokens."""
        assert (self.page_table[hollow, 0, 0] < 0).all(), "adopting into a resident page"
        assert (self.page_table[donor, 0, 0] >= 0).all(), "adopting from an empty page"
        self.page_table[hollow] = self.page_table[donor]
        self.page_table[donor] = -1

    def remap(self, state: RequestState, first: int, last: int) -> None:
        """The tree replaced token pages ``first .. last`` of a dense row by its own."""
        heads: Pages = self.page_table[self.token_pages(state, first, last)]
        assert (heads >= 0).all(), "a dense request was mapped onto an emptied page"
        self.streams.table[state.slot, :, :, first:last] = heads.transpose(1, 2, 0)

    def _list(self, state: RequestState) -> Pages:
        return self.streams.table[state.slot, :, :, : state.num_pages]

    # -- reading --

    @property
    def outstanding(self) -> int:
        """Head pages promised to requests whose prefill is under way, not yet taken."""
        return sum(max(0, s.peak_pages - s.taken_pages) for s in self.prefilling)

    def pages_for_next_token(self, state: RequestState) -> int:
        """Head pages that one more token takes (0 or one per stream)."""
        kv_len = int(self.streams.desc[state.slot, 0, 0, KV_LEN])
        return self.num_streams if kv_len % self.page_size == 0 else 0

    def stats(self) -> LedgerStats:
        by_policy = Counter(state.policy.name for state in self.rows.values())
        return LedgerStats(
            total_pages=self.pool.num_pages,
            used_pages=self.pool.num_used,
            free_pages=self.pool.num_free,
            evictable_pages=self.tree.idle_pages() if self.tree is not None else 0,
            page_bytes=self.page_bytes,
            page_size=self.page_size,
            num_streams=self.num_streams,
            requests_by_policy=dict(by_policy),
            requests_total=dict(self.requests_total),
            dropped_tokens=self.dropped / self.num_streams,
            folds=self.folds,
        )

    def check(self) -> None:
        """Raise unless every reference is accounted for (O(pages); for tests and idle checks)."""
        self.pool.check()
        refs = np.zeros_like(self.pool.refs)
        dense = self.page_table[self.page_table >= 0]
        np.add.at(refs, dense, 1)
        for state in self.rows.values():
            if state.private:
                np.add.at(refs, self._list(state).reshape(-1), 1)
        if (refs != self.pool.refs).any():
            bad = np.flatnonzero(refs != self.pool.refs)
            raise AssertionError(f"{len(bad)} head pages have references nobody holds: {bad[:8]}")
