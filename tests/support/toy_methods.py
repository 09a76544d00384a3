"""Two methods as anybody may write one: a file, with parameters that nobody has heard of.

As a plugin of pytest they are in the registry before tests are collected. It names each test that
was made for one of them, and runs each function once for each: with its first policy.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from sglang_kv.compression import FoldPlan, Geometry, Plan, Window, WindowPlan
from sglang_kv.compression.base import Candidates, Compressor, register

if TYPE_CHECKING:
    from torch import Tensor


@register("toy-best")
@dataclass(frozen=True)
class ToyBest(Compressor):
    """The ``room`` tokens with the highest scores, those before ``gate`` of the prompt doubled."""

    idea: ClassVar[str] = "for tests: the best tokens, early ones doubled"
    scores_tokens: ClassVar[bool] = True

    room: int = field(default=900, metadata={"min": 4, "doc": "tokens kept"})
    gate: float = field(default=0.25, metadata={"min": 0.0, "max": 1.0, "doc": "what is early"})
    listeners: int | None = field(default=None, metadata={"min": 1, "doc": "queries that score"})
    order: str = field(default="high", metadata={"choices": ("high", "low"), "doc": "which stay"})

    @property
    def amounts(self) -> dict[str, int]:
        return {"room": self.room}

    def plan(self, prompt_tokens: int, geometry: Geometry) -> Plan:
        shape = (geometry.num_layers, geometry.num_kv_heads)
        return FoldPlan.of(
            self,
            geometry,
            fold_at=prompt_tokens,
            kept=np.full(shape, min(self.room, prompt_tokens), dtype=np.int64),
            score_from=max(0, prompt_tokens - (self.listeners or 8)),
        )

    def choose(self, tokens: Candidates) -> Tensor:
        import torch

        from sglang_kv.compression.scoring import top_mask

        early = torch.arange(tokens.scores.shape[-1]) < self.gate * tokens.num_tokens
        scores = torch.where(early, 2 * tokens.scores, tokens.scores)
        return top_mask(scores if self.order == "high" else -scores, tokens.kept)


@register("toy-recent")
@dataclass(frozen=True)
class ToyRecent(Compressor):
    """The ``head`` first tokens and the ``tail`` newest."""

    idea: ClassVar[str] = "for tests: first and newest tokens"

    head: int = field(default=6, metadata={"min": 0, "doc": "first tokens kept"})
    tail: int = field(default=700, metadata={"min": 1, "doc": "newest tokens kept"})

    @property
    def amounts(self) -> dict[str, int]:
        return {"tail": self.head + self.tail}

    def plan(self, prompt_tokens: int, geometry: Geometry) -> Plan:
        dense = self.head + self.tail + 1
        plan = WindowPlan(geometry, dense_prefix=dense, match_limit=dense)
        return dataclasses.replace(plan, window=Window(self.head, self.tail))


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    first: dict[tuple[str, str], Any] = {}
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    for item in items:
        for name in ("toy-best", "toy-recent"):
            if name in item.name:
                reporter.write_line(f"COLLECTED {item.nodeid}")
                first.setdefault((item.nodeid.split("[")[0], name), item)
    items[:] = first.values()
