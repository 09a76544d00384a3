"""A scheduler in miniature: SGLang's calls on the two ledgers and the tree, in its order.

It keeps a memory of its own: each slot of each head page holds a digest of the tokens (and,
after a drop, of the policy) that its K and V would have been computed from. Every step reads
back what each stream would attend to, so a page that was freed too early, shared too widely
or mapped wrongly shows as a wrong digest, not as a wrong logit.
"""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from sglang.srt.managers.schedule_batch import ReqKvInfo
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey

from sglang_kv.compression import Compressor
from sglang_kv.kernels.layout import GAP, KV_LEN
from sglang_kv.kernels.reference import visible_mask
from sglang_kv.ledger import LedgerAllocator
from sglang_kv.pool import HeadPagePool
from sglang_kv.prefix_cache import HeadPageRadixCache
from sglang_kv.state import PhysicalLedger, RequestState

LAYERS, HEADS, CONTEXT = 2, 3, 512


class Req:
    """The fields of SGLang's ``Req`` that the ledgers and the tree touch."""

    def __init__(self, prompt: list[int], policy: Compressor):
        self.origin_input_ids = array("q", prompt)
        self.output_ids = array("q")
        self.kv = ReqKvInfo()
        self.extra_key = self.cache_salt = None
        self.priority = 0
        self.skip_radix_cache_insert = False
        self.lock: Any = None
        self.last_node: Any = None
        self.prefix_len = self.extend_end = 0
        self.sampling_params = SimpleNamespace(max_new_tokens=64, ignore_eos=False)
        self.sglang_kv = RequestState(self, policy)

    @property
    def full_untruncated_fill_ids(self) -> array[int]:
        return self.origin_input_ids + self.output_ids

    def finished(self) -> bool:
        return False


