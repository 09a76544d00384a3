"""What the engine keeps of real attention, against oracles: tokens and pages, prompt and decode."""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("sglang")

from attending import Attending, folds_of
from fold_oracles import (
    Select,
    adaptive_pages,
    by_page,
    by_token,
    fold_history,
    most_touched,
    pyramid_counts,
)
from ledger_harness import LAYERS, Req
from oracles import pool

from sglang_kv import runtime
from sglang_kv.compression import parse_policy

WINDOW, KERNEL, BUDGET, DECODE_BUDGET, INTERVAL, BETA, FLOOR = 6, 5, 70, 40, 4, 5, 0.25
HEAVY, RECENT = 45, 25
ANSWER = 2 * INTERVAL + 1
#: Around the budget, and around pages of 16 and 32.
LENGTHS = (70, 71, 96, 97, 128, 131)
SIZES, GROUPS = (1, 16, 32), (1, 3, 4, 8)
SHAPES = list(itertools.product(SIZES, GROUPS))


@pytest.fixture(autouse=True)
def _no_runtime() -> Iterator[None]:
    before = runtime.current()
    yield
    runtime.install(before)


def snapkv_scores(mass: Tensor) -> Tensor:
    """Pooled, over the tokens before the newest ones; those are kept without a score."""
    rated = pool(mass[:-WINDOW], KERNEL, "avg")
    return torch.cat([rated, torch.zeros(WINDOW)])


def page_budget(budget: int, recent: int, length: int, size: int) -> int:
    """Pages of a prompt: what the budget fills, or what the newest tokens lie in."""
    lie_in = math.ceil(length / size) - (length - recent) // size
    return min(math.ceil(length / size), max(budget // size, lie_in))


def snapkv(layer: int, fold_at: int, size: int, *, pages: bool, method: str) -> Select:
    """SnapKV and PyramidKV, whose layers have a line's proportions in decode, too."""
    if pages:
        units, most = page_budget(BUDGET, WINDOW, fold_at, size), math.ceil(fold_at / size)
        held = most - (fold_at - WINDOW) // size
        held_later = most_touched(WINDOW, size)
        later = max(DECODE_BUDGET // size, held_later)
    else:
        units, most, held = min(BUDGET, fold_at), fold_at, WINDOW
        later, held_later = DECODE_BUDGET, WINDOW
    if method == "pyramidkv":
        units = pyramid_counts(LAYERS, units, held, most, BETA)[layer]
        later = pyramid_counts(LAYERS, later, held_later, 2 * later, BETA)[layer]

    def select(position: int, held: list[list[int]], mass: list[Tensor]) -> list[list[int]]:
        scores = [snapkv_scores(m) for m in mass]
        count = units if position == fold_at else later
        if pages:
            return [by_page(s, WINDOW, count, size) for s in scores]
        return [by_token(s, WINDOW, count) for s in scores]

    return select


def h2o(fold_at: int, size: int, *, pages: bool, norm: str) -> Select:
    def rank(position: int, held: list[int], mass: Tensor) -> Tensor:
        # Each later query saw the token, and itself did.
        return mass / (position - torch.tensor(held)) if norm == "mean" else mass

    def select(position: int, held: list[list[int]], mass: list[Tensor]) -> list[list[int]]:
        ranks = [rank(position, *pair) for pair in zip(held, mass, strict=True)]
        if not pages:
            return [by_token(r, RECENT, HEAVY + RECENT) for r in ranks]
        count = max((HEAVY + RECENT) // size, most_touched(RECENT, size))
        if position == fold_at:
            count = page_budget(HEAVY + RECENT, RECENT, fold_at, size)
        return [by_page(r, RECENT, count, size) for r in ranks]

    return select


def adaptive(fold_at: int, size: int, *, pages: bool) -> Select:
    def select(position: int, held: list[list[int]], mass: list[Tensor]) -> list[list[int]]:
        scores = [snapkv_scores(m) for m in mass]
        counts = adaptive_pages(scores, WINDOW, BUDGET, FLOOR, size, pages)
        if pages:
            return [by_page(s, WINDOW, n, size) for s, n in zip(scores, counts, strict=True)]
        return [by_token(s, WINDOW, n * size) for s, n in zip(scores, counts, strict=True)]

    return select


def check(
    spec: dict[str, Any], size: int, group: int, oracle: Any, *, scored: int | None, interval: Any
) -> None:
    """`oracle` makes each layer's `Select`, of (layer, fold_at). `scored`: last queries of the
    prompt, None for all."""
    # A length of those for each shape and policy, so that all meet.
    length = LENGTHS[zlib.crc32(repr((size, group, spec)).encode()) % len(LENGTHS)]
    h = Attending(page_size=size, group=group, seed=length)
    req = Req(list(range(length)), parse_policy(spec))
    got = dict(folds_of(h, req, length, ANSWER, chunk=size + 13))
    dropped = 0
    for layer in range(LAYERS):
        expected = fold_history(
            h.q[layer],
            h.k[layer],
            oracle(layer, length),
            fold_at=length,
            total=length + ANSWER,
            score_from=0 if scored is None else length - scored,
            interval=interval,
        )
        dropped += len(expected)
        for at, kept in expected:
            assert got[at][layer] == kept, f"layer {layer} of {length} tokens at {at}"
        if spec["method"] != "pyramidkv":  # whose layers need not all drop at one fold
            assert sorted(got) == [at for at, _ in expected]
    assert dropped or interval is None


@pytest.mark.parametrize("granularity", ["token", "page"])
@pytest.mark.parametrize("norm", ["sum", "mean"])
@pytest.mark.parametrize(("size", "group"), SHAPES)
def test_h2o(size: int, group: int, norm: str, granularity: str) -> None:
    pages = granularity == "page"
    spec = {"method": "h2o", "heavy": HEAVY, "recent": RECENT, "interval": INTERVAL, "norm": norm}
    check(
        {**spec, "granularity": granularity},
        size,
        group,
        lambda layer, fold_at: h2o(fold_at, size, pages=pages, norm=norm),
        scored=None,
        interval=INTERVAL,
    )


@pytest.mark.parametrize("granularity", ["token", "page"])
@pytest.mark.parametrize("method", ["snapkv", "pyramidkv"])
@pytest.mark.parametrize(("size", "group"), SHAPES)
def test_snapkv_and_pyramidkv_in_prompt_and_decode(
    size: int, group: int, method: str, granularity: str
) -> None:
    pages = granularity == "page"
    spec = {"method": method, "budget": BUDGET, "window": WINDOW, "kernel_size": KERNEL}
    spec |= {"decode_budget": DECODE_BUDGET, "interval": INTERVAL, "granularity": granularity}
    if method == "pyramidkv":
        spec["beta"] = float(BETA)
    check(
        spec,
        size,
        group,
        lambda layer, fold_at: snapkv(layer, fold_at, size, pages=pages, method=method),
        scored=WINDOW,
        interval=INTERVAL,
    )


@pytest.mark.parametrize("granularity", ["token", "page"])
@pytest.mark.parametrize(("size", "group"), SHAPES)
def test_adaptive_heads(size: int, group: int, granularity: str) -> None:
    pages = granularity == "page"
    spec = {"method": "snapkv", "budget": BUDGET, "window": WINDOW, "kernel_size": KERNEL}
    spec |= {"granularity": granularity, "head_budgets": "adaptive", "head_floor": FLOOR}
    check(
        spec,
        size,
        group,
        lambda layer, fold_at: adaptive(fold_at, size, pages=pages),
        scored=WINDOW,
        interval=None,
    )
