"""column_sums: against the reference, and what must not change by a bit."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sglang_kv.kernels import attention, reference
from sglang_kv.kernels.layout import KV_LEN, PagedStreams
from sglang_kv.kernels.scores import column_sums

pytestmark = pytest.mark.usefixtures("isa")

MakeStreams = Callable[..., PagedStreams]
BF16, FP32 = torch.bfloat16, torch.float32

# gap, num_sinks, window_left: as in test_attention.py.
POLICIES = [
    (0, 0, -1),
    (0, 0, 20),
    (0, 4, 31),
    (64, 4, 15),
    (32, 16, 0),
    (96, 24, 50),
    (32, 8, 40),
]


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def indptr_of(counts: list[int]) -> Tensor:
    return int32(0, *itertools.accumulate(counts))


def some_scores(streams: PagedStreams, batch: int) -> Tensor:
    """Sums of earlier calls, with more slots and more width than the batch needs."""
    width = int(streams.desc[..., KV_LEN].max()) + 5
    return torch.rand(batch + 2, streams.table.shape[1], streams.num_kv_heads, width)


def check(
    streams: PagedStreams,
    q: Tensor,
    counts: list[int] | None = None,
    first: list[int] | None = None,
    **options: Any,
) -> None:
    """Sums of all queries, or from `first` on; bits that belong to no key must stay."""
    batch = len(streams.slots)
    indptr = indptr_of(counts or [1] * batch)
    options = {"sm_scale": 0.125} | options
    _, lse = reference.extend(q, indptr, streams, 0, **options)
    scores = some_scores(streams, batch)
    before, expected = scores.clone(), scores.clone()
    score_slots = torch.randperm(batch + 2)[:batch].int()
    first_query = int32(*(first or [0] * batch))
    column_sums(
        q,
        None if counts is None else indptr,
        first_query,
        lse,
        streams,
        0,
        scores,
        score_slots,
        **options,
    )
    reference.column_sums(q, indptr, first_query, lse, streams, 0, expected, score_slots, **options)
    torch.testing.assert_close(scores, expected, atol=1e-5, rtol=2e-5)
    untouched = torch.ones(scores.shape, dtype=torch.bool)
    for slot, score_slot in zip(streams.slots.tolist(), score_slots.tolist(), strict=True):
        for h, kv_len in enumerate(streams.desc[slot, 0, :, KV_LEN].tolist()):
            untouched[score_slot, 0, h, :kv_len] = False
    assert torch.equal(scores[untouched], before[untouched])


@pytest.mark.parametrize("kv_dtype", [BF16, FP32])
@pytest.mark.parametrize("q_dtype", [BF16, FP32])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_head_dims_and_dtypes(
    make_streams: MakeStreams, head_dim: int, q_dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    streams = make_streams([70, 1, 33], head_dim=head_dim, dtype=kv_dtype)
    check(streams, torch.randn(3, 6, head_dim).to(q_dtype))
    check(streams, torch.randn(69, 6, head_dim).to(q_dtype), [35, 1, 33], [3, 0, 0])


@pytest.mark.parametrize("group", [1, 3, 4, 7, 8, 16])
@pytest.mark.parametrize("kv_dtype", [BF16, FP32])
def test_groups(make_streams: MakeStreams, group: int, kv_dtype: torch.dtype) -> None:
    streams = make_streams([130, 17], num_kv_heads=3, dtype=kv_dtype)
    check(streams, torch.randn(2, 3 * group, 64).to(BF16))
    check(streams, torch.randn(78, 3 * group, 64).to(BF16), [75, 3], [20, 1])


@pytest.mark.parametrize("page_size", [1, 16, 32])
@pytest.mark.parametrize("kv_dtype", [BF16, FP32])
def test_ragged_lengths(make_streams: MakeStreams, page_size: int, kv_dtype: torch.dtype) -> None:
    """Around a page, a block and a run of keys; and an empty stream in between."""
    lens: list[int | list[int]] = [1, page_size, page_size + 1, 0, 63, 64, 65]
    lens += [max(page_size - 1, 1), [511, 0], 512, [513, 70]]
    streams = make_streams(lens, page_size=page_size, dtype=kv_dtype)
    check(streams, torch.randn(len(lens), 6, 64).to(BF16))
    longest = [n if isinstance(n, int) else max(n) for n in lens]
    counts = [min(n, 1 + 5 * i) for i, n in enumerate(longest)]
    first = [i * n // 11 for i, n in enumerate(counts)]
    check(streams, torch.randn(sum(counts), 6, 64).to(BF16), counts, first)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("layer_window_left", [-1, 0, 25, 90])
def test_a_policy_for_each_stream(
    make_streams: MakeStreams, page_size: int, layer_window_left: int
) -> None:
    """Streams of one request differ in length, gap, sinks and window."""
    lens = [[97, 40, 30], [128, 130, 16], [17, 200, 64], [64, 33, 90], [300, 129, 80]]
    streams = make_streams(lens, num_kv_heads=3, page_size=page_size, policies=POLICIES)
    options: dict[str, Any] = {"layer_window_left": layer_window_left}
    check(streams, torch.randn(5, 6, 64), **options)
    counts = [30, 16, 17, 30, 70]
    check(streams, torch.randn(sum(counts), 6, 64), counts, **options)
    check(streams, torch.randn(sum(counts), 6, 64), counts, [29, 0, 17, 3, 11], **options)


@pytest.mark.parametrize("kv_dtype", [BF16, FP32])
def test_long_streams(make_streams: MakeStreams, kv_dtype: torch.dtype) -> None:
    """Several runs and tiles; sinks and a window with whole runs between them that nobody sees."""
    streams = make_streams(
        [1500, 1400], dtype=kv_dtype, policies=[(0, 0, -1), (512, 4, 100), (0, 0, 700), (0, 70, 9)]
    )
    check(streams, torch.randn(2, 6, 64).to(BF16))
    check(streams, torch.randn(500, 6, 64).to(BF16), [200, 300], [0, 100])


def test_soft_cap(make_streams: MakeStreams) -> None:
    streams = make_streams([70, 20], policies=POLICIES)
    check(streams, 20 * torch.randn(2, 6, 64), logits_soft_cap=5.0)
    check(streams, 20 * torch.randn(86, 6, 64), [66, 20], logits_soft_cap=5.0)


def test_non_contiguous_queries(make_streams: MakeStreams) -> None:
    streams = make_streams([40, 7])
    check(streams, torch.randn(2, 10, 64).to(BF16)[:, 1:7])
    check(streams, torch.randn(6, 45, 64).transpose(0, 1), [40, 5])


def test_layers_are_apart(make_streams: MakeStreams) -> None:
    streams = make_streams([40, 9], num_layers=3, policies=POLICIES)
    q = torch.randn(2, 4, 64)
    scores = some_scores(streams, 2)
    expected = scores.clone()
    for layer in range(3):
        _, lse = attention.decode(q, streams, layer, sm_scale=0.125, return_lse=True)
        for op, to in ((column_sums, scores), (reference.column_sums, expected)):
            op(q, None, int32(0, 0), lse, streams, layer, to, int32(2, 0), sm_scale=0.125)
        torch.testing.assert_close(scores, expected, atol=1e-5, rtol=2e-5)


def test_the_reference_is_the_sum_of_softmax(make_streams: MakeStreams) -> None:
    """Columns of torch's softmax, for a dense stream and its last 20 queries."""
    streams = make_streams([37], num_kv_heads=1, dtype=FP32)
    q, indptr = torch.randn(37, 3, 64), int32(0, 37)
    _, lse = reference.extend(q, indptr, streams, 0, sm_scale=0.125)
    scores = torch.zeros(1, 1, 1, 37)
    reference.column_sums(q, indptr, int32(17), lse, streams, 0, scores, int32(0), sm_scale=0.125)
    k, _ = reference.stream_tokens(streams, int(streams.slots[0]), 0, 0)
    logits = torch.einsum("qhd,kd->hqk", q, k) * 0.125
    causal = torch.ones(37, 37, dtype=torch.bool).tril()
    weights = logits.masked_fill(~causal, -math.inf).softmax(-1)
    torch.testing.assert_close(scores[0, 0, 0], weights[:, 17:].sum((0, 1)))


