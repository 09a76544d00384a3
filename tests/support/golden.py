"""What a peer library kept: the golden files of `tests/golden`, their tensors built anew.

The files hold seeds, parameters and kept positions; `tests/golden/make_kvpress.py` says how
they are made. A kept set is a hexadecimal number: bit p is set iff position p is kept.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

KVPRESS = Path(__file__).resolve().parent.parent / "golden/kvpress.json"

Kept = list[list[int]]  # sorted positions per KV head


@dataclass(frozen=True, kw_only=True)
class SnapKVCase:
    """One attention layer at the end of a prompt."""

    name: str
    q: Tensor  # [q_heads, window, head_dim]: the last queries, after RoPE
    k: Tensor  # [kv_heads, tokens, head_dim]: all keys, after RoPE
    window: int
    kernel_size: int  # average pooling, zero padding counted
    compression_ratio: float  # what kvpress was asked to drop
    budget: int  # what it kept, the window included
    kept: Kept
    margin: float  # relative gap in score between the last token kept and the first dropped

    @property
    def tokens(self) -> int:
        return self.k.shape[1]


@dataclass(frozen=True, kw_only=True)
class PyramidKVCase:
    """All layers of one model, first to last: each a SnapKV case with the layer's budget."""

    name: str
    beta: int
    layers: list[SnapKVCase]


@dataclass(frozen=True, kw_only=True)
class PyramidKVBudgets:
    """The budgets alone, for more shapes than there are kept sets."""

    tokens: int
    window: int
    compression_ratio: float
    beta: int
    budgets: list[int]  # per layer, the window included


def tensors(
    seed: int, q_heads: int, kv_heads: int, head_dim: int, tokens: int, window: int
) -> tuple[Tensor, Tensor]:
    """The q and k that a seed stands for."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(q_heads, window, head_dim, generator=generator)
    k = torch.randn(kv_heads, tokens, head_dim, generator=generator)
    return q, k


def pack(positions: list[int]) -> str:
    return f"{sum(1 << position for position in positions):x}"


def unpack(kept: str) -> list[int]:
    bits = int(kept, 16)
    return [position for position in range(bits.bit_length()) if bits >> position & 1]


def load(part: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(KVPRESS.read_text(encoding="utf-8"))[part]
    return rows


def snapkv_cases() -> Iterator[SnapKVCase]:
    return (_snapkv_case(row) for row in load("snapkv"))


def pyramidkv_cases() -> Iterator[PyramidKVCase]:
    for row in load("pyramidkv"):
        layers = []
        beta = row.pop("beta")
        per_layer = zip(row.pop("budgets"), row.pop("kept"), row.pop("margins"), strict=True)
        for layer, (budget, kept, margin) in enumerate(per_layer):
            here = {**row, "seed": row["seed"] + layer}
            layers.append(_snapkv_case({**here, "budget": budget, "kept": kept, "margin": margin}))
        name = f"{layers[0].name}-layers{len(layers)}-beta{beta}"
        yield PyramidKVCase(name=name, beta=beta, layers=layers)


def pyramidkv_budgets() -> Iterator[PyramidKVBudgets]:
    return (PyramidKVBudgets(**row) for row in load("pyramidkv_budgets"))


def _snapkv_case(row: dict[str, Any]) -> SnapKVCase:
    shape = {key: row[key] for key in ("q_heads", "kv_heads", "head_dim", "tokens", "window")}
    q, k = tensors(row["seed"], **shape)
    return SnapKVCase(
        name="{q_heads}q{kv_heads}kv-n{tokens}-w{window}-pool{kernel_size}"
        "-drop{compression_ratio}-seed{seed}".format(**row),
        q=q,
        k=k,
        kept=[unpack(head) for head in row["kept"]],
        **{key: row[key] for key in ("window", "kernel_size", "compression_ratio")},
        **{key: row[key] for key in ("budget", "margin")},
    )
