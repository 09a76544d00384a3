"""decode and extend against the reference, for every shape and policy that the runtime uses."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sglang_kv.kernels import attention, reference
from sglang_kv.kernels.layout import PagedStreams

pytestmark = pytest.mark.usefixtures("isa")

MakeStreams = Callable[..., PagedStreams]
BF16, FP32 = torch.bfloat16, torch.float32

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


def check_decode(streams: PagedStreams, q: Tensor, **options: Any) -> None:
    out = torch.full(q.shape, torch.nan)
    _, lse = attention.decode(q, streams, 0, out=out, return_lse=True, sm_scale=0.125, **options)
    expected, expected_lse = reference.decode(q, streams, 0, sm_scale=0.125, **options)
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(lse, expected_lse, atol=1e-4, rtol=0)


def check_extend(streams: PagedStreams, counts: list[int], q: Tensor, **options: Any) -> None:
    indptr = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
    out = torch.full(q.shape, torch.nan)
    _, lse = attention.extend(
        q, indptr, streams, 0, out=out, return_lse=True, sm_scale=0.125, **options
    )
    expected, expected_lse = reference.extend(q, indptr, streams, 0, sm_scale=0.125, **options)
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(lse, expected_lse, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kv_dtype", [BF16, FP32])
@pytest.mark.parametrize("q_dtype", [BF16, FP32])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_head_dims_and_dtypes(
    make_streams: MakeStreams, head_dim: int, q_dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    streams = make_streams([70, 1, 33], head_dim=head_dim, dtype=kv_dtype)
    check_decode(streams, torch.randn(3, 6, head_dim).to(q_dtype))
    check_extend(streams, [35, 1, 33], torch.randn(69, 6, head_dim).to(q_dtype))


@pytest.mark.parametrize("group", [*range(1, 9), 12, 16])
def test_groups(make_streams: MakeStreams, group: int) -> None:
    streams = make_streams([130, 17], num_kv_heads=3)
    check_decode(streams, torch.randn(2, 3 * group, 64).to(BF16))
    check_extend(streams, [75, 3], torch.randn(78, 3 * group, 64).to(BF16))


@pytest.mark.parametrize("page_size", [1, 16, 32])
@pytest.mark.parametrize("kv_dtype", [BF16, FP32])
def test_ragged_lengths(make_streams: MakeStreams, page_size: int, kv_dtype: torch.dtype) -> None:
    """Around a page, a block of keys and a split; and an empty stream in between."""
    lens = [1, max(page_size - 1, 1), page_size, page_size + 1, 0, 63, 64, 65, 511, 512, 513]
    streams = make_streams(lens, page_size=page_size, dtype=kv_dtype)
    check_decode(streams, torch.randn(len(lens), 6, 64).to(BF16))
    counts = [min(n, 1 + 5 * i) for i, n in enumerate(lens)]
    check_extend(streams, counts, torch.randn(sum(counts), 6, 64).to(BF16))


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("layer_window_left", [-1, 0, 25, 90])
def test_a_policy_for_each_stream(
    make_streams: MakeStreams, page_size: int, layer_window_left: int
) -> None:
    """Streams of one request differ in length, gap, sinks and window."""
    lens = [[97, 40, 5], [128, 130, 16], [17, 200, 64], [64, 33, 90], [300, 129, 80]]
    streams = make_streams(lens, num_kv_heads=3, page_size=page_size, policies=POLICIES)
    options = {"layer_window_left": layer_window_left}
    check_decode(streams, torch.randn(5, 6, 64), **options)
    counts = [5, 16, 17, 30, 70]
    check_extend(streams, counts, torch.randn(sum(counts), 6, 64), **options)


def test_soft_cap(make_streams: MakeStreams) -> None:
    streams = make_streams([70, 20], policies=POLICIES)
    check_decode(streams, 20 * torch.randn(2, 6, 64), logits_soft_cap=5.0)
    check_extend(streams, [66, 20], 20 * torch.randn(86, 6, 64), logits_soft_cap=5.0)


@pytest.mark.parametrize("kv_dtype", [BF16, FP32])
def test_long_streams(make_streams: MakeStreams, kv_dtype: torch.dtype) -> None:
    """Several splits, and a prefix before the chunk."""
    streams = make_streams([3000, 1500], dtype=kv_dtype, policies=[(0, 0, -1), (512, 4, 2000)])
    check_decode(streams, torch.randn(2, 6, 64).to(BF16))
    check_extend(streams, [200, 150], torch.randn(350, 6, 64).to(BF16))


def test_large_scores(make_streams: MakeStreams) -> None:
    """Weights that underflow, and rescaling by factors that do."""
    streams = make_streams([700], dtype=FP32)
    check_decode(streams, 60 * torch.randn(1, 6, 64))
    check_extend(streams, [300], 60 * torch.randn(300, 6, 64))


def test_non_contiguous_queries_and_results(make_streams: MakeStreams) -> None:
    streams = make_streams([40, 7])
    qkv = torch.randn(2, 10, 64).to(BF16)
    heads_first = torch.randn(6, 2, 64).to(BF16)
    for q in (qkv[:, 1:7], heads_first.transpose(0, 1)):
        check_decode(streams, q)
        check_extend(streams, [1, 1], q)
        wide = torch.zeros(2, 12, 64)
        attention.decode(q, streams, 0, sm_scale=0.125, out=wide[:, ::2])
        torch.testing.assert_close(
            wide[:, ::2], attention.decode(q.float(), streams, 0, sm_scale=0.125)
        )
        assert (wide[:, 1::2] == 0).all()


def test_the_result_has_the_dtype_of_the_queries(make_streams: MakeStreams) -> None:
    streams = make_streams([40])
    q = torch.randn(1, 6, 64).to(BF16)
    out = attention.decode(q, streams, 0, sm_scale=0.125)
    assert out.dtype == BF16
    exact = attention.decode(q, streams, 0, sm_scale=0.125, out=torch.empty(1, 6, 64))
    assert (out == exact.to(BF16)).all()


def test_layers_are_apart(make_streams: MakeStreams) -> None:
    streams = make_streams([40, 9], num_layers=3, policies=POLICIES)
    q = torch.randn(2, 4, 64)
    for layer in range(3):
        out = attention.decode(q, streams, layer, sm_scale=0.125)
        expected, _ = reference.decode(q, streams, layer, sm_scale=0.125)
        torch.testing.assert_close(out, expected, atol=1e-4, rtol=0)


def test_empty_streams_and_batches(make_streams: MakeStreams) -> None:
    streams = make_streams([0, [0, 5]])
    q = torch.randn(2, 4, 64)
    indptr = torch.tensor([0, 1, 2], dtype=torch.int32)
    for out, lse in (
        attention.decode(q, streams, 0, sm_scale=0.125, return_lse=True),
        attention.extend(q, indptr, streams, 0, sm_scale=0.125, return_lse=True),
    ):
        assert out.isfinite().all()
        assert (out[0] == 0).all()
        assert (out[1, :2] == 0).all()
        assert (lse[0] == -math.inf).all()
        assert lse[1].isfinite().tolist() == [False, False, True, True]
    none = make_streams([3])
    none = PagedStreams(none.pages, none.table, none.desc, none.slots[:0])
    assert attention.decode(q[:0], none, 0, sm_scale=0.125).shape == (0, 4, 64)


def test_pages_beyond_the_range_of_32_bit_offsets(make_streams: MakeStreams) -> None:
    """The last page of a pool of more than 2**31 elements; the others are never committed."""
    small = make_streams([16], num_kv_heads=1, head_dim=128)
    page = int(small.table[small.slots[0], 0, 0, 0])
    pages = small.pages.new_empty(2**19 + 8, 2, 16, 128)
    pages[-1] = small.pages[page]
    big = PagedStreams(pages, torch.full_like(small.table, len(pages) - 1), small.desc, small.slots)
    q = torch.randn(1, 4, 128)
    out = attention.decode(q, big, 0, sm_scale=0.125)
    assert (out == attention.decode(q, small, 0, sm_scale=0.125)).all()


@pytest.mark.parametrize("page_size", [1, 16, 32])
@pytest.mark.parametrize(("q_dtype", "kv_dtype"), [(BF16, BF16), (FP32, BF16), (FP32, FP32)])
@pytest.mark.parametrize("policy", POLICIES)
def test_sinks_with_queries_of_their_own(
    make_streams: MakeStreams,
    policy: tuple[int, int, int],
    q_dtype: torch.dtype,
    kv_dtype: torch.dtype,
    page_size: int,
) -> None:
    streams = make_streams([150, 3, 97], page_size=page_size, dtype=kv_dtype, policies=[policy])
    q, sink_q = torch.randn(2, 3, 6, 64).to(q_dtype)
    check_decode(streams, q, sink_q=sink_q)
    check_decode(streams, q, sink_q=sink_q, layer_window_left=40)
    q, sink_q = torch.randn(2, 210, 6, 64).to(q_dtype)
    check_extend(streams, [130, 3, 77], q, sink_q=sink_q)
    check_extend(streams, [130, 3, 77], q, sink_q=sink_q, logits_soft_cap=3.0)


def test_the_queries_of_sinks_matter(make_streams: MakeStreams) -> None:
    streams = make_streams([150], policies=[(0, 4, 31)])
    q = torch.randn(1, 6, 64)
    plain = attention.decode(q, streams, 0, sm_scale=0.125)
    assert torch.equal(attention.decode(q, streams, 0, sm_scale=0.125, sink_q=q), plain)
    turned = attention.decode(q, streams, 0, sm_scale=0.125, sink_q=-q)
    assert (turned - plain).abs().max() > 0.01