@pytest.mark.parametrize("kv_dtype", [BF16, FP32])
def test_every_query_gives_one(make_streams: MakeStreams, kv_dtype: torch.dtype) -> None:
    """Over all keys, each query head of each counted query adds 1."""
    counts, first = [100, 64, 30], [20, 64, 0]
    streams = make_streams([700, 64, 130], dtype=kv_dtype, policies=POLICIES)
    q, indptr = torch.randn(sum(counts), 6, 64).to(kv_dtype), indptr_of(counts)
    _, lse = attention.extend(q, indptr, streams, 0, sm_scale=0.125, return_lse=True)
    scores = torch.zeros(3, 1, 2, 700)
    column_sums(q, indptr, int32(*first), lse, streams, 0, scores, int32(2, 1, 0), sm_scale=0.125)
    sums = scores.double().sum(-1)[[2, 1, 0], 0]
    given = torch.tensor(counts) - torch.tensor(first)
    expected = 3.0 * given[:, None].expand(3, 2).double()
    torch.testing.assert_close(sums, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("q_dtype", [BF16, FP32])
@pytest.mark.parametrize("policy", [(0, 0, -1), (0, 4, 50), (128, 20, 64)])
def test_chunks_are_the_whole(
    make_streams: MakeStreams, q_dtype: torch.dtype, policy: tuple[int, int, int]
) -> None:
    streams = make_streams([[200, 200]], policies=[policy])
    q = torch.randn(200, 6, 64).to(q_dtype)
    _, lse = attention.extend(q, int32(0, 200), streams, 0, sm_scale=0.125, return_lse=True)
    results = []
    for chunk in (200, 1, 16, 37):
        scores = torch.zeros(1, 1, 2, 200)
        for begin in range(0, 200, chunk):
            end = min(begin + chunk, 200)
            desc = streams.desc.clone()
            desc[..., KV_LEN] = end
            column_sums(
                q[begin:end],
                None if chunk == 1 else int32(0, end - begin),
                int32(0),
                lse[begin:end],
                replace(streams, desc=desc),
                0,
                scores,
                int32(0),
                sm_scale=0.125,
            )
        results.append(scores)
    assert all(torch.equal(scores, results[0]) for scores in results[1:])


COUNTS, FIRST = [200, 33, 1, 64, 100], [0, 30, 0, 64, 99]


@pytest.fixture
def batch(make_streams: MakeStreams) -> PagedStreams:
    lens = [[900, 1300], [70, 33], 1, [2000, 64], 513]
    return make_streams(lens, policies=[(0, 0, -1), (0, 4, 500), (128, 20, 64)])


@pytest.mark.parametrize("q_dtype", [BF16, FP32])
def test_neighbours_and_threads_change_nothing(batch: PagedStreams, q_dtype: torch.dtype) -> None:
    q, indptr = torch.randn(sum(COUNTS), 6, 64).to(q_dtype), indptr_of(COUNTS)
    _, lse = attention.extend(q, indptr, batch, 0, sm_scale=0.125, return_lse=True)
    before = some_scores(batch, 5)
    args = (lse, batch, 0)
    together = before.clone()
    column_sums(q, indptr, int32(*FIRST), *args, together, int32(*range(5)), sm_scale=0.125)
    torch.set_num_threads(2)
    for _ in range(5):
        again = before.clone()
        column_sums(q, indptr, int32(*FIRST), *args, again, int32(*range(5)), sm_scale=0.125)
        assert torch.equal(again, together)
    torch.set_num_threads(1)
    apart = before.clone()
    for i in range(5):
        rows = slice(int(indptr[i]), int(indptr[i + 1]))
        column_sums(
            q[rows],
            int32(0, COUNTS[i]),
            int32(FIRST[i]),
            lse[rows],
            replace(batch, slots=batch.slots[i : i + 1]),
            0,
            apart,
            int32(i),
            sm_scale=0.125,
        )
    assert torch.equal(apart, together)


def test_skipped_requests_and_rows(batch: PagedStreams) -> None:
    """A request without a slot, and rows that saw nothing: the others get what they get alone."""
    q, indptr = torch.randn(sum(COUNTS), 6, 64), indptr_of(COUNTS)
    _, lse = attention.extend(q, indptr, batch, 0, sm_scale=0.125, return_lse=True)
    before = some_scores(batch, 5)
    scores, expected = before.clone(), before.clone()
    slots = int32(3, -1, -1, 0, 1)
    lse[150:200, 2] = -math.inf
    # What is not scored is not looked at: neither its first query nor, below, its width.
    first = int32(0, 99, -5, 64, 99)
    column_sums(q, indptr, first, lse, batch, 0, scores, slots, sm_scale=0.125)
    reference.column_sums(q, indptr, first, lse, batch, 0, expected, slots, sm_scale=0.125)
    torch.testing.assert_close(scores, expected, atol=1e-5, rtol=2e-5)
    for untouched in (0, 2, 4, 5, 6):  # slot 0 is of a request that leaves out all its queries
        assert torch.equal(scores[untouched], before[untouched])
    narrow = torch.zeros(1, 1, 2, 70)
    slots = int32(-1, 0, -1, -1, -1)
    column_sums(q, indptr, int32(*FIRST), lse, batch, 0, narrow, slots, sm_scale=0.125)
    assert (narrow > 0).any()


def test_an_empty_batch(batch: PagedStreams) -> None:
    scores = torch.zeros(1, 1, 2, 70)
    q, lse = torch.zeros(0, 6, 64), torch.zeros(0, 6)
    none = replace(batch, slots=batch.slots[:0])
    column_sums(q, None, int32(), lse, none, 0, scores, int32(), sm_scale=0.125)


def test_empty_streams(make_streams: MakeStreams) -> None:
    streams = make_streams([0, [0, 5]])
    q = torch.randn(2, 4, 64)
    _, lse = attention.decode(q, streams, 0, sm_scale=0.125, return_lse=True)
    scores = torch.zeros(2, 1, 2, 5)
    column_sums(q, None, int32(0, 0), lse, streams, 0, scores, int32(0, 1), sm_scale=0.125)
    assert scores.sum((1, 3)).round(decimals=4).tolist() == [[0, 0], [0, 2]]
