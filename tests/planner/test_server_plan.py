"""The plan that a starting server logs, without a server."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_kv.compression import Geometry, parse_policy
from sglang_kv.compression.gates import find_gates
from sglang_kv.planner.find import find_model
from sglang_kv.planner.memory import Serving
from sglang_kv.planner.server import server_plan
from sglang_kv.planner.units import PlanError

DEMO = find_model("smollm2-135m-instruct")
GEOMETRY = Geometry(30, 3, 16, find_gates("SmolLM2-135M-Instruct", 30, 3))
#: What the tests' server allocates: 187 pages of 90 streams, 4 KiB each.
TOKENS, ALLOCATED = 2992, 187 * 90 * 4096


def plan(method: str = "none", prompt: int = 1000) -> Any:
    policy = parse_policy(method)
    return server_plan(
        DEMO,
        Serving(chunk=512),
        policy.plan(prompt, GEOMETRY),
        policy=method,
        pool_tokens=TOKENS,
        prompt=prompt,
    )


def test_the_line() -> None:
    assert plan().line == (
        "KV plan: 22.5 KiB per token, 65.74 MiB for 2,992 tokens. A request of 1,000 tokens with "
        "policy none takes 22.15 MiB, 22.15 MiB while it prefills; 2 fit at once"
    )
    assert plan("duoattention").line.endswith("3 fit at once")


def test_prediction_and_allocation_agree() -> None:
    assert plan().pool_bytes == ALLOCATED
    assert plan().warning(ALLOCATED) is None
    assert plan().warning(round(ALLOCATED * 1.009)) is None


def test_a_difference_is_a_warning() -> None:
    assert plan().warning(ALLOCATED * 2) == (
        "KV plan: 65.74 MiB predicted and 131.48 MiB allocated (+100.0%): `sglang-kv plan` does "
        "not hold for this server"
    )
    assert "(-2.0%)" in plan().warning(round(ALLOCATED * 0.98))


@pytest.mark.parametrize("name", ["deepseek-v3", "qwen3.8-27b"])
def test_models_that_keep_more_than_kv(name: str) -> None:
    with pytest.raises(PlanError, match=f"^{name}: keeps more than K and V"):
        server_plan(
            find_model(name),
            Serving(),
            parse_policy("none").plan(100, GEOMETRY),
            policy="none",
            pool_tokens=TOKENS,
            prompt=100,
        )


BF16 = "torch.bfloat16"


@pytest.mark.parametrize(
    ("allocated", "dtype", "config", "level", "text"),
    [
        (ALLOCATED, BF16, {}, "INFO", "KV plan: 22.5 KiB per token"),
        (2 * ALLOCATED, "torch.float32", {}, "INFO", "KV plan: 45 KiB per token"),
        (2 * ALLOCATED, BF16, {}, "WARNING", "predicted and 131.48 MiB allocated (+100.0%)"),
        (ALLOCATED, BF16, {"ssm_state_size": 16}, "INFO", "no KV plan: demo: config.json: llama:"),
    ],
)
def test_the_log(
    demo_model: Path,
    caplog: pytest.LogCaptureFixture,
    allocated: int,
    dtype: str,
    config: dict[str, Any],
    level: str,
    text: str,
) -> None:
    """A plan that cannot be made stops no server."""
    pytest.importorskip("sglang")
    from sglang_kv.capacity import log_plan

    held = json.loads((demo_model / "config.json").read_text()) | config
    pool: Any = SimpleNamespace(
        size=TOKENS,
        dtype=dtype,
        get_kv_size_bytes=lambda: (allocated // 2, allocated // 2),
    )
    ledger: Any = SimpleNamespace(page_size=16, geometry=GEOMETRY, chunk_tokens=512)
    model_config: Any = SimpleNamespace(
        context_len=8192,
        model_path="models/demo",
        hf_config=SimpleNamespace(to_dict=lambda: held),
    )
    with caplog.at_level(logging.INFO, logger="sglang_kv.capacity"):
        log_plan(ledger, pool, parse_policy("none"), model_config)
    last = caplog.records[-1]
    assert (last.levelname, text in last.getMessage()) == (level, True)
