"""Methods with tuned parameters, by what they are for. The methods' defaults are their papers'."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Preset:
    """A policy for a purpose; ``without_gates`` where the model has no head gates."""

    purpose: str
    tuned_on: str
    with_gates: dict[str, Any]
    without_gates: dict[str, Any]

    def policy(self, *, has_gates: bool) -> dict[str, Any]:
        return dict(self.with_gates if has_gates else self.without_gates)


_AGENT = {"method": "streamingllm", "sinks": 4, "budget": 4096}
_COPY = {"method": "snapkv", "keep_ratio": 0.16, "window": 16, "kernel_size": 31}

PRESETS: dict[str, Preset] = {
    "agent": Preset("endless sessions in constant memory", "no model", _AGENT, _AGENT),
    "document": Preset(
        "questions about long documents",
        "no model",
        {"method": "duoattention"},
        {"method": "pyramidkv", "keep_ratio": 0.25},
    ),
    "copy": Preset(
        "answers that copy digits, names or code out of a long prompt",
        "SmolLM2-135M-Instruct",
        {**_COPY, "head_budgets": "gates"},
        _COPY,
    ),
}


def apply_preset(name: str, config: dict[str, Any] | None, *, has_gates: bool) -> dict[str, Any]:
    """A preset's ``method`` and ``config``, its parameters changed by the operator's."""
    policy, changes = PRESETS[name].policy(has_gates=has_gates), config or {}
    method = policy.pop("method")
    if "budget" in changes:  # it stands in place of the preset's own
        policy.pop("keep_ratio", None)
    if "keep_ratio" in changes or "recent" in changes:
        policy.pop("budget", None)
    return {"method": method, "config": {**policy, **changes}}
