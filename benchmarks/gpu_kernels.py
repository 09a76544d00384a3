"""Attention on a GPU against the reference, case by case: decode and extend.

A part of `scripts/gpu_check.py`. With ``device="cpu"`` the cases run too, on short streams: to find
out before a GPU is paid for that they do.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sglang_kv.benchmarks import gpu_streams
from sglang_kv.benchmarks.gpu_streams import (
    POLICIES,
    Finding,
    Where,
    distance,
    findings,
    random_streams,
)
from sglang_kv.kernels import reference
from sglang_kv.kernels.flashinfer import wrappers
from sglang_kv.kernels.layout import FP8_DTYPES, PagedStreams

KV_HEADS, LAYERS = 2, 2
#: Tokens of each request, and how many of them are new in an extend.
LENS, COUNTS = (1, 15, 16, 17, 300, 700, 97, 1100, 0), (1, 15, 3, 17, 130, 64, 97, 5, 0)
#: Long enough for two splits of decode at head_dim 256.
FEW_LENS, FEW_COUNTS = (1, 0, 140), (1, 0, 9)
#: Of outputs of size one: 16 bits, and fp32. Sums of attention are as near as the logits.
TOLERANCE, FP32_TOLERANCE = 2e-2, 1e-4
HALF, (E4M3, E5M2) = torch.float16, FP8_DTYPES


@dataclass(frozen=True)
class Case:
    """A shape that a model may have, and what its layers and its policies ask of attention.

    `dtype` is that of the pages, None the device's own; queries have it too, unless it has 8 bits.
    """

    group: int = 4
    head_dim: int = 128
    page_size: int = 16
    dtype: torch.dtype | None = None
    sink_q: bool = False
    soft_cap: float = 0.0
    layer_window: int = -1

    def __str__(self) -> str:
        parts = [f"group {self.group} head_dim {self.head_dim} page {self.page_size}"]
        if self.dtype is not None:
            parts.append(str(self.dtype).removeprefix("torch."))
        if self.sink_q:
            parts.append("sink_q")
        if self.soft_cap:
            parts.append(f"soft cap {self.soft_cap:g}")
        if self.layer_window >= 0:
            parts.append(f"layer window {self.layer_window}")
        return " ".join(parts)


#: Decode and extend, each by every path that has kernels for it.
ATTENTION = (
    Case(),
    Case(3, 64, sink_q=True),
    Case(dtype=E4M3),
    Case(1, 64, 32),
    Case(5, layer_window=25),
    Case(6, 80, soft_cap=5.0),
    Case(7, 96, 1),
    Case(8, 256, soft_cap=30.0),
    Case(16, 128, 32, sink_q=True, layer_window=90),
    Case(4, 64, 1, HALF, sink_q=True),
    Case(6, dtype=HALF, soft_cap=5.0),
    Case(7, 64, 32, E4M3, sink_q=True),
    Case(8, 256, dtype=E4M3),
    Case(4, 128, 1, E5M2, layer_window=25),
)


@dataclass(frozen=True)
class Batch:
    """A case's streams, here and on the device, its queries, and its options."""

    case: Case
    where: Where
    streams: PagedStreams
    plain: PagedStreams
    counts: tuple[int, ...]
    q: Tensor
    sink_q: Tensor | None

    @classmethod
    def of(cls, case: Case, where: Where, *, decode: bool) -> Batch:
        lens, counts = (FEW_LENS, FEW_COUNTS) if where.small else (LENS, COUNTS)
        # The heads of a request differ in length, as far as their new tokens allow.
        ragged = [[n, max(count, 2 * n // 3)] for n, count in zip(lens, counts, strict=True)]
        streams = random_streams(
            where,
            ragged,
            layers=LAYERS,
            kv_heads=KV_HEADS,
            head_dim=case.head_dim,
            page_size=case.page_size,
            policies=POLICIES,
            dtype=case.dtype,
        )
        new = (1,) * len(lens) if decode else counts
        dtype = where.dtype if case.dtype in FP8_DTYPES else case.dtype
        shape = (sum(new), KV_HEADS * case.group, case.head_dim)
        q, sink_q = (where.randn(*shape, dtype=dtype) for _ in range(2))
        plain = gpu_streams.on_cpu(streams)
        return cls(case, where, streams, plain, new, q, sink_q if case.sink_q else None)

    @property
    def indptr(self) -> list[int]:
        return [0, *itertools.accumulate(self.counts)]

    @property
    def scales(self) -> dict[str, Any]:
        """Of 8-bit pages."""
        known = self.streams.pages.dtype in FP8_DTYPES
        return {"k_scale": 0.7, "v_scale": 1.3} if known else {}

    @property
    def options(self) -> dict[str, Any]:
        """Of every op that scores keys."""
        return {
            "sm_scale": self.case.head_dim**-0.5,
            "logits_soft_cap": self.case.soft_cap,
            "layer_window_left": self.case.layer_window,
        }

    @property
    def most(self) -> float:
        return FP32_TOLERANCE if self.q.dtype == torch.float32 else TOLERANCE

    def expected(self) -> tuple[Tensor, Tensor]:
        """Output and lse of the reference."""
        sink_q = None if self.sink_q is None else self.sink_q.cpu()
        return reference.extend(
            self.q.cpu(),
            torch.tensor(self.indptr),
            self.plain,
            1,
            sink_q=sink_q,
            **self.options,
            **self.scales,
        )


def check_attention(
    where: Where, path: str, cases: Sequence[Case] = ATTENTION
) -> Iterator[list[Finding]]:
    """Decode and extend by one path; a list of findings for each op that ran."""
    for case in cases:
        if path == "flashinfer" and case.head_dim not in wrappers.HEAD_DIMS:
            continue
        for op in ("decode", "extend"):
            run = _by_flashinfer if path == "flashinfer" else _by_triton
            yield findings(f"{path} {op} {case}", functools.partial(_attend, case, where, op, run))


def _attend(
    case: Case, where: Where, op: str, run: Callable[[Batch, str], tuple[Tensor, Tensor]]
) -> Iterator[tuple[str, float, float]]:
    batch = Batch.of(case, where, decode=op == "decode")
    out, lse = run(batch, op)
    right, right_lse = batch.expected()
    yield "", distance(out, right), batch.most
    yield " lse", distance(lse, right_lse), batch.most


def _by_flashinfer(batch: Batch, op: str) -> tuple[Tensor, Tensor]:
    case = batch.case
    flashinfer = gpu_streams.FlashInfer(
        batch.streams,
        case.group,
        batch.q.dtype,
        logits_soft_cap=case.soft_cap,
        window_left=case.layer_window,
        **batch.scales,
    )
    if op == "decode":
        flashinfer.plan_decode()
    else:
        flashinfer.plan_extend(batch.indptr)
    return flashinfer.run(batch.q, 1, batch.sink_q)


def _by_triton(batch: Batch, op: str) -> tuple[Tensor, Tensor]:
    attention = gpu_streams.triton("attention")
    options = {**batch.options, **batch.scales, "sink_q": batch.sink_q, "return_lse": True}
    found: tuple[Tensor, Tensor]
    if op == "decode":
        found = attention.decode(batch.q, batch.streams, 1, **options)
    else:
        indptr = batch.where.ints(batch.indptr)
        found = attention.extend(batch.q, indptr, batch.streams, 1, **options)
    return found
