"""What a policy keeps of scores alone: its plan's counts, its own choice, no engine."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sglang_kv.compression import FoldPlan, Geometry, Plan, parse_policy
from sglang_kv.compression.base import Candidates


def kept_by(policy: dict[str, Any], scores: Tensor, page_size: int, layers: int = 1) -> Any:
    """What a policy keeps of a prompt: its plan's counts, its own choice. Per layer and head."""
    heads, tokens = scores.shape[-2:]
    parsed = parse_policy(policy)
    plan = parsed.plan(tokens, Geometry(layers, heads, page_size))
    everything = [[list(range(tokens))] * heads] * layers
    if type(plan) is Plan:
        return everything
    assert isinstance(plan, FoldPlan)
    assert plan.kept is not None
    assert plan.policy is not None
    shape = (layers, heads)
    candidates = Candidates(
        scores=scores.expand(layers, heads, tokens),
        lengths=torch.full(shape, tokens),
        kept=torch.from_numpy(plan.kept),
        positions=None,
        num_tokens=tokens,
        score_from=plan.score_from,
        page_size=page_size,
        weights=torch.ones(shape),
    )
    before = [t.clone() if isinstance(t, Tensor) else t for t in candidates]
    mask = plan.policy.choose(candidates)
    for old, new in zip(before, candidates, strict=True):
        assert torch.equal(old, new) if isinstance(old, Tensor) else old == new
    if plan.adaptive:  # a layer's total is fixed; how its heads share it, the scores say
        assert (mask.sum((-2, -1)) == candidates.kept.sum(-1)).all() or tokens % page_size
    else:
        assert torch.equal(mask.sum(-1), candidates.kept)
    return [[head.nonzero().flatten().tolist() for head in layer] for layer in mask]
