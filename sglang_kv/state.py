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

from sglang_kv.compression import FoldPlan, Geometry, WindowPlan
from sglang_kv.compression.plan import Mask
from sglang_kv.drop import Dropper
from sglang_kv.fold import Folder
from sglang_kv.pool import HeadPagePool, Pages
from sglang_kv.pressure import Pressure
from sglang_kv.request import RequestState
from sglang_kv.rotary import Rotary
from sglang_kv.streams import KV_LEN, StreamTable

if TYPE_CHECKING:
    import torch


class Snapshots(Protocol):
    """What the ledger asks of the ends of sessions that the tree keeps."""

    def copies_ahead(self, state: RequestState, node: Any, length: int) -> int: ...

    def drop_of(self, state: RequestState) -> bool: ...


class Readers(Protocol):
    """What the ledger asks of the prefix tree."""

    disable: bool

    def set_reader(self, state: RequestState, node: Any | None) -> None: ...

    def evict_pages(self, want_free: int) -> bool: ...

    def idle_pages(self) -> int: ...

    def pages_of_others(self, state: RequestState) -> int: ...

    def resume(self, state: RequestState) -> None: ...

    def remember(self, state: RequestState) -> None: ...

    def left(self, state: RequestState) -> None: ...

    def admitted(self, state: RequestState) -> None: ...

    def stats(self) -> PrefixStats: ...

    def dump(self) -> dict[str, Any]: ...

    @property
    def snapshots(self) -> Snapshots: ...


@dataclass(frozen=True)
class PrefixStats:
    """A reading of the prefix tree, in tokens.

    Args:
        hit_tokens: of prompts, those that came from the tree, by method, once per request.
        prompt_tokens: of the same prompts, all.
        given_up: by ``step/reason`` (`tree_stats.TreeStats`).
        importance: tokens with memory, each under the first bound that is not below its importance.
    """

    hit_tokens: dict[str, int]
    prompt_tokens: dict[str, int]
    given_up: dict[str, int]
    importance: dict[str, int]


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
    evicted_tokens: float = 0.0
    prefixes: PrefixStats | None = None  # None: there is no prefix tree


