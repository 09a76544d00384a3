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
from serving import PAGE_BYTES, PAGE_TOKENS, STREAMS
from short_model import LONGER, shortened
from warm import WarmServer

from sglang_kv.benchmarks.server import Server, generate_body
from sglang_kv.compression import method_names

pytestmark = pytest.mark.server

TOKENS = 6000
#: Positions that the model of one test is told to know; its longest other request fits.
TRAINED = 384
FLAGS = [
    *("--kv-compression", "none", "--dtype", "float32", "--context-length", "2048"),
    *("--max-total-tokens", str(TOKENS), "--chunked-prefill-size", "256"),
    *("--max-running-requests", "8", "--sleep-on-idle"),
]
FLASHINFER = ["--attention-backend", "sglang_kv_flashinfer"]
ENV = {"OMP_WAIT_POLICY": "PASSIVE"}
#: Metrics of the KV memory: its pages, and their bytes.
POOL = ("head_pages_total", "kv_bytes_total")
#: Logprobs nearer than this are a tie, between paths whose attention is compared to 1e-4.
TIE = 1e-3
METHODS = method_names()
#: Each method at least twice.
MIXED = max(12, 2 * len(METHODS))


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
        policy = small[METHODS[i % len(METHODS)]] if i < MIXED else random_policy(rng)
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


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8_e4m3"])
def test_every_layer_is_the_cpp_paths(
    demo_model: Path, text_ids: list[int], tmp_path: Path, kv_dtype: str
) -> None:
    """With pages of the model's own dtype, fp32, and of 8 bits; one request goes past the
    positions that the model knows."""
    model = shortened(demo_model, tmp_path / demo_model.name, TRAINED)  # gates go by its name
    bodies = requests(text_ids, MIXED, longest=300, new_tokens=14)
    past = {"method": "streamingllm", "sinks": 4, "recent": 60}
    bodies.append(generate_body(text_ids[:600], past, max_new_tokens=14, ignore_eos=True))
    env = environment(tmp_path / "plugin", check=True) | LONGER
    flags = [*FLAGS, *FLASHINFER, "--kv-cache-dtype", kv_dtype, "--enable-metrics"]
    with WarmServer(model, *flags, env=env) as server:
        got = answers(server, bodies)
        pages, total = (server.metric(f"sglang_kv:{name}") for name in POOL)
        for body, answer in zip(bodies, got, strict=True):
            asked = body["sampling_params"]["custom_params"]["kv_compression"]["method"]
            assert answer["meta_info"]["kv_compression"]["method"] == asked
            assert len(answer["output_ids"]) == 14
        log = server.log
    assert pages * PAGE_TOKENS >= TOKENS * STREAMS
    assert total / pages == PAGE_BYTES * {"auto": 2.0, "fp8_e4m3": 0.5}[kv_dtype]
    assert "attention by FlashInfer" in log
    checked = re.findall(r"path checked: \{'layers': (\d+), 'decode': (\d+), 'extend': (\d+)", log)
    assert max(int(n) for n, _, _ in checked) > 30
    assert max(int(n) for _, n, _ in checked) >= 10, "too few decode steps went that way"
    assert sum(a["meta_info"]["kv_compression"]["freed_bytes"] > 0 for a in got) >= 6
    moved = got[-1]["meta_info"]["kv_compression"]
    assert moved["parameters"]["positions"] == "cache"
    assert moved["logical_tokens"] == 613 > TRAINED
    assert moved["kept_tokens"] == 64


def gap_where_they_part(got: Any, expected: Any) -> float | None:
    """How far apart ``expected``'s two likeliest tokens were, in logprobs, where ``got`` has
    another token for the first time; None where it has none."""
    pairs = zip(got["output_ids"], expected["output_ids"], strict=True)
    for i, (token, wanted) in enumerate(pairs):
        if token != wanted:
            first, second = expected["meta_info"]["output_top_logprobs"][i]
            return float(first[0] - second[0])
    return None


@pytest.mark.slow
def test_fifty_requests_get_the_cpp_paths_tokens(
    demo_model: Path, text_ids: list[int], tmp_path: Path
) -> None:
    """The same tokens; but a tie may fall either way, since the two round differently."""
    bodies = requests(text_ids, 50, longest=200, new_tokens=12)
    for body in bodies:
        body |= {"return_logprob": True, "top_logprobs_num": 2}
    with WarmServer(demo_model, *FLAGS, env=ENV) as server:
        assert "attention by C++" in server.log
        expected = answers(server, bodies)
    env = environment(tmp_path, check=False)
    with WarmServer(demo_model, *FLAGS, *FLASHINFER, env=env) as server:
        assert "attention by FlashInfer" in server.log
        got = answers(server, bodies)
    gaps = {i: gap_where_they_part(*pair) for i, pair in enumerate(zip(got, expected, strict=True))}
    parted = {i: gap for i, gap in gaps.items() if gap is not None}
    assert all(gap < TIE for gap in parted.values()), parted
    assert len(parted) <= 2, parted
