"""The virtual ledger: SGLang's own paged allocator, wide enough for every logical token.

Its ids are names, not memory. Where it frees a token page, that page's head pages go.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator

from sglang_kv.state import PhysicalLedger


class LedgerAllocator(PagedTokenToKVPoolAllocator):
    """`PagedTokenToKVPoolAllocator` (any page size, 1 too) with a physical ledger below."""

    ledger: PhysicalLedger | None = None
    _checked = -1

    def _release_page_ids(self, *page_ids: torch.Tensor) -> None:
        # The one place through which every free of SGLang's goes, deferred groups included.
        if self.ledger is not None:
            for ids in page_ids:
                self.ledger.release_token_pages(ids.cpu().numpy())
        super()._release_page_ids(*page_ids)

    def check_decode_capacity(
        self,
        *,
        num_tokens: int,
        tree_cache: Any,
        requests: Any = None,
        spec_algorithm: Any = None,
    ) -> bool:
        """Whether both ledgers have room for the next decode step, after evicting the tree.

        A no makes SGLang retract requests until this says yes.
        """
        if not super().check_decode_capacity(
            num_tokens=num_tokens,
            tree_cache=tree_cache,
            requests=requests,
            spec_algorithm=spec_algorithm,
        ):
            return False
        ledger = self.ledger
        if ledger is None:
            return True
        states = [r.sglang_kv for r in requests or () if r.kv.holds_kv]
        need = sum(ledger.pages_for_next_token(s) for s in states)
        # A prefill under way cannot be retracted: what it was promised stays its own.
        want = need + ledger.outstanding
        if ledger.pool.num_free >= want:
            return True
        if ledger.tree is not None:
            if ledger.tree.evict_pages(want):
                return True
            # What was shared with something that has gone needs no copy any more.
            need = sum(ledger.pages_for_next_token(s) for s in states)
            want = need + ledger.outstanding
            if ledger.pool.num_free >= want:
                return True
        with ledger.folder.after_forwards():
            return ledger.pressure is not None and ledger.pressure.relieve(ledger, want)

    def verify_byte_accounting(self) -> list[str]:
        """SGLang's idle check: the physical ledger's references must add up."""
        ledger = self.ledger
        # Asked at every turn of the idle loop; the walk is due once after each change.
        if ledger is None or ledger.pool.changes == self._checked:
            return []
        self._checked = ledger.pool.changes
        try:
            ledger.check()
        except AssertionError as error:
            return [str(error)]
        return []
