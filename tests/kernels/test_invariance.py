"""Results that must not change by a bit."""

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sglang_kv.kernels import attention
from sglang_kv.kernels.layout import PagedStreams

pytestmark = pytest.mark.usefixtures("isa")

MakeStreams = Callable[..., PagedStreams]

LENS = [[900, 1300], [70, 33], 1, [2000, 64], 513]
POLICIES = [(0, 0, -1), (0, 4, 500), (128, 20, 64)]


@pytest.fixture
def streams(make_streams: MakeStreams) -> PagedStreams:
    return make_streams(LENS, policies=POLICIES)


@pytest.fixture(params=[torch.bfloat16, torch.float32])
def q_dtype(request: pytest.FixtureRequest) -> torch.dtype:
    dtype: torch.dtype = request.param
    return dtype


def decode(q: Tensor, streams: PagedStreams) -> tuple[Tensor, Tensor]:
    return attention.decode(q, streams, 0, sm_scale=0.125, return_lse=True)


def extend(q: Tensor, counts: list[int], streams: PagedStreams) -> tuple[Tensor, Tensor]:
    indptr = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
    return attention.extend(q, indptr, streams, 0, sm_scale=0.125, return_lse=True)


def assert_same(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> None:
    assert torch.equal(a[0], b[0])
    assert torch.equal(a[1], b[1])


def test_decode_ignores_its_neighbours(streams: PagedStreams, q_dtype: torch.dtype) -> None:
    q = torch.randn(5, 6, 64).to(q_dtype)
    out, lse = decode(q, streams)
    for i in range(5):
        alone = replace(streams, slots=streams.slots[i : i + 1])
        assert_same(decode(q[i : i + 1], alone), (out[i : i + 1], lse[i : i + 1]))
    order = torch.tensor([3, 0, 4, 1, 2])
    shuffled = replace(streams, slots=streams.slots[order])
    assert_same(decode(q[order], shuffled), (out[order], lse[order]))


def test_extend_ignores_its_neighbours(streams: PagedStreams, q_dtype: torch.dtype) -> None:
    counts = [200, 33, 1, 64, 100]
    q = torch.randn(sum(counts), 6, 64).to(q_dtype)
    out, lse = extend(q, counts, streams)
    for i, end in enumerate(itertools.accumulate(counts)):
        rows = slice(end - counts[i], end)
        alone = replace(streams, slots=streams.slots[i : i + 1])
        assert_same(extend(q[rows], [counts[i]], alone), (out[rows], lse[rows]))


def test_threads_change_nothing(streams: PagedStreams, q_dtype: torch.dtype) -> None:
    counts = [200, 33, 1, 64, 100]
    q, chunk = torch.randn(5, 6, 64).to(q_dtype), torch.randn(sum(counts), 6, 64).to(q_dtype)
    torch.set_num_threads(1)
    decoded, extended = decode(q, streams), extend(chunk, counts, streams)
    torch.set_num_threads(2)
    for _ in range(5):
        assert_same(decode(q, streams), decoded)
        assert_same(extend(chunk, counts, streams), extended)


@pytest.mark.parametrize("policy", POLICIES)
def test_chunks_are_the_whole(
    make_streams: MakeStreams, q_dtype: torch.dtype, policy: tuple[int, int, int]
) -> None:
    streams = make_streams([400], policies=[policy])
    q = torch.randn(400, 6, 64).to(q_dtype)
    whole = extend(q, [400], streams)
    ends = [1, 7, 64, 200, 331, 400]
    for begin, end in itertools.pairwise([0, *ends]):
        desc = streams.desc.clone()
        desc[..., 0] = end
        part = replace(streams, desc=desc)
        rows = slice(begin, end)
        assert_same(extend(q[rows], [end - begin], part), (whole[0][rows], whole[1][rows]))
