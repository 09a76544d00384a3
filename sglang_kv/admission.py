"""Admission by head pages: a request enters when its physical peak fits, never sooner.

The virtual ledger rarely runs dry, so SGLang's own budget would let everything in. The
gate sits in ``add_one_req`` itself, the one call that every admission goes through, and
reserves a chunked prompt's whole peak at its first chunk: a half-prefilled request cannot
be retracted, so it must never have to wait for memory.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any, cast

from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS, AddReqResult, PrefillAdder

from sglang_kv.compression import WindowPlan
from sglang_kv.request import RequestState
from sglang_kv.state import PhysicalLedger


@cache
def gated_adder(base: Any, ledger: PhysicalLedger) -> type[PrefillAdder]:
    """``base`` with the physical gate (cached: SGLang asks at every scheduling round)."""

    class HeadPageAdder(base):
        chunked_req_limit: int | None

        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **kwargs)
            running = self.running_batch.reqs if self.running_batch is not None else ()
            self._growth = sum(self._running_growth(req) for req in running)

        def _running_growth(self, req: Any) -> int:
            if ledger.pressure is not None and req.sglang_kv.scores_for_pressure:
                return 0  # room to decode is made when it is needed
            left = self._get_running_request_total_token_offset(req)
            return growth_pages(ledger, req.sglang_kv, max(0, int(left)))

        def add_one_req(
            self, req: Any, has_chunked_req: bool, truncation_align_size: int | None
        ) -> AddReqResult:
            state: RequestState = req.sglang_kv
            admitted = len(self.can_run_list)
            # Its prefix must survive both this check and the evictions that make room.
            tree = ledger.tree
            if tree is not None:
                tree.set_reader(state, req.last_node)
            result = AddReqResult.NO_TOKEN
            need, growth = self._demand(req)
            fits = self._fits(need, growth)
            if not fits and tree is not None and self._alone and tree.snapshots.drop_of(state):
                # What it could go on from is what is in its way.
                req.init_next_round_input(tree)
                tree.set_reader(state, req.last_node)
                need, growth = self._demand(req)
                fits = self._fits(need, growth)
            if fits:
                result = self._add(req, has_chunked_req, truncation_align_size)
            if len(self.can_run_list) > admitted:
                state.peak_pages, state.taken_pages = need, 0
                ledger.prefilling.add(state)
                self._growth += growth
                if self.new_chunked_req is req:
                    # SGLang keeps track of one unfinished prompt: a chunk that was cut short
                    # for our reasons must not leave room for a second one in this pass.
                    self.rem_chunk_tokens = 0
                    result = AddReqResult.OTHER
            elif tree is not None:
                tree.set_reader(state, None)
            return result

        def _add(self, req: Any, *args: Any) -> AddReqResult:
            # Without a tree, SGLang admits `ignore_eos` requests by a shortcut of its own, past
            # the hooks below: chunks would not end where a policy takes hold.
            params = req.sampling_params
            ignore_eos, params.ignore_eos = params.ignore_eos, False
            try:
                return super().add_one_req(req, *args)
            finally:
                params.ignore_eos = ignore_eos

        def add_chunked_req(self, req: Any) -> Any:
            limit = _chunk_limit(ledger, req.sglang_kv)
            if limit is not None:
                limit = min(limit, _to_fold(req) or limit)
                self.chunked_req_limit = min(limit, self.chunked_req_limit or limit)
            elif self.rem_chunk_tokens is None:
                # Without chunked prefill, a request that is computed again still stops at its
                # folds, and SGLang takes what follows for a chunk.
                self.rem_chunk_tokens = _to_fold(req) or len(req.full_untruncated_fill_ids)
            unfinished = super().add_chunked_req(req)
            if unfinished is not None:
                self.rem_chunk_tokens = 0
            return unfinished

        def _check_prefill_budget(
            self, req: Any, *, chunk_limit: int | None, **kwargs: Any
        ) -> tuple[bool, int | None]:
            fits, limit = super()._check_prefill_budget(req, chunk_limit=chunk_limit, **kwargs)
            own = _chunk_limit(ledger, req.sglang_kv)
            if limit is not None and own is not None:
                limit = min(limit, own)
            return fits, limit

        def _select_prefill_admission(self, req: Any, **kwargs: Any) -> Any:
            admission = super()._select_prefill_admission(req, **kwargs)
            rest = _to_fold(req)
            if isinstance(admission, AddReqResult) or not rest or rest >= admission.extend_len:
                return admission
            # The chunk ends where the policy takes hold, wherever in a page that is.
            return replace(admission, extend_len=rest, max_new_tokens=0, is_chunked=True)

        def _demand(self, req: Any) -> tuple[int, int]:
            """Head pages beyond the matched prefix: for the prefill's peak, and to decode."""
            state: RequestState = req.sglang_kv
            tokens, held = len(req.full_untruncated_fill_ids), req.prefix_len // ledger.page_size
            peak = _peak_pages(ledger, state, tokens, held)
            if ledger.pressure is not None and state.scores_for_pressure:
                return peak, 0
            left = max(req.sampling_params.max_new_tokens - len(req.output_ids), 0)
            if ledger.tree is not None:
                peak += ledger.tree.snapshots.copies_ahead(state, req.last_node, tokens)
            end = state.plan.pages(tokens + min(left, CLIP_MAX_NEW_TOKENS))
            return peak, max(0, end - held * ledger.num_streams - peak)

        @property
        def _alone(self) -> bool:
            return not (self._growth or self.can_run_list or ledger.rows)

        def _fits(self, need: int, growth: int) -> bool:
            pool, tree = ledger.pool, ledger.tree
            promised = ledger.outstanding
            wanted = promised + need + growth + self._growth
            # Room to decode is an estimate, so it must not keep out a request that is alone.
            if not self._alone and pool.num_free < wanted:
                idle = tree.idle_pages() if tree is not None else 0
                if pool.num_free + idle < wanted:
                    return False
            want = promised + need
            return pool.num_free >= want or (tree is not None and tree.evict_pages(want))

    HeadPageAdder.__name__ = f"HeadPage{base.__name__}"
    return cast(type[PrefillAdder], HeadPageAdder)


