"""What score-based policies keep, against oracles that know scores and positions only."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sglang")

from ledger_harness import GATES, HEADS, LAYERS, Harness, Req, made_up_attention

from sglang_kv.compression import parse_policy

STREAMS = list(np.ndindex(LAYERS, HEADS))
Stream = tuple[int, int]


def received(stream: Stream, queries: range, count: int) -> Any:
    """Attention that each of the first ``count`` tokens got from ``queries``."""
    q, k = np.array(queries)[:, None], np.arange(count)
    return (made_up_attention(stream, q, k) * (q >= k)).sum(0).astype(np.float64)


def pooled(scores: Any, kernel: int, pooling: str) -> Any:
    padded = np.pad(scores, kernel // 2)
    windows = np.lib.stride_tricks.sliding_window_view(padded, kernel)
    return windows.mean(-1) if pooling == "avg" else windows.max(-1)


def best(scores: Any, count: int) -> list[int]:
    """Highest first, the lower position among equals."""
    return sorted(sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:count])


def prefill(h: Harness, length: int, policy: dict[str, Any], chunk: int) -> Req:
    req = Req(random.Random(length).choices(range(1000), k=length), parse_policy(policy))
    h.admit(req)
    while req.extend_end < length:
        h.extend(req, chunk)
        h.checkpoint(req)
    return req


LENGTHS = [1, 5, 15, 16, 17, 23, 24, 25, 31, 32, 33, 64, 100, 129]


@pytest.mark.parametrize("page_size", [1, 4, 16, 32])
@pytest.mark.parametrize("pooling", ["avg", "max"])
@pytest.mark.parametrize(("window", "kernel", "budget"), [(8, 5, 24), (1, 1, 2), (16, 31, 32)])
def test_snapkv(page_size: int, pooling: str, window: int, kernel: int, budget: int) -> None:
    h = Harness(page_size=page_size, pool_tokens=8192, virtual_tokens=8192, rows=32)
    for length in LENGTHS:
        spec = {"method": "snapkv", "budget": budget, "window": window, "pooling": pooling}
        prefill(h, length, {**spec, "kernel_size": kernel}, chunk=page_size + 13)
        if length <= budget:
            assert not h.folds
            continue
        _, position, kept = h.folds.pop()
        assert position == length
        for stream in STREAMS:
            others = received(stream, range(length - window, length), length - window)
            chosen = best(pooled(others, kernel, pooling).astype(np.float32), budget - window)
            assert kept[stream] == [*chosen, *range(length - window, length)]


@pytest.mark.parametrize("page_size", [4, 16])
@pytest.mark.parametrize("share", ["head", "layer"])
def test_snapkv_by_page(page_size: int, share: str) -> None:
    h = Harness(page_size=page_size, pool_tokens=8192, virtual_tokens=8192)
    window, budget = 6, 48
    for length in (50, 63, 64, 65, 100, 129):
        spec = {"method": "snapkv", "budget": budget, "window": window, "kernel_size": 1}
        prefill(h, length, {**spec, "granularity": "page", "share": share}, chunk=200)
        _, _, kept = h.folds.pop()
        pages = -(-length // page_size)
        first = (length - window) // page_size  # the window's pages stay
        for stream in STREAMS:
            heads = [stream] if share == "head" else [(stream[0], i) for i in range(HEADS)]
            total = np.zeros(pages * page_size)
            for head in heads:
                weight = 1.0 if share == "head" else float(GATES.values[head])
                others = received(head, range(length - window, length), length - window)
                total[: length - window] += weight * others
            block = total.reshape(pages, page_size).sum(-1)[:first]
            chosen = [*best(block.astype(np.float32), budget // page_size - (pages - first))]
            expected = [
                p * page_size + i for p in (*chosen, *range(first, pages)) for i in range(page_size)
            ]
            assert kept[stream] == [p for p in expected if p < length]


@pytest.mark.parametrize("norm", ["sum", "mean"])
@pytest.mark.parametrize(("scores", "fold_at"), [("all", None), ("window", None), ("all", 40)])
def test_h2o_is_the_papers_loop(norm: str, scores: str, fold_at: int | None) -> None:
    """Page size 1 and interval 1: after each token, the least of all but the recent goes."""
    heavy, recent, window, length, answer = 7, 5, 6, 60, 30
    h = Harness(page_size=1, pool_tokens=4096)
    spec = {"method": "h2o", "heavy": heavy, "recent": recent, "interval": 1, "norm": norm}
    spec |= {"scores": scores} | ({"fold_at": fold_at} if fold_at else {})
    spec |= {"window": window} if scores == "window" else {}
    req = prefill(h, length, spec, chunk=17)
    for token in range(answer):
        h.decode(req, token)
    folds = {position: kept for _, position, kept in h.folds}
    first = fold_at or length
    assert sorted(folds) == list(range(first, length + answer))
    for stream in STREAMS:
        start = 0 if scores == "all" else first - window
        kept = list(range(first))
        score = dict(enumerate(received(stream, range(start, first), first)))
        for now in range(first, length + answer):
            if now > first:
                kept.append(now - 1)
                score[now - 1] = 0.0
                for p in kept:
                    score[p] += float(made_up_attention(stream, now - 1, p))
            rank = [
                np.float32(score[p]) / (np.float32(now - max(p, start)) if norm == "mean" else 1)
                for p in kept[:-recent]
            ]
            kept = [*(kept[i] for i in best(rank, heavy)), *kept[-recent:]]
            assert folds[now][stream] == kept


@pytest.mark.parametrize("granularity", ["token", "page"])
def test_adaptive_heads_share_a_layers_pages(granularity: str) -> None:
    h = Harness(page_size=4, pool_tokens=8192, virtual_tokens=8192)
    spec = {"method": "snapkv", "budget": 34, "window": 5, "kernel_size": 1}
    spec |= {"granularity": granularity, "head_budgets": "adaptive", "head_floor": 0.25}
    length = 101
    req = prefill(h, length, spec, chunk=200)
    counts = req.sglang_kv.counts
    assert (counts.sum(-1) == 34 // 4 * HEADS).all()  # whole pages, the layer's total as if equal
    assert counts.min() >= 2  # the floor
    _, _, kept = h.folds.pop()
    for layer in range(LAYERS):
        # Each head's share follows its part of the best tokens of all heads together.
        ranks = np.stack(
            [received((layer, i), range(length - 5, length), length - 5) for i in range(HEADS)]
        )
        budget = sum(len(kept[layer, i]) - 5 for i in range(HEADS))
        wins = np.bincount([i // (length - 5) for i in best(ranks.flatten(), budget)], minlength=3)
        order = np.argsort(-wins, kind="stable")
        assert (np.diff(counts[layer][order]) <= 0).all()


def test_a_fold_frees_pages_that_the_tree_does_not_hold() -> None:
    h = Harness(page_size=4, pool_tokens=2048, disable_tree=True)
    req = prefill(h, 100, {"method": "snapkv", "budget": 20, "window": 5}, chunk=200)
    assert h.ledger.pool.num_used == req.sglang_kv.held_pages == 5 * LAYERS * HEADS


def test_a_fold_frees_published_pages_when_memory_is_wanted() -> None:
    h = Harness(page_size=4, pool_tokens=2048)
    req = prefill(h, 100, {"method": "snapkv", "budget": 20, "window": 5}, chunk=200)
    assert h.tree.evict_pages(h.ledger.pool.num_pages - req.sglang_kv.held_pages)
    h.decode(req, 1)
    h.release(req, publish=True)
    h.check_empty()


def test_a_failed_admission_is_tried_again_when_memory_comes_free() -> None:
    """At the fold; when the tree takes the dense prompt over, which it may empty; in decode."""
    h = Harness(page_size=4, pool_tokens=2048)
    req = Req(list(range(100)), parse_policy({"method": "snapkv", "budget": 20, "window": 5}))
    h.admit(req)
    h.extend(req, 100)
    assert h.ledger.take_freed()
    assert h.tree.idle_pages() == 0
    h.checkpoint(req)
    assert h.tree.idle_pages() > 0
    assert h.ledger.take_freed()
    h.decode(req, 1)
    assert not h.ledger.take_freed()
    req = prefill(h, 40, {"method": "h2o", "recent": 8, "heavy": 8, "interval": 2}, chunk=200)
    h.ledger.take_freed()
    for token in range(3):
        h.decode(req, token)
    assert h.ledger.take_freed()


@pytest.mark.parametrize("granularity", ["token", "page"])
def test_the_models_budget_goes_to_heads_by_their_gates(granularity: str) -> None:
    h = Harness(page_size=4, pool_tokens=8192, virtual_tokens=8192)
    spec = {"method": "snapkv", "budget": 34, "window": 6, "kernel_size": 1}
    spec |= {"granularity": granularity, "head_budgets": "gates", "head_floor": 0.25}
    length = 100
    prefill(h, length, spec, chunk=200)
    _, _, kept = h.folds.pop()
    sizes = np.array([len(kept[stream]) for stream in STREAMS])
    order = np.argsort(GATES.values.flatten(), kind="stable")
    assert (np.diff(sizes[order]) >= 0).all()
    if granularity == "token":
        assert sizes.sum() == 34 * LAYERS * HEADS
        share = 7 + GATES.values.flatten() / GATES.values.sum() * 21 * 6
        assert abs(sizes - 6 - share).max() < 1
    else:
        assert sum(-(-n // 4) for n in sizes) == 34 // 4 * LAYERS * HEADS
