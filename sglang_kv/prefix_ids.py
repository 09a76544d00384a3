"""The virtual side of the prefix cache: SGLang's locks, its ids, and its sizes in tokens."""

from __future__ import annotations

import time

import torch
from sglang.srt.mem_cache.base_prefix_cache import (
    BasePrefixCache,
    DecLockRefParams,
    DecLockRefResult,
    EvictParams,
    EvictResult,
    IncLockRefResult,
)

from sglang_kv.owner import LedgerOwner, PrefixNode
from sglang_kv.radix.tree import RadixTree


class IdLedger(BasePrefixCache):
    """What SGLang asks of a prefix cache about ids alone; memory is `HeadPageRadixCache`'s."""

    tree: RadixTree[torch.Tensor]
    owner: LedgerOwner
    disable: bool

    @property
    def root_node(self) -> PrefixNode:
        return self.tree.root

    def path_device_indices(self, node: PrefixNode) -> torch.Tensor:
        values = [step.value for step in node.path()]
        return torch.cat(values) if values else torch.empty((0,), dtype=torch.int64)

    def inc_lock_ref(self, node: PrefixNode) -> IncLockRefResult:
        return IncLockRefResult(delta=0 if self.disable else -self.tree.lock(node))

    def dec_lock_ref(
        self, node: PrefixNode, params: DecLockRefParams | None = None
    ) -> DecLockRefResult:
        return DecLockRefResult(delta=0 if self.disable else self.tree.unlock(node))

    def evict(self, params: EvictParams) -> EvictResult:
        """Give up ids, and the memory of what is named by them."""
        if self.disable:
            return EvictResult()
        start = time.perf_counter()
        self.owner.stats.reason = "ids"
        freed = self.tree.evict_tokens(params.num_tokens)
        self.update_eviction_metrics(freed, start)
        return EvictResult(num_tokens_evicted=freed)

    def supports_prefix_sharing(self) -> bool:
        return not self.disable

    def evictable_size(self) -> int:
        return self.tree.evictable_tokens

    def protected_size(self) -> int:
        return self.tree.protected_tokens

    def total_size(self) -> int:
        return self.tree.evictable_tokens + self.tree.protected_tokens
