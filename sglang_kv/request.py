"""What one request holds of the physical ledger, and what its policy does to it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_kv.compression import Compressor, Plan


class RequestState:
    """Lives on SGLang's ``Req`` as ``sglang_kv``, from intake to the end."""

    def __init__(self, req: Any, policy: Compressor, plan: Plan, *, overridden: bool = False):
        self.req = req
        self.policy = policy
        self.plan = plan
        self.overridden = overridden
        self.counted = False
        self.dropped = 0  # stream-tokens dropped, over all its lives
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
        self.positions: Any | None = None  # of what a fold kept, where later folds need them
        self.length = 0  # tokens with memory, all computed by forwards already submitted
        self.counts[:] = 0  # pages in each stream's list
        self.peak_pages = 0  # promised while prefilling, else 0
        self.taken_pages = 0  # of those: taken from the pool, and not yet given back to it
        self.folded_at = -1  # position up to which the policy has been applied
        self.private = False
        self.awaiting_checkpoint = False  # a prefill ran whose result the tree has not seen
        self.owes_pages = False  # private, but its dense prefix is still to be published

    @property
    def held_pages(self) -> int:
        """Pages in all its lists."""
        return int(self.counts.sum())

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

    def note(self, page_bytes: int) -> None:
        """Keep the report of this moment."""
        geometry = self.plan.geometry
        logical = min(self.length, self.known_tokens)
        dense = -(-self.length // geometry.page_size) * geometry.num_streams
        self._last = {
            "method": self.policy.name,
            "parameters": self.policy.parameters,
            "logical_tokens": logical,
            "kept_tokens": self.plan.kept_tokens(logical),
            "freed_bytes": (dense - self.held_pages) * page_bytes,
            "kept_pages": self.held_pages,
            "kept_bytes": self.held_pages * page_bytes,
        }
        if self.overridden:
            self._last["overridden"] = True
