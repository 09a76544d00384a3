"""Which part of a step a sampled stack belongs to."""

from __future__ import annotations

import pytest

from sglang_kv.benchmarks.step_time import part_of, shares

MODEL = "run_batch (scheduler.py);forward (model_runner.py);forward (llama.py)"


@pytest.mark.parametrize(
    ("inner", "part"),
    [
        ("forward (radix_attention.py);_attend (backend.py)", "attention"),
        ("forward (radix_attention.py);_attend (backend.py);append (transfer.py)", "KV append"),
        ("forward (linear.py);apply (unquant.py)", "linear layers"),
        ("forward (layernorm.py)", "norm, rotary, activation"),
        ("forward (vocab_parallel_embedding.py)", "rest of the model"),
    ],
)
def test_innermost_known_frame_decides(inner: str, part: str) -> None:
    assert part_of(f"{MODEL};{inner}") == part


def test_shares_are_of_all_samples() -> None:
    found = shares([f"{MODEL};apply (unquant.py) 3", "main (x.py) 1"])
    assert found == {"linear layers": 0.75, "other": 0.25}


def test_no_sample_is_an_error() -> None:
    with pytest.raises(SystemExit, match="no samples"):
        shares([])