def _to_fold(req: Any) -> int:
    """Tokens until the chunk has to end because the policy takes hold; 0: no such place."""
    begin = int(req.prefix_len)
    stop = req.sglang_kv.next_stop(begin)
    return 0 if stop is None else stop - begin


def _peak_pages(
    ledger: PhysicalLedger,
    state: RequestState,
    tokens: int,
    matched: int,
    chunk: int | None = None,
) -> int:
    shared = ledger.tree is not None and not ledger.tree.disable
    published = (state.plan.dense_prefix or 0) // ledger.page_size if shared else 0
    chunk = _chunk_limit(ledger, state) if chunk is None else chunk
    peak = state.plan.peak_pages(tokens, chunk, matched=matched, published=published)
    return peak + _turned_pages(ledger, state, tokens, chunk, published)


def _turned_pages(
    ledger: PhysicalLedger, state: RequestState, tokens: int, chunk: int | None, published: int
) -> int:
    """Pages of the tree that are in the window still when its keys are first turned: copied."""
    plan, trained = state.plan, ledger.trained_length
    if not isinstance(plan, WindowPlan) or not plan.cache_positions:
        return 0
    if trained is None or tokens <= trained:
        return 0
    first = plan.window.first_page(max(0, trained - (chunk or 0)), ledger.page_size)
    return max(0, published - first) * ledger.num_streams


