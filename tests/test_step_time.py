"""Which part of a step a sampled stack belongs to."""

from __future__ import annotations

import pytest

from sglang_kv.benchmarks.step_time import part_of, shares

MODEL = (
    "Scheduler.event_loop_overlap (scheduler.py:1);ModelRunner.forward (model_runner.py:2);"
    "LlamaAttention.forward (models/llama.py:3)"
)


@pytest.mark.parametrize(
    ("inner", "part"),
    [
        ("HeadPageAttnBackend._attend (sglang_kv/backend.py:115)", "attention"),
        ("HeadPageAttnBackend._attend (backend.py:1);append (kernels/transfer.py:9)", "KV append"),
        ("TorchNativeAttnBackend.forward_decode (torch_native_backend.py:3)", "attention"),
        ("UnquantizedLinearMethod.apply (quantization/unquant.py:12)", "linear layers"),
        ("wrapper (hook_registry.py:386);unquantized (sglang_kv/fused.py:9)", "linear layers"),
        ("unquantized (fused.py:9);linear (sglang_kv/kernels/linear.py:9)", "linear layers"),
        ("lm_head (sglang_kv/fused.py:9);linear (kernels/linear.py:9)", "lm head"),
        ("MergedColumnParallelLinear.forward (layers/linear.py:9)", "linear layers"),
        ("wrapper (hook_registry.py:386);rms_norm (fused.py:30)", "norm, rotary, activation"),
        ("VocabParallelEmbedding.forward (vocab_parallel_embedding.py:3)", "rest of the model"),
    ],
)
def test_innermost_known_frame_decides(inner: str, part: str) -> None:
    assert part_of(f"{MODEL};{inner}") == part


def test_shares_are_of_the_scheduler_thread() -> None:
    lines = [
        f"{MODEL};apply (unquant.py:1) 3",
        "event_loop_overlap (scheduler.py:4) 1",
        "x (y.py) 9",
    ]
    assert shares(lines) == ({"linear layers": 0.75, "scheduler": 0.25}, 4)


def test_no_sample_is_an_error() -> None:
    with pytest.raises(SystemExit, match="no samples"):
        shares(["x (y.py:1) 9"])
