"""A scheduler in miniature: SGLang's calls on the two ledgers and the tree, in its order.

It keeps a memory of its own: each slot of each head page holds a digest of the tokens (and,
after a drop, of the policy) that its K and V would have been computed from. Every step reads
back what each stream would attend to, so a page that was freed too early, shared too widely
or mapped wrongly shows as a wrong digest, not as a wrong logit.
"""

from __future__ import annotations

import zlib
from array import array
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from sglang.srt.managers.schedule_batch import ReqKvInfo
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey

from sglang_kv.compression import Compressor, FoldPlan, Geometry, WindowPlan
from sglang_kv.compression.gates import HeadGates
from sglang_kv.fold import Folder
from sglang_kv.kernels.layout import GAP, KV_LEN
from sglang_kv.kernels.reference import visible_mask
from sglang_kv.ledger import LedgerAllocator
from sglang_kv.namespaces import Sharing
from sglang_kv.pool import HeadPagePool
from sglang_kv.prefix_cache import HeadPageRadixCache
from sglang_kv.request import RequestState
from sglang_kv.state import PhysicalLedger
from sglang_kv.thinning import Thinner, require_need, takes_thinned, thinning_plan

LAYERS, HEADS, CONTEXT = 2, 3, 512
GATES = HeadGates(
    np.linspace(0, 1, LAYERS * HEADS, dtype=np.float32).reshape(LAYERS, HEADS), "none", "test", ""
)


class Req:
    """The fields of SGLang's ``Req`` that the ledgers and the tree touch."""

    def __init__(
        self,
        prompt: list[int],
        policy: Compressor,
        *,
        evictable: bool = False,
        tenant: str | None = None,
        salt: str | None = None,
        extra_key: str | None = None,
        lora_id: str | None = None,
        thinned: bool = False,
    ):
        self.origin_input_ids = array("q", prompt)
        self.output_ids = array("q")
        self.kv = ReqKvInfo()
        # SGLang joins the two.
        self.extra_key = extra_key if lora_id is None else (extra_key or "") + lora_id
        self.cache_salt, self.lora_id = salt, lora_id
        self.tenant, self.thinned = tenant, thinned
        self.priority = 0
        self.skip_radix_cache_insert = False
        self.lock: Any = None
        self.last_node: Any = None
        self.prefix_len = self.extend_end = 0
        self.sampling_params = SimpleNamespace(max_new_tokens=64, ignore_eos=False)
        self.policy, self.evictable = policy, evictable
        self.done = False
        self.finished_reason = None
        self.digests: dict[int, int] = {}
        self.prefixes: list[int] = []
        self.dense_until = CONTEXT  # tokens after a drop have other KV
        self.taken_dense = 0  # tokens that it went on from and full attention computed
        self.sglang_kv: RequestState = None  # type: ignore[assignment]  # from `Harness.admit` on

    @property
    def full_untruncated_fill_ids(self) -> array[int]:
        return self.origin_input_ids + self.output_ids

    def finished(self) -> bool:
        return self.done


