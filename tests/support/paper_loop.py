"""StreamingLLM as its paper's code runs it: one token at a time, keys before RoPE in the cache,
all of them rotated at each step by their index in the cache, eviction after the step."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

#: (heads [n, heads, head_dim], positions [n]) -> rotated heads
Rope = Callable[[Tensor, Tensor], Tensor]


class RollingCache:
    """Keys before RoPE and values of one layer, each [kv_heads, tokens, head_dim]."""

    def __init__(self, sinks: int, recent: int):
        self.sinks, self.recent = sinks, recent
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def attend(self, q: Tensor, k: Tensor, v: Tensor, rope: Rope, scale: float) -> Tensor:
        """One token's query [heads, head_dim] against the cache and itself."""
        self.keys.append(k)
        self.values.append(v)
        keys, values = torch.stack(self.keys), torch.stack(self.values)  # [tokens, kv_heads, dim]
        index = torch.arange(len(keys))
        keys = rope(keys, index)
        query = rope(q[None], index[-1:])[0].view(keys.shape[1], -1, q.shape[-1])
        weights = (torch.einsum("hgd,thd->hgt", query, keys) * scale).softmax(-1)
        out = torch.einsum("hgt,thd->hgd", weights, values).reshape(q.shape)
        if len(self.keys) > self.sinks + self.recent:
            del self.keys[self.sinks], self.values[self.sinks]
        return out


def llama_logprobs(model: Any, ids: Sequence[int], sinks: int, recent: int) -> list[float]:
    """Log probability of each token but the first, of a transformers Llama in fp32."""
    layers, config = model.model.layers, model.config
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    dim = config.hidden_size // heads
    caches = [RollingCache(sinks, recent) for _ in layers]
    found = []

    def rope(x: Tensor, positions: Tensor) -> Tensor:
        cos, sin = model.model.rotary_emb(x[None], positions[None])
        cos, sin = cos[0, :, None], sin[0, :, None]
        half = torch.cat((-x[..., dim // 2 :], x[..., : dim // 2]), dim=-1)
        return x * cos + half * sin

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # one token at a time: threads would wait for each other
    with torch.inference_mode():
        for token, following in itertools.pairwise(ids):
            x = model.model.embed_tokens(torch.tensor([token]))
            for layer, cache in zip(layers, caches, strict=True):
                y, attention = layer.input_layernorm(x), layer.self_attn
                q = attention.q_proj(y).view(heads, dim)
                k, v = (p(y).view(kv_heads, dim) for p in (attention.k_proj, attention.v_proj))
                out = cache.attend(q, k, v, rope, dim**-0.5)
                x = x + attention.o_proj(out.reshape(1, -1))
                x = x + layer.mlp(layer.post_attention_layernorm(x))
            logits = model.lm_head(model.model.norm(x))[0]
            found.append(float(logits.log_softmax(-1)[following]))
    torch.set_num_threads(threads)
    return found
