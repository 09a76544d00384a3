"""Up to which position a model's rotary embedding was trained or scaled, by its configuration."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig

pytest.importorskip("sglang")

from cache_positions import plain_rotary
from sglang.srt.layers.rotary_embedding.factory import get_rope

from sglang_kv.rotary import TurnBack, trained_length

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0}


def config(positions: int, scaling: dict[str, Any] | None) -> Any:
    more = {} if scaling is None else {"rope_scaling": dict(scaling)}  # which transformers fills in
    return LlamaConfig(max_position_embeddings=positions, rope_theta=10000.0, **more)


@pytest.mark.parametrize(
    ("positions", "scaling", "length"),
    [
        (4096, None, 4096),
        (4096, {"rope_type": "linear", "factor": 2.0}, 8192),
        (131072, LLAMA3, 131072),
        # As Qwen's models are told to be scaled: transformers fills the original length in.
        (32768, YARN, 131072),
        (32768, {**YARN, "original_max_position_embeddings": 32768}, 131072),
        # As others ship: the config already says the scaled length, or even more.
        (131072, {**YARN, "original_max_position_embeddings": 32768}, 131072),
        (163840, {**YARN, "original_max_position_embeddings": 32768}, 163840),
    ],
)
def test_by_configuration(positions: int, scaling: dict[str, Any] | None, length: int) -> None:
    assert trained_length(config(positions, scaling)) == length


def test_sglangs_table_for_yarn_is_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that positions up to there can be turned back."""
    plain_rotary(monkeypatch)
    found = config(64, YARN)
    rope = get_rope(32, 32, 64, 10000, True, dict(found.rope_parameters), torch.float32)
    length = trained_length(found)
    assert length == 256
    assert len(TurnBack.of(rope, length).cos_sin) == length
