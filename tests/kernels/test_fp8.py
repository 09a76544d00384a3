"""Pages of 8-bit floats: each op against the reference, and against the same numbers in fp32."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sglang_kv.kernels import attention, reference, scores, transfer
from sglang_kv.kernels.layout import FP8_DTYPES, KV_LEN, PagedStreams, allocate_pages

pytestmark = [
    pytest.mark.usefixtures("isa"),
    pytest.mark.parametrize("dtype", FP8_DTYPES, ids=["e4m3", "e5m2"]),
]

MakeStreams = Callable[..., PagedStreams]
BF16, FP32 = torch.bfloat16, torch.float32
SCALES = {"k_scale": 0.37, "v_scale": 2.9}


def one_page(dtype: torch.dtype) -> PagedStreams:
    """A stream of sixteen tokens."""
    return PagedStreams(
        allocate_pages(1, 16, 64, dtype),
        torch.zeros(1, 1, 1, 1, dtype=torch.int32),
        torch.tensor([16, 0, 0, -1], dtype=torch.int32).view(1, 1, 1, 4),
        torch.zeros(1, dtype=torch.int32),
    )


def stored(values: Tensor, dtype: torch.dtype, **scales: float) -> Tensor:
    """What `append` makes of up to 1024 numbers, as bits."""
    streams = one_page(dtype)
    rows = torch.zeros(1024)
    rows[: len(values)] = values
    k = rows.view(16, 1, 64).to(values.dtype)
    transfer.append(k, k, torch.tensor([0, 16], dtype=torch.int32), streams, 0, **scales)
    bits = streams.pages.view(torch.uint8)
    assert scales or torch.equal(bits[0, 0], bits[0, 1])
    return bits[0, 0].flatten()[: len(values)]


def every_number(dtype: torch.dtype) -> Tensor:
    """The finite ones, as fp32."""
    numbers = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    return numbers[numbers.isfinite()]


def as_float(streams: PagedStreams) -> PagedStreams:
    """The same streams in fp32 pages."""
    shape = streams.pages.shape
    pages = allocate_pages(shape[0], shape[2], shape[3], FP32)
    return replace(streams, pages=pages.copy_(streams.pages.float()))


def bits(pages: Tensor) -> Tensor:
    return pages.view(torch.uint8)


def test_every_number_comes_back(dtype: torch.dtype) -> None:
    """Of the 256, stored and read by each op that reads: a query picks one dimension of a key."""
    codes = torch.arange(256, dtype=torch.uint8)
    numbers = codes.view(dtype).float()
    assert torch.equal(stored(numbers[numbers.isfinite()], dtype), codes[numbers.isfinite()])

    streams = one_page(dtype)
    one = replace(streams, desc=torch.tensor([[[[1, 0, 0, -1]]]], dtype=torch.int32))
    for part in numbers.split(64):
        bits(streams.pages).zero_()
        bits(streams.pages)[0, 1, 0] = bits(part.to(dtype))
        q = torch.zeros(1, 1, 64)
        for out in (
            attention.decode(q, one, 0, sm_scale=1.0),
            attention.extend(q, torch.tensor([0, 1], dtype=torch.int32), one, 0, sm_scale=1.0),
        ):
            assert torch.equal(out[0, 0].nan_to_num(7.5), part.nan_to_num(7.5))


def test_rounding_is_torchs(dtype: torch.dtype) -> None:
    """Middles between neighbours and what lies next to them, up to the largest, and beyond."""
    numbers = every_number(dtype).abs().unique()
    largest = torch.finfo(dtype).max
    middles = (numbers[1:] + numbers[:-1]) / 2
    near = torch.cat([middles, numbers])
    beyond = torch.tensor([largest * 1.03, largest * 1.06, 1e6, 3e38, math.inf, 1e-12, 1e-42])
    for values in (
        near,
        torch.nextafter(near, torch.tensor(math.inf)),
        torch.nextafter(near, torch.tensor(-1.0)),
        beyond,
        torch.randn(1024) * 10 ** torch.linspace(-7, 6, 1024),
    ):
        for signed in (values, -values):
            got = stored(signed, dtype)
            assert torch.equal(got, bits(signed.clamp(-largest, largest).to(dtype)))
            assert got.view(dtype).float().isfinite().all()
    assert stored(torch.tensor([math.nan, -math.nan]), dtype).view(dtype).float().isnan().all()


@pytest.mark.parametrize("q_dtype", [BF16, FP32])
@pytest.mark.parametrize(("page_size", "head_dim"), [(1, 80), (16, 64), (32, 256)])
def test_append(
    make_streams: MakeStreams,
    dtype: torch.dtype,
    q_dtype: torch.dtype,
    page_size: int,
    head_dim: int,
) -> None:
    """Ragged, from one projection, divided by scales; nothing else in the pool is touched."""
    streams = make_streams(
        [[50, 35], 1, 0, 40], page_size=page_size, head_dim=head_dim, dtype=dtype, num_layers=2
    )
    shape = streams.pages.shape
    pages = allocate_pages(shape[0], shape[2], shape[3], dtype)
    bits(pages).copy_(bits(streams.pages))
    expected = replace(streams, pages=pages)
    for counts in (None, [34, 1, 1, 0]):
        indptr = None
        if counts is not None:
            indptr = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
        total = 4 if counts is None else sum(counts)
        k, v = (300 * torch.randn(total, 4, head_dim)).to(q_dtype).split(2, dim=1)
        transfer.append(k, v, indptr, streams, 1, **SCALES)
        reference.append(k, v, indptr, expected, 1, **SCALES)
        assert torch.equal(bits(streams.pages), bits(expected.pages))


@pytest.mark.parametrize("q_dtype", [BF16, FP32])
@pytest.mark.parametrize(
    ("head_dim", "group", "page_size"), [(64, 3, 16), (80, 7, 1), (96, 1, 32), (256, 16, 16)]
)
def test_attention(
    make_streams: MakeStreams,
    dtype: torch.dtype,
    q_dtype: torch.dtype,
    head_dim: int,
    group: int,
    page_size: int,
) -> None:
    """Ragged, empty, over a split, with sinks apart: the reference, and fp32 pages of the same."""
    lens = [[70, 1], [0, 0], [33, 600], [64, 65]]
    policies = [(0, 0, -1), (64, 4, 15), (0, 4, 31), (0, 0, 20)]
    streams = make_streams(
        lens, head_dim=head_dim, page_size=page_size, dtype=dtype, policies=policies
    )
    options: dict[str, Any] = {"sm_scale": 0.3, "logits_soft_cap": 20.0, **SCALES}
    for counts in ([1] * 4, [1, 0, 33, 64]):
        q = torch.randn(sum(counts), 2 * group, head_dim).to(q_dtype)
        sink_q = torch.randn(q.shape).to(q_dtype)
        indptr = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
        out = torch.empty(q.shape)
        also: dict[str, Any] = {"sink_q": sink_q, "out": out, "return_lse": True}
        if counts == [1] * 4:
            _, lse = attention.decode(q, streams, 0, **also, **options)
        else:
            _, lse = attention.extend(q, indptr, streams, 0, **also, **options)
        want, want_lse = reference.extend(q, indptr, streams, 0, sink_q=sink_q, **options)
        torch.testing.assert_close(out, want, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(lse, want_lse, atol=1e-4, rtol=1e-5)
        same = torch.empty(q.shape)
        also["out"] = same
        if counts == [1] * 4:
            attention.decode(q, as_float(streams), 0, **also, **options)
        else:
            attention.extend(q, indptr, as_float(streams), 0, **also, **options)
        assert torch.equal(out, same), "widened rows are not what fp32 pages hold"


@pytest.mark.parametrize(("head_dim", "group"), [(64, 3), (80, 7), (256, 16)])
def test_column_sums(
    make_streams: MakeStreams, dtype: torch.dtype, head_dim: int, group: int
) -> None:
    """Over more than one run of keys, from a chunk and from single queries."""
    streams = make_streams([70, [0, 0], [33, 600], 64], head_dim=head_dim, dtype=dtype)
    options = {"sm_scale": 0.2, "k_scale": SCALES["k_scale"]}
    slots = torch.tensor([3, -1, 0, 1], dtype=torch.int32)
    first = torch.tensor([2, 0, 0, 60], dtype=torch.int32)
    for counts, rows in (([1] * 4, None), ([20, 0, 33, 64], first)):
        q = torch.randn(sum(counts), 2 * group, head_dim).to(BF16)
        indptr = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
        _, lse = reference.extend(q, indptr, streams, 0, **options)
        begin = torch.zeros(4, dtype=torch.int32) if rows is None else rows
        before = torch.rand(4, 1, 2, int(streams.desc[..., KV_LEN].max()))
        got, want = before.clone(), before.clone()
        scores.column_sums(
            q, None if rows is None else indptr, begin, lse, streams, 0, got, slots, **options
        )
        reference.column_sums(q, indptr, begin, lse, streams, 0, want, slots, **options)
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
        assert not torch.equal(got, before)


def test_bad_scales(make_streams: MakeStreams, dtype: torch.dtype) -> None:
    streams = make_streams([20], dtype=dtype)
    q, k = torch.randn(1, 4, 64), torch.randn(1, 2, 64)
    for name, value in (("k_scale", 0.0), ("v_scale", -1.0), ("k_scale", math.inf)):
        with pytest.raises(ValueError, match=f"{name} must be positive and finite"):
            attention.decode(q, streams, 0, sm_scale=1.0, **{name: value})
        with pytest.raises(ValueError, match=f"{name} must be positive and finite"):
            transfer.append(k, k, None, streams, 0, **{name: value})
