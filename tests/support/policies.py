"""Policies for tests, made from the registry: a new method is covered without an edit."""

from __future__ import annotations

import contextlib
import dataclasses
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
    "heavy": 11,
    "interval": 4,
    "min_budget": 24,
}
#: What a ratio stands in place of.
AMOUNTS = ("budget", "heavy", "recent")
OTHERS: dict[str, list[Any]] = {
    "keep_ratio": [0.5],
    "decode_budget": [16],
    "fold_at": [1, 30, 61],
    "threshold": [0.5],
    "delta": [20],
    "beta": [1.0],
    "scores": ["window"],
    "norm": ["mean"],
}


def variants(method: str) -> list[dict[str, Any]]:
    """Parameter sets of a method: small ones, each choice, each optional parameter."""
    fields = {f.name: f for f in dataclasses.fields(methods()[method])}
    small = {key: value for key, value in SMALL.items() if key in fields}
    found = [small]
    for name, field in fields.items():
        values = [v for v in field.metadata.get("choices", ()) if v != field.default]
        for value in values + OTHERS.get(name, []):
            drop = AMOUNTS if name == "keep_ratio" else ()
            candidate = {k: v for k, v in small.items() if k not in drop} | {name: value}
            if candidate not in found:
                found.append(candidate)
    return [{"method": method, **params} for params in found]


def all_variants() -> list[Compressor]:
    found = []
    for method in methods():
        small, *others = variants(method)
        found.append(parse_policy(small))
        for spec in others:
            with contextlib.suppress(PolicyError):  # some choices do not go together
                found.append(parse_policy(spec))
    return found


def full_budget(method: str) -> Compressor:
    """A policy whose budget covers every test's length."""
    fields = {f.name for f in dataclasses.fields(methods()[method])}
    large = {k: 10_000 for k in ("budget", "recent", "heavy") if k in fields}
    return parse_policy({"method": method, **large})


def label(policy: Compressor) -> str:
    default = methods()[policy.name]()
    return ",".join(
        [
            policy.name,
            *(f"{k}={v}" for k, v in policy.parameters.items() if v != getattr(default, k)),
        ]
    )
