"""The memory behind the prefix tree: head pages, and SGLang's ids for whole-token pages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from sglang_kv.radix.node import Node, State, Thin
from sglang_kv.radix.owner import Owner
from sglang_kv.tree_stats import TreeStats

if TYPE_CHECKING:
    from sglang_kv.snapshots import SnapshotStore
    from sglang_kv.state import PhysicalLedger
    from sglang_kv.thinning import Thinner
    from sglang_kv.tree_events import TreeEvents

PrefixNode = Node[torch.Tensor]


def crossover(model_config: Any) -> float:
    """The position at which attention costs a token as much as all the rest of the model does.

    From the products of a Llama-like layer: 2 operations per weight, and 4 per query channel and
    position attended to.
    """
    config, dim = model_config.hf_text_config, model_config.head_dim
    hidden, heads = model_config.hidden_size, model_config.num_attention_heads
    kv_heads = model_config.get_total_num_kv_heads()
    inner = getattr(config, "intermediate_size", None) or 4 * hidden
    weights = hidden * dim * (2 * heads + 2 * kv_heads) + 3 * hidden * inner
    return 2 * weights / (4 * heads * dim)


class LedgerOwner(Owner[torch.Tensor]):
    """A node's value is SGLang's ids, int64 ``[tokens]``; its bytes are its head pages.

    Args:
        ledger: who has the page table.
        allocator: SGLang's, where ids go back to.
        snapshots: the ends of sessions that hang at nodes.
        events: who is told of stores and removals.
        crossover: position at which attention costs as much to compute as all the rest of a token.
        thinner: what nodes may be thinned to; None: they are emptied at once.
    """

    def __init__(
        self,
        ledger: PhysicalLedger,
        allocator: Any,
        snapshots: SnapshotStore,
        events: TreeEvents,
        crossover: float,
        thinner: Thinner | None = None,
    ):
        self.ledger = ledger
        self.allocator = allocator
        self.snapshots = snapshots
        self.events = events
        self.crossover = crossover
        self.thinner = thinner
        self.stats = TreeStats()

    # -- asked --

    def weigh(self, node: PrefixNode) -> int:
        return self.num_pages(node) * self.ledger.page_bytes

    def num_pages(self, node: PrefixNode) -> int:
        """Head pages of a node; those of a snapshot may be shared with other snapshots."""
        if node.snapshot is not None:
            return len(node.snapshot.pages)
        if node.state is State.HOLLOW:
            return 0
        if node.state is State.THINNED:
            return int((self.ledger.page_table[self.token_pages(node.value)] >= 0).sum())
        return len(node) // self.ledger.page_size * self.ledger.num_streams

    def cost(self, node: PrefixNode) -> float:
        """In tokens computed at the start of a prompt. What a snapshot stands for is all of it."""
        start = 0 if node.snapshot is not None else node.start
        return (node.end - start) * (1.0 + (start + node.end) / 2 / self.crossover)

    def plan_thin(self, node: PrefixNode) -> Thin | None:
        return None if self.thinner is None else self.thinner.plan_thin(node)

    # -- told --

    def stored(self, node: PrefixNode) -> None:
        node.value = node.value.clone()  # a slice would keep the whole prompt's ids
        if node.snapshot is not None:
            self.snapshots.stored(node)
        else:
            self.events.stored(node)

    def split(self, upper: PrefixNode, lower: PrefixNode) -> None:
        upper.value, lower.value = upper.value.clone(), lower.value.clone()
        self.events.split(upper, lower)

    def filled(self, node: PrefixNode, donor: torch.Tensor) -> None:
        if node.state is State.THINNED:
            self.ledger.release_token_pages(self.token_pages(node.value))
        self.ledger.adopt(self.token_pages(node.value), self.token_pages(donor))
        self.events.stored(node)

    def thinned(self, node: PrefixNode) -> None:
        assert self.thinner is not None
        self.stats.gave_up("thin", len(node))
        lost = self.token_pages(node.value)[self.thinner.given_up(node)]
        self.ledger.thin_token_pages(lost, self.thinner.streaming)
        self.events.removed(node)

    def emptied(self, node: PrefixNode) -> None:
        self.stats.gave_up("empty" if node.snapshot is None else "snapshot", len(node))
        if node.snapshot is not None:
            self.snapshots.forget(node)
        else:
            self.ledger.release_token_pages(self.token_pages(node.value))
            self.events.removed(node)

    def removed(self, node: PrefixNode) -> None:
        if node.holds_memory:
            self.stats.gave_up("remove", len(node))
        if node.snapshot is not None:
            self.snapshots.forget(node)
        else:
            # Freed in a group of SGLang's, ids come back at its end; memory does at once.
            self.ledger.release_token_pages(self.token_pages(node.value))
        self.events.removed(node)
        self.allocator.free_segment(node.value, start_pos=0)

    def token_pages(self, ids: torch.Tensor) -> NDArray[np.int64]:
        """Virtual page ids of whole pages of tokens."""
        size = self.ledger.page_size
        return ids[::size].cpu().numpy().astype(np.int64) // size
