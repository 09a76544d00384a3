"""Prefixes whose streaming heads have given up their middle, and requests that go on from them.

Under pressure a prefix first loses what DuoAttention's streaming heads would not look at: all but
sinks and the last window before the node's end. What is left serves a ``duoattention`` request that
needs no more, at the node's end. Its KV was computed with full attention, and a request that
computes its own prompt windows its streaming heads from the first chunk on; so its answer depends
on whether somebody else was there before, and a request has to ask for such hits.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

from sglang_kv.compression import (
    Compressor,
    Geometry,
    Plan,
    PolicyError,
    WindowPlan,
    parse_policy,
)
from sglang_kv.compression.duoattention import DuoAttention
from sglang_kv.compression.plan import Mask
from sglang_kv.config import PREFIX_KEY
from sglang_kv.radix.node import Thin
from sglang_kv.streams import GAP, KV_LEN, NUM_SINKS, WINDOW_LEFT

if TYPE_CHECKING:
    from sglang_kv.owner import PrefixNode
    from sglang_kv.request import RequestState
    from sglang_kv.state import PhysicalLedger


def need_of(plan: Plan) -> Thin | None:
    """What a request with such a plan needs of a thinned prefix; None: it needs everything."""
    if not isinstance(plan, WindowPlan) or plan.windowed is None or plan.geometry.gates is None:
        return None
    if plan.fold_at is not None or plan.dense_first_chunk:
        return None
    heads = np.argwhere(~plan.windowed)
    return Thin(
        hashlib.sha256(plan.geometry.gates.values.tobytes()).hexdigest()[:16],
        frozenset((int(layer), int(head)) for layer, head in heads),
        sinks=plan.window.num_sinks,
        recent=plan.window.window_left,
    )


def require_need(plan: Plan) -> Thin:
    """`need_of`, for a request that asks for thinned prefixes. Raises `PolicyError`."""
    need = need_of(plan)
    if need is None:
        raise PolicyError(
            f"{PREFIX_KEY}: 'thinned' needs kv_compression.method 'duoattention' with streaming "
            "heads, without fold_at and with first_chunk 'windowed'"
        )
    return need


class Thinner:
    """Thins nodes to what one plan needs; all of them, before any is emptied.

    Args:
        ledger: the physical ledger, whose page table says what is left of a node.
        plan: of a ``duoattention`` policy; what it needs is what nodes keep.
    """

    def __init__(self, ledger: PhysicalLedger, plan: WindowPlan):
        assert plan.windowed is not None
        self.ledger = ledger
        self.window = plan.window
        self.streaming: Mask = plan.windowed
        self.thin = require_need(plan)
        #: So many tokens are alike for everybody, and whoever matches them reads all of them.
        self.alike = plan.match_limit or 0

    @classmethod
    def of(cls, ledger: PhysicalLedger, plan: Plan) -> Thinner | None:
        """None where all heads keep everything."""
        return cls(ledger, plan) if isinstance(plan, WindowPlan) else None

    def plan_thin(self, node: PrefixNode) -> Thin | None:
        """What to thin ``node`` to; None where nothing above its end would be won.

        A short node that gives up nothing itself is thinned for the sake of those above it, which
        can only be thinned after it.
        """
        return self.thin if self._given_up(node.end) else None

    def given_up(self, node: PrefixNode) -> Mask:
        """Which of a node's token pages streaming heads give up. ``[pages]``"""
        size, gone = self.ledger.page_size, self._given_up(node.end)
        pages = np.arange(node.start // size, node.end // size)
        mask: Mask = (pages >= gone.start) & (pages < gone.stop)
        return mask

    def _given_up(self, end: int) -> range:
        """Token pages that streaming heads give up on the path to a node that ends at ``end``."""
        sinks = self.window.sink_pages(self.ledger.page_size)
        if end <= self.alike:
            # A request that matches no more than this reads it as full attention does, all of it,
            # though the window of a query at ``end`` may be past a token already.
            return range(sinks, sinks)
        return range(sinks, self.window.first_page(end, self.ledger.page_size))

    def resume(self, state: RequestState) -> None:
        """A request that took more of a prefix than its own KV would equal begins with what it
        needs of it, by reference."""
        end = int(state.req.prefix_len)
        if state.private or not takes_thinned(state, end):
            return
        ledger, plan, size = self.ledger, state.plan, self.ledger.page_size
        assert isinstance(plan, WindowPlan) and plan.windowed is not None  # noqa: PT018
        pages, sinks = end // size, plan.window.sink_pages(size)
        gone = max(0, plan.window.first_page(end, size) - sinks)
        heads = ledger.page_table[ledger.token_pages(state, 0, pages)].transpose(1, 2, 0)
        ledger.streams.fit(pages)
        ledger.streams.touch(state.slot, 0, pages)
        table = ledger.streams.table[state.slot]
        table[:, :, :pages] = heads
        table[plan.windowed, sinks : pages - gone] = heads[plan.windowed, sinks + gone :]
        state.counts[:] = pages
        state.counts[plan.windowed] -= gone
        desc = ledger.streams.desc[state.slot]
        desc[:, :, KV_LEN] = end
        desc[plan.windowed, KV_LEN] -= gone * size
        desc[plan.windowed, GAP] = gone * size
        desc[plan.windowed, NUM_SINKS] = plan.window.num_sinks
        desc[plan.windowed, WINDOW_LEFT] = plan.window.window_left
        lists = ledger.lists(state)
        assert (lists >= 0).all(), "a request went on from memory that had gone"
        ledger.pool.share(lists)
        state.private, state.thinned_prefix = True, end
        state.length = state.folded_at = end
        ledger.forget_reader(state)


def takes_thinned(state: RequestState, prefix: int) -> bool:
    """Whether ``prefix`` matched tokens are more than its own computing would have given alike."""
    return state.need is not None and prefix > (state.plan.match_limit or 0)


def thinning_plan(geometry: Geometry, policy: Compressor) -> Plan:
    """What nodes are thinned for: the server's policy, or the method's defaults.

    Raises `PolicyError` where there are no gates.
    """
    chosen = policy if isinstance(policy, DuoAttention) else parse_policy("duoattention")
    return chosen.plan(1, geometry)
