"""H2O: the newest tokens and the heavy hitters, by attention summed over prompt and decode.

Zhang et al., "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language
Models", NeurIPS 2023 (https://arxiv.org/abs/2306.14048), with "local statistics": a token's score
is what it received from the queries so far. Differs from the reference code: scores are summed
over the GQA group and kept per request; a prompt is scored in a second pass, without its attention
matrix; a fold happens every ``interval`` tokens. With page size 1 and interval 1 it is the paper's
loop.
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
    check_int,
    register,
)
from sglang_kv.compression.budgets import GRANULARITIES, SHARES, Units, later_limit
from sglang_kv.compression.plan import FoldPlan, Geometry, Plan

if TYPE_CHECKING:
    from torch import Tensor


@register("h2o")
@dataclass(frozen=True)
class H2O(Compressor):
    """Per KV head: the ``recent`` newest tokens, and the ``heavy`` others with the highest
    ``s_j = sum over t of alpha_{t,j}``."""

    idea: ClassVar[str] = (
        "recent tokens + heavy hitters by accumulated attention, prompt and decode"
    )
    cost: ClassVar[str] = (
        "a second pass of all queries over the prompt (`scores` window: of the last ones) and of "
        "each decoded token; does not reuse a cached prefix"
    )
    paper: ClassVar[str] = "https://arxiv.org/abs/2306.14048"
    aliases: ClassVar[dict[str, str]] = {"budget": "heavy and recent together, split evenly"}
    scores_tokens: ClassVar[bool] = True

    heavy: int | None = field(default=1024, metadata={"min": 0, "doc": "heavy hitters kept"})
    recent: int | None = field(default=1024, metadata={"min": 1, "doc": "newest tokens kept"})
    keep_ratio: float | None = field(
        default=None,
        metadata={
            "min": 0.0,
            "max": 1.0,
            "doc": "in place of both: share of the prompt, split evenly",
        },
    )
    min_budget: int = field(
        default=128,
        metadata={
            "min": 2,
            "needs": ("keep_ratio",),
            "doc": "fewest tokens that keep_ratio comes to",
        },
    )
    interval: int = field(default=16, metadata={"min": 1, "doc": "tokens between folds in decode"})
    norm: str = field(
        default="sum",
        metadata={"choices": ("sum", "mean"), "doc": "sum, or mean over the queries that saw it"},
    )
    scores: str = field(
        default="all",
        metadata={
            "choices": ("all", "window"),
            "doc": "prompt queries that score: all, or the last",
        },
    )
    window: int = field(
        default=32,
        metadata={"min": 1, "needs": ("scores", "window"), "doc": "how many with scores=window"},
    )
    granularity: str = field(
        default="token",
        metadata={"choices": GRANULARITIES, "doc": "token (copied) or page (whole, by reference)"},
    )
    share: str = field(
        default="head",
        metadata={"choices": SHARES, "doc": "each head chooses, or a layer's heads together"},
    )
    fold_at: int | None = field(
        default=None, metadata={"min": 1, "doc": "prompt position to fold at first; None: its end"}
    )

    @classmethod
    def from_params(cls, params: Mapping[str, Any]) -> Self:
        """``budget`` and ``keep_ratio`` take the place of ``heavy`` and ``recent``."""
        params = dict(params)
        whole = [key for key in ("budget", "keep_ratio") if key in params]
        if whole:
            other = [key for key in (*whole[1:], "heavy", "recent") if key in params]
            if other:
                raise PolicyError(
                    f"kv_compression.{whole[0]}: give either {whole[0]} or {other[0]}, not both"
                )
        if "budget" in params:
            budget = params.pop("budget")
            check_int("budget", budget, 2)
            params["heavy"], params["recent"] = split(budget)
        policy = super().from_params(params)
        if "keep_ratio" in params:
            return dataclasses.replace(policy, heavy=None, recent=None)
        return policy

    @property
    def amounts(self) -> dict[str, int]:
        if self.heavy is None or self.recent is None:
            return {"min_budget": self.min_budget}
        return {"heavy": self.heavy + self.recent}

    def budgets(self, fold_at: int) -> tuple[int, int]:
        """Heavy and recent tokens for a prompt that is folded there."""
        if self.heavy is None or self.recent is None:
            assert self.keep_ratio is not None
            return split(max(int(self.keep_ratio * fold_at), self.min_budget))
        return self.heavy, self.recent

    def plan(self, prompt_tokens: int, geometry: Geometry) -> Plan:
        fold_at = min(self.fold_at or prompt_tokens, prompt_tokens)
        heavy, recent = self.budgets(fold_at)
        by_page = self.granularity == "page"
        size = geometry.page_size if by_page else None
        units = Units.of(heavy + recent, recent, fold_at, size, by_page)
        limit = later_limit(heavy + recent, recent, size or 1)
        shape = (geometry.num_layers, geometry.num_kv_heads)
        return FoldPlan.of(
            dataclasses.replace(self, heavy=heavy, recent=recent),
            geometry,
            fold_at=fold_at,
            kept=np.full(shape, units.tokens(units.budget), dtype=np.int64),
            score_from=0 if self.scores == "all" else max(0, fold_at - self.window),
            score_on=True,
            by_page=by_page,
            interval=self.interval,
            limit=np.full(shape, limit, dtype=np.int64),
        )

    def choose(self, tokens: Candidates) -> Tensor:
        # Not at the top: plans are made where there is no torch.
        import torch

        from sglang_kv.compression.scoring import choose_ranked

        assert self.recent is not None
        scores = tokens.scores
        if self.norm == "mean":
            index = torch.arange(scores.shape[-1])
            position = index if tokens.positions is None else tokens.positions
            # The key at p was seen by the scored queries from p on.
            seen_by = tokens.num_tokens - position.clamp(min=tokens.score_from)
            scores = scores / seen_by.clamp(min=1)
        return choose_ranked(
            scores,
            tokens,
            recent=self.recent,
            by_page=self.granularity == "page",
            share=self.share,
        )


def split(budget: int) -> tuple[int, int]:
    """Heavy and recent: halves, as the paper splits them; an odd token goes to the recent ones."""
    return budget // 2, budget - budget // 2
