"""Kept sets from the real kernels' scores: against kvpress, and against oracles in plain torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from fold_oracles import pyramid_counts
from golden import SnapKVCase, pyramidkv_budgets, pyramidkv_cases, snapkv_cases, tensors
from kept import kept_by
from oracles import h2o_kept, pyramid_budgets, snapkv_kept
from torch import Tensor

from sglang_kv.compression import FoldPlan, Geometry, Plan, parse_policy
from sglang_kv.kernels.attention import extend
from sglang_kv.kernels.layout import KV_LEN, WINDOW_LEFT, PagedStreams, allocate_pages
from sglang_kv.kernels.scores import column_sums
from sglang_kv.kernels.transfer import append

HEAD_DIM = 64


def attention_received(q: Tensor, k: Tensor, page_size: int, chunks: Sequence[int]) -> Tensor:
    """Column sums of the last queries over a prompt that is computed in ``chunks``.

    ``q``: ``[q_heads, window, head_dim]``, the newest; ``k``: ``[kv_heads, tokens, head_dim]``.
    """
    kv_heads, tokens, dim = k.shape
    window = q.shape[1]
    pages = -(-tokens // page_size)
    streams = PagedStreams(
        allocate_pages(pages * kv_heads, page_size, dim, torch.float32),
        torch.randperm(pages * kv_heads).int().view(1, 1, kv_heads, pages),
        torch.zeros(1, 1, kv_heads, 4, dtype=torch.int32),
        torch.zeros(1, dtype=torch.int32),
    )
    streams.desc[..., WINDOW_LEFT] = -1
    # Earlier queries are not scored, so any will do.
    every = torch.cat([torch.zeros(len(q), tokens - window, dim), q], 1).transpose(0, 1)
    keys = k.transpose(0, 1)
    scores = torch.zeros(1, 1, kv_heads, tokens)
    start = 0
    for size in chunks:
        end = min(start + size, tokens)
        indptr = torch.tensor([0, end - start], dtype=torch.int32)
        streams.desc[..., KV_LEN] = end
        append(keys[start:end], keys[start:end], indptr, streams, 0)
        query = every[start:end].contiguous()
        _, lse = extend(query, indptr, streams, 0, sm_scale=dim**-0.5, return_lse=True)
        first = max(0, tokens - window - start)
        if first < end - start:
            first_query = torch.tensor([first], dtype=torch.int32)
            slots = torch.zeros(1, dtype=torch.int32)
            options = {"sm_scale": dim**-0.5}
            column_sums(query, indptr, first_query, lse, streams, 0, scores, slots, **options)
        start = end
    assert start == tokens
    return scores[0, 0]


def spec(case: SnapKVCase, **more: Any) -> dict[str, Any]:
    known = {"budget": case.budget, "window": case.window, "kernel_size": case.kernel_size}
    return {"method": "snapkv", **known, **more}


def differing(cases: Iterable[SnapKVCase], method: str) -> list[str]:
    """Of kvpress's cases: those where a method keeps other tokens, at the same budget."""
    different, seen = [], 0
    for case in cases:
        if case.budget <= case.window:  # ours must keep something beside the window
            continue
        seen += 1
        scores = attention_received(case.q, case.k, 16, [case.tokens])
        if kept_by(spec(case, method=method), scores, 16)[0] != case.kept:
            different.append(case.name)
    assert seen > 5
    return different


def test_snapkv_keeps_what_kvpress_keeps() -> None:
    assert not differing(snapkv_cases(), "snapkv")


def test_pyramidkv_keeps_what_kvpress_keeps() -> None:
    """Of each layer, at the budget that kvpress gave it; whose line is another one, see below."""
    assert not differing(
        (layer for case in pyramidkv_cases() for layer in case.layers), "pyramidkv"
    )


