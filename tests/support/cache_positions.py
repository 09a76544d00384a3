"""StreamingLLM with positions in its cache, on real keys and values: the ledger harness with
kernels and rotations, and the paper's loop beside it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ledger_harness import HEADS, LAYERS, Harness, Req
from paper_loop import RollingCache
from torch import Tensor

from sglang_kv.compression import parse_policy
from sglang_kv.kernels import attention, transfer
from sglang_kv.kernels.layout import PagedStreams, allocate_pages
from sglang_kv.rotary import Rotary, TurnBack

DIM, GROUP = 64, 2


def plain_rotary(patch: pytest.MonkeyPatch) -> None:
    """SGLang decides at import whose rotary kernels it would use; here, its plain torch code."""
    from sglang.srt.layers.rotary_embedding import base

    patch.setattr(base, "_is_cpu", True)


SCALINGS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    "linear": {"rope_type": "linear", "factor": 4.0},
}


def rope_of(scaling: str, *, halves: bool = True, rotary_dim: int = DIM) -> Any:
    from sglang.srt.layers.rotary_embedding import get_rope

    return get_rope(DIM, rotary_dim, 512, 10000, halves, SCALINGS[scaling], torch.float32)


def rotate(rope: Any, x: Tensor, positions: Tensor) -> Tensor:
    """[n, heads, head_dim] at those positions, by SGLang's own module."""
    flat = x.reshape(len(x), -1).contiguous()
    return rope.forward_native(positions, flat, flat.clone())[0].view(x.shape)


class Engine(Harness):
    """The harness with real keys, values and attention, of tokens that are random vectors."""

    def __init__(
        self,
        rope: Any,
        page_size: int,
        trained: int | None,
        *,
        dtype: torch.dtype = torch.float32,
    ):
        super().__init__(page_size=page_size, pool_tokens=1024)
        self.pages = allocate_pages(self.ledger.pool.num_pages, page_size, DIM, dtype)
        self.ledger.folder.memory = self.pages
        self.rope = rope
        self.ledger.trained_length = trained
        self.ledger.rotary = self.rotary = Rotary([TurnBack.of(rope, trained or 512)] * LAYERS)
        self.told: list[int] = []
        self.out: dict[int, Tensor] = {}

    def _forward(self, req: Req, start: int, target: int) -> None:
        ledger, slot = self.ledger, req.sglang_kv.slot
        streams = PagedStreams(
            self.pages,
            ledger.streams.table_tensor,
            ledger.streams.desc_tensor,
            torch.tensor([slot], dtype=torch.int32),
        )
        indptr = torch.tensor([0, target - start], dtype=torch.int32)
        positions = torch.arange(start, target) - int(ledger.streams.offset[slot])
        last = int(ledger.streams.last_position[slot])
        self.told += positions.tolist()
        outs = []
        for layer in range(LAYERS):
            q, k, v = vectors(layer, range(start, target))
            q, k = rotate(self.rope, q, positions), rotate(self.rope, k, positions)
            transfer.append(k, v, indptr, streams, layer)
            sink_q = self.rotary.sink_queries(q, (positions - last).clamp(min=0), layer)
            out = attention.extend(q, indptr, streams, layer, sm_scale=0.125, sink_q=sink_q)
            outs.append(out)
        for i, t in enumerate(range(start, target)):
            self.out[t] = torch.stack([out[i] for out in outs])


def vectors(layer: int, positions: range) -> tuple[Tensor, Tensor, Tensor]:
    """q [n, heads, head_dim], k and v [n, kv_heads, head_dim] before RoPE."""
    found = [
        torch.randn(3, HEADS * GROUP, DIM, generator=torch.Generator().manual_seed(t * 7 + layer))
        for t in positions
    ]
    q, k, v = torch.stack(found).unbind(1)
    return q, k[:, :HEADS], v[:, :HEADS]


def paper(rope: Any, length: int, sinks: int, recent: int) -> Tensor:
    """[length, layers, heads, head_dim]"""
    caches = [RollingCache(sinks, recent) for _ in range(LAYERS)]
    outs = []
    for t in range(length):
        of_layers = []
        for layer, cache in enumerate(caches):
            q, k, v = (x[0] for x in vectors(layer, range(t, t + 1)))
            of_layers.append(cache.attend(q, k, v, lambda x, p: rotate(rope, x, p), 0.125))
        outs.append(torch.stack(of_layers))
    return torch.stack(outs)


def run(engine: Engine, policy: dict[str, Any], length: int, prompt: int, chunk: int) -> Req:
    req = Req(list(range(prompt)), parse_policy(policy))
    engine.admit(req)
    while req.extend_end < prompt:
        engine.extend(req, chunk)
        engine.checkpoint(req)
    while req.extend_end < length:
        engine.decode(req, req.extend_end)
    return req
