"""The scheduler process's one instance of everything, and the way to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang_kv.config import Options
    from sglang_kv.state import LedgerStats, PhysicalLedger


@dataclass
class Runtime:
    """Options and the physical ledger; ``scheduler`` is set once it exists."""

    options: Options
    ledger: PhysicalLedger
    trained_length: int | None = None

    def stats(self) -> LedgerStats:
        return self.ledger.stats()


_current: Runtime | None = None


def current() -> Runtime | None:
    """This process's runtime; None outside the scheduler or without compression."""
    return _current


def install(runtime: Runtime | None) -> None:
    global _current
    _current = runtime
