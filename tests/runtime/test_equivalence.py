"""What the server computes, against two things that are not ours: stock SGLang, and the
model in transformers with the paper's mask."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import policy_attention
import pytest
import torch
from serving import NONE, STREAMING, chat
from warm import WarmServer

from sglang_kv.benchmarks.server import HTTPError, Server
from sglang_kv.compression.gates import find_gates

pytestmark = pytest.mark.server

LENGTHS = [1, 2, 15, 16, 17, 31, 33, 64, 100, 127, 128, 200, 300, 511, 640, 777, 1025, 2050]
LONGEST = 4500  # three chunks
NEW_TOKENS = 8
FLAGS = [
    *("--max-total-tokens", "16000", "--max-running-requests", "8", "--context-length", "8192"),
    *("--page-size", "16", "--chunked-prefill-size", "2048", "--sleep-on-idle"),
]
QUIET = {"OMP_WAIT_POLICY": "PASSIVE"}  # idle threads leave the cores to the oracle
STOCK = ["--attention-backend", "torch_native"]
OURS = ["--kv-compression", "none", "--disable-radix-cache"]
CAPITAL = "The capital of France is"


@pytest.fixture(scope="module")
def prompts(text_ids: list[int]) -> list[list[int]]:
    """Prose and noise of 19 lengths, around the edges of pages and chunks."""
    rng = random.Random(0)
    noise = [[rng.randrange(100, 40000) for _ in range(n)] for n in LENGTHS[::2]]
    prose = [text_ids[n : 2 * n] for n in LENGTHS[1::2]]
    return [*noise, *prose, (text_ids * 2)[:LONGEST]]


def answers(server: Server, prompts: list[list[int]]) -> list[Any]:
    """Logprobs of prompt and greedy output, one request at a time: equal batch shapes."""
    return [
        server.generate(
            prompt,
            max_new_tokens=NEW_TOKENS,
            ignore_eos=True,
            return_logprob=True,
            logprob_start_len=0,
        )
        for prompt in prompts
    ]


def logprobs(answer: Any) -> torch.Tensor:
    meta = answer["meta_info"]
    pairs = [*meta["input_token_logprobs"][1:], *meta["output_token_logprobs"]]
    return torch.tensor([pair[0] for pair in pairs])


@dataclass
class Stock:
    """What a server without the flag logged and said, in fp32.

    Its prefix cache is on, but prompts whose logprobs are asked for are computed whole.
    """

    log: str
    answers: list[Any]
    capital: Any
    chat: Any
    asked_for_a_policy: list[str]


def said(send: Callable[[], Any]) -> str:
    """Status and body of an error; or that there was none."""
    try:
        return f"200 {send()}"
    except HTTPError as error:
        return f"{error.status} {error.body}"


@pytest.fixture(scope="module")
def stock(demo_model: Path, prompts: list[list[int]]) -> Stock:
    with WarmServer(demo_model, *FLAGS, *STOCK, "--dtype", "float32", env=QUIET) as server:
        return Stock(
            answers=answers(server, prompts),
            capital=server.generate(CAPITAL, max_new_tokens=2),
            chat=chat(server, CAPITAL),
            asked_for_a_policy=[
                said(lambda: server.generate(CAPITAL, NONE)),
                said(lambda: server.generate(CAPITAL, STREAMING)),
                said(lambda: chat(server, CAPITAL, STREAMING)),
            ],
            log=server.log,
        )


@pytest.fixture(scope="module")
def stock_fp32(stock: Stock) -> list[Any]:
    return stock.answers


@pytest.fixture(scope="module")
def reference(demo_model: Path) -> Any:
    """The model in transformers."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32)


@pytest.fixture(scope="module")
def ours_fp32(demo_model: Path) -> Any:
    with WarmServer(demo_model, *FLAGS, *OURS, "--dtype", "float32", env=QUIET) as server:
        assert "impl=HeadPageRadixCache" in server.log
        yield server


def test_without_the_flag_the_server_is_stock(stock: Stock) -> None:
    found = re.search(r"Tree cache initialized: .*impl=(\w+)", stock.log)
    assert found is not None
    assert "HeadPage" not in found[1]
    assert "Paris" in stock.capital["text"]
    assert "kv_compression" not in stock.capital["meta_info"]
    assert "sglext" not in stock.chat


def test_without_the_flag_a_policy_is_refused(stock: Stock) -> None:
    """Served anyway, the client would take full attention for compressed."""
    assert len(stock.asked_for_a_policy) == 3
    for answer in stock.asked_for_a_policy:
        assert answer.startswith("400 "), answer
        assert "this server was started without --kv-compression" in answer


def test_none_equals_stock(
    stock_fp32: list[Any], ours_fp32: Server, prompts: list[list[int]]
) -> None:
    for stock, ours in zip(stock_fp32, answers(ours_fp32, prompts), strict=True):
        assert ours["meta_info"]["kv_compression"]["method"] == "none"
        torch.testing.assert_close(logprobs(ours), logprobs(stock), atol=2e-3, rtol=0)
        assert ours["output_ids"] == stock["output_ids"]