@pytest.mark.parametrize("page_size", [1, 16, 32])
@pytest.mark.parametrize("group", [1, 3, 4, 8])
def test_snapkv_keeps_what_the_oracle_keeps(group: int, page_size: int) -> None:
    window, budget = 12, 40
    for tokens in (13, 39, 40, 41, 47, 48, 49, 64, 65, 129, 300):
        q, k = tensors(tokens + group, 2 * group, 2, HEAD_DIM, tokens, window)
        whole = attention_received(q, k, page_size, [tokens])
        # The window's queries lie in one chunk, in two, in many.
        for chunk in (page_size + 1, 5):
            cut = attention_received(q, k, page_size, [chunk] * (tokens // chunk + 1))
            assert torch.equal(cut, whole)
        for pooling in ("avg", "max"):
            policy = {"method": "snapkv", "budget": budget, "window": window, "kernel_size": 7}
            expected = snapkv_kept(q, k, window, 7, pooling, budget)
            assert kept_by({**policy, "pooling": pooling}, whole, page_size)[0] == expected


@pytest.mark.parametrize("page_size", [1, 16, 32])
@pytest.mark.parametrize("norm", ["sum", "mean"])
@pytest.mark.parametrize("group", [1, 3, 4, 8])
def test_h2o_keeps_what_the_oracle_keeps(group: int, norm: str, page_size: int) -> None:
    for tokens in (19, 20, 21, 31, 32, 33, 100):
        q, k = tensors(tokens + group, 2 * group, 2, HEAD_DIM, tokens, tokens)
        scores = attention_received(q, k, page_size, [24] * (tokens // 24 + 1))
        policy = {"method": "h2o", "heavy": 12, "recent": 8, "norm": norm}
        expected = h2o_kept(q, k, 12, 8, norm, [tokens])[-1]
        assert kept_by(policy, scores, page_size)[0] == expected


@pytest.mark.parametrize("page_size", [1, 16, 32])
@pytest.mark.parametrize("group", [1, 3, 4, 8])
@pytest.mark.parametrize(("layers", "beta"), [(1, 20), (3, 20), (5, 2), (4, 1)])
def test_pyramidkv_keeps_what_the_oracle_keeps(
    layers: int, beta: int, group: int, page_size: int
) -> None:
    """Each layer's own budget of its own scores; short prompts cut the first layers' budgets."""
    window, budget = 12, 40
    for tokens in (40, 41, 48, 65, 129):
        counts = [tokens] * layers
        if tokens > budget:
            counts = pyramid_counts(layers, budget, window, tokens, beta)
        scores, expected = [], []
        for layer, count in enumerate(counts):
            q, k = tensors(100 * layer + tokens + group, 2 * group, 2, HEAD_DIM, tokens, window)
            scores.append(attention_received(q, k, page_size, [tokens]))
            expected.append(snapkv_kept(q, k, window, 7, "avg", count))
        policy = {"method": "pyramidkv", "budget": budget, "window": window, "kernel_size": 7}
        found = kept_by({**policy, "beta": float(beta)}, torch.stack(scores), page_size, layers)
        assert found == expected


def layer_counts(tokens: int, layers: int, page_size: int = 16, **policy: Any) -> list[int]:
    parsed = parse_policy({"method": "pyramidkv", **policy})
    plan = parsed.plan(tokens, Geometry(layers, 2, page_size))
    if type(plan) is Plan:
        return [tokens] * layers
    assert isinstance(plan, FoldPlan)
    assert plan.kept is not None
    assert (plan.kept[:, 0] == plan.kept[:, 1]).all()
    return [int(n) for n in plan.kept[:, 0]]


@pytest.mark.parametrize("layers", [1, 2, 4, 30, 32, 80])
@pytest.mark.parametrize(("budget", "window"), [(64, 8), (128, 8), (320, 64), (2048, 32)])
@pytest.mark.parametrize("shape", [{"beta": 20}, {"beta": 5}, {"beta": 1}, {"delta": 40}])
def test_pyramidkv_budgets(layers: int, budget: int, window: int, shape: dict[str, Any]) -> None:
    """The line of the paper, its sum to the token; what a short prompt cuts off is handed on."""
    mean = budget - window
    for tokens in (budget + 1, budget + 37, 2 * budget, 100_000):
        counts = layer_counts(tokens, layers, budget=budget, window=window, **shape)
        assert sum(counts) == layers * budget
        assert counts == sorted(counts, reverse=True)
        assert max(counts) <= tokens
        assert min(counts) >= window
        if tokens == 100_000:
            line = pyramid_budgets(layers, mean, **shape)
            assert all(abs(n - window - x) < 1 for n, x in zip(counts, line, strict=True))
    if shape == {"beta": 1} or layers == 1:
        assert set(counts) == {budget}
    assert layer_counts(budget, layers, budget=budget, window=window, **shape) == [budget] * layers


@pytest.mark.parametrize("page_size", [16, 32])
def test_pyramidkv_budgets_in_pages(page_size: int) -> None:
    for tokens in (700, 1000, 1024, 5000):
        counts = layer_counts(
            tokens, 30, page_size, budget=256, window=32, granularity="page", beta=20
        )
        pages = [-(-n // page_size) for n in counts]
        assert sum(pages) == 30 * (256 // page_size)
        spare = -tokens % page_size
        assert all(n == p * page_size - spare for n, p in zip(counts, pages, strict=True))


def decode_counts(tokens: int, layers: int, page_size: int = 16, **policy: Any) -> list[int]:
    """Tokens that a fold in decode leaves of each layer."""
    plan = parse_policy({"method": "pyramidkv", **policy}).plan(
        tokens, Geometry(layers, 2, page_size)
    )
    assert isinstance(plan, FoldPlan)
    assert plan.fold_at is not None
    left = plan.target(plan.fold_at + 640, np.full((layers, 2), 100_000))
    assert (left[:, 0] == left[:, 1]).all()
    return [int(n) for n in left[:, 0]]


@pytest.mark.parametrize("layers", [1, 2, 4, 30, 32, 80])
@pytest.mark.parametrize(
    ("budget", "later", "window"), [(64, 40, 8), (2048, 256, 32), (320, 400, 64)]
)
@pytest.mark.parametrize("shape", [{"beta": 20}, {"beta": 5}, {"beta": 1}, {"delta": 40}])
def test_pyramidkv_stays_one_in_decode(
    layers: int, budget: int, later: int, window: int, shape: dict[str, Any]
) -> None:
    """The prompt's line, smaller: its sum to the token, whether the prompt was folded or not."""
    scale = Fraction(later - window, budget - window)
    line = pyramid_budgets(layers, budget - window, **shape)
    for tokens in (window, budget, 100_000):
        policy = {"budget": budget, "window": window, "decode_budget": later, **shape}
        counts = decode_counts(tokens, layers, **policy)
        assert sum(counts) == layers * later
        wanted = [window + scale * x for x in line]
        assert all(abs(n - x) < 1 for n, x in zip(counts, wanted, strict=True))


@pytest.mark.parametrize("page_size", [16, 32])
def test_pyramidkv_stays_one_in_decode_in_pages(page_size: int) -> None:
    policy = {"budget": 512, "decode_budget": 320, "granularity": "page"}
    counts = decode_counts(1000, 30, page_size, **policy)
    assert all(n % page_size == 0 for n in counts)  # 100,000 tokens end with a page
    pages = [n // page_size for n in counts]
    assert sum(pages) == 30 * (320 // page_size)
    assert pages == sorted(pages, reverse=True)
    held = 2 if page_size == 32 else 3  # pages that 32 tokens can touch
    assert pages[-1] >= held
    assert pages[0] - held > 5 * (pages[-1] - held)


def test_where_pyramidkv_and_kvpress_part() -> None:
    """kvpress draws its line through budgets that count the window, rounds each layer by itself
    and falls back to equal budgets when a layer would get less than the window; ours draws it
    beside the window, as the paper does, and its sum is exact. Where both are flat, they agree."""
    flat = [c for c in pyramidkv_budgets() if c.beta == 1 and c.compression_ratio < 0.9]
    assert flat
    for case in flat:
        mean = round(case.tokens * (1 - case.compression_ratio))
        if not case.window < mean < case.tokens or len(set(case.budgets)) > 1:
            continue
        ours = layer_counts(case.tokens, len(case.budgets), budget=mean, window=case.window, beta=1)
        assert ours == [mean] * len(case.budgets)
        assert set(case.budgets) == {mean}
    sums = [sum(c.budgets) - len(c.budgets) * c.budgets[0] for c in pyramidkv_budgets()]
    assert min(sums) < 0  # what the golden file is for: it does hold pyramids


def test_parameters_default_to_the_papers() -> None:
    snapkv = dataclasses.asdict(parse_policy("snapkv"))
    assert (snapkv["window"], snapkv["kernel_size"], snapkv["pooling"]) == (32, 5, "avg")
    assert parse_policy({"method": "snapkv", "keep_ratio": 0.25}).parameters["budget"] is None
    assert np.isclose(parse_policy("pyramidkv").parameters["beta"], 20)
