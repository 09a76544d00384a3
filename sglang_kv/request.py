"""What one request holds of the physical ledger, and what its policy does to it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_kv.compression import Compressor, FoldPlan, Plan, WindowPlan
from sglang_kv.radix.key import Namespace
from sglang_kv.radix.node import Thin
from sglang_kv.worth import QUERIES

#: Last queries of a prompt that say what its pages are worth, where pressure may take some.
SCORED_QUERIES = 32


class RequestState:
    """Lives on SGLang's ``Req`` as ``sglang_kv``, from intake to the end."""

    def __init__(
        self,
        req: Any,
        policy: Compressor,
        plan: Plan,
        *,
        overridden: bool = False,
        evictable: bool = False,
        tenant: str | None = None,
        measures: bool = False,
        need: Thin | None = None,
    ):
        self.req = req
        self.policy = policy
        self.plan = plan
        self.overridden = overridden
        self.evictable = evictable  # may give up pages under pressure
        self.tenant = tenant  # whose prefixes it may share, as the server found
        self.namespace: Namespace | None = None  # set when it is matched
        self.credited = False  # the tree has learned what its prompt was worth
        # Whether its last queries say what its prompt is worth to them, and what they said.
        self.measures = measures and not isinstance(plan, WindowPlan)
        self.mass: Any | None = None
        self.window = 0  # of so many queries
        self.need = need  # what it needs of a thinned prefix, if it asked for such
        self.goes_on: bool | None = None  # its prompt only goes on where an earlier one ended
        self.counted = False
        self.reader_node: Any | None = None
        shape = (plan.geometry.num_layers, plan.geometry.num_kv_heads)
        self.counts: NDArray[np.int64] = np.zeros(shape, dtype=np.int64)
        self.reset()
        self._last: dict[str, Any] | None = None

    def reset(self) -> None:
        """Back to holding nothing: released, or retracted and waiting to be computed again."""
        self.row = -1
        self.slot = 0
        self.score_slot = -1  # in the score table, while its queries are scored
        self.scoring = False  # some of its queries are still to be
        self.positions: Any | None = None  # of what a fold kept, where later folds need them
        self.length = 0  # tokens with memory, all computed by forwards already submitted
        self.counts[:] = 0  # pages in each stream's list
        self.peak_pages = 0  # promised while prefilling, else 0
        self.taken_pages = 0  # of those: taken from the pool, and not yet given back to it
        self.folded_at = -1  # position up to which the policy has been applied
        self.thinned_prefix = 0  # tokens that it went on from, of a prefix that it had asked for
        self.evicted = 0  # stream-tokens taken under pressure
        self.offset = 0  # what its logical positions are ahead of those the model is told
        self.private = False
        self.awaiting_checkpoint = False  # a prefill ran whose result the tree has not seen
        self.owes_pages = False  # private, but its dense prefix is still to be published

    @property
    def held_pages(self) -> int:
        """Pages in all its lists."""
        return int(self.counts.sum())

    @property
    def cache_positions(self) -> bool:
        """Whether its positions are those in the cache."""
        return isinstance(self.plan, WindowPlan) and self.plan.cache_positions

    # -- whose queries are scored --

    @property
    def scores(self) -> bool:
        """Whether any of its queries are."""
        return isinstance(self.plan, FoldPlan) or self.scores_for_pressure

    @property
    def scores_for_pressure(self) -> bool:
        return self.evictable and not isinstance(self.plan, WindowPlan)

    def scored_queries(self, begin: int, end: int) -> int | None:
        """Of the queries at ``begin .. end``: the first that is scored, from ``begin``; or None."""
        plan = self.plan
        if not self.scores:
            return self._measured_queries(begin, end)
        last = len(self.req.origin_input_ids)  # a chunk ends there: see `next_stop`
        if isinstance(plan, FoldPlan):
            assert plan.fold_at is not None
            last = end if plan.score_on else plan.fold_at
        first = self.score_from
        return max(first - begin, 0) if end > first and begin < last else None

    def _measured_queries(self, begin: int, end: int) -> int | None:
        prompt = len(self.req.origin_input_ids)
        # Computed again, answer and all, its prompt's last queries are no longer the last.
        if not self.measures or end != prompt or begin >= end:
            return None
        return max(prompt - QUERIES, begin) - begin

    @property
    def measured_window(self) -> int | None:
        """Queries of which what is scored at its prompt's end is the sum; None: it is no measure
        of what the prompt's pages are worth."""
        prompt = len(self.req.origin_input_ids)
        if not self.measures or self.private or self.length != prompt or self.score_slot < 0:
            return None
        window = prompt - self.score_from if self.scores else QUERIES
        # Summed over most of a prompt, early tokens have more for being seen by more.
        return window if window <= max(QUERIES, prompt // 2) else None

    @property
    def score_from(self) -> int:
        """First position whose query is scored."""
        if isinstance(self.plan, FoldPlan):
            return self.plan.score_from
        return max(0, len(self.req.origin_input_ids) - SCORED_QUERIES)

    def scored_tokens(self, lengths: NDArray[np.int32]) -> NDArray[np.int64]:
        """Leading tokens of each stream that all its scored queries have seen."""
        held: NDArray[np.int64] = lengths.astype(np.int64)
        if isinstance(self.plan, FoldPlan) and self.plan.score_on:
            return held
        return held - max(0, self.length - self.score_from)

    def next_stop(self, position: int) -> int | None:
        """Where a chunk that begins at ``position`` has to end; None: anywhere."""
        stop = self.plan.next_stop(position)
        prompt = len(self.req.origin_input_ids)
        if not isinstance(self.plan, FoldPlan) and self.scores and position < prompt:
            # Computed again, its answer's queries are not to count as its prompt's last.
            return prompt if stop is None else min(stop, prompt)
        return stop

    def match_limit(self) -> int | None:
        """Tokens that may come from the prefix tree; None: no limit."""
        limit = self.plan.match_limit
        if not self.scores_for_pressure:
            return limit
        scored = max(0, len(self.req.origin_input_ids) - SCORED_QUERIES)
        return scored if limit is None else min(limit, scored)

    @property
    def known_tokens(self) -> int:
        """Prompt and output so far: what a prefill would compute now."""
        return len(self.req.origin_input_ids) + len(self.req.output_ids)

    def publish_limit(self) -> int | None:
        """Tokens that the prefix tree may take from this request; None: no limit."""
        if self.private and not self.owes_pages:
            return int(self.req.kv.cache_protected_len)
        return self.plan.dense_prefix

    def report(self) -> dict[str, Any] | None:
        """What was applied, for the client; after release, the last values."""
        return self._last

    def note(self, page_bytes: int, held_tokens: float) -> None:
        """Keep the report of this moment; ``held_tokens``: in its lists, mean over the streams."""
        geometry = self.plan.geometry
        logical = min(self.length, self.known_tokens)
        # Not what the plan comes to: a fold may still be due, and pressure is in no plan.
        kept = round(held_tokens) - (self.length - logical)
        if isinstance(self.plan, WindowPlan):
            kept = self.plan.kept_tokens(logical)  # of the pages that it lies in, what is seen
        dense = -(-self.length // geometry.page_size) * geometry.num_streams
        self._last = {
            "method": self.policy.name,
            "parameters": self.policy.parameters,
            "logical_tokens": logical,
            "kept_tokens": kept,
            "freed_bytes": (dense - self.held_pages) * page_bytes,
            "kept_pages": self.held_pages,
            "kept_bytes": self.held_pages * page_bytes,
        }
        if self.evicted:
            self._last["evicted_tokens"] = self.evicted // geometry.num_streams
        if self.thinned_prefix:
            self._last["thinned_prefix_tokens"] = self.thinned_prefix
        if self.overridden:
            self._last["overridden"] = True
