"""DuoAttention: retrieval heads keep everything, streaming heads keep sinks and a window.

Xiao et al., "DuoAttention: Efficient Long-Context LLM Inference with Retrieval and Streaming
Heads", ICLR 2025 (https://arxiv.org/abs/2410.10819). Which head is which is fixed per model, by
its gates. Differs from the reference code: a streaming head is windowed inside a prompt's chunks
too, so that what it sees does not depend on how the prompt was cut; ``first_chunk`` "dense" is the
reference's way for the first chunk.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

from sglang_kv.compression.base import Compressor, PolicyError, register
from sglang_kv.compression.gates import retrieval_heads
from sglang_kv.compression.plan import Geometry, Plan, Window
from sglang_kv.compression.streamingllm import window_plan


@register("duoattention")
@dataclass(frozen=True)
class DuoAttention(Compressor):
    """A KV head whose gate is among the lowest ``sparsity`` of the model's, or below
    ``threshold``, keeps ``sinks`` first and ``recent`` newest tokens; the others keep all."""

    idea: ClassVar[str] = (
        "retrieval heads keep all, streaming heads sinks + recent; needs head gates"
    )
    paper: ClassVar[str] = "https://arxiv.org/abs/2410.10819"
    needs_gates: ClassVar[bool] = True

    sinks: int = field(
        default=64,
        metadata={
            "min": 0,
            "doc": "first tokens that streaming heads keep, whatever the gates were found with",
        },
    )
    recent: int = field(
        default=256,
        metadata={
            "min": 1,
            "doc": "newest tokens that streaming heads keep, whatever the gates were found with",
        },
    )
    sparsity: float | None = field(
        default=0.5, metadata={"min": 0.0, "max": 1.0, "doc": "share of streaming heads"}
    )
    threshold: float | None = field(
        default=None,
        metadata={"min": 0.0, "max": 1.0, "doc": "in place of sparsity: least gate that keeps all"},
    )
    first_chunk: str = field(
        default="windowed",
        metadata={"choices": ("windowed", "dense"), "doc": "attention in a prompt's first chunk"},
    )
    fold_at: int | None = field(
        default=None,
        metadata={"min": 1, "doc": "prompt position up to which attention is full"},
    )

    @classmethod
    def from_params(cls, params: Mapping[str, Any]) -> Self:
        """``threshold`` takes the place of ``sparsity``."""
        if "sparsity" in params and "threshold" in params:
            raise PolicyError(
                "kv_compression.threshold: give either sparsity or threshold, not both"
            )
        policy = super().from_params(params)
        return replace(policy, sparsity=None) if "threshold" in params else policy

    def validate(self) -> None:
        if self.first_chunk == "dense" and self.fold_at is not None:
            raise PolicyError(
                "kv_compression.first_chunk: 'dense' has no effect with fold_at, up to which "
                "attention is full anyway"
            )

    @property
    def amounts(self) -> dict[str, int]:
        return {"recent": self.sinks + self.recent}

    def plan(self, prompt_tokens: int, geometry: Geometry) -> Plan:
        if geometry.gates is None:
            raise PolicyError(
                "kv_compression.method: 'duoattention' needs head gates, and this server has none "
                "for its model; make them with sglang-kv calibrate, or download a published "
                "pattern, and start the server with --kv-gates FILE"
            )
        geometry.require_even("kv_compression.method: 'duoattention'")
        retrieval = retrieval_heads(
            geometry.gates, sparsity=self.sparsity, threshold=self.threshold
        )
        streaming = ~retrieval[:, geometry.heads]
        if not streaming.any():
            return Plan(geometry)
        window = Window(num_sinks=self.sinks, window_left=self.recent)
        plan = window_plan(geometry, window, self.fold_at, prompt_tokens, streaming)
        if self.first_chunk == "dense":
            # What is dense depends on how the prompt is cut, so nothing of it is matched.
            return replace(plan, match_limit=0, dense_first_chunk=True)
        return plan
