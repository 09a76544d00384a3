"""StreamingLLM: attention sinks and a sliding window, constant memory at any length.

Xiao et al., "Efficient Streaming Language Models with Attention Sinks", ICLR 2024
(https://arxiv.org/abs/2309.17453). Differs from the reference code: a prompt is windowed
inside its chunks too, so what a query sees does not depend on how the prompt was cut; and
keys stay at their original positions, which is exact within the model's trained length.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from sglang_kv.compression.base import Compressor, PolicyError, Window, _check_int, register


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

    @classmethod
    def from_params(cls, params: Mapping[str, Any]) -> Compressor:
        """Accepts ``budget`` (sinks and recent together) in place of ``recent``."""
        params = dict(params)
        if "budget" in params:
            budget = params.pop("budget")
            _check_int("budget", budget, 1)
            if "recent" in params:
                raise PolicyError("kv_compression.budget: give either budget or recent, not both")
            sinks = params.get("sinks", cls.sinks)
            _check_int("sinks", sinks, 0)
            if budget <= sinks:
                raise PolicyError(
                    f"kv_compression.budget: {budget} leaves no recent token beside "
                    f"{sinks} sinks (it counts both)"
                )
            params["recent"] = budget - sinks
        return super().from_params(params)

    def fold_position(self, prompt_tokens: int) -> int | None:
        return None if self.fold_at is None else min(self.fold_at, prompt_tokens)

    @property
    def window(self) -> Window:
        return Window(num_sinks=self.sinks, window_left=self.recent)

    @property
    def dense_prefix(self) -> int | None:
        # Position t <= sinks + recent sees everything before it, so its KV is dense.
        return self.sinks + self.recent + 1

    @property
    def min_kept(self) -> int | None:
        return self.sinks + self.recent

    def kept_tokens(self, num_tokens: int) -> int:
        return min(num_tokens, self.sinks + self.recent)
