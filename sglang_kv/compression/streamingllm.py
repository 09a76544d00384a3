"""StreamingLLM: attention sinks and a sliding window, constant memory at any length.

Xiao et al., "Efficient Streaming Language Models with Attention Sinks", ICLR 2024
(https://arxiv.org/abs/2309.17453). Differs from the reference code: a prompt is windowed
inside its chunks too, so what a query sees does not depend on how the prompt was cut. Positions
are those in the cache, as in the paper, but keys stay where they are: for the sinks the query is
turned back instead, and past the trained length all of a request's positions move down together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

from sglang_kv.compression.base import Compressor, PolicyError, check_int, register
from sglang_kv.compression.plan import Geometry, Mask, Plan, Window, WindowPlan


@register("streamingllm")
@dataclass(frozen=True)
class StreamingLLM(Compressor):
    """Every stream keeps the first ``sinks`` tokens and the ``recent`` newest ones.

    As in the paper's loop, a query attends to the kept tokens and to itself: position
    ``t`` sees ``p < sinks`` and ``p >= t - recent``.
    """

    idea: ClassVar[str] = "attention sinks + a sliding window; constant memory at any length"
    paper: ClassVar[str] = "https://arxiv.org/abs/2309.17453"
    aliases: ClassVar[dict[str, str]] = {"budget": "sinks and recent together"}

    sinks: int = field(default=4, metadata={"min": 0, "doc": "first tokens never dropped"})
    recent: int = field(default=1020, metadata={"min": 1, "doc": "newest tokens kept"})
    fold_at: int | None = field(
        default=None,
        metadata={"min": 1, "doc": "prompt position up to which attention is full"},
    )
    positions: str = field(
        default="cache",
        metadata={
            "choices": ("cache", "original"),
            "doc": "`cache`: as if nothing lay between sinks and window, at any length; "
            "`original`: sinks move away, up to the model's trained length",
        },
    )

    @classmethod
    def from_params(cls, params: Mapping[str, Any]) -> Self:
        """Accepts ``budget`` (sinks and recent together) in place of ``recent``."""
        params = dict(params)
        if "budget" in params:
            budget = params.pop("budget")
            check_int("budget", budget, 1)
            if "recent" in params:
                raise PolicyError("kv_compression.budget: give either budget or recent, not both")
            sinks = params.get("sinks", cls.sinks)
            check_int("sinks", sinks, 0)
            if budget <= sinks:
                raise PolicyError(
                    f"kv_compression.budget: {budget} leaves no recent token beside "
                    f"{sinks} sinks (it counts both)"
                )
            params["recent"] = budget - sinks
        return super().from_params(params)

    def plan(self, prompt_tokens: int, geometry: Geometry) -> Plan:
        window = Window(num_sinks=self.sinks, window_left=self.recent)
        plan = window_plan(geometry, window, self.fold_at, prompt_tokens)
        return replace(plan, cache_positions=self.positions == "cache")

    @property
    def amounts(self) -> dict[str, int]:
        return {"recent": self.sinks + self.recent}


def window_plan(
    geometry: Geometry,
    window: Window,
    fold_at: int | None,
    prompt_tokens: int,
    windowed: Mask | None = None,
) -> WindowPlan:
    """Windows from ``fold_at`` on, or from the first token; in all streams, or some."""
    # Position t <= sinks + recent sees everything before it, so its KV is dense.
    dense = match = window.num_sinks + window.window_left + 1
    if fold_at is not None:
        fold_at = min(fold_at, prompt_tokens)
        # A chunk has to end at the fold, so at least its last token is computed.
        dense, match = max(dense, fold_at), max(match, fold_at - 1)
    return WindowPlan(
        geometry,
        fold_at=fold_at,
        dense_prefix=dense,
        match_limit=match,
        window=window,
        windowed=windowed,
    )
