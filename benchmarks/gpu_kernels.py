"""Kernels of a GPU against the reference, and their speed beside a device copy.

The parts of `scripts/gpu_check.py`. With ``device="cpu"`` they run too, small, with an executor of
FlashInfer's layout in place of FlashInfer: to find out before a GPU is paid for that they run.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sglang_kv.kernels import reference
from sglang_kv.kernels.flashinfer.attention import FlashInferAttention, LayerOptions
from sglang_kv.kernels.layout import FP8_DTYPES, KV_LEN, PagedStreams, allocate_pages

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

    def seconds(self, call: Callable[[], Any]) -> float:
        """Median time of a call, after two to warm up."""
        for _ in range(2):
            call()
        times = []
        for _ in range(self.rounds):
            if self.device == "cpu":
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


def copy_gb_s(where: Where) -> float:
    """Bytes that a device copy reads and writes per second, in 1e9."""
    size = 2**31 if where.device != "cpu" else 2**26
    source = torch.empty(size, dtype=torch.uint8, device=where.device)
    target = torch.empty_like(source)
    return 2 * size / where.seconds(lambda: target.copy_(source)) / 1e9


# -- streams --


def random_streams(
    where: Where,
    lens: list[int],
    *,
    layers: int = 1,
    kv_heads: int = KV_HEADS,
    head_dim: int = HEAD_DIM,
    policies: tuple[tuple[int, int, int], ...] = ((0, 0, -1),),
    dtype: torch.dtype | None = None,
) -> PagedStreams:
    """A request per length, one policy after the other; pages anywhere in the pool.

    Pages are of ``where.dtype`` unless `dtype` says otherwise.
    """
    widest = -(-max(lens) // PAGE)
    count = len(lens) * layers * kv_heads * widest
    pages = allocate_pages(count, PAGE, head_dim, dtype or where.dtype, where.device)
    if pages.dtype in FP8_DTYPES:
        pages.copy_(torch.randn(pages.shape, device=where.device).to(pages.dtype))
    else:
        pages.normal_()
    table = torch.randperm(count, device=where.device).int()
    table = table.view(len(lens), layers, kv_heads, widest).contiguous()
    desc = torch.zeros(len(lens), layers, kv_heads, 4, dtype=torch.int32)
    for i, length in enumerate(lens):
        desc[i] = torch.tensor([length, *policies[i % len(policies)]])
    slots = torch.arange(len(lens), dtype=torch.int32)
    return PagedStreams(pages, table, desc.to(where.device), slots.to(where.device))


def on_cpu(streams: PagedStreams) -> PagedStreams:
    return PagedStreams(
        streams.pages.cpu(), streams.table.cpu(), streams.desc.cpu(), streams.slots.cpu()
    )


class FlashInfer:
    """The FlashInfer path with the calls of `sglang_kv.kernels`: plans, then runs."""

    def __init__(self, streams: PagedStreams, group: int, q_dtype: torch.dtype, **scales: float):
        layers, heads = streams.table.shape[1:3]
        self.streams = streams
        self.attention = FlashInferAttention(
            [LayerOptions(streams.head_dim**-0.5, **scales)] * layers,  # type: ignore[arg-type]
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

    def run(self, q: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        out, lse = self.attention.run(q, layer, return_lse=True)
        assert lse is not None
        return out, lse


# -- correctness --


def check_attention(where: Where, path: str) -> Iterator[tuple[str, float]]:
    """Largest difference to the reference, case by case; of outputs of size one."""
    lens = [1, 15, 16, 17, 300, 700, 97, 1100]
    counts = [1, 15, 3, 17, 130, 64, 97, 5]
    indptr = [0, *itertools.accumulate(counts)]
    wide, (e4m3, e5m2) = where.dtype, FP8_DTYPES
    for group, head_dim, dtype in (
        *((4, 128, wide), (1, 64, wide), (5, 128, wide), (7, 64, wide), (8, 256, wide)),
        *((4, 128, e4m3), (7, 64, e4m3), (8, 256, e4m3), (4, 128, e5m2)),
    ):
        streams = random_streams(
            *(where, lens), layers=2, kv_heads=2, head_dim=head_dim, policies=POLICIES, dtype=dtype
        )
        plain, scale = on_cpu(streams), head_dim**-0.5
        scales: dict[str, Any] = {"k_scale": 0.7, "v_scale": 1.3} if dtype in FP8_DTYPES else {}
        q_dtype = where.dtype
        for name in ("decode", "extend"):
            rows = len(lens) if name == "decode" else indptr[-1]
            q = torch.randn(rows, 2 * group, head_dim, device=where.device).to(q_dtype)
            device_indptr = torch.tensor(indptr, dtype=torch.int32, device=where.device)
            if path == "flashinfer":
                flashinfer = FlashInfer(streams, group, q_dtype, **scales)
                if name == "decode":
                    flashinfer.plan_decode()
                else:
                    flashinfer.plan_extend(indptr)
                out, lse = flashinfer.run(q, 1)
            elif name == "decode":
                out, lse = triton("attention").decode(
                    q, streams, 1, sm_scale=scale, return_lse=True, **scales
                )
            else:
                out, lse = triton("attention").extend(
                    q, device_indptr, streams, 1, sm_scale=scale, return_lse=True, **scales
                )
            expected: tuple[Tensor, Tensor]
            if name == "decode":
                expected = reference.decode(q.cpu(), plain, 1, sm_scale=scale, **scales)
            else:
                host = device_indptr.cpu()
                expected = reference.extend(q.cpu(), host, plain, 1, sm_scale=scale, **scales)
            case = f"{path} {name} group {group} head_dim {head_dim} {dtype}"
            yield case, _distance(out, expected[0])
            yield f"{case} lse", _distance(lse, expected[1])


def check_transfer(where: Where) -> Iterator[tuple[str, float]]:
    """Append, gather and column sums of the Triton path."""
    lens, counts = [40, 17, 1, 300], [5, 17, 1, 130]
    indptr = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
    streams = random_streams(where, lens, layers=2, kv_heads=2)
    plain = on_cpu(streams)
    k, v = torch.randn(2, sum(counts), 2, HEAD_DIM, device=where.device).to(where.dtype)
    device_indptr = indptr.to(where.device)
    triton("transfer").append(k, v, device_indptr, streams, 1)
    reference.append(k.cpu(), v.cpu(), indptr, plain, 1)
    yield "append", _distance(streams.pages, plain.pages)
    scales = {"k_scale": 0.5, "v_scale": 2.0**-9}  # exact; some values are too large for e4m3
    for dtype in FP8_DTYPES:
        narrow = random_streams(where, lens, layers=2, kv_heads=2, dtype=dtype)
        right = on_cpu(narrow)
        triton("transfer").append(k, v, device_indptr, narrow, 1, **scales)
        reference.append(k.cpu(), v.cpu(), indptr, right, 1, **scales)
        bits = narrow.pages.view(torch.uint8), right.pages.view(torch.uint8)
        yield f"append {dtype}", _distance(*bits)

    q = torch.randn(sum(counts), 2 * GROUP, HEAD_DIM, device=where.device).to(where.dtype)
    scale = HEAD_DIM**-0.5
    _, lse = reference.extend(q.cpu(), indptr, plain, 1, sm_scale=scale)
    first = torch.tensor([2, 0, 0, 100], dtype=torch.int32)
    scores = torch.zeros(4, 2, 2, 512)
    expected, rows = scores.clone(), torch.tensor([3, -1, 0, 1], dtype=torch.int32)
    on_device = [t.to(where.device) for t in (first, lse, scores, rows)]
    triton("scores").column_sums(
        q, device_indptr, on_device[0], on_device[1], streams, 1, *on_device[2:], sm_scale=scale
    )
    reference.column_sums(q.cpu(), indptr, first, lse, plain, 1, expected, rows, sm_scale=scale)
    yield "column_sums", _distance(on_device[2], expected)

    lists = gather_lists(streams, lens)
    triton("transfer").gather(streams.pages, *(t.to(where.device) for t in lists))
    reference.gather(plain.pages, *lists)
    yield "gather", _distance(streams.pages, plain.pages)


def gather_lists(streams: PagedStreams, lens: list[int]) -> list[Tensor]:
    """Every third token of each stream of layer 0, to the front of its own pages."""
    table = streams.table[:, 0].cpu().long()
    lists: list[list[Tensor]] = [[], [], []]
    for i, length in enumerate(lens):
        for head in range(streams.num_kv_heads):
            keep = torch.arange(0, length, 3)
            pages = table[i, head]
            lists[0].append(pages[: -(-length // PAGE)])
            lists[1].append(keep)
            lists[2].append(pages[: -(-len(keep) // PAGE)])
    found: list[Tensor] = []
    for parts in lists:
        ends = np.cumsum([0, *(len(part) for part in parts)])
        found += [torch.from_numpy(ends), torch.cat(parts)]
    return found


def triton(name: str) -> Any:
    """A module of the Triton path."""
    import importlib

    return importlib.import_module(f"sglang_kv.kernels.triton.{name}")


def _distance(found: Tensor, expected: Tensor) -> float:
    found, expected = found.float().cpu(), expected.float()
    if not torch.equal(found.isinf(), expected.isinf()):
        return float("inf")
    return float((found - expected).nan_to_num(0.0, 0.0, 0.0).abs().max())


# -- speed --


def decode_gb_s(where: Where, path: str, batch: int, tokens: int, walked: float = 4e8) -> float:
    """K and V of a decode step per second, in 1e9 bytes: one layer after the other, so many that
    no cache holds them."""
    size = batch * tokens * KV_HEADS * HEAD_DIM * 2 * where.dtype.itemsize
    layers = max(1, min(32, round(walked / size)))
    streams = random_streams(where, [tokens] * batch, layers=layers)
    q = torch.randn(batch, KV_HEADS * GROUP, HEAD_DIM, device=where.device).to(where.dtype)
    run: Callable[[int], Any]
    if path == "flashinfer":
        flashinfer = FlashInfer(streams, GROUP, where.dtype)
        flashinfer.plan_decode()
        run = lambda layer: flashinfer.attention.run(q, layer)  # noqa: E731
    else:
        decode, scale = triton("attention").decode, HEAD_DIM**-0.5
        run = lambda layer: decode(q, streams, layer, sm_scale=scale)  # noqa: E731
    seconds = where.seconds(lambda: [run(layer) for layer in range(layers)])
    return size * layers / seconds / 1e9


def stock_decode_gb_s(where: Where, batch: int, tokens: int) -> float:
    """FlashInfer as it is meant to be used, on the same K and V kept whole: all heads in a page."""
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    pages = -(-tokens // PAGE)
    kv = torch.randn(batch * pages, 2, PAGE, KV_HEADS, HEAD_DIM, device=where.device)
    kv = kv.to(where.dtype)
    workspace = torch.zeros(2**28, dtype=torch.uint8, device=where.device)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    wrapper.plan(
        torch.arange(batch + 1, dtype=torch.int32) * pages,
        torch.randperm(batch * pages, device=where.device).int(),
        torch.full((batch,), (tokens - 1) % PAGE + 1, dtype=torch.int32),
        KV_HEADS * GROUP,
        KV_HEADS,
        HEAD_DIM,
        PAGE,
        q_data_type=where.dtype,
        kv_data_type=where.dtype,
    )
    q = torch.randn(batch, KV_HEADS * GROUP, HEAD_DIM, device=where.device).to(where.dtype)
    size = batch * tokens * KV_HEADS * HEAD_DIM * 2 * where.dtype.itemsize
    return size / where.seconds(lambda: wrapper.run(q, kv)) / 1e9


def prefill_tflop_s(where: Where, path: str, chunk: int, context: int) -> float:
    """A chunk at the end of a context: two products, of the pairs that a causal mask leaves."""
    streams = random_streams(where, [context])
    q = torch.randn(chunk, KV_HEADS * GROUP, HEAD_DIM, device=where.device).to(where.dtype)
    if path == "flashinfer":
        flashinfer = FlashInfer(streams, GROUP, where.dtype)
        flashinfer.plan_extend([0, chunk])
        seconds = where.seconds(lambda: flashinfer.attention.run(q, 0))
    else:
        indptr = torch.tensor([0, chunk], dtype=torch.int32, device=where.device)
        extend, scale = triton("attention").extend, HEAD_DIM**-0.5
        seconds = where.seconds(lambda: extend(q, indptr, streams, 0, sm_scale=scale))
    pairs = chunk * (context - chunk) + chunk * (chunk + 1) / 2
    return 4 * pairs * HEAD_DIM * KV_HEADS * GROUP / seconds / 1e12


def host_plan_ms(where: Where, batch: int, tokens: int) -> dict[str, float]:
    """Planning of a decode step on the host, 32 layers: nothing changed, and every list anew."""
    streams = random_streams(where, [tokens] * batch, layers=32)
    flashinfer = FlashInfer(streams, GROUP, where.dtype)
    version = itertools.count()

    def milliseconds(call: Callable[[], Any]) -> float:
        times = []
        for _ in range(8):
            begin = time.perf_counter()
            call()
            times.append(time.perf_counter() - begin)
        return round(statistics.median(times[2:]) * 1e3, 3)

    same = milliseconds(lambda: flashinfer.plan_decode(-1))
    anew = milliseconds(lambda: flashinfer.plan_decode(next(version)))
    flashinfer.desc[..., KV_LEN] += 1
    return {"same": same, "lists anew": anew}
