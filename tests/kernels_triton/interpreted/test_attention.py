"""decode and extend against the reference. What is exact in fp32 is checked in fp32."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sglang_kv.kernels import reference
from sglang_kv.kernels.layout import KV_LEN, PagedStreams
from sglang_kv.kernels.triton import attention, checks

MakeStreams = Callable[..., PagedStreams]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

# gap, num_sinks, window_left: dense, window, sinks and window, dropped middle, sinks only, half a
# page of sinks, a window that reaches the sinks.
POLICIES = [
    (0, 0, -1),
    (0, 0, 20),
    (0, 4, 31),
    (64, 4, 15),
    (32, 16, 0),
    (96, 24, 50),
    (32, 8, 40),
]


def indptr_of(counts: list[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)


def check(
    streams: PagedStreams,
    q: Tensor,
    counts: list[int] | None = None,
    layer: int = 0,
    **options: Any,
) -> None:
    """decode, or extend by `counts`. Weights are rounded to the dtype of `q`, the lse is not."""
    indptr = indptr_of(counts or [1] * len(streams.slots))
    more = {"sm_scale": 0.125, "out": torch.full(q.shape, torch.nan), "return_lse": True} | options
    if counts is None:
        out, lse = attention.decode(q, streams, layer, **more)
    else:
        out, lse = attention.extend(q, indptr, streams, layer, **more)
    options = {"sm_scale": 0.125} | options
    expected, expected_lse = reference.extend(q, indptr, streams, layer, **options)
    largest = streams.pages.float().nan_to_num().abs().max()
    rounding = {FP32: 1e-5, FP16: 2**-11, BF16: 2**-8}[q.dtype]
    torch.testing.assert_close(out, expected, atol=float(largest) * rounding, rtol=0)
    torch.testing.assert_close(lse, expected_lse, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("head_dim", "group", "dtype", "arch"),
    [
        (64, 1, BF16, 90),
        (80, 3, FP16, 90),
        (96, 5, E4M3, 80),
        (128, 6, BF16, 90),
        (256, 7, E5M2, 80),
        (64, 16, FP32, 90),
        (64, 2, E4M3, 90),
        (80, 4, E5M2, 90),
    ],
)
def test_shapes_and_dtypes(
    make_streams: MakeStreams,
    monkeypatch: pytest.MonkeyPatch,
    head_dim: int,
    group: int,
    dtype: torch.dtype,
    arch: int,
) -> None:
    """8-bit floats as they are read where the GPU converts them, and where it cannot."""
    monkeypatch.setattr(checks, "architecture", lambda device: arch)
    streams = make_streams([35, 1], head_dim=head_dim, dtype=dtype)
    q = torch.randn(8, group, head_dim).to(BF16 if dtype.itemsize == 1 else dtype)
    check(streams, q[:2])
    check(streams, q, [7, 1])


@pytest.mark.parametrize(
    ("page_size", "lens"),
    [(1, [1, 2, 65]), (16, [15, 16, 0, 17, 127, 128, 129]), (32, [31, 33, 64])],
)
def test_ragged_lengths(make_streams: MakeStreams, page_size: int, lens: list[int]) -> None:
    """Around a page and a block of keys, and an empty stream in between."""
    streams = make_streams(lens, page_size=page_size)
    check(streams, torch.randn(len(lens), 3, 64).to(BF16))
    counts = [min(n, 1 + 3 * i) for i, n in enumerate(lens)]
    check(streams, torch.randn(sum(counts), 3, 64).to(BF16), counts)


@pytest.mark.parametrize(
    ("own_sink_queries", "layer_window_left"), [(False, -1), (True, -1), (True, 0), (True, 45)]
)
def test_a_policy_for_each_stream(
    make_streams: MakeStreams, own_sink_queries: bool, layer_window_left: int
) -> None:
    """Streams of one request differ in length, gap, sinks and window."""
    lens = [[150, 97, 40, 128, 17, 200, 90]]
    streams = make_streams(lens, num_kv_heads=7, dtype=FP32, policies=POLICIES)
    options: dict[str, Any] = {"layer_window_left": layer_window_left}
    q, sink_q = torch.randn(2, 15, 7, 64)
    check(streams, q[:1], sink_q=sink_q[:1] if own_sink_queries else None, **options)
    check(streams, q, [15], sink_q=sink_q if own_sink_queries else None, **options)


@pytest.mark.parametrize("policy", [(0, 0, -1), (16, 20, 100), (0, 40, 130)])
def test_tiles(make_streams: MakeStreams, policy: tuple[int, int, int]) -> None:
    """Several tiles of one request, some of their blocks seen whole; a tile shared with nobody."""
    streams = make_streams([230, 3], policies=[policy])
    check(streams, torch.randn(41, 7, 64).to(BF16), [38, 3])


@pytest.mark.parametrize(
    ("policy", "lens"), [((0, 0, -1), [1100, 257, 256]), ((512, 80, 700), [1100])]
)
def test_splits(make_streams: MakeStreams, policy: tuple[int, int, int], lens: list[int]) -> None:
    streams = make_streams(lens, dtype=FP32, policies=[policy])
    check(streams, torch.randn(len(lens), 2, 64))
    if policy[1]:
        q, sink_q = torch.randn(2, 1, 2, 64)
        check(streams, q, sink_q=sink_q)


@pytest.mark.parametrize("most", [2, 32])
def test_how_streams_are_split(
    make_streams: MakeStreams, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """17 blocks in two splits, and in one more than are merged at once."""
    monkeypatch.setattr(attention, "MAX_SPLITS", most)
    monkeypatch.setattr(attention, "MIN_BLOCKS", 1)
    streams = make_streams([544, 33], head_dim=256, dtype=FP32)
    check(streams, torch.randn(2, 2, 256))


def test_large_scores_and_soft_cap(make_streams: MakeStreams) -> None:
    """Weights that underflow, and a cap that many scores reach."""
    streams = make_streams([70, 20], dtype=FP32, policies=POLICIES[3:])
    q = 60 * torch.randn(20, 2, 64)
    for options in ({}, {"logits_soft_cap": 5.0}):
        check(streams, q[:2], **options)
        check(streams, q, [16, 4], **options)


def test_non_contiguous_tensors_and_layers(make_streams: MakeStreams) -> None:
    streams = make_streams([40, 7], num_layers=3, num_kv_heads=2)
    qkv = torch.randn(2, 10, 64).to(BF16)
    heads_first = torch.randn(6, 2, 64).to(BF16)
    for layer, q in ((1, qkv[:, 1:7]), (2, heads_first.transpose(0, 1))):
        wide = torch.zeros(2, 12, 64)
        check(streams, q, layer=layer)
        check(streams, q, [1, 1], layer=layer, sink_q=q)
        attention.decode(q, streams, layer, sm_scale=0.125, out=wide[:, ::2])
        expected, _ = reference.decode(q, streams, layer, sm_scale=0.125)
        torch.testing.assert_close(wide[:, ::2], expected, atol=0.02, rtol=0)
        assert (wide[:, 1::2] == 0).all()


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_scales_of_stored_keys_and_values(make_streams: MakeStreams, dtype: torch.dtype) -> None:
    streams = make_streams([300, 20], dtype=dtype)
    q = torch.randn(4, 3, 64)
    scales: dict[str, Any] = {"sm_scale": 0.125, "k_scale": 0.37, "v_scale": 3.0}
    indptr = indptr_of([3, 1])
    for got, want in (
        (
            attention.decode(q[:2], streams, 0, return_lse=True, **scales),
            reference.decode(q[:2], streams, 0, **scales),
        ),
        (
            attention.extend(q, indptr, streams, 0, return_lse=True, **scales),
            reference.extend(q, indptr, streams, 0, **scales),
        ),
    ):
        torch.testing.assert_close(got[0], want[0], atol=1e-4, rtol=0)
        torch.testing.assert_close(got[1], want[1], atol=1e-4, rtol=0)


def test_results_have_the_dtype_of_the_queries(make_streams: MakeStreams) -> None:
    streams = make_streams([40])
    q = torch.randn(1, 3, 64).to(BF16)
    out = attention.decode(q, streams, 0, sm_scale=0.125)
    exact = attention.decode(q, streams, 0, sm_scale=0.125, out=torch.empty(1, 3, 64))
    assert out.dtype == BF16
    assert torch.equal(out, exact.to(BF16))


def test_nothing_seen_is_zero(make_streams: MakeStreams) -> None:
    streams = make_streams([0, 3])
    q = torch.randn(2, 3, 64).to(BF16)
    for out, lse in (
        attention.decode(q, streams, 0, sm_scale=0.125, return_lse=True),
        attention.extend(q, indptr_of([1, 1]), streams, 0, sm_scale=0.125, return_lse=True),
    ):
        assert (out[0] == 0).all()
        assert (lse[0] == -math.inf).all()
        assert lse[1].isfinite().all()
    none = replace(streams, slots=streams.slots[:0])
    assert attention.decode(q[:0], none, 0, sm_scale=0.125).shape == (0, 3, 64)


def test_neighbours_change_no_bit(make_streams: MakeStreams) -> None:
    streams = make_streams([90, 500, 5], policies=[(0, 0, -1), (64, 4, 300), (0, 0, 3)])
    q = torch.randn(3, 3, 64).to(BF16)
    together = attention.decode(q, streams, 0, sm_scale=0.125)
    alone = replace(streams, slots=streams.slots[1:2])
    assert torch.equal(attention.decode(q[1:2], alone, 0, sm_scale=0.125), together[1:2])


def test_chunks_are_the_whole(make_streams: MakeStreams) -> None:
    """To the last bit but one: the interpreter's matrix product rounds by where a row stands."""
    streams = make_streams([500], policies=[(64, 4, 300)])
    q, out = torch.randn(60, 5, 64).to(BF16), torch.empty(2, 60, 5, 64)
    attention.extend(q, indptr_of([60]), streams, 0, sm_scale=0.125, out=out[0])
    desc = streams.desc.clone()
    desc[..., KV_LEN] -= 13
    shorter = replace(streams, desc=desc)
    attention.extend(q[:47], indptr_of([47]), shorter, 0, sm_scale=0.125, out=out[1, :47])
    attention.extend(q[47:], indptr_of([13]), streams, 0, sm_scale=0.125, out=out[1, 47:])
    torch.testing.assert_close(out[1], out[0], atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("message", "broken"),
    [
        ("q must have 3", {"q": torch.zeros(2, 256)}),
        ("q must be bfloat16, float16 or", {"q": torch.zeros(2, 4, 64).double()}),
        ("q has head_dim", {"q": torch.zeros(2, 4, 80)}),
        ("q has 34 heads", {"q": torch.zeros(2, 34, 64)}),
        ("q must be contiguous in its last", {"q": torch.zeros(2, 64, 4).transpose(1, 2)}),
        ("slots", {"q": torch.zeros(3, 4, 64)}),
        ("out has 3 tokens", {"out": torch.zeros(3, 4, 64)}),
        ("sink_q must have the dtype", {"sink_q": torch.zeros(2, 4, 64).half()}),
        ("sm_scale", {"sm_scale": 0.0}),
        ("v_scale", {"v_scale": 0.0}),
        ("logits_soft_cap", {"logits_soft_cap": -1.0}),
        ("layer is 1", {"layer": 1}),
        ("scores and score_slots", {"scores": torch.zeros(1, 1, 2, 8)}),
        ("q is on meta", {"q": torch.zeros(2, 4, 64, device="meta")}),
    ],
)
def test_what_does_not_fit_is_refused(
    make_streams: MakeStreams, message: str, broken: dict[str, Any]
) -> None:
    streams = make_streams([20, 5], num_kv_heads=2)
    arguments = {"q": torch.zeros(2, 4, 64), "layer": 0, "sm_scale": 0.125} | broken
    with pytest.raises(ValueError, match=message):
        attention.decode(streams=streams, **arguments)


def test_extend_needs_a_row_range_for_each_request(make_streams: MakeStreams) -> None:
    streams, q = make_streams([20, 5]), torch.zeros(2, 1, 64)
    with pytest.raises(ValueError, match="qo_indptr has 2 entries for 2 slots"):
        attention.extend(q, indptr_of([2]), streams, 0, sm_scale=0.125)
