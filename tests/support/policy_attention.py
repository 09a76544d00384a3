"""A model in transformers whose attention drops what a policy drops: the oracle of a whole server.

One forward over prompt and answer. Every layer computes the rows before the fold with full
attention, asks the oracle what each KV head keeps, and lets later rows see no more than that.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from oracles import best, pyramid_budgets, snapkv_kept
from torch import Tensor

#: ``(layer, q, k) -> bool [kv_heads, tokens, tokens]``: what each row of each KV head sees.
Seen = Callable[[int, Tensor, Tensor], Tensor]


def logprobs(model_path: Any, ids: list[int], seen: Seen) -> Tensor:
    """Log-probability of each token after the first, fp32."""
    from transformers import AttentionInterface

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        group = query.shape[1] // key.shape[1]
        allowed = seen(module.layer_idx, query[0], key[0]).repeat_interleave(group, 0)
        k, v = (t[0].repeat_interleave(group, 0) for t in (key, value))
        logits = query[0] @ k.mT / math.sqrt(query.shape[-1])
        weights = logits.masked_fill(~allowed, -math.inf).softmax(-1)
        return (weights @ v).transpose(0, 1)[None], None

    AttentionInterface.register("policy", attend)
    tokens = torch.tensor([ids])
    with torch.no_grad():
        out = _model(model_path)(tokens).logits[0]
    return out.log_softmax(-1)[:-1].gather(1, tokens[0, 1:, None])[:, 0]


@functools.lru_cache(maxsize=1)
def _model(path: Any) -> Any:
    """It looks up its attention by name, anew in each forward."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="policy"
    )


def causal(count: int) -> Tensor:
    return torch.ones(count, count, dtype=torch.bool).tril()


def one_shot(fold_at: int, window: int, kernel: int, pooling: str, budgets: list[int]) -> Seen:
    """SnapKV, and PyramidKV with its budgets per layer."""

    def seen(layer: int, q: Tensor, k: Tensor) -> Tensor:
        kept = snapkv_kept(
            q[:, fold_at - window : fold_at],
            k[:, :fold_at],
            window,
            kernel,
            pooling,
            budgets[layer],
        )
        mask = causal(q.shape[1]).repeat(len(k), 1, 1)
        for head, positions in enumerate(kept):
            dropped = torch.ones(fold_at, dtype=torch.bool)
            dropped[positions] = False
            mask[head, fold_at:, :fold_at] &= ~dropped
        return mask

    return seen


def pyramid(layers: int, budget: int, window: int, beta: int) -> list[int]:
    """The line's budgets, by largest remainder."""
    line = pyramid_budgets(layers, budget - window, beta=beta)
    whole = [math.floor(x) for x in line]
    rest = layers * (budget - window) - sum(whole)
    for i in sorted(range(layers), key=lambda i: (whole[i] - line[i], i))[:rest]:
        whole[i] += 1
    return [window + n for n in whole]


def h2o(fold_at: int, heavy: int, recent: int, interval: int) -> Seen:
    """Row by row: attend, add up, and every ``interval`` rows drop."""

    def seen(layer: int, q: Tensor, k: Tensor) -> Tensor:
        count, group = q.shape[1], q.shape[0] // k.shape[0]
        mask = causal(count).repeat(len(k), 1, 1)
        for head, keys in enumerate(k):
            members = q[head * group : (head + 1) * group]
            logits = members @ keys.T / math.sqrt(q.shape[-1])
            prompt = logits[:, :fold_at, :fold_at].masked_fill(~causal(fold_at), -math.inf)
            score = torch.zeros(count)
            score[:fold_at] = prompt.softmax(-1).sum((0, 1))
            kept = list(range(fold_at))
            for now in range(fold_at, count):
                if (now - fold_at) % interval == 0 and len(kept) > heavy + recent:
                    old = kept[:-recent]
                    kept = [*(old[i] for i in best(score[old], heavy)), *kept[-recent:]]
                kept.append(now)
                row = torch.full((count,), -math.inf)
                row[kept] = 0.0
                mask[head, now] = row == 0.0
                score += (logits[:, now] + row).softmax(-1).sum(0)
        return mask

    return seen


def heads(retrieval: Tensor, sinks: int, recent: int) -> Seen:
    """DuoAttention: retrieval heads, bool ``[layers, kv_heads]``, see everything."""

    def seen(layer: int, q: Tensor, k: Tensor) -> Tensor:
        every = causal(q.shape[1])
        position = torch.arange(q.shape[1])
        window = every & ((position < sinks) | (position >= position[:, None] - recent))
        return torch.stack([every if full else window for full in retrieval[layer].tolist()])

    return seen