@pytest.mark.parametrize(
    ("sinks", "recent", "length"), [(4, 252, 2400), (0, 40, 300), (4, 1020, 900)]
)
def test_streamingllm_equals_the_papers_mask(
    ours_fp32: Server, reference: Any, text_ids: list[int], sinks: int, recent: int, length: int
) -> None:
    """Within chunks, across them and in decode, a query sees sinks, window and itself.

    At original positions; those in the cache are test_long_streams.py's.
    """
    prompt = text_ids[:length]
    answer = ours_fp32.generate(
        prompt,
        {"method": "streamingllm", "sinks": sinks, "recent": recent, "positions": "original"},
        max_new_tokens=40,
        ignore_eos=True,
        return_logprob=True,
        logprob_start_len=0,
    )
    ids = torch.tensor([prompt + answer["output_ids"]])
    position = torch.arange(ids.shape[1])
    seen = (position <= position[:, None]) & (
        (position < sinks) | (position >= position[:, None] - recent)
    )
    mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    with torch.no_grad():
        logits = reference(ids, attention_mask=mask[None, None]).logits[0]
    expected = logits.log_softmax(-1)[:-1].gather(1, ids[0, 1:, None])[:, 0]
    torch.testing.assert_close(logprobs(answer), expected, atol=2e-3, rtol=0)
    report = answer["meta_info"]["kv_compression"]
    assert report["kept_tokens"] == min(sinks + recent, report["logical_tokens"])


LAYERS = 30
SNAPKV = {"method": "snapkv", "window": 16, "kernel_size": 7, "budget": 150}
PYRAMIDKV = {**SNAPKV, "method": "pyramidkv", "beta": 5}
H2O = {"method": "h2o", "heavy": 60, "recent": 40, "interval": 8}
DUO = {"method": "duoattention", "sinks": 16, "recent": 64, "sparsity": 0.4}


def oracle_of(policy: dict[str, Any], fold_at: int, demo_model: Path) -> policy_attention.Seen:
    if policy["method"] == "h2o":
        return policy_attention.h2o(fold_at, policy["heavy"], policy["recent"], policy["interval"])
    if policy["method"] == "duoattention":
        gates = find_gates(str(demo_model), LAYERS, 3)
        assert gates is not None
        order = gates.values.flatten().argsort(kind="stable")
        retrieval = torch.ones(gates.values.size, dtype=torch.bool)
        retrieval[order[: round(policy["sparsity"] * len(order))].tolist()] = False
        retrieval = retrieval.view(LAYERS, 3)
        return policy_attention.heads(retrieval, policy["sinks"], policy["recent"])
    window, budget = policy["window"], policy["budget"]
    budgets = [budget] * LAYERS
    if policy["method"] == "pyramidkv":
        budgets = policy_attention.pyramid(LAYERS, budget, window, policy["beta"])
    return policy_attention.one_shot(fold_at, window, policy["kernel_size"], "avg", budgets)


@pytest.mark.parametrize("policy", [SNAPKV, PYRAMIDKV, H2O, DUO], ids=lambda p: p["method"])
@pytest.mark.parametrize("fold_at", [None, 611])
def test_methods_equal_their_oracle(
    ours_fp32: Server,
    demo_model: Path,
    text_ids: list[int],
    policy: dict[str, Any],
    fold_at: int | None,
) -> None:
    """The whole server against the model in transformers, with the oracle's choice as its mask."""
    length = 700
    if fold_at is not None and policy["method"] == "duoattention":
        pytest.skip("its fold_at is that of streamingllm")
    answer = ours_fp32.generate(
        text_ids[:length],
        policy if fold_at is None else {**policy, "fold_at": fold_at},
        max_new_tokens=40,
        ignore_eos=True,
        return_logprob=True,
        logprob_start_len=0,
    )
    ids = text_ids[:length] + answer["output_ids"]
    expected = policy_attention.logprobs(
        demo_model, ids, oracle_of(policy, fold_at or length, demo_model)
    )
    torch.testing.assert_close(logprobs(answer), expected, atol=2e-3, rtol=0)
    assert answer["meta_info"]["kv_compression"]["freed_bytes"] > 0


@pytest.mark.slow
def test_bf16_is_as_close_to_fp32_as_stock_is(
    stock_fp32: list[Any], demo_model: Path, prompts: list[list[int]]
) -> None:
    def distance(*flags: str) -> float:
        with WarmServer(demo_model, *FLAGS, *flags, "--dtype", "bfloat16", env=QUIET) as server:
            got = answers(server, prompts)
        gaps = []
        for ours, exact in zip(got, stock_fp32, strict=True):
            # After the first token the texts may differ; the prompt's logprobs never do.
            count = len(exact["meta_info"]["input_token_logprobs"]) - 1
            gaps.append((logprobs(ours)[:count] - logprobs(exact)[:count]).abs())
        return float(torch.cat(gaps).mean())

    assert distance(*OURS) <= 1.1 * distance(*STOCK)
