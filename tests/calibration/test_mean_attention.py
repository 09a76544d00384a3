"""The cross-check: mean heads without rotation, and how far back they look."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from sglang_kv.calibration import mean_attention
from sglang_kv.calibration.attention import UnsupportedModelError
from sglang_kv.calibration.passkey import Passkey


def test_means_are_those_of_the_projections(model: Any, sample: Passkey) -> None:
    """The rotation is taken back: what is left is what q_proj and k_proj gave."""
    wanted: list[torch.Tensor] = []
    hooks = [
        getattr(layer.self_attn, name).register_forward_hook(
            lambda _module, _args, out: wanted.append(out[0].mean(0).unflatten(0, (-1, 8)))
        )
        for layer in model.model.layers
        for name in ("q_proj", "k_proj")
    ]
    try:
        found = mean_attention.mean_heads(model, sample)
    finally:
        for hook in hooks:
            hook.remove()
    layers = [torch.cat(wanted[i : i + 2]) for i in (0, 2, 4)]
    np.testing.assert_allclose(found, torch.stack(layers).numpy(), atol=1e-4)
    assert found.shape == (3, 6 + 2, 8)


def test_scores_are_the_mean_cumulative_attention(model: Any) -> None:
    torch.manual_seed(0)
    queries, keys = torch.randn(3, 6, 8), torch.randn(3, 2, 8)
    scores = mean_attention.looks_back(model, queries, keys)
    cos, sin = (part[0] for part in mean_attention.rotation(model, mean_attention.POSITIONS))

    def rotated(x: torch.Tensor, at: int) -> torch.Tensor:
        turned = torch.cat([-x[4:], x[:4]])
        return x * cos[at] + turned * sin[at]

    for layer, head in ((0, 0), (1, 4), (2, 5)):
        last = rotated(queries[layer, head], 499)
        logits = torch.stack([rotated(keys[layer, head // 3], p) @ last for p in range(500)])
        weights = (logits * 8**-0.5).softmax(0)
        assert scores[layer, head] == pytest.approx(float(weights.cumsum(0).mean()), abs=1e-5)


def test_looking_back_scores_high(model: Any) -> None:
    """Without a preference the mean of a cumulative sum is one half."""
    nothing = torch.zeros(3, 6, 8), torch.zeros(3, 2, 8)
    np.testing.assert_allclose(mean_attention.looks_back(model, *nothing), 0.501, atol=1e-3)
    with pytest.raises(ValueError, match="at least one sample"):
        mean_attention.calibrate(model, [])


def test_gates_average_samples_and_groups(model: Any, sample: Passkey) -> None:
    gates = mean_attention.calibrate(model, [sample, sample])
    means = torch.from_numpy(mean_attention.mean_heads(model, sample))
    scores = mean_attention.looks_back(model, means[:, :6], means[:, 6:])
    np.testing.assert_allclose(gates, scores.reshape(3, 2, 3).mean(-1), atol=1e-5)
    assert 0 < gates.min() <= gates.max() < 1


def test_a_model_without_rotation_is_refused() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=96, n_embd=16, n_layer=1, n_head=2)).eval()
    with pytest.raises(UnsupportedModelError, match="gpt2: no rotary embedding"):
        mean_attention.rotation(model, 4)