class Harness:
    def __init__(
        self,
        *,
        page_size: int = 4,
        pool_tokens: int = 256,
        virtual_tokens: int = 2048,
        rows: int = 16,
        disable_tree: bool = False,
        order: str = "lru",
        sharing: Sharing | None = None,
        thinned_for: Compressor | None = None,
        measures: bool = False,
        events: bool = False,
    ):
        self.page_size = page_size
        self.rows = ReqToTokenPool(rows, CONTEXT, "cpu", False)
        self.allocator = LedgerAllocator(
            virtual_tokens, page_size, torch.bfloat16, "cpu", None, False
        )
        pool = HeadPagePool(pool_tokens // page_size * LAYERS * HEADS)
        geometry = Geometry(LAYERS, HEADS, page_size, GATES)
        # Its K holds digests; the real gather moves them.
        self.pages = torch.zeros((pool.num_pages, 2, page_size, 16), dtype=torch.int32)
        self.memory = self.pages[:, 0, :, 0].numpy()
        self.ledger = PhysicalLedger(
            pool,
            geometry,
            Folder(self.pages, geometry),
            num_token_pages=virtual_tokens // page_size,
            page_bytes=2,
            req_to_token=self.rows.req_to_token,
        )
        self.allocator.ledger = self.ledger
        self.rows.attach_aux_cache(self.ledger)
        self.measures = measures
        thinner = None
        if thinned_for is not None:
            thinner = Thinner.of(self.ledger, thinning_plan(geometry, thinned_for))
        self.tree = HeadPageRadixCache(
            CacheInitParams(
                disable=disable_tree,
                req_to_token_pool=self.rows,
                token_to_kv_pool_allocator=self.allocator,
                page_size=page_size,
                eviction_policy=order,
                enable_kv_cache_events=events,
            ),
            self.ledger,
            sharing=sharing,
            thinner=thinner,
        )
        self.running: list[Req] = []
        self.taken_dense: dict[Any, int] = {}  # `Req.taken_dense` of whom a snapshot is from
        self.kept: dict[RequestState, dict[tuple[int, int], list[int]]] = {}
        #: (request, position, kept positions per stream) of every fold
        self.folds: list[tuple[RequestState, int, dict[tuple[int, int], list[int]]]] = []
        self.ledger.folder.observer = self._observe

    # -- a request's life --

    def admit(self, req: Req) -> None:
        """Match and lock, as at admission."""
        if req.sglang_kv is None:
            plan = req.policy.plan(len(req.origin_input_ids), self.ledger.geometry)
            req.sglang_kv = RequestState(
                req,
                req.policy,
                plan,
                evictable=req.evictable,
                tenant=req.tenant,
                measures=self.measures,
                need=require_need(plan) if req.thinned else None,
            )
        self.match(req)
        req.lock = self.tree.lock(req.last_node)
        self.tree.set_reader(req.sglang_kv, req.last_node)

    def match(self, req: Req) -> None:
        """What the tree has of it."""
        ids = req.full_untruncated_fill_ids
        key = RadixKey(ids, req.extra_key, limit=len(ids) - 1, cache_salt=req.cache_salt)
        match = self.tree.match_prefix(MatchPrefixParams(key=key, req=req))
        req.prefix_len = req.extend_end = match.device_prefix_len
        req.kv.cache_protected_len = match.device_prefix_len
        req.kv.cache_inserted_len = 0
        req.last_node = match.last_device_node
        snapshot = req.last_node.snapshot
        if snapshot is not None:
            req.taken_dense = self.taken_dense[snapshot]
        elif takes_thinned(req.sglang_kv, req.prefix_len):
            req.taken_dense = req.prefix_len

    def extend(self, req: Req, tokens: int) -> None:
        """One prefill chunk: allocate, forward, drop. It ends at the fold, as at admission."""
        end = min(req.prefix_len + tokens, len(req.full_untruncated_fill_ids))
        stop = req.sglang_kv.next_stop(req.prefix_len)
        self.alloc(req, end if stop is None else min(stop, end))
        self.ledger.after_prefill([req])
        self.check()

    def checkpoint(self, req: Req) -> None:
        if not req.skip_radix_cache_insert:
            self.tree.checkpoint(req, up_to=req.extend_end)
        req.prefix_len = req.extend_end
        self.check()

    def decode(self, req: Req, token: int) -> None:
        req.output_ids.append(token)
        req.prefix_len = req.extend_end
        self.alloc(req, req.extend_end + 1)
        req.prefix_len = req.extend_end
        self.check()

    def release(self, req: Req, *, publish: bool) -> None:
        """SGLang's ``release_kv_cache``."""
        req.done = publish
        publish = publish and not req.skip_radix_cache_insert
        if publish:
            self.tree.checkpoint(req, up_to=req.extend_end)
        self.tree.free_kv_row(req.kv, [(req.kv.cache_protected_len, req.extend_end)])
        self.tree.unlock(req.lock)
        req.lock = None
        known = set(self.tree.snapshots.of_node.values())
        self.rows.free(req)
        for snapshot in set(self.tree.snapshots.of_node.values()) - known:
            self.taken_dense[snapshot] = req.taken_dense
        req.kv.mark_kv_released()
        req.kv.cache_protected_len = req.kv.kv_committed_len = 0
        self.running.remove(req)
        self.kept.pop(req.sglang_kv, None)
        req.digests.clear()
        req.dense_until = CONTEXT
        req.taken_dense = 0
        self.check()

    def alloc(self, req: Req, target: int) -> None:
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
        """Of the token at ``position`` and all that its KV was computed from."""
        limit = req.sglang_kv.plan.dense_prefix
        dense = (limit is None or position < limit) and position < req.dense_until
        if position not in req.digests:  # tokens are only ever appended
            # What was computed behind a thinned prefix is other KV than without one.
            how = None if dense or position < req.taken_dense else f"{req.policy}{req.thinned}"
            who = (req.tenant, req.cache_salt, req.extra_key, req.lora_id)
            # Of numbers, a hash is the same in every process.
            req.digests[position] = hash((_prefix(req, position), checksum(how, who))) % 2**30
        return req.digests[position]

    def _forward(self, req: Req, start: int, target: int) -> None:
        state = req.sglang_kv
        # What the streams hold is known to this scheduler alone: it follows the folds itself.
        kept: dict[tuple[int, int], list[int]] = self.kept.setdefault(state, {})
        for stream in np.ndindex(LAYERS, HEADS):
            desc = self.ledger.streams.desc[state.slot][stream]
            pages = self.ledger.streams.table[state.slot][stream]
            count = int(desc[KV_LEN])
            positions = self._positions(req, stream, desc, start, target)
            for index in range(count - (target - start), count):
                slot = (pages[index // self.page_size], index % self.page_size)
                self.memory[slot] = self._digest(req, positions[index]) + sum(stream)
            self._read(req, stream, positions, target - start)
            kept[stream] = positions
        self._score(req, start, target)

    def _positions(
        self, req: Req, stream: tuple[int, int], desc: Any, start: int, target: int
    ) -> list[int]:
        """The logical position of each token of a stream."""
        plan = req.sglang_kv.plan
        count = int(desc[KV_LEN])
        if isinstance(plan, WindowPlan):
            edge = plan.window.sink_pages(self.page_size) * self.page_size
            gone = int(desc[GAP]) + req.sglang_kv.offset
            return [i if i < edge else i + gone for i in range(count)]
        before = self.kept[req.sglang_kv].get(stream, list(range(start)))
        assert len(before) + target - start == count, "a stream lost or won tokens"
        return [*before, *range(start, target)]

    def _score(self, req: Req, start: int, target: int) -> None:
        """Attention that the new queries give: made up, different for every key and stream."""
        state = req.sglang_kv
        passed = self.ledger.folder.score_pass([state], [target - start])
        if passed is None or int(passed.slots[0]) < 0:
            return
        for stream in np.ndindex(LAYERS, HEADS):
            row = self.ledger.folder.scores.values[state.score_slot][stream]
            keys = np.array(self.kept[state][stream])
            queries = np.arange(start + int(passed.first_query[0]), target)
            given = made_up_attention(stream, queries[:, None], keys)
            seen = queries[:, None] >= keys
            row[: len(keys)] += torch.from_numpy((given * seen).sum(0)).float()

    def _observe(self, state: RequestState, mask: torch.Tensor) -> None:
        """Tokens were dropped: follow them by position."""
        state.req.dense_until = min(state.req.dense_until, state.length)
        for stream in np.ndindex(LAYERS, HEADS):
            before = self.kept[state][stream]
            self.kept[state][stream] = [before[i] for i in mask[stream].nonzero().flatten()]
        self.folds.append((state, state.length, dict(self.kept[state])))

    def _read(self, req: Req, stream: tuple[int, int], positions: list[int], queries: int) -> None:
        state = req.sglang_kv
        desc = self.ledger.streams.desc[state.slot][stream]
        pages = self.ledger.streams.table[state.slot][stream]
        mask = visible_mask(queries, torch.from_numpy(desc), self.page_size).numpy()
        for query in range(queries):
            t = req.extend_end - queries + query
            seen = [positions[i] for i in np.flatnonzero(mask[query])]
            expected = paper_visible(state, stream, t)
            if expected is None:  # scores say, or the cut of the prompt does
                continue
            assert seen == expected, f"query {t} of {state.policy} sees {seen}"
        read = mask.any(0).tolist()
        for index, position in enumerate(positions):
            if read[index]:
                slot = (pages[index // self.page_size], index % self.page_size)
                want = self._digest(req, position) + sum(stream)
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


def batch_of(req: Req, start: int, target: int) -> Any:
    """What SGLang hands to an attention backend for a forward of these tokens."""
    count = target - start
    decodes = bool(req.output_ids) and count == 1
    return SimpleNamespace(
        req_pool_indices=torch.tensor([req.kv.req_pool_idx]),
        forward_mode=SimpleNamespace(is_decode_or_idle=lambda: decodes),
        extend_seq_lens=torch.tensor([count]),
        extend_seq_lens_cpu=[count],
        positions=torch.arange(start, target),
    )


def _prefix(req: Req, position: int) -> int:
    """A hash of the tokens up to ``position``, each made of the one before."""
    known = req.prefixes
    if position >= len(known):
        for token in req.full_untruncated_fill_ids[len(known) : position + 1]:
            known.append(hash((known[-1] if known else 0, token)))
    return known[position]


@cache
def checksum(*words: Any) -> int:
    return zlib.crc32(repr(words).encode())


def made_up_attention(stream: tuple[int, int], query: Any, position: Any) -> Any:
    """Small whole numbers without a pattern: their fp32 sums are exact in any order."""
    mixed = (query * 7919 + position * 104729 + stream[0] * 1299709 + stream[1] * 15485863) % 65521
    return mixed * mixed % 65521 % 64


def paper_visible(state: RequestState, stream: tuple[int, int], t: int) -> list[int] | None:
    """What the query at ``t`` sees in the paper's loop: one token at a time, evict after it."""
    policy, plan = state.policy, state.plan
    if isinstance(plan, FoldPlan) or getattr(plan, "dense_first_chunk", False) or state.evicted:
        return None
    whole = not isinstance(plan, WindowPlan) or t < (plan.fold_at or 0)
    if whole or (plan.windowed is not None and not plan.windowed[stream]):  # type: ignore[union-attr]
        return list(range(t + 1))
    window = plan.window  # type: ignore[union-attr]
    asked = policy.parameters
    sinks, recent = asked.get("sinks", window.num_sinks), asked.get("recent", window.window_left)
    return [*_evicted_loop(sinks, recent, t), t]


@cache
def _evicted_loop(sinks: int, recent: int, t: int) -> tuple[int, ...]:
    kept: list[int] = []
    for position in range(t):
        kept.append(position)
        if len(kept) > sinks + recent:
            kept = kept[:sinks] + kept[len(kept) - recent :]
    return tuple(kept)
