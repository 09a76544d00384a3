"""Head scores without training: which heads look back at the fact that the answer copies.

On passkey samples, the attention that the number in the text receives while the answer is
written, measured per (layer, query head) and averaged over samples. A KV head scores as its
best query head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from sglang_kv.calibration.attention import attention, recording, shape
from sglang_kv.calibration.passkey import Passkey

Array = np.ndarray[Any, np.dtype[np.float32]]
Rows = Literal["predicting", "question", "all"]
Columns = Literal["value", "needle", "copied"]


def attention_mass(model: Any, sample: Passkey) -> Array:
    """What each needle token receives from each query, [layers, heads, rows, columns].

    Rows are the positions from the question's start to the last that predicts a token of
    the answer's number; columns are the needle's tokens.
    """
    layers, heads, _ = shape(model.config)
    rows = range(sample.question.start, sample.predicting.stop)
    mass = np.zeros((layers, heads, len(rows), len(sample.needle)), np.float32)
    ids = torch.tensor([sample.ids], device=model.device)
    with torch.inference_mode(), attention(model, recording(mass, rows, sample.needle)):
        model.base_model(ids, use_cache=False)
    return mass


def reduce_mass(
    mass: Array, sample: Passkey, rows: Rows = "predicting", columns: Columns = "value"
) -> Array:
    """One sample's score per (layer, query head).

    Args:
        mass: as `attention_mass` gives it.
        sample: the sample that it was measured on.
        rows: the queries whose mean counts: those that predict the number, those of the
            question and the answer's beginning, or both.
        columns: what they look at: the number, the needle's whole sentence, or (for
            ``predicting`` rows) just the token that is copied next.
    """
    asked = len(sample.question) - 1
    part = {"predicting": mass[:, :, asked:], "question": mass[:, :, :asked], "all": mass}[rows]
    at = sample.value.start - sample.needle.start
    if columns == "copied":
        pairs = range(min(len(sample.value), len(sample.answer)))
        picked = np.stack([mass[:, :, asked + i, at + i] for i in pairs])
        return np.asarray(picked.mean(0), np.float32)
    if columns == "value":
        part = part[..., at : at + len(sample.value)]
    return np.asarray(part.sum(-1).mean(-1), np.float32)


def group_heads(scores: Array, num_kv_heads: int, reduce: Literal["max", "mean"] = "max") -> Array:
    """Scores of query heads [layers, heads] as scores of KV heads [layers, kv_heads]."""
    grouped = scores.reshape(scores.shape[0], num_kv_heads, -1)
    return np.asarray(grouped.max(-1) if reduce == "max" else grouped.mean(-1), np.float32)


def to_gates(scores: Array) -> Array:
    """Scores as gates in [0, 1]: the best head has 1."""
    best = float(scores.max())
    if not best > 0:
        raise ValueError("no head looks at the needle: nothing to calibrate")
    return np.clip(scores / best, 0, 1).astype(np.float32)


@dataclass
class Sums:
    """What samples add up to: fp64 [layers, heads, ...], of ``done`` samples."""

    total: np.ndarray[Any, np.dtype[np.float64]]
    done: int = 0

    def mean(self) -> Array:
        if not self.done:
            raise ValueError("calibration needs at least one sample")
        return (self.total / self.done).astype(np.float32)


def calibrate(
    model: Any,
    samples: Iterable[Passkey],
    *,
    rows: Rows = "predicting",
    columns: Columns = "value",
    reduce: Literal["max", "mean"] = "max",
    sums: Sums | None = None,
    after_sample: Callable[[Sums], None] = lambda sums: None,
) -> Array:
    """Gates [layers, kv_heads] of ``model`` from ``samples``, which must end.

    Args:
        model: a causal LM of transformers, in eval mode.
        samples: passkey samples in the model's tokens.
        rows, columns: as for `reduce_mass`.
        reduce: of a KV head's query heads.
        sums: of samples before these, added to in place; None: there were none.
        after_sample: called with the sums so far.
    """
    layers, heads, kv_heads = shape(model.config)
    sums = sums or Sums(np.zeros((layers, heads), np.float64))
    for sample in samples:
        sums.total += reduce_mass(attention_mass(model, sample), sample, rows, columns)
        sums.done += 1
        after_sample(sums)
    return to_gates(group_heads(sums.mean(), kv_heads, reduce))
