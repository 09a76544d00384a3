"""The scheduler process's one instance of everything, and the way to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from sglang_kv.compression import Plan, PolicyError, WindowPlan

if TYPE_CHECKING:
    from sglang_kv.config import Options
    from sglang_kv.namespaces import Sharing
    from sglang_kv.state import LedgerStats, PhysicalLedger
    from sglang_kv.thinning import Thinner


@dataclass
class Runtime:
    """Options, the physical ledger, and what the prefix tree is built with."""

    options: Options
    ledger: PhysicalLedger
    sharing: Sharing
    crossover: float
    #: Whether prompts say what they were worth to them.
    measures: bool = False
    #: What prefixes are thinned to; None: never.
    thinner: Thinner | None = None

    def refusal(self, plan: Plan) -> str | None:
        """Why this model cannot be served by such a plan, or None."""
        if not (isinstance(plan, WindowPlan) and plan.cache_positions):
            return None
        assert self.ledger.rotary is not None, "asked before the model was loaded"
        if self.ledger.rotary.refusal is None:
            return None
        return (
            f"kv_compression.positions: 'cache' cannot be had with this model: "
            f"{self.ledger.rotary.refusal}; 'original' can"
        )

    def check_default(self) -> None:
        """Raise `PolicyError` where the model rules out the server's default policy."""
        refusal = self.refusal(self.options.default_policy.plan(1, self.ledger.geometry))
        if refusal is not None:
            raise PolicyError(refusal)

    def stats(self) -> LedgerStats:
        return self.ledger.stats()


_current: Runtime | None = None
_rows: NDArray[np.int64] = np.zeros(0, dtype=np.int64)


def current() -> Runtime | None:
    """This process's runtime; None outside the scheduler or without compression."""
    return _current


def current_rows() -> NDArray[np.int64]:
    """SGLang's rows of the batch that is about to run, on the host."""
    return _rows


def announce_rows(rows: NDArray[np.int64]) -> None:
    global _rows
    _rows = rows


def install(runtime: Runtime | None) -> None:
    global _current
    _current = runtime
