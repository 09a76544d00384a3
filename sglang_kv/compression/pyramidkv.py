"""PyramidKV: SnapKV with more budget for the lower layers, less for the upper ones.

Cai et al., "PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information Funneling",
2024 (https://arxiv.org/abs/2406.02069). Differs from the reference code, whose integer steps
overshoot the budget by up to 29 % (80 layers, 128 tokens): here the layers' budgets sum to exactly
``num_layers x budget``, by largest remainder, and what a short prompt cuts off goes to the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from sglang_kv.compression.base import PolicyError, register
from sglang_kv.compression.budgets import Units, clamp_shares, largest_remainder
from sglang_kv.compression.snapkv import SnapKV


@register("pyramidkv")
@dataclass(frozen=True)
class PyramidKV(SnapKV):
    """``B_l = B_base + dB (L - 1 - l) / (L - 1)``, with mean ``budget``; tokens as in SnapKV.

    ``dB`` is ``delta``, or follows from ``beta`` as in the paper: without the window, the last
    layer gets the ``beta``-th part of the mean. ``beta`` 1 is a flat line. Folds in decode keep the
    line's proportions, with mean ``decode_budget``.
    """

    idea: ClassVar[str] = (
        "SnapKV with a budget per layer, falling linearly from the first to the last"
    )
    cost: ClassVar[str] = "as snapkv"
    paper: ClassVar[str] = "https://arxiv.org/abs/2406.02069"

    beta: float = field(
        default=20.0, metadata={"min": 1.0, "doc": "mean budget over the last layer's"}
    )
    delta: int | None = field(
        default=None,
        metadata={
            "min": 0,
            "doc": "in place of beta: tokens from last to first layer; where keep_ratio comes to "
            "less, as many as leave the last layer its window",
        },
    )

    @classmethod
    def from_params(cls, params: Mapping[str, Any]) -> Self:
        """``delta`` takes the place of ``beta``."""
        if "beta" in params and "delta" in params:
            raise PolicyError("kv_compression.beta: give either beta or delta, not both")
        return super().from_params(params)

    def validate(self) -> None:
        super().validate()
        if self.head_budgets == "gates":
            raise PolicyError(
                "kv_compression.head_budgets: 'gates' splits the whole model's budget, which "
                "leaves no line over the layers; use snapkv"
            )
        if self.delta is not None and self.budget is not None and self.keep_ratio is None:
            most = 2 * (self.budget - self.window)
            if self.delta > most:
                raise PolicyError(
                    f"kv_compression.delta: {self.delta} leaves the last layer less than its "
                    f"window; at most {most} with budget {self.budget} and window {self.window}"
                )

    def layer_units(self, units: Units, num_layers: int) -> list[int]:
        mean = units.budget - units.window
        line = falling(mean, self.fall(mean, mean * units.per), num_layers)
        line = clamp_shares(line, 0, units.most - units.window)
        return [n + units.window for n in largest_remainder(line, num_layers * mean)]

    def layer_shares(self, mean: int, prompt_mean: int, num_layers: int) -> list[int]:
        line = falling(mean, self.fall(mean, prompt_mean), num_layers)
        return largest_remainder(line, num_layers * mean)

    def fall(self, mean: int, prompt_mean: int) -> float:
        """How far a line with that mean falls, if ``delta`` is meant for one with a mean of
        ``prompt_mean`` tokens."""
        if self.delta is None:
            return 2 * mean * (1 - 1 / self.beta)
        return min(self.delta * mean / max(prompt_mean, 1), 2 * mean)


def falling(mean: int, fall: float, num_layers: int) -> list[float]:
    """A straight line over the layers with that mean; the last has ``fall`` less than the first."""
    if num_layers == 1:
        return [float(mean)]
    step = fall / (num_layers - 1)
    return [mean + fall / 2 - step * layer for layer in range(num_layers)]