class Harness:
    def __init__(
        self,
        *,
        page_size: int = 4,
        pool_tokens: int = 256,
        virtual_tokens: int = 2048,
        rows: int = 16,
        disable_tree: bool = False,
    ):
        self.page_size = page_size
        self.rows = ReqToTokenPool(rows, CONTEXT, "cpu", False)
        self.allocator = LedgerAllocator(
            virtual_tokens, page_size, torch.bfloat16, "cpu", None, False
        )
        pool = HeadPagePool(pool_tokens // page_size * LAYERS * HEADS)
        self.ledger = PhysicalLedger(
            pool,
            num_layers=LAYERS,
            num_kv_heads=HEADS,
            num_token_pages=virtual_tokens // page_size,
            page_size=page_size,
            page_bytes=2,
            req_to_token=self.rows.req_to_token,
        )
        self.allocator.ledger = self.ledger
        self.rows.attach_aux_cache(self.ledger)
        self.tree = HeadPageRadixCache(
            CacheInitParams(
                disable=disable_tree,
                req_to_token_pool=self.rows,
                token_to_kv_pool_allocator=self.allocator,
                page_size=page_size,
            ),
            self.ledger,
        )
        self.memory = np.zeros((pool.num_pages, page_size), dtype=np.int64)
        self.running: list[Req] = []

    # -- a request's life --

    def admit(self, req: Req) -> None:
        """Match and lock, as at admission."""
        ids = req.full_untruncated_fill_ids
        key = RadixKey(ids, None, limit=len(ids) - 1)
        match = self.tree.match_prefix(MatchPrefixParams(key=key, req=req))
        req.prefix_len = req.extend_end = match.device_prefix_len
        req.kv.cache_protected_len = match.device_prefix_len
        req.kv.cache_inserted_len = 0
        req.last_node = match.last_device_node
        req.lock = self.tree.lock(req.last_node)
        self.tree.set_reader(req.sglang_kv, req.last_node)

    def extend(self, req: Req, tokens: int) -> None:
        """One prefill chunk: allocate, forward, drop. It ends at the fold, as at admission."""
        end = min(req.prefix_len + tokens, len(req.full_untruncated_fill_ids))
        fold_at = req.sglang_kv.fold_at or 0
        self._alloc(req, fold_at if req.prefix_len < fold_at < end else end)
        self.ledger.after_prefill([req])
        self.check()

    def checkpoint(self, req: Req) -> None:
        self.tree.checkpoint(req, up_to=req.extend_end)
        req.prefix_len = req.extend_end
        self.check()

    def decode(self, req: Req, token: int) -> None:
        req.output_ids.append(token)
        req.prefix_len = req.extend_end
        self._alloc(req, req.extend_end + 1)
        req.prefix_len = req.extend_end
        self.check()

    def release(self, req: Req, *, publish: bool) -> None:
        """SGLang's ``release_kv_cache``."""
        if publish:
            self.tree.checkpoint(req, up_to=req.extend_end)
        self.tree.free_kv_row(req.kv, [(req.kv.cache_protected_len, req.extend_end)])
        self.tree.unlock(req.lock)
        req.lock = None
        self.rows.free(req)
        req.kv.mark_kv_released()
        req.kv.cache_protected_len = req.kv.kv_committed_len = 0
        self.running.remove(req)
        self.check()

    def _alloc(self, req: Req, target: int) -> None:
        start = req.prefix_len
        held = req.kv.holds_kv
        if not held:
            prefix = (
                self.tree.path_device_indices(req.last_node)
                if start
                else torch.empty(0, dtype=torch.int64)
            )
            rows = self.rows.alloc([req])
            assert rows is not None
            self.ledger.bind(req)
            self.rows.write((rows[0], slice(0, start)), prefix.to(torch.int32))
            self.running.append(req)
        row = req.kv.req_pool_idx
        last = self.rows.req_to_token[row, start - 1 : start].to(torch.int64) if start else -1
        ids = self.allocator.alloc_extend(
            torch.tensor([start]),
            torch.tensor([start]),
            torch.tensor([target]),
            torch.tensor([target]),
            torch.as_tensor(last).reshape(1),
            target - start,
        )
        assert ids is not None, "the virtual ledger ran dry"
        self.rows.write((row, slice(start, target)), ids.to(torch.int32))
        self.rows.alloc_aux_to_lengths(
            req_pool_indices_cpu=torch.tensor([row]), target_seq_lens_cpu=torch.tensor([target])
        )
        req.kv.kv_allocated_len = req.kv.kv_committed_len = target
        req.extend_end = target
        self._forward(req, start, target)

    # -- what a forward would write and read --

    def _digest(self, req: Req, position: int) -> int:
        ids = tuple(req.full_untruncated_fill_ids[: position + 1])
        limit = req.sglang_kv.dense_prefix
        dense = limit is None or position < limit
        return hash((ids, None if dense else repr(req.sglang_kv.policy)))

    def _positions(self, req: Req, desc: Any) -> list[int]:
        window = req.sglang_kv.policy.window
        edge = window.sink_pages(self.page_size) * self.page_size
        return [i if i < edge else i + int(desc[GAP]) for i in range(int(desc[KV_LEN]))]

    def _forward(self, req: Req, start: int, target: int) -> None:
        state = req.sglang_kv
        for layer in range(LAYERS):
            for head in range(HEADS):
                desc = self.ledger.streams.desc[state.slot, layer, head]
                pages = self.ledger.streams.table[state.slot, layer, head]
                count = int(desc[KV_LEN])
                for j in range(target - start):
                    index = count - (target - start) + j
                    slot = (pages[index // self.page_size], index % self.page_size)
                    self.memory[slot] = self._digest(req, start + j) + layer * 7 + head
                self._read(req, layer, head, target - start)

    def _read(self, req: Req, layer: int, head: int, queries: int) -> None:
        state = req.sglang_kv
        desc = self.ledger.streams.desc[state.slot, layer, head]
        pages = self.ledger.streams.table[state.slot, layer, head]
        positions = self._positions(req, desc)
        mask = visible_mask(queries, torch.from_numpy(desc), self.page_size)
        for query in range(queries):
            t = req.extend_end - queries + query
            seen = [positions[i] for i in torch.nonzero(mask[query]).flatten().tolist()]
            assert seen == paper_visible(state, t), f"query {t} of {state.policy} sees {seen}"
        for index, position in enumerate(positions):
            if mask[:, index].any():
                slot = (pages[index // self.page_size], index % self.page_size)
                want = self._digest(req, position) + layer * 7 + head
                assert self.memory[slot] == want, f"position {position} was overwritten"

    # -- invariants --

    def check(self) -> None:
        self.ledger.check()
        self.tree.check()
        held = sum(
            -(-req.kv.kv_allocated_len // self.page_size) * self.page_size
            - req.kv.cache_protected_len
            for req in self.running
        )
        total = (
            self.allocator.available_size()
            + self.tree.evictable_size()
            + self.tree.protected_size()
            + held
        )
        assert total == self.ledger.dense_capacity, "the virtual ledger leaks"

    def check_empty(self) -> None:
        """After everything left and the tree was flushed, both ledgers hold nothing."""
        assert not self.ledger.rows
        self.tree.evict_pages(self.ledger.pool.num_pages)
        self.check()
        assert self.ledger.pool.num_used == 0, "head pages leaked"


def paper_visible(state: RequestState, t: int) -> list[int]:
    """What the query at ``t`` sees in the paper's loop: one token at a time, evict after it."""
    policy = state.policy
    if policy.name == "none" or t < (state.fold_at or 0):
        return list(range(t + 1))
    sinks, recent = policy.parameters["sinks"], policy.parameters["recent"]
    kept: list[int] = []
    for position in range(t):
        kept.append(position)
        if len(kept) > sinks + recent:
            kept = kept[:sinks] + kept[len(kept) - recent :]
    return [*kept, t]
