"""Scores of keys on a GPU against the reference: decode that leaves them, and column sums.

A part of `scripts/gpu_check.py`, of the Triton path alone; the streams are those of `gpu_kernels`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from sglang_kv.benchmarks import gpu_streams
from sglang_kv.benchmarks.gpu_kernels import (
    E4M3,
    E5M2,
    FEW_LENS,
    HALF,
    KV_HEADS,
    LAYERS,
    LENS,
    Batch,
    Case,
)
from sglang_kv.benchmarks.gpu_streams import Finding, Where, distance, findings
from sglang_kv.kernels import reference

#: Decode that adds its weights to scores.
SCORED = (
    Case(),
    Case(3, 64, 32, sink_q=True, soft_cap=5.0),
    Case(7, 64, 1, E4M3, sink_q=True),
    Case(16, 80, dtype=HALF, layer_window=45),
)
#: Column sums, of a prompt's queries and of a decode's.
SUMMED = (
    Case(),
    Case(3, 64, 1, soft_cap=5.0),
    Case(16, 80, 32, layer_window=45),
    Case(6, 96, dtype=HALF),
    Case(8, 256),
    Case(7, dtype=E4M3),
    Case(4, 64, dtype=E5M2),
)


def check_scores(
    where: Where, scored: Sequence[Case] = SCORED, summed: Sequence[Case] = SUMMED
) -> Iterator[list[Finding]]:
    """Triton's two ways to a key's score: decode that leaves it, and column sums after any op."""
    for case in scored:
        found = functools.partial(_scores_of_decode, case, where)
        yield findings(f"triton decode scores {case}", found)
    for case, decode in itertools.product(summed, (True, False)):
        name = f"triton column_sums {'decode ' if decode else ''}{case}"
        yield findings(name, functools.partial(_scores_of_sums, case, where, decode))


def _scores_of_decode(case: Case, where: Where) -> Iterator[tuple[str, float, float]]:
    batch = Batch.of(case, where, decode=True)
    scores, slots, first = _score_table(batch)
    found = scores.to(where.device, copy=True)
    _, lse = gpu_streams.triton("attention").decode(
        batch.q,
        batch.streams,
        1,
        sink_q=batch.sink_q,
        return_lse=True,
        scores=found,
        score_slots=slots.to(where.device),
        **batch.options,
        **batch.scales,
    )
    _sum_columns(batch, first, lse.cpu(), scores, slots)
    yield "", distance(found, scores), batch.most


def _scores_of_sums(case: Case, where: Where, decode: bool) -> Iterator[tuple[str, float, float]]:
    batch = Batch.of(case, where, decode=decode)
    scores, slots, first = _score_table(batch)
    found = scores.to(where.device, copy=True)
    _, lse = batch.expected()
    gpu_streams.triton("scores").column_sums(
        batch.q,
        None if decode else where.ints(batch.indptr),
        first.to(where.device),
        lse.to(where.device),
        batch.streams,
        1,
        found,
        slots.to(where.device),
        **batch.options,
        **_key_scale(batch),
    )
    _sum_columns(batch, first, lse, scores, slots)
    yield "", distance(found, scores), batch.most


def _score_table(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Sums so far, each request's row in them (one request has none), and its first query."""
    size = len(batch.counts)
    width = max(FEW_LENS if batch.where.small else LENS) + 5
    slots = torch.randperm(size + 1)[:size].int()
    slots[0] = -1
    first = torch.tensor([count // 3 for count in batch.counts], dtype=torch.int32)
    return torch.rand(size + 1, LAYERS, KV_HEADS, width), slots, first


def _sum_columns(batch: Batch, first: Tensor, lse: Tensor, scores: Tensor, slots: Tensor) -> None:
    """Add to `scores` what the reference does."""
    reference.column_sums(
        batch.q.cpu(),
        torch.tensor(batch.indptr),
        first,
        lse,
        batch.plain,
        1,
        scores,
        slots,
        **batch.options,
        **_key_scale(batch),
    )


def _key_scale(batch: Batch) -> dict[str, Any]:
    return {name: value for name, value in batch.scales.items() if name == "k_scale"}
