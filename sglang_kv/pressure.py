"""When memory runs out in decode: the least important pages of running requests go first.

``--kv-pressure evict``: before SGLang retracts a request, whose prompt would then be computed
again, requests that allow it give up whole pages, the lowest ``Score(Block_k) = sum of its tokens'
scores`` first: the same number in each stream, by reference, nothing is copied. What a request
keeps then depends on its neighbours, so both the server and the request must allow it.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from sglang_kv.compression import FoldPlan, WindowPlan
from sglang_kv.compression.plan import Mask
from sglang_kv.compression.scoring import page_scores
from sglang_kv.kernels.layout import KV_LEN
from sglang_kv.request import RequestState

if TYPE_CHECKING:
    from sglang_kv.state import PhysicalLedger

#: Newest tokens that are never given up.
NEWEST = 64
#: Steps of decode that room is made for at once, so that not every step has to.
STEPS_AHEAD = 16


class Offer(NamedTuple):
    """What a request could give: its pages by rising score, and what each further one costs."""

    state: RequestState
    order: NDArray[np.int64]  # [layers, kv_heads, pages], the lowest first
    costs: list[float]  # of one more page in every stream


@dataclass
class Pressure:
    """Takes pages from running requests.

    Args:
        floor: share of its tokens that a request keeps at least.
        min_keep: tokens per stream that it keeps at least.
    """

    floor: float
    min_keep: int = 0

    def relieve(self, ledger: PhysicalLedger, want_free: int) -> bool:
        """Make ``want_free`` head pages free, if the requests' floors allow it."""
        offers = [o for s in ledger.rows.values() if (o := self._offer(ledger, s)) is not None]
        missing = want_free - ledger.pool.num_free
        if sum(len(offer.costs) for offer in offers) * ledger.num_streams < missing:
            return False  # it would not be enough, and what is lost is lost
        ahead = -(-STEPS_AHEAD // ledger.page_size) * ledger.num_streams * len(ledger.rows)
        levels: dict[int, int] = {}
        # What several requests give costs the least if each next page is the cheapest of all.
        heap = [(offer.costs[0], i) for i, offer in enumerate(offers)]
        heapq.heapify(heap)
        promised = 0
        while heap and promised < missing + ahead:
            _, i = heapq.heappop(heap)
            levels[i] = levels.get(i, 0) + 1
            promised += ledger.num_streams
            if levels[i] < len(offers[i].costs):
                heapq.heappush(heap, (offers[i].costs[levels[i]], i))
        for i, count in levels.items():
            self._take(ledger, offers[i], count)
        # A page that the prefix tree holds is free only when the tree lets go of it, too.
        return ledger.pool.num_free >= want_free or (
            ledger.tree is not None and ledger.tree.evict_pages(want_free)
        )

    def _offer(self, ledger: PhysicalLedger, state: RequestState) -> Offer | None:
        plan = state.plan
        if not state.evictable or state.score_slot < 0 or isinstance(plan, WindowPlan):
            return None
        if state.awaiting_checkpoint or state in ledger.prefilling or state.owes_pages:
            return None
        if isinstance(plan, FoldPlan) and not plan.by_page and not state.private:
            # Its first fold by token makes its pages its own; a later one moves tokens within
            # them, which pages kept by reference, and shared, would not survive.
            return None
        size = ledger.page_size
        lengths = ledger.streams.desc[state.slot, :, :, KV_LEN]
        spare = lengths.min() - max(self.min_keep, int(self.floor * state.length))
        # Whole pages of scored tokens, the newest left out.
        scored = int(max(0, np.minimum(state.scored_tokens(lengths), lengths - NEWEST).min()))
        pages = scored // size
        if pages <= 0 or spare < size:
            return None
        free = torch.from_numpy(self._gets_free(ledger, state, pages))
        count = min(int(free.sum(-1).min()), int(spare) // size)
        if count <= 0:
            return None
        values = ledger.folder.scores.values[state.score_slot, :, :, : pages * size].cpu()
        worth = page_scores(values, size).masked_fill(~free, torch.inf)
        ranked = torch.sort(worth, dim=-1, stable=True)
        costs = ranked.values[..., :count].sum((0, 1)).tolist()
        return Offer(state, ranked.indices.numpy(), costs)

    def _gets_free(self, ledger: PhysicalLedger, state: RequestState, pages: int) -> Mask:
        """Which of a request's first pages nobody else reads. ``[layers, kv_heads, pages]``"""
        table = ledger.streams.table[state.slot, :, :, :pages]
        alone: Mask = ledger.pool.refs[table] == 1
        if not state.private and ledger.tree is not None:
            # A dense request reads the tree's pages, and so may others.
            alone[:, :, : ledger.tree.pages_of_others(state)] = False
        return alone

    def _take(self, ledger: PhysicalLedger, offer: Offer, count: int) -> None:
        lengths = ledger.streams.desc[offer.state.slot, :, :, KV_LEN].astype(np.int64)
        longest = int(lengths.max())
        kept = torch.arange(longest) < torch.from_numpy(lengths)[..., None]
        size = ledger.page_size
        tokens = torch.from_numpy(offer.order[..., :count])[..., None] * size + torch.arange(size)
        kept.scatter_(-1, tokens.flatten(-2), False)
        ledger.dropper.evict(offer.state, kept, lengths - count * size)
