"""Policies for tests, made from the registry: a new method is covered without an edit."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from typing import Any

from sglang_kv.compression import Compressor, PolicyError, parse_policy
from sglang_kv.compression.base import methods

#: Small enough to drop most of a prompt of a hundred tokens; a method takes what it knows.
SMALL: dict[str, Any] = {
    "budget": 26,
    "window": 5,
    "kernel_size": 3,
    "sinks": 2,
    "recent": 9,
    "heavy": 12,
    "interval": 4,
    "min_budget": 24,
}
#: What a ratio stands in place of.
AMOUNTS = ("budget", "heavy", "recent")
OTHERS: dict[str, list[Any]] = {
    "keep_ratio": [0.5],
    "decode_budget": [14, 6],
    "fold_at": [1, 30, 61],
    "threshold": [0.5],
    "sparsity": [0.0, 1.0],
    "sinks": [150],  # more than a law's prompt
    "heavy": [0],
    "delta": [20],
    "beta": [1.0],
    "scores": ["window"],
    "norm": ["mean"],
    # Their defaults are enough.
    "head_floor": [],
}
#: What a random parameter is drawn from: integers between two bounds, or floats.
RANGES: dict[str, tuple[Any, Any]] = {
    "budget": (2, 300),
    "heavy": (0, 150),
    "recent": (1, 200),
    "sinks": (0, 70),
    "window": (1, 64),
    "kernel_size": (1, 15),
    "min_budget": (2, 150),
    "keep_ratio": (0.0, 0.4),
    "decode_budget": (2, 250),
    "interval": (8, 64),
    "fold_at": (20, 700),
    "sparsity": (0.0, 1.0),
    "threshold": (0.0, 1.0),
    "head_floor": (0.0, 1.0),
    "beta": (1.0, 40.0),
    "delta": (0, 200),
}
#: Whose defaults would keep every prompt of a test.
ALWAYS = ("budget", "heavy", "recent", "sinks")


#: Tokens kept that drop most of a prompt of a hundred, and none of any test's.
FEW, PLENTY = 40, 10_000


def variants(method: str) -> list[dict[str, Any]]:
    """Parameter sets of a method: small ones, each choice, each optional parameter."""
    fields = {f.name: f for f in dataclasses.fields(methods()[method])}
    small = _fewest(method, {key: value for key, value in SMALL.items() if key in fields})
    found = [with_effect(method, small)]
    for name, field in fields.items():
        values = [v for v in field.metadata.get("choices", ()) if v != field.default]
        for value in values + OTHERS.get(name, _unlisted(field)):
            drop = AMOUNTS if name == "keep_ratio" else ()
            candidate = {k: v for k, v in small.items() if k not in drop} | {name: value}
            candidate = with_effect(method, candidate)
            if candidate not in found:
                found.append(candidate)
    return [{"method": method, **params} for params in found]


def with_effect(method: str, params: dict[str, Any]) -> dict[str, Any]:
    """Those that do something beside the others; a policy refuses the rest."""
    fields = {f.name: f for f in dataclasses.fields(methods()[method])}

    def needed(key: str) -> bool:
        other, *values = fields[key].metadata.get("needs", (key,))
        value = params.get(other, fields[other].default)
        return value in values if values else value is not None

    return {key: value for key, value in params.items() if needed(key)}


def small_policy(method: str) -> Compressor:
    """The first of `variants`, with tokens where they were: a change of positions takes a model's
    rotary embedding, which most tests have not."""
    known = {f.name: f.metadata.get("choices", ()) for f in dataclasses.fields(methods()[method])}
    where = {"positions": "original"} if "original" in known.get("positions", ()) else {}
    return parse_policy(variants(method)[0] | where)


def _unlisted(field: dataclasses.Field[Any]) -> list[Any]:
    """Two values of a number that no list here knows."""
    if field.metadata.get("choices") or field.name in SMALL:
        return []
    low, high = bounds(field)
    middle = (low + high) / 2 if isinstance(low, float) else (low + high) // 2
    return [value for value in (low, middle) if value != field.default]


def bounds(field: dataclasses.Field[Any]) -> tuple[Any, Any]:
    """What a number is drawn from: as listed here, else from what its field says."""
    if field.name in RANGES:
        return RANGES[field.name]
    low, default = field.metadata.get("min", 0), field.default or 0
    if "float" in str(field.type):
        return float(low), float(field.metadata.get("max", max(1.0, 2 * low, 2 * default)))
    return int(low), int(field.metadata.get("max", low + min(2 * default or 64, 300)))


def _fewest(method: str, params: dict[str, Any]) -> dict[str, Any]:
    """`params`, and few of whatever amount no list here knows, if the method kept much."""
    kept = _amount(method, params)
    if kept is None or kept <= FEW:
        return params
    return _towards(method, params, FEW)


def _towards(method: str, params: dict[str, Any], wanted: int) -> dict[str, Any]:
    """`params` and those unlisted numbers which bring `_amount` nearer to `wanted`."""
    for field in dataclasses.fields(methods()[method]):
        if field.name in params or "choices" in field.metadata or "max" in field.metadata:
            continue
        candidate = params | {field.name: max(wanted // 2, field.metadata.get("min", 0))}
        with contextlib.suppress(PolicyError):
            before, after = (_amount(method, given) for given in (params, candidate))
            if before is not None and after is not None:
                params = candidate if abs(after - wanted) < abs(before - wanted) else params
    return params


def _amount(method: str, params: dict[str, Any]) -> int | None:
    """Fewest tokens that the policy's parameters name; None: they name none."""
    policy = parse_policy({"method": method, **with_effect(method, params)})
    return min(policy.amounts.values(), default=None)


def all_variants() -> list[Compressor]:
    found = []
    for method in methods():
        small, *others = variants(method)
        found.append(parse_policy(small))
        for spec in others:
            with contextlib.suppress(PolicyError):  # some choices do not go together
                found.append(parse_policy(spec))
    return found


def random_policy(rng: random.Random) -> dict[str, Any]:
    """A valid policy of any method but ``none``, any of its parameters set."""
    method = rng.choice([name for name in methods() if name != "none"])
    while True:
        spec: dict[str, Any] = {"method": method}
        for field in dataclasses.fields(methods()[method]):
            if rng.random() < (0.8 if field.name in ALWAYS else 0.3):
                spec[field.name] = _random_value(rng, field)
        if "budget" in methods()[method].aliases and rng.random() < 0.2:
            spec = {k: v for k, v in spec.items() if k not in AMOUNTS}
            spec["budget"] = rng.randint(*RANGES["budget"])
        with contextlib.suppress(PolicyError):  # they do not go together: once more
            parse_policy(spec)
            return spec


def _random_value(rng: random.Random, field: dataclasses.Field[Any]) -> Any:
    if choices := field.metadata.get("choices"):
        return rng.choice(choices)
    low, high = bounds(field)
    return rng.uniform(low, high) if isinstance(low, float) else rng.randint(low, high)


def full_budget(method: str) -> Compressor:
    """A policy whose budget covers every test's length."""
    fields = {f.name: f for f in dataclasses.fields(methods()[method])}
    large = {k: PLENTY for k in ("budget", "recent", "heavy") if k in fields}
    kept = _amount(method, large)
    if kept is not None and kept < PLENTY:
        large = _towards(method, large, 2 * PLENTY)
    return parse_policy({"method": method, **large})


def label(policy: Compressor) -> str:
    default = methods()[policy.name]()
    return ",".join(
        [
            policy.name,
            *(f"{k}={v}" for k, v in policy.parameters.items() if v != getattr(default, k)),
        ]
    )
