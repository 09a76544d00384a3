"""Past the trained length, through a server: the demo model, told that it knows 128 positions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from paper_loop import llama_logprobs
from serving import NONE, eventually, flush, ledger, refusal
from short_model import LONGER, shortened
from warm import WarmServer

from sglang_kv.benchmarks.server import Server

pytestmark = pytest.mark.server

TRAINED = 128
SCALING = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
POLICY = {"method": "streamingllm", "sinks": 4, "recent": 28}


@pytest.fixture(scope="module")
def short_model(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shortened(demo_model, tmp_path_factory.mktemp("short") / "model", TRAINED, SCALING)


@pytest.fixture(scope="module")
def server(short_model: Path) -> Iterator[Server]:
    flags = ["--kv-compression", "streamingllm", "--dtype", "float32", "--sleep-on-idle"]
    flags += ["--kv-compression-config", json.dumps({"sinks": 4, "recent": 28})]
    flags += ["--context-length", "4096", "--max-total-tokens", "2048"]
    flags += ["--chunked-prefill-size", "512"]
    env = {"OMP_WAIT_POLICY": "PASSIVE", **LONGER}
    with WarmServer(short_model, *flags, env=env) as running:
        yield running


def logprobs(answer: Any) -> torch.Tensor:
    meta = answer["meta_info"]
    pairs = [*meta["input_token_logprobs"][1:], *meta["output_token_logprobs"]]
    return torch.tensor([pair[0] for pair in pairs])


def test_the_papers_loop(server: Server, short_model: Path, text_ids: list[int]) -> None:
    """Prompt and answer, before, at and after positions move down."""
    answer = as_the_papers_loop(server, short_model, text_ids[:150], POLICY)
    report = answer["meta_info"]["kv_compression"]
    assert report["parameters"]["positions"] == "cache"
    assert report["logical_tokens"] == 150 + 59
    assert report["kept_tokens"] == 32


@pytest.mark.slow
@pytest.mark.parametrize(
    ("positions", "scaling", "sinks", "recent", "chunk"),
    [
        (TRAINED, None, 1, 63, 64),
        (TRAINED, SCALING, 4, 60, 32),
        (TRAINED // 4, {"rope_type": "linear", "factor": 4.0}, 2, 50, 48),
        (TRAINED // 4, {"rope_type": "yarn", "factor": 4.0}, 8, 40, 80),
    ],
)
def test_the_papers_loop_with_other_angles_and_sizes(
    demo_model: Path,
    tmp_path: Path,
    text_ids: list[int],
    positions: int,
    scaling: dict[str, Any] | None,
    sinks: int,
    recent: int,
    chunk: int,
) -> None:
    model = shortened(demo_model, tmp_path / "model", positions, scaling)
    flags = ["--kv-compression", "streamingllm", "--dtype", "float32", "--sleep-on-idle"]
    # The method's own default does not fit these positions, and warm-up asks for the server's.
    flags += ["--kv-compression-config", json.dumps({"sinks": sinks, "recent": recent})]
    flags += ["--context-length", "4096", "--max-total-tokens", "2048"]
    flags += ["--chunked-prefill-size", str(chunk)]
    policy = {"method": "streamingllm", "sinks": sinks, "recent": recent}
    with WarmServer(model, *flags, env={"OMP_WAIT_POLICY": "PASSIVE", **LONGER}) as running:
        as_the_papers_loop(running, model, text_ids[:150], policy)
        # The positions end where the test says they do.
        said = refusal(lambda: running.generate(text_ids[:300], NONE))
        assert f"exceeds the {TRAINED} positions" in said


def as_the_papers_loop(server: Server, model: Path, prompt: list[int], policy: Any) -> Any:
    """A prompt and 60 tokens more have the loop's log probabilities; returns the answer."""
    from transformers import AutoModelForCausalLM

    ask = {"max_new_tokens": 60, "ignore_eos": True, "return_logprob": True}
    answer = server.generate(prompt, policy, **ask, logprob_start_len=0)
    loop = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    ids = prompt + answer["output_ids"]
    expected = torch.tensor(llama_logprobs(loop, ids, policy["sinks"], policy["recent"]))
    torch.testing.assert_close(logprobs(answer), expected, atol=1e-3, rtol=0)
    return answer


def test_streams_of_any_length_side_by_side(server: Server, text_ids: list[int]) -> None:
    """Far past the trained length; memory is the window's, and comes back."""
    prompts = [text_ids[:1000], text_ids[500:1000], text_ids[:600]]
    policies = [POLICY, {**POLICY, "recent": 60}, POLICY]

    def ask(prompt: list[int], policy: dict[str, Any]) -> Any:
        return server.generate(prompt, policy, max_new_tokens=16, ignore_eos=True)

    with ThreadPoolExecutor() as threads:
        answers = list(threads.map(ask, prompts, policies))
    for answer, prompt, policy in zip(answers, prompts, policies, strict=True):
        report = answer["meta_info"]["kv_compression"]
        assert report["logical_tokens"] == len(prompt) + 15
        assert report["kept_tokens"] == 4 + int(policy["recent"])

    def nothing_is_held() -> bool:
        found = ledger(server)
        return bool(found["used_pages"] == found["evictable_pages"])

    eventually(nothing_is_held)


def test_who_keeps_original_positions_ends_at_the_trained_length(
    server: Server, text_ids: list[int]
) -> None:
    for policy in (NONE, {**POLICY, "positions": "original"}):
        said = refusal(lambda policy=policy: server.generate(text_ids[:300], policy))
        assert f"exceeds the {TRAINED} positions" in said
        answer = server.generate(text_ids[:100], policy, max_new_tokens=50, ignore_eos=True)
        assert answer["meta_info"]["completion_tokens"] == TRAINED - 100
    said = refusal(lambda: server.generate(text_ids[:10], {**POLICY, "recent": 110}))
    assert "kv_compression.recent" in said


def test_the_next_turn_computes_only_what_is_new(server: Server, text_ids: list[int]) -> None:
    """Warm as cold, past the trained length, to the third turn."""
    ids, known, answer = text_ids[:200], 0, 24
    flush(server)
    for turn in range(3):
        ask = {"max_new_tokens": answer, "ignore_eos": True, "return_logprob": True}
        warm = server.generate(ids, POLICY, **ask)
        cached = warm["meta_info"]["cached_tokens"]
        assert cached == known // 16 * 16
        if turn:
            flush(server)
            cold = server.generate(ids, POLICY, **ask)
            assert cold["meta_info"]["cached_tokens"] == 0
            assert cold["output_ids"] == warm["output_ids"]
            torch.testing.assert_close(logprobs(warm), logprobs(cold), atol=2e-3, rtol=0)
        known = len(ids) + answer - 1  # nobody has computed the last token
        ids = ids + warm["output_ids"] + text_ids[1000 * turn : 1000 * turn + 37]
