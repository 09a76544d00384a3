"""Which kernels a server runs: C++ on CPUs; on GPUs FlashInfer, and Triton for what it lacks."""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

logger = logging.getLogger(__name__)

#: Names of the attention backend. The first picks by device; the others are for comparing.
AUTO, FLASHINFER, TRITON = "sglang_kv", "sglang_kv_flashinfer", "sglang_kv_triton"
BACKENDS = (AUTO, FLASHINFER, TRITON)


@dataclass(frozen=True)
class Kernels:
    """The ops of one device, with the signatures of `sglang_kv.kernels`.

    ``scores_in_decode``: `decode` also takes ``scores`` and ``score_slots``, and does by the way
    what `column_sums` after it would have to read the keys again for.
    """

    name: str
    decode: Callable[..., Any]
    extend: Callable[..., Any]
    append: Callable[..., None]
    gather: Callable[..., None]
    column_sums: Callable[..., None]
    turned_queries: Callable[..., Any]
    turn_keys: Callable[..., None]
    scores_in_decode: bool


@functools.cache
def kernels_of(device_type: str) -> Kernels:
    """The ops for tensors of a device type: "cpu" or "cuda"."""
    folders = {"cpu": ("C++", ""), "cuda": ("Triton", ".triton")}
    if device_type not in folders:
        raise ValueError(f"device: no kernels for {device_type!r}; cpu and cuda have some")
    name, folder = folders[device_type]
    attends, moves, sums, turns = (
        importlib.import_module(f"sglang_kv.kernels{folder}.{module}")
        for module in ("attention", "transfer", "scores", "rotate")
    )
    return Kernels(
        name,
        attends.decode,
        attends.extend,
        moves.append,
        moves.gather,
        sums.column_sums,
        turns.turned_queries,
        turns.turn_keys,
        scores_in_decode=device_type == "cuda",
    )


def upload(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A host tensor on ``device``, without the host waiting for it."""
    if device.type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def flashinfer_refusal(
    device: torch.device, head_dim: int, group: int, q_dtype: torch.dtype
) -> str | None:
    """Why FlashInfer's paged kernels cannot serve such a model; None: they can."""
    from sglang_kv.kernels.flashinfer import wrappers

    if device.type == "cuda" and q_dtype not in wrappers.Q_DTYPES:
        return f"queries of {q_dtype}"
    if head_dim not in wrappers.HEAD_DIMS:
        return f"head_dim {head_dim}"
    if group > 16:
        return f"{group} query heads per KV head"
    return None


def choose(
    backend: str, device: torch.device, head_dim: int, group: int, q_dtype: torch.dtype
) -> str:
    """FLASHINFER, TRITON or "cpp"; logged in one line.

    Raises ValueError for a named backend that cannot serve the model.
    """
    refusal = flashinfer_refusal(device, head_dim, group, q_dtype)
    if backend == AUTO:
        path = "cpp" if device.type == "cpu" else TRITON if refusal else FLASHINFER
    else:
        path = backend
    if path == FLASHINFER and refusal:
        raise ValueError(f"--attention-backend {backend}: FlashInfer has no kernel for {refusal}")
    if path == TRITON and device.type == "cpu":
        raise ValueError(f"--attention-backend {TRITON}: Triton's kernels need a GPU")
    attends = {
        "cpp": "C++",
        TRITON: "Triton" + (f" (FlashInfer has no kernel for {refusal})" if refusal else ""),
        FLASHINFER: "FlashInfer; under CUDA graphs Triton",
    }[path]
    logger.info(
        "sglang-kv: attention by %s; everything else by %s, on %s",
        attends,
        kernels_of(device.type).name,
        device,
    )
    return path
