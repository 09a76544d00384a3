"""The scheduler in miniature with real attention: its requests' keys go through a server's backend
into the pool, and what folds rank is what the kernels say that their queries looked at."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from ledger_harness import CONTEXT, HEADS, LAYERS, Harness, Req, batch_of
from sglang.srt.layers.radix_attention import RadixAttention
from torch import Tensor, nn

from sglang_kv import runtime
from sglang_kv.backend import HeadPageAttnBackend
from sglang_kv.config import Options
from sglang_kv.kvcache import HeadPageKVPool
from sglang_kv.namespaces import Sharing

DIM, POOL = 64, 1024


class Attending(Harness):
    """Serves one request at a time, whose queries and keys follow from `seed` and the position.

    - `q`: fp32 ``[layers, query heads, positions, DIM]``, after the rotary embedding
    - `k`: fp32 ``[layers, HEADS, positions, DIM]``

    It installs a runtime; who makes one puts the former back.
    """

    def __init__(self, *, page_size: int, group: int, seed: int = 0):
        super().__init__(
            page_size=page_size, pool_tokens=POOL, virtual_tokens=4096, disable_tree=True
        )
        random = torch.Generator().manual_seed(seed)
        self.q = torch.randn(LAYERS, HEADS * group, CONTEXT, DIM, generator=random)
        self.k = torch.randn(LAYERS, HEADS, CONTEXT, DIM, generator=random)
        self.pool = HeadPageKVPool(
            POOL,
            page_size=page_size,
            dtype=torch.float32,
            head_num=HEADS,
            head_dim=DIM,
            layer_num=LAYERS,
            device="cpu",
            enable_memory_saver=False,
        )
        move = self.ledger.folder.gather_tokens

        def gather(pages: Tensor, *lists: Tensor) -> None:
            move(pages, *lists)
            move(self.pool.pages, *lists)

        self.ledger.folder.gather_tokens = gather
        self.layers = [
            RadixAttention(group * HEADS, DIM, DIM**-0.5, HEADS, index) for index in range(LAYERS)
        ]
        runtime.install(runtime.Runtime(Options(method="none"), self.ledger, Sharing(), 0.0))
        runner: Any = SimpleNamespace(
            token_to_kv_pool=self.pool,
            req_to_token_pool=self.rows,
            model=nn.ModuleList(self.layers),
            model_config=SimpleNamespace(context_len=CONTEXT),
        )
        self.backend = HeadPageAttnBackend(runner)

    def _score(self, req: Req, start: int, target: int) -> None:
        count, batch = target - start, batch_of(req, start, target)
        self.backend.init_forward_metadata(batch)
        for index, layer in enumerate(self.layers):
            q, k = (
                tensor[index, :, start:target].transpose(0, 1).reshape(count, -1)
                for tensor in (self.q, self.k)
            )
            self.backend.forward_decode(q, k, k.clone(), layer, batch)


def folds_of(h: Attending, req: Req, length: int, answer: int, chunk: int) -> list[Any]:
    """Serve a request; (position, kept positions ``[layer][kv_head]``) of every fold that drops."""
    h.admit(req)
    while req.extend_end < length:
        h.extend(req, chunk)
        h.checkpoint(req)
    for token in range(answer):
        h.decode(req, token)
    return [
        (position, [[kept[layer, head] for head in range(HEADS)] for layer in range(LAYERS)])
        for _, position, kept in h.folds
    ]
