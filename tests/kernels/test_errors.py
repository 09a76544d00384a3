"""What does not fit together is refused, and the message names the argument."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sglang_kv.kernels import attention, transfer
from sglang_kv.kernels.layout import GAP, KV_LEN, NUM_SINKS, PagedStreams, allocate_pages
from sglang_kv.kernels.scores import column_sums

MakeStreams = Callable[..., PagedStreams]


@pytest.fixture
def streams(make_streams: MakeStreams) -> PagedStreams:
    return make_streams([20, 5])


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def zeros_bf16(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("name", "q", "options"),
    [
        ("q must have 3", torch.zeros(2, 256), {}),
        ("q must be bfloat16 or float32", torch.zeros(2, 4, 64, dtype=torch.float16), {}),
        ("q has head_dim", torch.zeros(2, 4, 80), {}),
        ("q has 3 heads", torch.zeros(2, 3, 64), {}),
        ("q has 34 heads", torch.zeros(2, 34, 64), {}),
        ("q must be contiguous in its last", torch.zeros(2, 64, 4).transpose(1, 2), {}),
        ("slots", torch.zeros(3, 4, 64), {}),
        ("out has 3 tokens", torch.zeros(2, 4, 64), {"out": torch.zeros(3, 4, 64)}),
        ("out has 2 heads", torch.zeros(2, 4, 64), {"out": torch.zeros(2, 2, 64)}),
        ("sink_q has 3 tokens", torch.zeros(2, 4, 64), {"sink_q": torch.zeros(3, 4, 64)}),
        ("sink_q has 2 heads", torch.zeros(2, 4, 64), {"sink_q": torch.zeros(2, 2, 64)}),
        ("sink_q must have the dtype", torch.zeros(2, 4, 64), {"sink_q": zeros_bf16(2, 4, 64)}),
        ("sm_scale", torch.zeros(2, 4, 64), {"sm_scale": 0.0}),
        ("logits_soft_cap", torch.zeros(2, 4, 64), {"logits_soft_cap": -1.0}),
        ("layer", torch.zeros(2, 4, 64), {"layer": 1}),
    ],
)
def test_decode(streams: PagedStreams, name: str, q: Tensor, options: dict[str, Any]) -> None:
    arguments = {"layer": 0, "sm_scale": 0.125} | options
    with pytest.raises(ValueError, match=name):
        attention.decode(q, streams, **arguments)


@pytest.mark.parametrize(
    ("name", "indptr"),
    [
        ("qo_indptr must be int32", torch.tensor([0, 2, 4])),
        ("qo_indptr has 2 entries", int32(0, 4)),
        ("qo_indptr must go from 0 to 4", int32(0, 2, 3)),
        ("qo_indptr decreases", int32(0, 5, 4)),
        ("fewer than its 6 new tokens", int32(0, -2, 4)),
    ],
)
def test_extend(streams: PagedStreams, name: str, indptr: Tensor) -> None:
    if "fewer" in name:
        streams = replace(streams, slots=streams.slots.flip(0))
        indptr = int32(0, 6, 6)
    total = 6 if "fewer" in name else 4
    with pytest.raises(ValueError, match=name):
        attention.extend(torch.zeros(total, 4, 64), indptr, streams, 0, sm_scale=0.125)


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        (KV_LEN, 33, "kv_len 33, table holds 32"),
        (KV_LEN, -1, "kv_len -1"),
        (GAP, 8, "gap 8, not a multiple"),
        (NUM_SINKS, -1, "negative policy"),
    ],
)
def test_desc(streams: PagedStreams, column: int, value: int, message: str) -> None:
    streams.desc[streams.slots[1], 0, 1, column] = value
    with pytest.raises(ValueError, match=message):
        attention.decode(torch.zeros(2, 4, 64), streams, 0, sm_scale=0.125)


def test_tables(streams: PagedStreams) -> None:
    q = torch.zeros(2, 4, 64)
    for message, broken in (
        ("slots must be int32", replace(streams, slots=streams.slots.long())),
        (r"slots\[1\] is 9", replace(streams, slots=int32(0, 9))),
        ("table must be contiguous", replace(streams, table=streams.table[..., :1])),
        ("desc must be", replace(streams, desc=streams.desc[:1])),
        ("pages must be bfloat16", replace(streams, pages=streams.pages.half())),
        ("pages must hold contiguous", replace(streams, pages=streams.pages.transpose(2, 3))),
    ):
        with pytest.raises(ValueError, match=message):
            attention.decode(q, broken, 0, sm_scale=0.125)
    for page in (-1, len(streams.pages)):
        streams.table[streams.slots[0], 0, 1, 1] = page
        with pytest.raises(ValueError, match="table names a page outside"):
            attention.decode(q, streams, 0, sm_scale=0.125)
        with pytest.raises(ValueError, match="table names a page outside"):
            attention.extend(q, int32(0, 1, 2), streams, 0, sm_scale=0.125)
        with pytest.raises(ValueError, match="table names a page outside"):
            transfer.append(q[:, :2], q[:, :2], None, streams, 0)


def test_append(streams: PagedStreams) -> None:
    good = torch.zeros(2, 2, 64)
    for message, k, v in (
        ("k has 4 heads", torch.zeros(2, 4, 64), good),
        ("v has 1 tokens", good, torch.zeros(1, 2, 64)),
        ("v must be bfloat16", good, good.half()),
        ("slots", torch.zeros(3, 2, 64), torch.zeros(3, 2, 64)),
    ):
        with pytest.raises(ValueError, match=message):
            transfer.append(k, v, None, streams, 0)


def test_gather() -> None:
    pages = allocate_pages(8, 16, 64, torch.bfloat16)
    good = {
        "src_indptr": int32(0, 1),
        "src_indices": int32(0),
        "keep_indptr": int32(0, 2),
        "keep_indices": int32(3, 15),
        "dst_indptr": int32(0, 1),
        "dst_indices": int32(1),
    }
    transfer.gather(pages, **good)
    for message, broken in (
        ("src_indices has 8", {"src_indices": int32(8)}),
        ("keep_indices has 16", {"keep_indices": int32(3, 16)}),
        ("keep_indptr has 3 entries", {"keep_indptr": int32(0, 1, 2)}),
        ("dst_indptr must go from 0", {"dst_indptr": int32(0, 2)}),
        ("dst_indices gives stream 0 0 pages", {"dst_indptr": int32(0, 0), "dst_indices": int32()}),
    ):
        with pytest.raises(ValueError, match=message):
            transfer.gather(pages, **(good | broken))


@pytest.mark.parametrize(
    ("message", "broken"),
    [
        ("q must have 3", {"q": torch.zeros(2, 256)}),
        ("q must be bfloat16 or float32", {"q": torch.zeros(2, 4, 64).half()}),
        ("q has head_dim", {"q": torch.zeros(2, 4, 80)}),
        ("q has 3 heads", {"q": torch.zeros(2, 3, 64)}),
        ("slots", {"q": torch.zeros(3, 4, 64)}),
        ("qo_indptr must be int32", {"qo_indptr": torch.tensor([0, 1, 2])}),
        ("qo_indptr has 2 entries", {"qo_indptr": int32(0, 2)}),
        ("qo_indptr must go from 0 to 2", {"qo_indptr": int32(0, 1, 1)}),
        ("first_query must be int32", {"first_query": torch.tensor([0, 0])}),
        ("first_query has 3 entries", {"first_query": int32(0, 0, 0)}),
        (r"first_query\[1\] is -1", {"first_query": int32(0, -1)}),
        (r"first_query\[0\] is 2, the request has 1", {"first_query": int32(2, 0)}),
        (r"first_query\[0\] is 1, the request has 0", {"first_query": int32(1, 0),
                                                       "qo_indptr": int32(0, 0, 2)}),
        ("lse must have 2", {"lse": torch.zeros(2)}),
        ("lse must be float32", {"lse": torch.zeros(2, 4).double()}),
        ("lse must be contiguous", {"lse": torch.zeros(4, 2).T}),
        (r"lse is \[2, 2\]", {"lse": torch.zeros(2, 2)}),
        ("scores must have 4", {"scores": torch.zeros(1, 2, 20)}),
        ("scores must be float32", {"scores": torch.zeros(3, 1, 2, 20).double()}),
        ("scores must be contiguous", {"scores": torch.zeros(3, 1, 20, 2).transpose(2, 3)}),
        ("scores has 2 layers of 2 heads", {"scores": torch.zeros(3, 2, 2, 20)}),
        ("scores has 1 layers of 4 heads", {"scores": torch.zeros(3, 1, 4, 20)}),
        ("scores has width 19, request 0, head 0", {"scores": torch.zeros(3, 1, 2, 19)}),
        ("score_slots must be int32", {"score_slots": torch.tensor([0, 1])}),
        ("score_slots has 1 entries", {"score_slots": int32(0)}),
        (r"score_slots\[1\] is 3, scores has 3", {"score_slots": int32(0, 3)}),
        (r"score_slots\[0\] is -2", {"score_slots": int32(-2, 1)}),
        ("score_slots names 2 twice", {"score_slots": int32(2, 2)}),
        ("sm_scale", {"sm_scale": 0.0}),
        ("logits_soft_cap", {"logits_soft_cap": -1.0}),
        ("layer", {"layer": 1}),
    ],
)  # fmt: skip
def test_column_sums(streams: PagedStreams, message: str, broken: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {
        "q": torch.zeros(2, 4, 64),
        "qo_indptr": None,
        "first_query": int32(0, 0),
        "lse": torch.zeros(2, 4),
        "streams": streams,
        "layer": 0,
        "scores": torch.zeros(3, 1, 2, 20),
        "score_slots": int32(0, 2),
        "sm_scale": 0.125,
    }
    arguments |= broken
    with pytest.raises(ValueError, match=message):
        column_sums(**arguments)
    assert (arguments["scores"] == 0).all()


def test_column_sums_of_pages_outside_the_pool(streams: PagedStreams) -> None:
    q, scores = torch.zeros(2, 4, 64), torch.zeros(2, 1, 2, 20)
    for page in (-1, len(streams.pages)):
        streams.table[streams.slots[0], 0, 1, 1] = page
        with pytest.raises(ValueError, match="table names a page outside"):
            column_sums(
                q,
                None,
                int32(0, 0),
                torch.zeros(2, 4),
                streams,
                0,
                scores,
                int32(0, 1),
                sm_scale=0.125,
            )
