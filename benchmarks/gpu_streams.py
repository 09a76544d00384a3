"""Random streams on a device, and the two paths of a GPU that attend to them.

What the checks (`gpu_kernels`, `gpu_scores`, `gpu_memory`) and the timings (`gpu_speed`) of
`scripts/gpu_check.py` share. On a CPU, FlashInfer is an executor of its layout and Triton is
interpreted.
"""

from __future__ import annotations

import importlib
import math
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sglang_kv.kernels.flashinfer.attention import FlashInferAttention, LayerOptions
from sglang_kv.kernels.layout import FP8_DTYPES, PagedStreams, allocate_pages

#: gap, num_sinks, window_left of a stream.
POLICIES = ((0, 0, -1), (0, 4, 31), (64, 4, 15), (32, 16, 0), (0, 0, 20))
KV_HEADS, GROUP, HEAD_DIM, PAGE = 8, 4, 128, 16
PATHS = ("flashinfer", "triton")


@dataclass(frozen=True)
class Where:
    """The device, its dtype for K and V, and how long to measure one thing."""

    device: str
    dtype: torch.dtype = torch.bfloat16
    rounds: int = 15

    @property
    def small(self) -> bool:
        """Whether shapes are to be such as a CPU gets through."""
        return self.device == "cpu"

    def randn(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Normal numbers of `dtype`, or its own."""
        return torch.randn(*shape, device=self.device).to(dtype or self.dtype)

    def ints(self, values: Sequence[int]) -> Tensor:
        """int32, on the device."""
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def seconds(self, call: Callable[[], Any]) -> float:
        """Median time of a call, on a GPU after two to warm up."""
        for _ in range(0 if self.small else 2):
            call()
        times = []
        for _ in range(self.rounds):
            if self.small:
                begin = time.perf_counter()
                call()
                times.append(time.perf_counter() - begin)
                continue
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        return statistics.median(times)

    def captured(self, call: Callable[[], Any]) -> Callable[[], Any]:
        """The call as a CUDA graph: what it costs when the host is out of the way."""
        if self.small:
            return call
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            call()  # compiles, which a capture may not
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        replay: Callable[[], Any] = graph.replay
        return replay


class Finding(NamedTuple):
    """How far a kernel's result is from the reference's, and how far it may be."""

    name: str
    distance: float
    most: float

    @property
    def right(self) -> bool:
        return self.distance <= self.most  # not a number is not right


def findings(name: str, make: Callable[[], Iterator[tuple[str, float, float]]]) -> list[Finding]:
    """What a check finds, `name` before each; an error is a wrong result, and the next one runs."""
    found: list[Finding] = []
    try:
        for what, apart, most in make():
            found.append(Finding(f"{name}{what}", apart, most))
    except Exception as error:  # the other checks are worth having
        traceback.print_exc()
        found.append(Finding(f"{name}: {type(error).__name__}: {error}", math.inf, 0.0))
    return found


def distance(found: Tensor, expected: Tensor) -> float:
    """Largest difference, of the numbers beyond one a share of them; infinite where only one of
    the two is."""
    found, expected = found.float().cpu(), expected.float().cpu()
    if not torch.equal(found.isinf(), expected.isinf()) or found.isnan().any():
        return float("inf")
    apart = (found - expected).nan_to_num(0.0, 0.0, 0.0).abs() / expected.abs().clamp(min=1)
    return float(apart.nan_to_num(0.0).max())


def random_streams(
    where: Where,
    lens: Sequence[int | Sequence[int]],
    *,
    layers: int = 1,
    kv_heads: int = KV_HEADS,
    head_dim: int = HEAD_DIM,
    page_size: int = PAGE,
    policies: tuple[tuple[int, int, int], ...] = ((0, 0, -1),),
    dtype: torch.dtype | None = None,
) -> PagedStreams:
    """A request per length, or per list of lengths of its KV heads; pages anywhere in the pool.

    Policies are dealt to the streams in turn. Pages are of ``where.dtype`` unless `dtype` says
    otherwise.
    """
    each = torch.tensor([[n] * kv_heads if isinstance(n, int) else list(n) for n in lens])
    widest = -(-int(each.max()) // page_size)
    count = len(lens) * layers * kv_heads * widest
    pages = allocate_pages(count, page_size, head_dim, dtype or where.dtype, where.device)
    if pages.dtype in FP8_DTYPES:
        pages.copy_(torch.randn(pages.shape, device=where.device).to(pages.dtype))
    else:
        pages.normal_()
    table = torch.randperm(count, device=where.device).int()
    table = table.view(len(lens), layers, kv_heads, widest).contiguous()
    desc = torch.zeros(len(lens), layers, kv_heads, 4, dtype=torch.int32)
    desc[..., 0] = each[:, None]
    dealt = torch.tensor(policies, dtype=torch.int32)
    turn = torch.arange(len(lens))[:, None] + torch.arange(kv_heads)
    desc[..., 1:] = dealt[turn % len(policies)][:, None]
    slots = torch.arange(len(lens), dtype=torch.int32)
    return PagedStreams(pages, table, desc.to(where.device), slots.to(where.device))


def on_cpu(streams: PagedStreams) -> PagedStreams:
    """A copy for the reference."""
    fields = (streams.pages, streams.table, streams.desc, streams.slots)
    return PagedStreams(*(t.cpu().clone() for t in fields))


class FlashInfer:
    """The FlashInfer path with the calls of `sglang_kv.kernels`: plans, then runs."""

    def __init__(self, streams: PagedStreams, group: int, q_dtype: torch.dtype, **options: Any):
        layers, heads = streams.table.shape[1:3]
        self.streams = streams
        self.attention = FlashInferAttention(
            [LayerOptions(streams.head_dim**-0.5, **options)] * layers,
            num_qo_heads=group * heads,
            num_kv_heads=heads,
            head_dim=streams.head_dim,
            page_size=streams.page_size,
            q_dtype=q_dtype,
            kv_dtype=streams.pages.dtype,
            device=streams.pages.device,
        )
        self.slots = streams.slots.cpu().numpy()
        self.desc = streams.desc.cpu().numpy()[self.slots]

    def plan_decode(self, version: int = 0) -> None:
        self.attention.plan_decode(self.streams, self.slots, self.desc, version)

    def plan_extend(self, indptr: list[int]) -> None:
        self.attention.plan_extend(self.streams, self.slots, self.desc, indptr)

    def run(self, q: Tensor, layer: int, sink_q: Tensor | None = None) -> tuple[Tensor, Tensor]:
        out, lse = self.attention.run(q, layer, sink_q=sink_q, return_lse=True)
        assert lse is not None
        return out, lse


def triton(name: str) -> Any:
    """A module of the Triton path."""
    return importlib.import_module(f"sglang_kv.kernels.triton.{name}")
