"""The backend class that GPUs use, serving on a CPU: the ledger's copy on the device, FlashInfer's
arguments and their merging, with only FlashInfer's own calls replaced by an executor."""

from __future__ import annotations

import os
import random
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import executor_plugin
import pytest
from policies import all_variants, random_policy
from warm import WarmServer

from sglang_kv.benchmarks.server import Server, generate_body

pytestmark = pytest.mark.server

FLAGS = [
    *("--kv-compression", "none", "--dtype", "float32", "--context-length", "2048"),
    *("--max-total-tokens", "6000", "--chunked-prefill-size", "256"),
    *("--max-running-requests", "8", "--sleep-on-idle"),
]
FLASHINFER = ["--attention-backend", "sglang_kv_flashinfer"]
ENV = {"OMP_WAIT_POLICY": "PASSIVE"}
METHODS = ("none", "streamingllm", "h2o", "snapkv", "pyramidkv", "duoattention")


def environment(folder: Path, *, check: bool) -> dict[str, str]:
    found = executor_plugin.install(folder, check=check)["PYTHONPATH"]
    paths = [found, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**ENV, "PYTHONPATH": os.pathsep.join(paths)}


def requests(text: list[int], count: int, longest: int, new_tokens: int) -> list[dict[str, Any]]:
    """Mixed requests of all methods; the same for the same arguments."""
    rng = random.Random(count)
    small = {p.name: {"method": p.name, **_given(p)} for p in reversed(all_variants())}
    bodies = []
    for i in range(count):
        length = rng.choice([rng.randint(1, 40), rng.randint(40, longest), longest])
        start = rng.randrange(len(text) - length)
        policy = small[METHODS[i % 6]] if i < 12 else random_policy(rng)
        bodies.append(
            generate_body(
                text[start : start + length],
                policy,
                max_new_tokens=new_tokens,
                ignore_eos=True,
            )
        )
    return bodies


def _given(policy: Any) -> dict[str, Any]:
    default = type(policy)()
    return {k: v for k, v in policy.parameters.items() if v != getattr(default, k)}


def answers(server: Server, bodies: list[dict[str, Any]]) -> list[Any]:
    with ThreadPoolExecutor(6) as clients:
        return list(clients.map(lambda body: server.post("/generate", body), bodies))


def test_every_layer_is_the_cpp_paths(
    demo_model: Path, text_ids: list[int], tmp_path: Path
) -> None:
    bodies = requests(text_ids, 12, longest=300, new_tokens=20)
    env = environment(tmp_path, check=True)
    with WarmServer(demo_model, *FLAGS, *FLASHINFER, env=env, start_timeout_s=300) as server:
        got = answers(server, bodies)
        for body, answer in zip(bodies, got, strict=True):
            asked = body["sampling_params"]["custom_params"]["kv_compression"]["method"]
            assert answer["meta_info"]["kv_compression"]["method"] == asked
            assert len(answer["output_ids"]) == 20
        log = server.log
    assert "attention by FlashInfer" in log
    checked = re.findall(r"path checked: \{'layers': (\d+), 'decode': (\d+), 'extend': (\d+)", log)
    assert max(int(n) for n, _, _ in checked) > 30
    assert max(int(n) for _, n, _ in checked) >= 10, "too few decode steps went that way"
    assert sum(a["meta_info"]["kv_compression"]["freed_bytes"] > 0 for a in got) >= 6


@pytest.mark.slow
def test_fifty_requests_get_the_cpp_paths_tokens(
    demo_model: Path, text_ids: list[int], tmp_path: Path
) -> None:
    bodies = requests(text_ids, 50, longest=900, new_tokens=16)
    with WarmServer(demo_model, *FLAGS, env=ENV, start_timeout_s=300) as server:
        assert "attention by C++" in server.log
        expected = [a["output_ids"] for a in answers(server, bodies)]
    env = environment(tmp_path, check=False)
    with WarmServer(demo_model, *FLAGS, *FLASHINFER, env=env, start_timeout_s=300) as server:
        assert "attention by FlashInfer" in server.log
        assert [a["output_ids"] for a in answers(server, bodies)] == expected
