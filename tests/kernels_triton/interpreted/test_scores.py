"""column_sums, and decode's own scores, against the reference."""

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
from sglang_kv.kernels.triton import attention
from sglang_kv.kernels.triton.scores import column_sums

MakeStreams = Callable[..., PagedStreams]
BF16, FP32 = torch.bfloat16, torch.float32
POLICIES = [(0, 0, -1), (0, 0, 20), (0, 4, 31), (64, 4, 15), (32, 16, 0)]


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def some_scores(streams: PagedStreams) -> Tensor:
    """Sums of earlier calls, with more slots and more width than the batch needs."""
    width = int(streams.desc[..., KV_LEN].max()) + 5
    return torch.rand(len(streams.slots) + 2, streams.table.shape[1], streams.num_kv_heads, width)


def check(
    streams: PagedStreams,
    q: Tensor,
    counts: list[int] | None = None,
    first: list[int] | None = None,
    **options: Any,
) -> None:
    """Sums of all queries, or from `first` on; the last request of a batch is not scored."""
    batch = len(streams.slots)
    indptr = int32(0, *itertools.accumulate(counts or [1] * batch))
    options = {"sm_scale": 0.125} | options
    _, lse = reference.extend(q, indptr, streams, 0, **options)
    lse[0, 0] = -math.inf  # a row that saw nothing adds nothing
    scores = some_scores(streams)
    expected = scores.clone()
    slots = torch.randperm(batch + 2)[:batch].int()
    slots[-1] = -1
    given = None if counts is None else indptr
    rest = (int32(*(first or [0] * batch)), lse, streams, 0)
    column_sums(q, given, *rest, scores, slots, **options)
    reference.column_sums(q, indptr, *rest, expected, slots, **options)
    torch.testing.assert_close(scores, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(
    ("head_dim", "group", "dtype"),
    [(80, 3, BF16), (128, 7, torch.float8_e4m3fn), (64, 1, torch.float8_e5m2)],
)
def test_shapes_and_dtypes(
    make_streams: MakeStreams, head_dim: int, group: int, dtype: torch.dtype
) -> None:
    streams = make_streams([35, 0, 17, 9], head_dim=head_dim, dtype=dtype)
    q = torch.randn(40, group, head_dim).to(BF16)
    scales = {"k_scale": 0.37} if dtype.itemsize == 1 else {}
    check(streams, q[:4], **scales)
    check(streams, q, [20, 5, 6, 9], [3, 0, 6, 0], **scales)


@pytest.mark.parametrize("layer_window_left", [-1, 45])
def test_a_policy_for_each_stream(make_streams: MakeStreams, layer_window_left: int) -> None:
    lens = [[150, 97, 60, 128, 40], [1] * 5]
    streams = make_streams(lens, num_kv_heads=5, policies=POLICIES)
    q = torch.randn(31, 5, 64).to(BF16)
    check(streams, q, [30, 1], [4, 0], layer_window_left=layer_window_left)


def test_many_queries_under_a_soft_cap(make_streams: MakeStreams) -> None:
    streams = make_streams([90, 1], dtype=FP32)
    check(streams, 20 * torch.randn(91, 3, 64), [90, 1], logits_soft_cap=5.0)


def test_chunks_that_end_with_a_tile_change_no_bit(make_streams: MakeStreams) -> None:
    """Tiles of 16 queries of 4 heads, counted from the first token of the stream."""
    streams = make_streams([100])
    q = torch.randn(100, 4, 64).to(BF16)
    _, lse = reference.extend(q, int32(0, 100), streams, 0, sm_scale=0.125)
    results = []
    for ends in ([100], [48, 80, 100]):
        scores = torch.zeros(1, 1, 1, 100)
        for begin, end in itertools.pairwise([0, *ends]):
            desc = streams.desc.clone()
            desc[..., KV_LEN] = end
            rows = slice(begin, end)
            column_sums(
                q[rows],
                int32(0, end - begin),
                int32(0),
                lse[rows],
                replace(streams, desc=desc),
                0,
                scores,
                int32(0),
                sm_scale=0.125,
            )
        results.append(scores)
    assert torch.equal(*results)


@pytest.mark.parametrize("options", [{}, {"logits_soft_cap": 5.0, "layer_window_left": 45}])
def test_scores_of_decode(make_streams: MakeStreams, options: dict[str, Any]) -> None:
    """As column_sums after it; with splits, sinks of their own queries, and one not scored."""
    streams = make_streams(
        [[300, 60], [70, 0], [9, 9]], num_kv_heads=2, dtype=FP32, policies=POLICIES
    )
    q, sink_q = torch.randn(2, 3, 6, 64)
    options = {"sm_scale": 0.125, **options}
    scores = some_scores(streams)
    expected = scores.clone()
    slots = int32(3, 0, -1)
    out, lse = attention.decode(
        q,
        streams,
        0,
        return_lse=True,
        sink_q=sink_q,
        scores=scores,
        score_slots=slots,
        **options,
    )
    plain = attention.decode(q, streams, 0, sink_q=sink_q, **options)
    reference.column_sums(q, None, int32(0, 0, 0), lse, streams, 0, expected, slots, **options)
    torch.testing.assert_close(scores, expected, atol=2e-5, rtol=2e-5)
    assert torch.equal(out, plain)


@pytest.mark.parametrize(
    ("message", "broken"),
    [
        ("first_query must be int32", {"first_query": torch.tensor([0, 0])}),
        ("first_query has 3 entries", {"first_query": int32(0, 0, 0)}),
        ("lse must be float32", {"lse": torch.zeros(2, 4).double()}),
        (r"lse is \[2, 2\]", {"lse": torch.zeros(2, 2)}),
        ("scores must be contiguous", {"scores": torch.zeros(3, 1, 20, 2).transpose(2, 3)}),
        ("scores has 2 layers of 2 heads", {"scores": torch.zeros(3, 2, 2, 20)}),
        ("score_slots has 1 entries", {"score_slots": int32(0)}),
        ("k_scale", {"k_scale": 0.0}),
    ],
)
def test_what_does_not_fit_is_refused(
    make_streams: MakeStreams, message: str, broken: dict[str, Any]
) -> None:
    arguments = {
        "q": torch.zeros(2, 4, 64),
        "qo_indptr": None,
        "first_query": int32(0, 0),
        "lse": torch.zeros(2, 4),
        "layer": 0,
        "scores": torch.zeros(3, 1, 2, 20),
        "score_slots": int32(0, 2),
        "sm_scale": 0.125,
    }
    streams = make_streams([20, 5], num_kv_heads=2)
    with pytest.raises(ValueError, match=message):
        column_sums(streams=streams, **(arguments | broken))
