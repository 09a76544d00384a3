"""The ledger harness with a server's backend in it: real K and V in pages of any dtype, and each
forward's attention held against fp32."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
from cache_positions import rope_of
from ledger_harness import CONTEXT, HEADS, LAYERS, Harness, Req, batch_of
from sglang.srt.layers.radix_attention import RadixAttention
from torch import Tensor, nn

from sglang_kv import runtime
from sglang_kv.backend import HeadPageAttnBackend
from sglang_kv.compression import WindowPlan
from sglang_kv.config import Options
from sglang_kv.kernels import reference
from sglang_kv.kernels.layout import FP8_DTYPES
from sglang_kv.kernels.reference import visible_mask
from sglang_kv.kv_dtypes import Scales
from sglang_kv.kvcache import HeadPageKVPool
from sglang_kv.namespaces import Sharing

DIM, GROUP, PAGE, POOL = 64, 2, 16, 1024
SCALES = [Scales(0.5, 3.0), Scales(0.11, 0.7)]
#: Dimensions of a head that are rotated; the last one, whose keys are large, is none of them.
ROTATED = 32


def make_pool(dtype: torch.dtype) -> HeadPageKVPool:
    return HeadPageKVPool(
        POOL,
        page_size=PAGE,
        dtype=dtype,
        head_num=HEADS,
        head_dim=DIM,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
    )


def make_layer(index: int) -> Any:
    """SGLang's, with the scales of an FP8 checkpoint, and of ``--quantization-param-path``."""
    layer = RadixAttention(GROUP * HEADS, DIM, DIM**-0.5, HEADS, index)
    if index == 0:
        layer.k_scale, layer.v_scale = map(torch.tensor, SCALES[0])
        layer.k_scale_float, layer.v_scale_float = SCALES[0]
    else:
        layer.k_scale, layer.v_scale = SCALES[index]
    return layer


class Attention(nn.Module):
    """A model's attention, as far as its rotary embedding is looked for."""

    def __init__(self, attn: RadixAttention):
        super().__init__()
        self.attn, self.rotary_emb = attn, rope_of("none", rotary_dim=ROTATED)


