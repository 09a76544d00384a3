"""Two strangers agree: kvpress's kept sets and the oracles that our methods are tested with.

Where kvpress departs from the papers is in the docstring of `tests/golden/make_kvpress.py`.
"""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from golden import (
    PyramidKVBudgets,
    SnapKVCase,
    pyramidkv_budgets,
    pyramidkv_cases,
    snapkv_cases,
    tensors,
)
from oracles import h2o_kept, pyramid_budgets, snapkv_kept, snapkv_scores


def oracle_keeps(case: SnapKVCase) -> list[list[int]]:
    return snapkv_kept(case.q, case.k, case.window, case.kernel_size, "avg", case.budget)


def test_snapkv_kept_sets() -> None:
    different = [case.name for case in snapkv_cases() if oracle_keeps(case) != case.kept]
    assert not different


def test_pyramidkv_kept_sets() -> None:
    layers = [layer for case in pyramidkv_cases() for layer in case.layers]
    assert [layer.name for layer in layers if oracle_keeps(layer) != layer.kept] == []


def test_snapkv_budgets() -> None:
    for case in snapkv_cases():
        assert case.budget == max(1, int(case.tokens * (1 - case.compression_ratio))), case.name
        recent = list(range(case.tokens - case.window, case.tokens))
        for kept in case.kept:
            assert kept == sorted(set(kept)), case.name
            assert len(kept) == case.budget, case.name
            assert kept[-case.window :] == recent, case.name


def exact_line(case: PyramidKVBudgets) -> list[Fraction]:
    """kvpress's budgets before rounding: the paper's line through a mean that counts the window.

    It stands only if no layer gets less than the window; else every layer gets the mean.
    """
    layers, most = len(case.budgets), case.tokens - case.window
    mean = case.tokens * (1 - Fraction(str(case.compression_ratio)))
    line = pyramid_budgets(max(layers, 2), mean, beta=case.beta, most=most)
    if case.tokens >= line[0] >= line[-1] >= case.window:
        return line[:layers]  # a single layer gets the top of a line of two
    return [mean] * layers


def test_pyramidkv_budgets() -> None:
    kinds = set()
    for case in pyramidkv_budgets():
        line = exact_line(case)
        for got, exact in zip(case.budgets, line, strict=True):
            # A half goes to the even neighbour, unless floating point has moved it.
            assert abs(got - exact) <= Fraction(1, 2), case
            assert got == round(exact) or exact.denominator == 2, case
        kinds.add("pyramid" if line[0] > line[-1] else "uniform")
        kinds.add("clamped" if line[0] == case.tokens - case.window else "free")
    assert kinds == {"pyramid", "uniform", "clamped", "free"}


def test_pyramidkv_kept_sets_have_the_budgets() -> None:
    for case in pyramidkv_cases():
        first = case.layers[0]
        budgets = PyramidKVBudgets(
            tokens=first.tokens,
            window=first.window,
            compression_ratio=first.compression_ratio,
            beta=case.beta,
            budgets=[layer.budget for layer in case.layers],
        )
        rounded = [round(exact) for exact in exact_line(budgets)]
        assert [len(head) for layer in case.layers for head in layer.kept] == [
            budget for budget in rounded for _ in first.kept
        ], case.name


