"""Of equals the lower position stays: scores of a few whole numbers, so that most are tied."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fold_oracles import adaptive_pages, by_page, by_token
from kept import kept_by
from torch import Tensor

HEADS, BUDGET, RECENT = 3, 70, 7
LENGTHS = (71, 79, 80, 81, 96, 97, 128, 129, 200)


def tied(length: int) -> Tensor:
    """``[1, HEADS, length]``: nought to three."""
    random = torch.Generator().manual_seed(length)
    return torch.randint(0, 4, (1, HEADS, length), generator=random).float()


def policies(granularity: str) -> list[dict[str, Any]]:
    snapkv = {"budget": BUDGET, "window": RECENT, "kernel_size": 1, "granularity": granularity}
    h2o = {"heavy": BUDGET - RECENT, "recent": RECENT, "granularity": granularity}
    return [
        {"method": "snapkv", **snapkv},
        {"method": "pyramidkv", **snapkv},  # one layer: the line is its middle
        {"method": "h2o", **h2o},
    ]


@pytest.mark.parametrize("page_size", [1, 16, 32])
@pytest.mark.parametrize("length", LENGTHS)
def test_tokens(length: int, page_size: int) -> None:
    scores = tied(length)
    expected = [by_token(head, RECENT, BUDGET) for head in scores[0]]
    for policy in policies("token"):
        assert kept_by(policy, scores, page_size)[0] == expected, policy


@pytest.mark.parametrize("page_size", [1, 16, 32])
@pytest.mark.parametrize("length", LENGTHS)
def test_pages(length: int, page_size: int) -> None:
    scores = tied(length)
    scores[..., page_size : 3 * page_size] = 1.0  # pages with equal sums, too
    expected = [by_page(head, RECENT, BUDGET // page_size, page_size) for head in scores[0]]
    for policy in policies("page"):
        assert kept_by(policy, scores, page_size)[0] == expected, policy


@pytest.mark.parametrize("granularity", ["token", "page"])
@pytest.mark.parametrize("page_size", [1, 16, 32])
@pytest.mark.parametrize("length", LENGTHS)
def test_heads_that_share_a_budget(length: int, page_size: int, granularity: str) -> None:
    scores = tied(length)
    scores[:, 1] /= 2  # fewer of the best
    pages = granularity == "page"
    policy = policies(granularity)[0] | {"head_budgets": "adaptive", "head_floor": 0.3}
    counts = adaptive_pages(list(scores[0]), RECENT, BUDGET, 0.3, page_size, pages)
    expected = [
        by_page(head, RECENT, count, page_size)
        if pages
        else by_token(head, RECENT, count * page_size)
        for head, count in zip(scores[0], counts, strict=True)
    ]
    assert kept_by(policy, scores, page_size)[0] == expected