class Served(Harness):
    """The harness, and beside its digests real K and V, which each forward attends to.

    Args:
        dtype: of the pages.
        backend: the backend's class, and what it takes beside SGLang's model runner.

    What a token's K and V are follows from its digest. The oracle keeps what a page should give
    back, by position, and knows from the harness which positions a stream holds.
    """

    def __init__(self, dtype: torch.dtype, backend: Any = HeadPageAttnBackend, *options: Any):
        super().__init__(page_size=PAGE, pool_tokens=POOL, virtual_tokens=4096)
        self.pool = make_pool(dtype)
        assert self.pool.num_head_pages == self.ledger.pool.num_pages
        move = self.ledger.folder.gather_tokens

        def gather(pages: Tensor, *lists: Tensor) -> None:
            move(pages, *lists)
            move(self.pool.pages, *lists)

        self.ledger.folder.gather_tokens = gather
        self.layers = [make_layer(i) for i in range(LAYERS)]
        runtime.install(runtime.Runtime(Options(method="none"), self.ledger, Sharing(), 0.0))
        runner: Any = SimpleNamespace(
            token_to_kv_pool=self.pool,
            req_to_token_pool=self.rows,
            model=nn.ModuleList([Attention(layer) for layer in self.layers]),
            model_config=SimpleNamespace(context_len=CONTEXT),
            dtype=torch.float32,
        )
        self.backend: HeadPageAttnBackend = backend(runner, *options)
        self.made: dict[int, Tensor] = {}
        self.received: dict[Any, dict[tuple[int, int], Tensor]] = {}  # by position
        self.forwards = self.scored = 0

    def keys_and_values(self, req: Req, position: int) -> Tensor:
        """``[2, LAYERS, HEADS, DIM]``; some are beyond what 8 bits can say."""
        digest = self._digest(req, position)
        if digest not in self.made:
            random = torch.Generator().manual_seed(digest)
            kv = self.made[digest] = torch.randn((2, LAYERS, HEADS, DIM), generator=random)
            kv[1] *= 3
            kv[:, ..., -1] *= 1e6
        return self.made[digest]

    def given_back(self, kv: Tensor) -> Tensor:
        """What pages make of ``[tokens, 2, LAYERS, HEADS, DIM]``, in fp32."""
        if self.pool.dtype not in FP8_DTYPES:
            return kv.to(self.pool.dtype).float()
        largest = torch.finfo(self.pool.dtype).max
        scales = torch.tensor(SCALES).T[..., None, None]
        return (kv / scales).clamp(-largest, largest).to(self.pool.dtype).float() * scales

    def _score(self, req: Req, start: int, target: int) -> None:
        """In place of made-up attention: the backend's forward."""
        count, batch = target - start, batch_of(req, start, target)
        kv = torch.stack([self.keys_and_values(req, p) for p in range(start, target)])
        q = torch.randn(count, LAYERS, HEADS * GROUP, DIM)
        q[..., -1] *= 1e-3
        held = range(max(map(max, self.kept[req.sglang_kv].values())) + 1)
        memory = self.given_back(torch.stack([self.keys_and_values(req, p) for p in held]))
        self.backend.init_forward_metadata(batch)
        for index, layer in enumerate(self.layers):
            rows = [t[:, index].reshape(count, -1) for t in (q, kv[:, 0], kv[:, 1])]
            out = self.backend.forward_decode(*rows, layer, batch)
            want = [self.expected(req, (index, h), q[:, index], memory) for h in range(HEADS)]
            close(out.view(count, HEADS, GROUP, DIM), torch.stack(want, 1))
        self.forwards += 1

    def expected(self, req: Req, stream: tuple[int, int], q: Tensor, memory: Tensor) -> Tensor:
        """Attention of the new tokens in one stream, ``[tokens, GROUP, DIM]``; checks scores."""
        state, (layer, head) = req.sglang_kv, stream
        positions = self.kept[state][stream]
        desc = torch.from_numpy(self.ledger.streams.desc[state.slot][stream])
        mask = visible_mask(len(q), desc, PAGE)
        k, v = memory[positions, :, layer, head].unbind(1)
        queries = q[:, head * GROUP : (head + 1) * GROUP]
        logits = torch.einsum("qgd,kd->gqk", queries, k) * DIM**-0.5
        if isinstance(state.plan, WindowPlan) and state.plan.cache_positions:
            seen = self.seen_by_sinks(queries, req.extend_end - len(q), state.policy.parameters)
            of_sinks = torch.einsum("qgd,kd->gqk", seen, k) * DIM**-0.5
            is_sink = torch.tensor(positions) < state.policy.parameters["sinks"]
            logits = torch.where(is_sink, of_sinks, logits)
        weights = logits.masked_fill(~mask, -math.inf).softmax(-1)
        self.check_scores(state, stream, positions, weights)
        return torch.einsum("gqk,kd->qgd", weights, v)

    def seen_by_sinks(self, q: Tensor, start: int, parameters: dict[str, Any]) -> Tensor:
        """Queries from ``start`` on as the paper's sinks see them: at most one window away."""
        t = torch.arange(start, start + len(q))
        back = (t - parameters["sinks"] - parameters["recent"]).clamp(min=0)
        angles = back[:, None] / 10000 ** (torch.arange(0, ROTATED, 2) / ROTATED)
        return reference.turned(q, torch.cat((angles.cos(), -angles.sin()), -1)[:, None])

    def check_scores(
        self, state: Any, stream: tuple[int, int], positions: list[int], weights: Tensor
    ) -> None:
        passed = self.backend._scored  # noqa: SLF001
        if passed is None or state.score_slot < 0:
            self.received.pop(state, None)
            return
        known = self.received.setdefault(state, {}).setdefault(stream, torch.zeros(CONTEXT))
        first = int(passed.first_query[0])
        known[positions] += weights[:, first:].sum((0, 1))
        got = self.ledger.folder.scores.values[state.score_slot][stream][: len(positions)]
        torch.testing.assert_close(got, known[positions], atol=1e-3, rtol=1e-3)
        self.scored += 1


def close(got: Tensor, want: Tensor) -> None:
    """Equal, beside the largest number of each dimension."""
    assert got.isfinite().all()
    top = want.abs().flatten(0, -2).amax(0) + 1
    torch.testing.assert_close(got / top, want / top, atol=3e-4, rtol=0)
