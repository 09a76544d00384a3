"""SnapKV: what the prompt's last queries looked at stays, the rest goes.

Li et al., "SnapKV: LLM Knows What You are Looking for Before Generation", NeurIPS 2024
(https://arxiv.org/abs/2404.14469). Differs from the reference code: scores are reduced over the
GQA group and tokens are kept per KV head (the reference keeps a copy per query head); the window
may span several chunks, since each query's attention is added up in whichever chunk it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from sglang_kv.compression.base import (
    Candidates,
    Compressor,
    PolicyError,
    register,
    require_more,
)
from sglang_kv.compression.budgets import (
    GRANULARITIES,
    SHARES,
    Units,
    fill_shares,
    largest_remainder,
    later_limit,
    least_pages,
    touched_pages,
)
from sglang_kv.compression.plan import Counts, FoldPlan, Geometry, Plan

if TYPE_CHECKING:
    from torch import Tensor


@register("snapkv")
@dataclass(frozen=True)
class SnapKV(Compressor):
    """Per KV head: the prompt's ``window`` newest tokens and its best others, ``budget`` in all.

    ``s_i`` is the attention that token ``i`` received, mean over the ``window`` last queries and
    the group's query heads (their sum ranks alike), pooled over ``kernel_size`` neighbours.
    """

    idea: ClassVar[str] = "what the prompt's last queries attend to, per KV head"
    cost: ClassVar[str] = "one pass of the last queries over the prompt, one copy of what stays"
    paper: ClassVar[str] = "https://arxiv.org/abs/2404.14469"
    scores_tokens: ClassVar[bool] = True

    budget: int | None = field(
        default=2048, metadata={"min": 2, "doc": "tokens kept per layer and head, window included"}
    )
    keep_ratio: float | None = field(
        default=None,
        metadata={"min": 0.0, "max": 1.0, "doc": "in place of budget: share of the prompt"},
    )
    min_budget: int = field(
        default=128,
        metadata={
            "min": 2,
            "needs": ("keep_ratio",),
            "doc": "fewest tokens that keep_ratio comes to",
        },
    )
    window: int = field(default=32, metadata={"min": 1, "doc": "last queries that choose"})
    kernel_size: int = field(
        default=5, metadata={"min": 1, "max": 255, "doc": "tokens pooled over; odd"}
    )
    pooling: str = field(
        default="avg", metadata={"choices": ("avg", "max"), "doc": "how: avg or max"}
    )
    granularity: str = field(
        default="token",
        metadata={"choices": GRANULARITIES, "doc": "token (copied) or page (whole, by reference)"},
    )
    share: str = field(
        default="head",
        metadata={"choices": SHARES, "doc": "each head chooses, or a layer's heads together"},
    )
    head_budgets: str = field(
        default="equal",
        metadata={
            "choices": ("equal", "adaptive", "gates"),
            "doc": "adaptive: a layer's pages go to its heads by their scores (AdaKV); gates: the "
            "model's budget goes to its heads by their gates",
        },
    )
    head_floor: float = field(
        default=0.2,
        metadata={
            "min": 0.0,
            "max": 1.0,
            "needs": ("head_budgets", "adaptive", "gates"),
            "doc": "share of an equal budget that each head keeps, if not equal",
        },
    )
    decode_budget: int | None = field(
        default=None,
        metadata={
            "min": 2,
            "doc": "fold again in decode, to so many tokens in the layers' mean; None: the cache "
            "grows",
        },
    )
    interval: int = field(
        default=64,
        metadata={
            "min": 1,
            "needs": ("decode_budget",),
            "doc": "decoded tokens between such folds",
        },
    )
    fold_at: int | None = field(
        default=None, metadata={"min": 1, "doc": "prompt position to fold at; None: its end"}
    )

    @classmethod
    def from_params(cls, params: Mapping[str, Any]) -> Self:
        """``keep_ratio`` takes the place of ``budget``."""
        if "budget" in params and "keep_ratio" in params:
            raise PolicyError("kv_compression.budget: give either budget or keep_ratio, not both")
        policy = super().from_params(params)
        return dataclasses.replace(policy, budget=None) if "keep_ratio" in params else policy

    def validate(self) -> None:
        name = "budget" if self.keep_ratio is None else "min_budget"
        least = self.budget if self.keep_ratio is None else self.min_budget
        require_more(name, least, "window", self.window)
        require_more("decode_budget", self.decode_budget, "window", self.window)
        if self.kernel_size % 2 == 0:
            raise PolicyError(
                f"kv_compression.kernel_size: must be odd, got {self.kernel_size} (an even kernel "
                "shifts every score by half a token)"
            )
        if self.head_budgets != "equal" and self.share == "layer":
            raise PolicyError(
                "kv_compression.share: 'layer' gives all heads the same tokens, so head_budgets "
                f"cannot be {self.head_budgets!r}"
            )

        if self.head_budgets != "equal" and self.decode_budget is not None:
            raise PolicyError(
                "kv_compression.decode_budget: gives every head the same, so head_budgets cannot "
                f"be {self.head_budgets!r}"
            )

    @property
    def amounts(self) -> dict[str, int]:
        found = {"min_budget": self.min_budget}
        if self.budget is not None:
            found = {"budget": self.budget}
        if self.decode_budget is not None:
            found["decode_budget"] = self.decode_budget
        return found

    def plan(self, prompt_tokens: int, geometry: Geometry) -> Plan:
        if self.head_budgets != "equal":
            geometry.require_even(f"kv_compression.head_budgets: {self.head_budgets!r}")
        fold_at = min(self.fold_at or prompt_tokens, prompt_tokens)
        budget = self.budget
        if budget is None:
            assert self.keep_ratio is not None
            budget = max(int(self.keep_ratio * fold_at), self.min_budget)
        units = self.units(budget, fold_at, geometry.page_size)
        return FoldPlan.of(
            self,
            geometry,
            fold_at=fold_at,
            kept=self.kept(units, geometry),
            score_from=max(0, fold_at - self.window),
            score_on=self.decode_budget is not None,
            by_page=self.granularity == "page",
            adaptive=self.head_budgets == "adaptive",
            floor=self.floor(units, geometry) if self.head_budgets == "adaptive" else None,
            interval=None if self.decode_budget is None else self.interval,
            limit=None if self.decode_budget is None else self.limit(budget, geometry),
        )

    def kept(self, units: Units, geometry: Geometry) -> Counts:
        """Tokens that each stream keeps at ``fold_at``, window included. ``[layers, kv_heads]``"""
        if self.head_budgets == "gates":
            return self.kept_by_gates(units, geometry)
        counts = self.layer_units(units, geometry.num_layers)
        return geometry.per_layer([units.tokens(n) for n in counts])

    def floor(self, units: Units, geometry: Geometry) -> Counts:
        """Of those, what scores leave each stream at least with adaptive heads."""
        counts = self.layer_units(units, geometry.num_layers)
        least = [least_pages(n, units.window, self.head_floor) for n in counts]
        return geometry.per_layer([units.tokens(n) for n in least])

    def limit(self, budget: int, geometry: Geometry) -> Counts:
        """Tokens that a fold in decode leaves each stream, window included; the prompt's ``budget``
        says what proportions its layers have."""
        assert self.decode_budget is not None
        size = geometry.page_size if self.granularity == "page" else 1
        total = later_limit(self.decode_budget, self.window, size) // size
        held = touched_pages(self.window, size)
        others = self.layer_shares(total - held, budget - self.window, geometry.num_layers)
        return geometry.per_layer([(held + n) * size for n in others])

    def layer_units(self, units: Units, num_layers: int) -> list[int]:
        """What a stream of each layer gets, window included."""
        return [units.budget] * num_layers

    def layer_shares(self, mean: int, prompt_mean: int, num_layers: int) -> list[int]:
        """What a stream of each layer gets in decode, beside the window; ``prompt_mean``: tokens
        beside the window that the prompt's budget names."""
        return [mean] * num_layers

    def kept_by_gates(self, units: Units, geometry: Geometry) -> Counts:
        """The model's budget beside windows and floors goes to its heads in proportion to their
        gates; what a head cannot use, because it keeps the whole prompt, goes to the others."""
        if geometry.gates is None:
            raise PolicyError(
                "kv_compression.head_budgets: 'gates' needs head gates, and this server has none "
                "for its model (--kv-gates FILE)"
            )
        gates = geometry.gates.values
        equal, most = units.budget - units.window, units.most - units.window
        floor = self.head_floor * equal
        spare = gates.size * (equal - floor)
        shares = [floor + x for x in fill_shares(gates.flatten().tolist(), spare, most - floor)]
        whole = largest_remainder(shares, gates.size * equal)
        counts = [units.tokens(n + units.window) for n in whole]
        return np.array(counts, dtype=np.int64).reshape(gates.shape)[:, geometry.heads]

    def units(self, budget: int, fold_at: int, page_size: int) -> Units:
        """What a budget is counted in: tokens, or whole pages."""
        by_page = self.granularity == "page"
        paged = page_size if by_page or self.head_budgets == "adaptive" else None
        return Units.of(budget, self.window, fold_at, paged, by_page)

    def choose(self, tokens: Candidates) -> Tensor:
        # Not at the top: plans are made where there is no torch.
        import torch

        from sglang_kv.compression.scoring import choose_ranked, pool_scores

        index = torch.arange(tokens.scores.shape[-1])
        edge = (tokens.lengths - self.window)[..., None]
        # The window is kept without a score, and lends none to its neighbours.
        scores = pool_scores(
            tokens.scores.masked_fill(index >= edge, 0.0), self.kernel_size, self.pooling
        )
        return choose_ranked(
            scores,
            tokens,
            recent=self.window,
            by_page=self.granularity == "page",
            share=self.share,
            head_floor=self.head_floor if self.head_budgets == "adaptive" else None,
        )
