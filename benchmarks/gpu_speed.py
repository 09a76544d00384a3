"""Speed of a GPU's kernels: decode beside a device copy and beside FlashInfer's own layout.

A part of `scripts/gpu_check.py`. With ``device="cpu"`` it runs too, small, for nothing but that.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from sglang_kv.benchmarks.gpu_streams import (
    GROUP,
    HEAD_DIM,
    KV_HEADS,
    PAGE,
    FlashInfer,
    Where,
    random_streams,
    triton,
)
from sglang_kv.kernels.layout import KV_LEN


def copy_gb_s(where: Where) -> float:
    """Bytes that a device copy reads and writes per second, in 1e9."""
    size = 2**26 if where.small else 2**31
    source = torch.empty(size, dtype=torch.uint8, device=where.device)
    target = torch.empty_like(source)
    return 2 * size / where.seconds(lambda: target.copy_(source)) / 1e9


def kv_bytes(where: Where, batch: int, tokens: int) -> int:
    """K and V of one layer."""
    return batch * tokens * KV_HEADS * HEAD_DIM * 2 * where.dtype.itemsize


def decode_gb_s(
    where: Where,
    path: str,
    batch: int,
    tokens: int,
    *,
    walked: float = 4e8,
    captured: bool = False,
) -> float:
    """K and V of a decode step per second, in 1e9 bytes: one layer after the other, so many that
    no cache holds them. `captured`: as one CUDA graph."""
    size = kv_bytes(where, batch, tokens)
    layers = max(1, min(32, round(walked / size)))
    streams = random_streams(where, [tokens] * batch, layers=layers)
    q = where.randn(batch, KV_HEADS * GROUP, HEAD_DIM)
    run: Callable[[int], Any]
    if path == "flashinfer":
        flashinfer = FlashInfer(streams, GROUP, where.dtype)
        flashinfer.plan_decode()
        run = lambda layer: flashinfer.attention.run(q, layer)  # noqa: E731
    else:
        decode, scale = triton("attention").decode, HEAD_DIM**-0.5
        run = lambda layer: decode(q, streams, layer, sm_scale=scale)  # noqa: E731
    step: Callable[[], Any] = lambda: [run(layer) for layer in range(layers)]  # noqa: E731
    seconds = where.seconds(where.captured(step) if captured else step)
    return size * layers / seconds / 1e9


def stock_decode_gb_s(where: Where, batch: int, tokens: int) -> float:
    """FlashInfer as it is meant to be used, on the same K and V kept whole: all heads in a page."""
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    pages = -(-tokens // PAGE)
    kv = where.randn(batch * pages, 2, PAGE, KV_HEADS, HEAD_DIM)
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
    q = where.randn(batch, KV_HEADS * GROUP, HEAD_DIM)
    return kv_bytes(where, batch, tokens) / where.seconds(lambda: wrapper.run(q, kv)) / 1e9


def prefill_tflop_s(where: Where, path: str, chunk: int, context: int) -> float:
    """A chunk at the end of a context: two products, of the pairs that a causal mask leaves."""
    streams = random_streams(where, [context])
    q = where.randn(chunk, KV_HEADS * GROUP, HEAD_DIM)
    if path == "flashinfer":
        flashinfer = FlashInfer(streams, GROUP, where.dtype)
        flashinfer.plan_extend([0, chunk])
        seconds = where.seconds(lambda: flashinfer.attention.run(q, 0))
    else:
        indptr = where.ints([0, chunk])
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
