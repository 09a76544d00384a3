"""benchmarks/kept_sets.py: our sets beside another's, and what it says of a difference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from oracles import snapkv_kept

from sglang_kv.benchmarks import kept_sets
from sglang_kv.compression import parse_policy

LAYERS, HEADS, GROUP, TOKENS, DIM, WINDOW, KEPT = 2, 3, 3, 300, 64, 16, 48
POLICY = parse_policy(
    {"method": "snapkv", "keep_ratio": 0.16, "min_budget": 20, "window": WINDOW, "kernel_size": 7}
)
BUDGET = np.full((LAYERS, HEADS), KEPT)


@pytest.fixture
def arrays() -> dict[str, Any]:
    """Random tensors, and what the oracle of the paper keeps of them."""
    torch.manual_seed(0)
    q = torch.randn(LAYERS, HEADS * GROUP, WINDOW, DIM)
    k = torch.randn(LAYERS, HEADS, TOKENS, DIM)
    kept = {
        f"kept {n} arm": np.array(snapkv_kept(q[n], k[n], WINDOW, 7, "avg", KEPT), np.int32)
        for n in range(LAYERS)
    }
    return {"q 16": q.numpy(), "k": k.numpy(), **kept}


@pytest.mark.parametrize("budget", [BUDGET, None])
def test_the_oracles_sets_are_ours(arrays: dict[str, Any], budget: Any) -> None:
    found = kept_sets.compare(POLICY, arrays, "arm", budget)
    assert found == {
        **{"sets": LAYERS * HEADS, "equal": LAYERS * HEADS, "rounding": 0},
        **{"tokens": LAYERS * HEADS * KEPT, "exchanged": 0, "gap": 0.0},
    }


def test_another_choice_is_not_called_rounding(arrays: dict[str, Any]) -> None:
    kept = arrays["kept 1 arm"][0]
    other = min(set(range(TOKENS - WINDOW)) - set(kept.tolist()))
    kept[0] = other  # in the place of one that scores higher
    found = kept_sets.compare(POLICY, arrays, "arm", BUDGET)
    assert (found["equal"], found["exchanged"], found["rounding"]) == (LAYERS * HEADS - 1, 1, 0)
    assert found["gap"] > kept_sets.ROUNDING


def test_an_exchange_of_near_equals_is_rounding() -> None:
    exact = torch.tensor([1.0, 1.0 + 1e-7, 0.5], dtype=torch.float64)
    assert kept_sets.exchange_gap(exact, [0], [1]) == pytest.approx(1e-7, rel=1e-3)
    assert kept_sets.exchange_gap(exact, [0], [2]) == pytest.approx(0.5)


def test_a_lost_window_or_budget_is_never_rounding(arrays: dict[str, Any]) -> None:
    arrays["kept 0 arm"][2, -1] = 0 if arrays["kept 0 arm"][2, 0] else 1
    found = kept_sets.compare(POLICY, arrays, "arm", BUDGET)
    assert found["gap"] == float("inf")
    assert found["rounding"] == 0
    for n in range(LAYERS):
        arrays[f"kept {n} arm"] = arrays[f"kept {n} arm"][:, :-1]
    found = kept_sets.compare(POLICY, arrays, "arm", BUDGET)
    assert found["equal"] == found["rounding"] == 0


def test_totals() -> None:
    one = {"sets": 6, "equal": 6, "rounding": 0, "tokens": 60, "exchanged": 0, "gap": 0.0}
    two = one | {"equal": 5, "rounding": 1, "exchanged": 2, "gap": 3e-7}
    assert kept_sets.total([one, two]) == {
        **{"prompts": 2, "equal_prompts": 1, "sets": 12, "equal": 11, "rounding": 1},
        **{"tokens": 120, "exchanged": 2, "gap": 3e-7},
    }
