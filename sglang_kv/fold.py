"""Where folded tokens are scored, chosen and moved: the tensors behind the ledger's folds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sglang_kv.compression import FoldPlan, Geometry
from sglang_kv.compression.base import Candidates
from sglang_kv.compression.plan import Counts, Mask
from sglang_kv.kernel_paths import kernels_of, upload
from sglang_kv.pool import Pages
from sglang_kv.request import RequestState
from sglang_kv.scores import ScoreTable


class ScorePass(NamedTuple):
    """Which queries of a batch are scored, as `kernels.scores.column_sums` wants it."""

    first_query: Tensor  # int32 [batch]
    slots: Tensor  # int32 [batch], -1: none of this request


class KeptPositions(NamedTuple):
    """Logical positions after a fold; a stream's later tokens follow on from ``num_tokens``."""

    values: Tensor  # int64 [layers, kv_heads, tokens]
    lengths: Tensor  # int64 [layers, kv_heads], tokens that each stream kept
    num_tokens: int

    def of(self, width: int) -> Tensor:
        """Positions of a stream's first ``width`` tokens."""
        index = torch.arange(width, device=self.values.device)
        later = self.num_tokens + index - self.lengths[..., None]
        kept = torch.nn.functional.pad(self.values, (0, width - self.values.shape[-1]))
        return torch.where(index < self.lengths[..., None], kept, later)


class Folder:
    """Scores of running requests, and what a fold does with them.

    Args:
        pages: the pool, as `kernels.layout.allocate_pages` makes it.
        geometry: the streams of a request.
    """

    #: For tests: called with a request and what it keeps, bool ``[layers, kv_heads, tokens]``.
    observer: Callable[[RequestState, Tensor], None] | None = None

    def __init__(self, pages: Tensor, geometry: Geometry):
        self.memory = pages
        self.geometry = geometry
        self.device = pages.device
        #: On which SGLang runs its forwards; known with the first of them.
        self.forward_stream: Any = None
        self.gather_tokens = kernels_of(self.device.type).gather
        self.scores = ScoreTable(geometry.num_layers, geometry.num_kv_heads, self.device)
        self.weights = self._upload(geometry.head_weights().astype(np.float32))

    # -- scoring --

    def score_pass(
        self, states: Sequence[RequestState | None], new_tokens: Sequence[int]
    ) -> ScorePass | None:
        """What to score in a forward that computes the last ``new_tokens`` of each request."""
        first = [0] * len(states)
        slots = [-1] * len(states)
        longest = 0
        for i, (state, count) in enumerate(zip(states, new_tokens, strict=True)):
            if state is None:
                continue
            query = state.scored_queries(state.length - count, state.length)
            if query is None:
                continue
            if state.score_slot < 0:
                state.score_slot = self.scores.take()
            first[i], slots[i] = query, state.score_slot
            longest = max(longest, int(state.counts.max()) * self.geometry.page_size)
        if longest == 0:
            return None
        self.scores.fit(longest)
        return ScorePass(
            self._upload(np.array(first, dtype=np.int32)),
            self._upload(np.array(slots, dtype=np.int32)),
        )

    def mass(self, state: RequestState) -> Tensor:
        """Attention that each token of a dense request received, summed over heads by their gates.

        fp32 ``[tokens]``; does not wait for the device.
        """
        scores = self.scores.values[state.score_slot, :, :, : state.length]
        return torch.einsum("lh,lht->t", self.weights, scores)

    # -- choosing --

    def choose(
        self, state: RequestState, plan: FoldPlan, lengths: Counts, target: Counts
    ) -> Tensor:
        """Which tokens of each stream stay: bool ``[layers, kv_heads, tokens]``."""
        assert plan.policy is not None
        longest = int(lengths.max())
        self.scores.fit(longest)
        known: KeptPositions | None = state.positions
        candidates = Candidates(
            scores=self.scores.values[state.score_slot, :, :, :longest],
            lengths=self._upload(lengths),
            kept=self._upload(target),
            positions=None if known is None else known.of(longest),
            num_tokens=state.length,
            score_from=plan.score_from,
            page_size=self.geometry.page_size,
            weights=self.weights,
        )
        with self.device:  # what a policy makes is made where the scores are
            return plan.policy.choose(candidates)

    def counts(self, kept: Tensor) -> Counts:
        """Tokens that each stream keeps; waits for the device."""
        counts: Counts = kept.sum(-1).cpu().numpy()
        return counts

    def pages(self, kept: Tensor) -> Mask:
        """Pages that hold a kept token; waits for the device. ``[layers, kv_heads, pages]``"""
        size = self.geometry.page_size
        padded = torch.nn.functional.pad(kept, (0, -kept.shape[-1] % size))
        mask: Mask = padded.view(*kept.shape[:-1], -1, size).any(-1).cpu().numpy()
        return mask

    # -- moving --

    def gather(
        self,
        source: Pages,
        source_counts: Counts,
        kept: Tensor,
        target: Counts,
        destination: Pages,
        counts: Counts,
    ) -> None:
        """Copy the kept tokens of all streams, page lists end to end, to the front of others."""
        self.gather_tokens(
            self.memory,
            self._upload(_indptr(source_counts)),
            self._upload(source.astype(np.int64)),
            self._upload(_indptr(target)),
            kept.nonzero()[:, 2],
            self._upload(_indptr(counts)),
            self._upload(destination.astype(np.int64)),
        )

    def carry(self, state: RequestState, kept: Tensor, target: Counts) -> None:
        """Scores and positions go where their tokens went; or are let go."""
        kept = kept.to(self.device)
        if self.observer is not None:
            self.observer(state, kept)
        plan = state.plan
        on = isinstance(plan, FoldPlan) and plan.score_on
        if not on and not state.evictable:
            self.forget(state)
            return
        width = kept.shape[-1]
        lengths = self._upload(target)
        index = torch.arange(width, device=self.device)
        places = index < lengths[..., None]
        known: KeptPositions | None = state.positions
        positions = index.expand_as(kept) if known is None else known.of(width)
        moved = torch.zeros(kept.shape, dtype=torch.int64, device=self.device)
        moved[places] = positions[kept]
        state.positions = KeptPositions(moved[..., : int(target.max())], lengths, state.length)
        self.scores.fit(width)  # tokens that nobody scored may have come since
        scores = self.scores.values[state.score_slot, :, :, :width]
        of_kept = scores[kept]
        scores.zero_()
        scores[places] = of_kept

    def forget(self, state: RequestState) -> None:
        """The request is scored no more."""
        if state.score_slot >= 0:
            self.scores.give(state.score_slot)
            state.score_slot = -1
        state.positions = None

    def clear(self) -> None:
        self.scores.clear()

    def after_forwards(self) -> AbstractContextManager[Any]:
        """What moves tokens happens behind the forwards already submitted, on their stream."""
        if self.device.type != "cuda" or self.forward_stream is None:
            return nullcontext()
        return torch.cuda.stream(self.forward_stream)

    def _upload(self, values: NDArray[Any]) -> Tensor:
        return upload(torch.from_numpy(np.ascontiguousarray(values)), self.device)


def _indptr(counts: Counts) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(counts.reshape(-1))])
