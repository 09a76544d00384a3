"""The policies that the speed and memory benchmarks compare, and what they predict."""

from __future__ import annotations

from typing import Any

from sglang_kv.compression import Geometry, Plan, parse_policy
from sglang_kv.compression.gates import find_gates
from sglang_kv.presets import PRESETS

Policy = dict[str, Any]
NONE: Policy = {"method": "none"}
PAGE = 16


def copy(keep_ratio: float) -> Policy:
    """The `copy` preset at another ratio."""
    return {**PRESETS["copy"].policy(has_gates=True), "keep_ratio": keep_ratio}


def not_the_preset(arm: str, policy: Policy | None) -> str:
    """How a line of an arm that bears a preset's name differs from the preset as it is today.

    The share kept is the arm's own. Empty where there is no difference, and no such preset.
    """
    name = arm.split()[0]
    if name not in PRESETS or policy is None:
        return ""
    now = PRESETS[name].policy(has_gates=True)
    now |= {key: policy[key] for key in ("keep_ratio",) if key in policy}
    today, then = parse_policy(now).parameters, parse_policy(policy).parameters
    return ", ".join(f"`{key}` {value}" for key, value in then.items() if today.get(key) != value)


def arms(context: int, parts: tuple[int, ...] = (2, 4, 8)) -> dict[str, Policy]:
    """`none`, then every method at shares of the prompt."""
    found: dict[str, Policy] = {"none": NONE}
    for part in parts:
        kept = {"keep_ratio": 1 / part}
        found[f"streamingllm 1/{part}"] = {"method": "streamingllm", "budget": context // part}
        found[f"h2o 1/{part}"] = {"method": "h2o", **kept}
        found[f"snapkv 1/{part}"] = {"method": "snapkv", **kept}
        found[f"snapkv pages 1/{part}"] = {"method": "snapkv", "granularity": "page", **kept}
        found[f"pyramidkv 1/{part}"] = {"method": "pyramidkv", **kept}
        found[f"copy 1/{part}"] = copy(1 / part)
    for sparsity in (0.5, 0.75):
        found[f"duoattention {sparsity}"] = {"method": "duoattention", "sparsity": sparsity}
    return found


def geometry_of(model: str) -> Geometry:
    """The streams of a request of this model, in the benchmarks' page size."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model)
    layers, heads = config.num_hidden_layers, config.num_key_value_heads
    return Geometry(layers, heads, PAGE, find_gates(str(model), layers, heads))


def plan_of(policy: Policy, geometry: Geometry, context: int) -> Plan:
    return parse_policy(policy).plan(context, geometry)
