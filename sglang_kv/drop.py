"""What leaves a request's streams: behind a window, at a fold, under pressure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from sglang_kv.compression import FoldPlan, WindowPlan
from sglang_kv.compression.plan import Counts, Mask
from sglang_kv.kernel_paths import upload
from sglang_kv.pool import Pages
from sglang_kv.request import RequestState
from sglang_kv.streams import GAP, KV_LEN, NUM_SINKS, WINDOW_LEFT

if TYPE_CHECKING:
    from sglang_kv.state import PhysicalLedger


class Dropper:
    """Applies plans to the streams of the ledger, and gives back the pages that they leave."""

    def __init__(self, ledger: PhysicalLedger):
        self.ledger = ledger

    def drop(self, state: RequestState, position: int) -> None:
        """Drop what no query from ``position`` on may see."""
        if isinstance(state.plan, WindowPlan):
            self._slide(state, state.plan, position)
        elif isinstance(state.plan, FoldPlan) and state.folded_at < position == state.length:
            state.folded_at = position
            if state.plan.folds_at(position):
                self._fold(state, state.plan, position)

    def _slide(self, state: RequestState, plan: WindowPlan, position: int) -> None:
        """Drop the pages that lie before the window of ``position``."""
        window, size = plan.window, self.ledger.page_size
        dense = plan.dense_first_chunk and state.length == 0
        if position < (plan.fold_at or 0) or dense:
            return
        desc, table = self.ledger.streams.desc[state.slot], self.ledger.streams.table[state.slot]
        windowed = np.ones(desc.shape[:2], bool) if plan.windowed is None else plan.windowed
        if state.folded_at < 0:
            state.folded_at = position
            desc[windowed, NUM_SINKS] = window.num_sinks
            desc[windowed, WINDOW_LEFT] = window.window_left
        if state.length == 0:
            return
        sinks = window.sink_pages(size)
        first = int(windowed.argmax())  # windowed streams are all alike
        gone = int(desc.reshape(-1, 4)[first, GAP]) // size
        drop = window.first_page(position - state.offset, size) - sinks - gone
        if drop <= 0:
            return
        if not state.private:
            self.ledger.pool.share(self.ledger.lists(state))
            self._leave_token_pages(state)
        end = int(state.counts.flat[first])
        pages = table[windowed][:, :end]
        state.taken_pages -= self.ledger.pool.release(pages[:, sinks : sinks + drop].reshape(-1))
        pages[:, sinks : end - drop] = pages[:, sinks + drop :].copy()
        table[windowed, :end] = pages
        self.ledger.streams.touch(state.slot, sinks, end)
        desc[windowed, GAP] += drop * size
        desc[windowed, KV_LEN] -= drop * size
        state.counts[windowed] -= drop
        self.ledger.count_dropped(drop * size * len(pages))

    def rebases(self, state: RequestState, target: int) -> bool:
        """Whether positions have to move down before ``target`` tokens are computed."""
        trained = self.ledger.trained_length
        return state.cache_positions and trained is not None and target - state.offset > trained

    def rebase(self, state: RequestState, target: int) -> None:
        """Where ``target`` tokens would pass the trained length: what was dropped counts no more.

        The window's keys are turned back to right behind the sinks; the sinks stay.
        """
        if not self.rebases(state, target):
            return
        assert isinstance(state.plan, WindowPlan) and self.ledger.rotary is not None  # noqa: PT018
        desc, table = self.ledger.streams.desc[state.slot], self.ledger.streams.table[state.slot]
        distance, end = int(desc[0, 0, GAP]), int(state.counts[0, 0])
        if distance == 0:
            return  # nothing is held yet
        sinks = state.plan.window.sink_pages(self.ledger.page_size)
        pages = table[:, :, sinks:end]
        self._own(state, pages)
        self.ledger.streams.touch(state.slot, sinks, end)
        memory = self.ledger.folder.memory
        ids = torch.from_numpy(pages.reshape(len(pages), -1).astype(np.int64))
        self.ledger.rotary.turn_keys(memory, upload(ids, memory.device), distance)
        desc[:, :, GAP] = 0
        state.offset += distance
        self.ledger.streams.offset[state.slot] = state.offset

    def _own(self, state: RequestState, pages: Pages) -> None:
        """Pages of a private request that others read, too, are replaced by copies, in place."""
        pool, tree = self.ledger.pool, self.ledger.tree
        shared = pool.refs[pages] > 1
        if tree is not None and pool.num_free < shared.sum() and not tree.disable:
            tree.evict_pages(int(shared.sum()))  # and some may be its own alone, then
            shared = pool.refs[pages] > 1
        if not shared.any():
            return
        theirs = pages[shared]
        own = self.ledger.take(state, len(theirs))
        memory = self.ledger.folder.memory
        source, target = (torch.from_numpy(ids.astype(np.int64)) for ids in (theirs, own))
        memory[upload(target, memory.device)] = memory[upload(source, memory.device)]
        pool.release(theirs)
        pages[shared] = own

    def _fold(self, state: RequestState, plan: FoldPlan, position: int) -> None:
        """Cut the streams to what the plan's policy chooses."""
        desc = self.ledger.streams.desc[state.slot]
        lengths = desc[:, :, KV_LEN].astype(np.int64)
        target = plan.target(position, lengths)
        if (target >= lengths).all():
            return
        kept = self.ledger.folder.choose(state, plan, lengths, target)
        counts = self.ledger.folder.counts(kept) if plan.adaptive else None
        target = target if counts is None else counts
        if plan.by_page:
            self._keep_pages(state, self.ledger.folder.pages(kept))
        else:
            self._keep_tokens(state, kept, target)
        self.ledger.folder.carry(state, kept, target)
        desc[:, :, KV_LEN] = target
        self.ledger.count_dropped(int((lengths - target).sum()))

    def evict(self, state: RequestState, kept: Any, target: Counts) -> None:
        """Pressure takes whole pages of a request: ``kept`` as a fold by page has it."""
        desc = self.ledger.streams.desc[state.slot]
        lost = int((desc[:, :, KV_LEN] - target).sum())
        self._keep_pages(state, self.ledger.folder.pages(kept))
        self.ledger.folder.carry(state, kept, target)
        desc[:, :, KV_LEN] = target
        state.evicted += lost
        self.ledger.evicted += lost
        self.ledger.count_dropped(lost)

    def _keep_pages(self, state: RequestState, kept: Mask) -> None:
        """Whole pages stay where they are. ``kept``: ``[layers, kv_heads, pages]``."""
        table = self.ledger.streams.table[state.slot]
        held = np.arange(table.shape[2]) < state.counts[..., None]
        stays = np.zeros_like(held)
        stays[:, :, : kept.shape[2]] = kept
        counts = stays.sum(-1)
        pages = table[stays]
        if state.private:
            state.taken_pages -= self.ledger.pool.release(table[held & ~stays])
        else:
            self.ledger.pool.share(pages)
            self._leave_token_pages(state)
        table[np.arange(table.shape[2]) < counts[..., None]] = pages
        self.ledger.streams.touch(state.slot, 0, int(counts.max()))
        state.counts = counts

    def _keep_tokens(self, state: RequestState, kept: Any, target: Counts) -> None:
        """Tokens are gathered: at first into fresh pages, later within the request's own."""
        table = self.ledger.streams.table[state.slot]
        counts = -(-target // self.ledger.page_size)
        old = np.arange(table.shape[2]) < state.counts[..., None]
        new = np.arange(table.shape[2]) < counts[..., None]
        source = table[old]
        if state.private:
            assert (self.ledger.pool.refs[source] == 1).all(), (
                "tokens would move within shared pages"
            )
            destination, rest = table[new], table[old & ~new]
        else:
            destination, rest = self.ledger.take(state, int(counts.sum())), None
        self.ledger.folder.gather(source, state.counts, kept, target, destination, counts)
        if rest is None:
            self._leave_token_pages(state)
            table[new] = destination
            self.ledger.streams.touch(state.slot, 0, int(counts.max()))
        else:
            state.taken_pages -= self.ledger.pool.release(rest)
        state.counts = counts

    def _leave_token_pages(self, state: RequestState) -> None:
        """The request goes private: its token pages give up their head pages, except those that
        the tree has yet to take over."""
        size = self.ledger.page_size
        owned = int(state.req.kv.cache_protected_len) // size
        kept = owned
        if state.awaiting_checkpoint and self.ledger.publishes(state):
            limit = state.plan.dense_prefix
            whole = state.length if limit is None else min(limit, state.length)
            kept = max(owned, whole // size)
        self.ledger.release_token_pages(
            self.ledger.token_pages(state, kept, -(-state.length // size))
        )
        state.private = True
        state.owes_pages = kept > owned
        self.ledger.folds += 1
        if not state.owes_pages:
            self.ledger.forget_reader(state)