def test_the_file_covers_what_it_should() -> None:
    """And no decision in it hangs on the order of fp32 additions."""
    cases = list(snapkv_cases())
    assert {len(case.q) // len(case.k) for case in cases} == {1, 3, 4, 8}
    assert {case.tokens for case in cases} == {65, 200, 513, 1000}
    assert {case.window for case in cases} == {8, 16, 64}
    assert {case.kernel_size for case in cases} == {1, 5, 7, 31}
    assert {0.5, 0.75, 0.9} <= {case.compression_ratio for case in cases}
    assert {(len(case.layers), case.beta) for case in pyramidkv_cases()} == {
        (layers, beta) for layers in (1, 4, 30) for beta in (1, 5, 20)
    }
    layers = [layer for case in pyramidkv_cases() for layer in case.layers]
    assert min(case.margin for case in cases + layers) >= 5e-6


# The oracles where kvpress has nothing to say, by hand.


def test_equal_scores_keep_the_lower_position() -> None:
    q, k = torch.zeros(2, 4, 8), torch.ones(1, 20, 8)
    # Each query spreads evenly over what it sees, so all tokens before the window are equal.
    assert snapkv_kept(q, k, 4, 1, "avg", 7) == [[0, 1, 2, 16, 17, 18, 19]]
    # Zero padding counts, so an average is lower at both ends.
    assert snapkv_kept(q, k, 4, 5, "avg", 7) == [[2, 3, 4, 16, 17, 18, 19]]
    assert snapkv_kept(q, k, 4, 5, "max", 7) == [[0, 1, 2, 16, 17, 18, 19]]


def test_max_pooling_spreads_a_peak() -> None:
    q, k = torch.ones(1, 1, 1), torch.zeros(1, 12, 1)
    k[0, 6] = 3.0
    assert snapkv_kept(q, k, 1, 3, "max", 4) == [[5, 6, 7, 11]]
    assert snapkv_scores(q, k, 1, 1, "avg")[0, 6] == torch.softmax(k[0, :, 0], 0)[6]


def test_a_budget_keeps_everything_or_at_least_the_window() -> None:
    q, k = tensors(0, 2, 2, 8, tokens=10, window=4)
    assert snapkv_kept(q, k, 4, 1, "avg", 10) == [list(range(10))] * 2
    assert snapkv_kept(q, k, 4, 1, "avg", 4) == [[6, 7, 8, 9]] * 2
    with pytest.raises(ValueError, match="no room"):
        snapkv_kept(q, k, 4, 1, "avg", 3)
    with pytest.raises(ValueError, match="even kernel"):
        snapkv_kept(q, k, 4, 4, "avg", 5)


def test_h2o_of_a_prompt_is_the_column_sums() -> None:
    q, k = tensors(0, 6, 2, 8, tokens=30, window=30)
    logits = torch.einsum("hgqd,hkd->hgqk", q.view(2, 3, 30, 8), k) / 8**0.5
    weights = logits.masked_fill(torch.ones(30, 30).triu(1) == 1, -torch.inf).softmax(-1)
    sums = weights.sum((1, 2))
    for norm, scores in (("sum", sums), ("mean", sums / torch.arange(30, 0, -1))):
        expected = [
            sorted(head[:24].topk(5).indices.tolist()) + list(range(24, 30)) for head in scores
        ]
        assert h2o_kept(q, k, 5, 6, norm, [30]) == [expected]


def test_h2o_forgets_what_it_dropped() -> None:
    q, k = tensors(0, 4, 2, 8, tokens=40, window=40)
    history = h2o_kept(q, k, 4, 3, "sum", [20] + [1] * 20)
    for step, (before, after) in enumerate(pairwise(history), start=20):
        for was, now in zip(before, after, strict=True):
            assert len(now) == 7
            assert set(now) <= {*was, step}
            assert now[-3:] == [step - 2, step - 1, step]


def test_h2o_scores_stay_with_their_tokens() -> None:
    """Token 0 was heavy in the prompt only; it outlives tokens that are seen a little, later."""
    q, k = torch.ones(1, 12, 1), torch.zeros(1, 12, 1)
    k[0, 0] = 2.0
    q[0, 6:] = -1.0
    history = h2o_kept(q, k, 1, 2, "sum", [6] + [1] * 6)
    assert all(step[0][0] == 0 for step in history)


def test_h2o_without_heavy_hitters_is_a_window() -> None:
    q, k = tensors(0, 2, 1, 8, tokens=12, window=12)
    history = h2o_kept(q, k, 0, 4, "sum", [6] + [1] * 6)
    assert history == [[list(range(end - 4, end))] for end in range(6, 13)]
    assert h2o_kept(q, k, 8, 4, "mean", [12]) == [[list(range(12))]]
    assert h2o_kept(q, k, 8, 4, "mean", [5, 7]) == [[list(range(5))], [list(range(12))]]


def test_pyramid_lines() -> None:
    assert pyramid_budgets(4, 120, beta=20) == [234, 158, 82, 6]
    assert pyramid_budgets(3, 10, delta=5) == [Fraction(25, 2), 10, Fraction(15, 2)]
    assert pyramid_budgets(3, 120, beta=20, most=200) == [200, 120, 40]
    assert pyramid_budgets(5, 7, beta=1) == [7] * 5
    assert pyramid_budgets(1, 7, beta=20) == [7]
    for layers in (2, 7, 30, 80):
        assert sum(pyramid_budgets(layers, 1001, beta=7)) == layers * 1001