def _chunk_limit(ledger: PhysicalLedger, state: RequestState) -> int | None:
    """Most prompt tokens that one forward of such a request may compute.

    SGLang's chunk size; less for a prompt longer than a pool so small that it would not hold what
    stays together with the chunk.
    """
    chunk, size = ledger.chunk_tokens, ledger.page_size
    if chunk is None or not isinstance(state.plan, WindowPlan):
        return chunk
    if state.plan.cache_positions and ledger.trained_length is not None:
        # One that was refused still passes through here, with a single token.
        longest = state.plan.longest_chunk(ledger.trained_length) // size * size
        chunk = min(chunk, max(size, longest))
    tokens, pages = state.known_tokens, ledger.pool.num_pages
    if -(-tokens // size) * ledger.num_streams <= pages:
        return chunk

    def fits(limit: int) -> bool:
        # One more token: the answer's first is computed beside the prompt.
        return _peak_pages(ledger, state, tokens + 1, 0, limit) <= pages

    low, high = 1, -(-chunk // size)  # in pages
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle * size) else (low, middle - 1)
    return min(chunk, low * size)


def growth_pages(ledger: PhysicalLedger, state: RequestState, tokens: int) -> int:
    """Head pages that ``tokens`` more decoded tokens will take beyond what is held."""
    length = state.length
    if length == 0:
        return 0
    return max(0, state.plan.pages(length + tokens) - state.plan.pages(length))


def check_request(ledger: PhysicalLedger, req: Any) -> str | None:
    """Why this request can never be served, or None. Clips ``max_new_tokens`` to what fits.

    Called at intake, before the queue: a request that can never fit would stall it.
    """
    state: RequestState = req.sglang_kv
    plan = state.plan
    prompt = len(req.origin_input_ids)
    if prompt == 0:
        # SGLang refuses an empty `input_ids`, but not a text without tokens, and its rotary
        # embedding would take the server down over it.
        return "text: the prompt has no tokens"
    size, streams, pages = ledger.page_size, ledger.num_streams, ledger.pool.num_pages
    stop = plan.next_stop(0)
    if stop is not None and stop < prompt and ledger.chunk_tokens is None:
        return "kv_compression.fold_at: needs chunked prefill (--chunked-prefill-size)"
    refusal = _check_positions(ledger, state, prompt)
    if refusal is not None:
        return refusal
    peak = _peak_pages(ledger, state, prompt + 1, 0)
    if peak > pages:
        return (
            f"input_ids: the prompt of {prompt} tokens needs {-(-peak // streams)} KV pages per "
            f"layer and head at its peak with kv_compression.method={state.policy.name!r}, and the "
            f"whole pool has {pages // streams} ({pages // streams * size} tokens); shorten it, "
            "compress it, or raise --max-total-tokens"
        )
    params = req.sampling_params
    if ledger.trained_length is not None and not (
        # Without chunks, one that is computed again would be so at once.
        state.cache_positions and ledger.chunk_tokens
    ):
        params.max_new_tokens = min(params.max_new_tokens, ledger.trained_length - prompt)
    params.max_new_tokens = _longest_answer(ledger, state, prompt, params.max_new_tokens)
    if params.min_new_tokens > params.max_new_tokens:
        params.min_new_tokens = params.max_new_tokens
    return None


def _check_positions(ledger: PhysicalLedger, state: RequestState, prompt: int) -> str | None:
    """Why a request would get positions that the model was not trained for, or None."""
    plan, trained = state.plan, ledger.trained_length
    if trained is None:
        return None
    known = f"the {trained} positions that the model was trained for"
    if not (isinstance(plan, WindowPlan) and plan.cache_positions):
        if prompt >= trained:
            return (
                f"input_ids: the prompt of {prompt} tokens exceeds {known}, and this policy keeps "
                "original positions (streamingllm does not)"
            )
        return None
    if plan.longest_chunk(trained) < ledger.page_size:
        return (
            f"kv_compression.recent: sinks and recent, {plan.last_position} tokens, leave no room "
            f"to compute a page of tokens within {known}"
        )
    if plan.fold_at is not None and plan.fold_at > trained:
        return f"kv_compression.fold_at: full attention up to {plan.fold_at} exceeds {known}"
    if ledger.chunk_tokens is None and prompt >= trained:
        return (
            f"input_ids: the prompt of {prompt} tokens exceeds {known}, and without chunked "
            "prefill (--chunked-prefill-size) it is computed at once"
        )
    return None


def _longest_answer(ledger: PhysicalLedger, state: RequestState, prompt: int, wanted: int) -> int:
    """At most ``wanted`` tokens, and no more than memory lasts for beside what is kept."""
    plan, pages = state.plan, ledger.pool.num_pages

    def fits(answer: int) -> bool:
        # SGLang runs one step ahead of the end of an answer, so its last token counts as well. It
        # must also fit when it is computed again after a retraction.
        tokens = prompt + answer
        return max(plan.pages(tokens), _peak_pages(ledger, state, tokens, 0)) <= pages

    if wanted <= 0 or fits(wanted):
        return max(0, wanted)
    low, high = 0, wanted  # low fits, high does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