class PhysicalLedger:
    """SGLang's aux cache: memory for every token of every running request.

    Args:
        pool: the head pages.
        geometry: the streams of a request; the page size is that of both ledgers.
        num_token_pages: pages of the virtual ledger, without its padding page 0.
        page_bytes: bytes of one head page, K and V.
        req_to_token: SGLang's ``[rows, context]`` int32 table.
        folder: where folded tokens are scored, chosen and moved.
        chunk_tokens: most prompt tokens in one forward; None without chunked prefill.
        trained_length: positions that the model knows, where requests may be longer; else None.
    """

    def __init__(
        self,
        pool: HeadPagePool,
        geometry: Geometry,
        folder: Folder,
        *,
        num_token_pages: int,
        page_bytes: int,
        req_to_token: torch.Tensor,
        chunk_tokens: int | None = None,
        trained_length: int | None = None,
    ):
        num_layers, num_kv_heads = geometry.num_layers, geometry.num_kv_heads
        self.chunk_tokens = chunk_tokens
        self.trained_length = trained_length
        #: Set once the model is loaded.
        self.rotary: Rotary | None = None
        self.pool = pool
        self.geometry = geometry
        self.folder = folder
        self.page_size = geometry.page_size
        self.page_bytes = page_bytes
        self.num_streams = geometry.num_streams
        # SGLang reads this as its capacity.
        self.dense_capacity = num_token_pages * geometry.page_size
        self.req_to_token = req_to_token
        self.page_table: NDArray[np.int32] = np.full(
            (num_token_pages + 1, num_layers, num_kv_heads), -1, dtype=np.int32
        )
        self.streams = StreamTable(num_layers, num_kv_heads)
        self.rows: dict[int, RequestState] = {}
        self.row_to_slot: NDArray[np.int32] = np.zeros(len(req_to_token), dtype=np.int32)
        self.prefilling: set[RequestState] = set()
        self.scored = 0  # running requests whose policy scores tokens
        self.requests_total: Counter[str] = Counter()
        self.dropped = 0
        self.folds = 0
        self.evicted = 0  # stream-tokens that pressure took
        self._freed = False
        self.pressure: Pressure | None = None
        self.tree: Readers | None = None
        self.dropper = Dropper(self)

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
        self._watch(state, state.scores or (state.measures and not state.credited))
        if isinstance(state.plan, WindowPlan) and state.plan.cache_positions:
            self.streams.last_position[state.slot] = state.plan.last_position
        if not state.counted:
            state.counted = True
            self.requests_total[state.policy.name] += 1
            if self.tree is not None:
                self.tree.admitted(state)

    def alloc_to_lengths(
        self, *, req_pool_indices_cpu: torch.Tensor, target_seq_lens_cpu: torch.Tensor
    ) -> None:
        """Give each row memory for its target length; admission has made sure there is."""
        pairs = zip(req_pool_indices_cpu.tolist(), target_seq_lens_cpu.tolist(), strict=True)
        for row, target in pairs:
            state = self.rows[row]
            if state.length == 0 and self.tree is not None:
                self.tree.resume(state)
            with self.folder.after_forwards():
                self.dropper.drop(state, max(state.length, int(state.req.prefix_len)))
                self.dropper.rebase(state, target)
            if state.private:
                self._grow_private(state, target)
            else:
                self._grow_dense(state, target)
            state.length = target

    def free(self, row: int) -> None:
        """The request leaves its row: finished, aborted or retracted."""
        state = self.rows.pop(row)
        if self.tree is not None:
            self.tree.remember(state)
        self.note(state)
        self._watch(state, False)
        if state.private:
            self.pool.release(self.lists(state))
        self.folder.forget(state)
        self.forget_reader(state)
        if self.tree is not None:
            self.tree.left(state)
        self.prefilling.discard(state)
        self.streams.give(state.slot)
        self.row_to_slot[row] = 0
        state.reset()

    def note(self, state: RequestState) -> None:
        """Keep the report of a running request as it is now."""
        state.note(self.page_bytes, float(self.streams.desc[state.slot, :, :, KV_LEN].mean()))

    def clear(self) -> None:
        """SGLang flushed its pools: nothing holds anything any more."""
        for state in self.rows.values():
            state.reader_node = None
            state.reset()
        self.rows.clear()
        self.scored = 0
        self.prefilling.clear()
        self.folder.clear()
        self.row_to_slot[:] = 0
        self.streams.reset()
        self.page_table[:] = -1
        self.pool.reset()

    def reset_allocator(self) -> None:
        self.clear()

    # -- growing --

    def take(self, state: RequestState, count: int) -> Pages:
        """``count`` fresh pages. They were promised or checked for; should a count ever be off,
        prefixes that nobody reads go before the server does."""
        if self.pool.num_free < count and self.tree is not None:
            self.tree.evict_pages(count)
        state.taken_pages += count
        return self.pool.alloc(count)

    def _grow_dense(self, state: RequestState, target: int) -> None:
        first, last = int(state.counts[0, 0]), -(-target // self.page_size)
        if last > first:
            self.streams.fit(last)
            token_pages = self.token_pages(state, first, last)
            heads = self.page_table[token_pages]
            fresh = heads[:, 0, 0] < 0  # the rest came with the matched prefix
            assert ((heads < 0) == fresh[:, None, None]).all(), (
                "a dense request matched thinned pages"
            )
            heads[fresh] = self.take(state, int(fresh.sum()) * self.num_streams).reshape(
                -1, *heads.shape[1:]
            )
            self.page_table[token_pages[fresh]] = heads[fresh]
            self.streams.table[state.slot, :, :, first:last] = heads.transpose(1, 2, 0)
            self.streams.touch(state.slot, first, last)
            state.counts[:] = last
        self.streams.desc[state.slot, :, :, KV_LEN] = target

    def _grow_private(self, state: RequestState, target: int) -> None:
        kv_len = self.streams.desc[state.slot, :, :, KV_LEN]
        kv_len += target - state.length
        more = -(-kv_len // self.page_size) - state.counts
        if not more.any():
            return
        self.streams.fit(int((state.counts + more).max()))
        table = self.streams.table[state.slot]
        pages = self.take(state, int(more.sum()))
        for step in range(int(more.max())):  # streams need one each, as a rule
            layers, heads = np.nonzero(more > step)
            columns = state.counts[layers, heads] + step
            table[layers, heads, columns] = pages[: len(layers)]
            self.streams.touch_each(state.slot, layers, heads, columns)
            pages = pages[len(layers) :]
        state.counts += more

    # -- dropping --

    def after_prefill(self, reqs: Iterable[Any]) -> None:
        """A prefill was submitted: drop what its requests no longer need.

        Later work on the same stream may overwrite the pages; this forward still reads them.
        """
        for req in reqs:
            state: RequestState | None = getattr(req, "sglang_kv", None)
            if state is None or state.row < 0:
                continue
            state.awaiting_checkpoint = not req.skip_radix_cache_insert
            with self.folder.after_forwards():
                self._measure(state)
                self.dropper.drop(state, state.length)
            if req.extend_end >= len(req.full_untruncated_fill_ids):
                state.peak_pages = 0
                self.prefilling.discard(state)

    def _measure(self, state: RequestState) -> None:
        """At its prompt's end: what the prompt was worth to its last queries."""
        if state.length < len(state.req.origin_input_ids):
            return
        window = state.measured_window
        if window is not None:
            state.mass, state.window = self.folder.mass(state), window
        if not state.scores:
            self.folder.forget(state)
            self._watch(state, False)

    def _watch(self, state: RequestState, scoring: bool) -> None:
        """Whether some of a request's queries are still to be scored."""
        self.scored += scoring - state.scoring
        state.scoring = scoring

    def count_dropped(self, tokens: int) -> None:
        self.dropped += tokens
        self._freed = True

    def take_freed(self) -> bool:
        """Whether memory has come free, for an admission that failed to be tried again."""
        freed, self._freed = self._freed, False
        return freed

    def publishes(self, state: RequestState) -> bool:
        tree = self.tree
        return tree is not None and not tree.disable and not state.req.skip_radix_cache_insert

    def settle(self, state: RequestState) -> None:
        """The tree has taken what it may: a private request reads the tree's pages no more."""
        state.awaiting_checkpoint = False
        if state.private:
            self._freed |= state.owes_pages  # the tree may empty them from now on
            state.owes_pages = False
            self.forget_reader(state)

    def forget_reader(self, state: RequestState) -> None:
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

    def thin_token_pages(self, token_pages: NDArray[np.int64], streams: Mask) -> int:
        """Token pages give up the head pages of some streams, ``[layers, kv_heads]``; return how
        many got free."""
        heads = self.page_table[token_pages]
        lost = heads[:, streams]
        freed = self.pool.release(lost[lost >= 0])
        heads[:, streams] = -1
        self.page_table[token_pages] = heads
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
        self.streams.touch(state.slot, first, last)

    def lists(self, state: RequestState) -> Pages:
        """The pages of all its streams, end to end."""
        table = self.streams.table[state.slot]
        return table[np.arange(table.shape[2]) < state.counts[..., None]]

    # -- reading --

    @property
    def outstanding(self) -> int:
        """Head pages promised to requests whose prefill is under way, not yet taken."""
        return sum(max(0, s.peak_pages - s.taken_pages) for s in self.prefilling)

    def pages_for_next_token(self, state: RequestState) -> int:
        """Head pages that one more token takes: a stream needs one when its last is full, a first
        fold by token needs the copy's, and keys that are turned need pages of their own."""
        kv_len = self.streams.desc[state.slot, :, :, KV_LEN]
        grown = int((kv_len % self.page_size == 0).sum())
        if self.dropper.rebases(state, state.length + 1):
            if not state.private:  # its first drop comes with it: what the tree has is shared then
                return grown + int(state.req.kv.cache_protected_len) // self.page_size * (
                    self.num_streams
                )
            return grown + int((self.pool.refs[self.lists(state)] > 1).sum())
        plan, position = state.plan, state.length
        if state.private or not isinstance(plan, FoldPlan) or plan.by_page:
            return grown
        if position == state.folded_at or not plan.folds_at(position):
            return grown
        target = plan.target(position, kv_len.astype(np.int64))
        if (target >= kv_len).all():
            return grown
        return int((-(-target // self.page_size) + (target % self.page_size == 0)).sum())

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
            evicted_tokens=self.evicted / self.num_streams,
            prefixes=self.tree.stats() if self.tree is not None else None,
        )

    def check(self) -> None:
        """Raise unless every reference is accounted for (O(pages); for tests and idle checks)."""
        self.pool.check()
        refs = np.zeros_like(self.pool.refs)
        dense = self.page_table[self.page_table >= 0]
        np.add.at(refs, dense, 1)
        for state in self.rows.values():
            if state.private:
                np.add.at(refs, self.lists(state), 1)
        refs += self.pool.held
        if (refs != self.pool.refs).any():
            bad = np.flatnonzero(refs != self.pool.refs)
            raise AssertionError(f"{len(bad)} head pages have references nobody holds: {bad[:8]}")
