"""A bad policy is refused with HTTP 400 and the parameter's name, and leaves nothing behind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from serving import (
    NONE,
    STREAMING,
    chat,
    chat_body,
    completion_body,
    eventually,
    ledger,
    noise,
    refusal,
    uses_server,
    words,
)

from sglang_kv.benchmarks.server import HTTPError, Server, generate_body

pytestmark = uses_server("small")

CAPITAL = "The capital of France is"
SIZES = ("sinks", "recent", "budget", "fold_at")
NOT_INTEGERS = (1.5, 256.0, True, "256", None, [256], {"tokens": 256}, 10**30)


def streaming(**parameters: Any) -> dict[str, Any]:
    return {"method": "streamingllm", **parameters}


@pytest.fixture(autouse=True)
def nothing_is_left_behind(server: Server) -> Iterator[None]:
    """After what a test did, the next request is served and no page more is in use."""
    before = ledger(server)["used_pages"]
    yield
    assert "Paris" in server.generate(CAPITAL, STREAMING, max_new_tokens=4)["text"]
    eventually(lambda: ledger(server)["used_pages"] == before)


# Each of the two routes' own way to refuse -----------------------------------------------------

#: What a client may get wrong, and how the message begins.
BAD: list[tuple[Any, str]] = [
    ({"method": "no_such_method"}, "kv_compression.method: unknown method 'no_such_method'"),
    ({"method": 7}, "kv_compression.method: unknown method 7"),
    ({"method": None}, "kv_compression.method: missing"),
    ({}, "kv_compression.method: missing"),
    ({"recent": 252}, "kv_compression.method: missing"),
    ("no_such_method", "kv_compression.method: unknown method 'no_such_method'"),
    (["streamingllm"], "kv_compression: expected an object"),
    (256, "kv_compression: expected an object"),
    (True, "kv_compression: expected an object"),
    (streaming(window=252), "kv_compression.window: unknown parameter"),
    ({"method": "none", "recent": 252}, "kv_compression.recent: unknown parameter"),
    (streaming(recent=0), "kv_compression.recent: must be at least 1, got 0"),
    (streaming(recent=-1), "kv_compression.recent: must be at least 1, got -1"),
    (streaming(recent=2.5), "kv_compression.recent: expected an integer, got float 2.5"),
    (streaming(recent="252"), "kv_compression.recent: expected an integer, got str '252'"),
    (streaming(recent=2**40), "kv_compression.recent: must be less than"),
    (streaming(sinks=-1), "kv_compression.sinks: must be at least 0, got -1"),
    (streaming(sinks=8, budget=8), "kv_compression.budget: 8 leaves no recent token"),
    (streaming(recent=252, budget=256), "kv_compression.budget: give either budget or recent"),
    # --kv-compression-min-keep 64
    (streaming(sinks=4, recent=59), "kv_compression: "),
    (streaming(budget=63), "kv_compression: "),
]


@pytest.mark.parametrize(("policy", "message"), BAD, ids=[str(policy) for policy, _ in BAD])
def test_generate_refuses(server: Server, policy: Any, message: str) -> None:
    assert refusal(lambda: server.generate(CAPITAL, policy)).startswith(message)


@pytest.mark.parametrize(("policy", "message"), BAD, ids=[str(policy) for policy, _ in BAD])
def test_chat_refuses(server: Server, policy: Any, message: str) -> None:
    assert refusal(lambda: chat(server, CAPITAL, policy)).startswith(message)


def test_completions_refuse(server: Server) -> None:
    body = completion_body(CAPITAL, {"method": "no_such_method"})
    assert "kv_compression.method" in refusal(lambda: server.post("/v1/completions", body))


@pytest.mark.parametrize("key", SIZES)
def test_a_size_is_an_integer(server: Server, key: str) -> None:
    for value in NOT_INTEGERS:
        message = refusal(lambda value=value: server.generate(CAPITAL, streaming(**{key: value})))
        assert message.startswith(f"kv_compression.{key}: expected an integer"), value


@pytest.mark.parametrize("key", SIZES)
def test_a_size_is_neither_negative_nor_huge(server: Server, key: str) -> None:
    for value in (-1, -(2**63), 2**31, 2**63):
        message = refusal(lambda value=value: server.generate(CAPITAL, streaming(**{key: value})))
        assert message.startswith(f"kv_compression.{key}: must be "), value


def test_the_least_that_may_be_kept_is_in_the_message(server: Server) -> None:
    message = refusal(lambda: server.generate(CAPITAL, streaming(budget=63)))
    assert "keeps 63 tokens" in message
    assert "--kv-compression-min-keep 64" in message


@pytest.mark.parametrize("params", [["kv_compression"], "kv_compression", 7], ids=str)
def test_custom_params_are_an_object(server: Server, params: Any) -> None:
    body = generate_body(CAPITAL)
    body["sampling_params"]["custom_params"] = params
    assert "custom_params" in refusal(lambda: server.post("/generate", body))


@pytest.mark.parametrize("policy", [None, {"method": "streamingllm", "recent": 100}])
def test_a_text_without_tokens_is_refused(server: Server, policy: dict[str, Any] | None) -> None:
    # SGLang itself lets it through, and its rotary embedding then takes the server down.
    for text in ("", [CAPITAL, ""]):
        body = {**generate_body(CAPITAL, policy), "text": text}
        assert "the prompt has no tokens" in refusal(
            lambda body=body: server.post("/generate", body)
        )


def test_beam_search_is_refused(server: Server) -> None:
    body = generate_body(CAPITAL)
    body["sampling_params"].update(beam_width=2, n=2)
    assert refusal(lambda: server.post("/generate", body)).startswith("beam_width: ")


def test_one_bad_policy_refuses_the_batch(server: Server) -> None:
    params = [generate_body(CAPITAL, policy)["sampling_params"] for policy in (NONE, {})]
    body = {"text": [CAPITAL] * 2, "sampling_params": params}
    assert "kv_compression.method" in refusal(lambda: server.post("/generate", body))


def test_a_stream_is_refused_at_its_start(server: Server) -> None:
    # SGLang's own way: an event on /generate, a status on the OpenAI routes.
    (event,) = server.stream("/generate", generate_body(CAPITAL, {"method": "no_such_method"}))
    assert event["error"]["code"] == 400
    assert "kv_compression.method" in event["error"]["message"]
    body = chat_body(CAPITAL, {"method": "no_such_method"})
    with pytest.raises(HTTPError, match=r"kv_compression\.method") as caught:
        next(server.stream("/v1/chat/completions", body))
    assert caught.value.status == 400


# Prompts that can never fit --------------------------------------------------------------------


@pytest.mark.parametrize("policy", [NONE, streaming(fold_at=3500)], ids=["none", "late fold"])
def test_a_prompt_beyond_the_memory_is_refused(server: Server, policy: Any) -> None:
    """4,000 tokens into memory for 2,992: at once, rather than after waiting for ever."""
    message = refusal(lambda: server.generate(noise(4000), policy))
    assert message.startswith("input_ids: the prompt of 4000 tokens needs ")
    assert "(2992 tokens)" in message


def test_chat_refuses_a_prompt_beyond_the_memory(server: Server) -> None:
    assert refusal(lambda: chat(server, words(4000), NONE)).startswith("input_ids: ")


def test_a_stream_tells_of_a_prompt_beyond_the_memory(server: Server) -> None:
    *_, event = server.stream("/v1/chat/completions", chat_body(words(4000), NONE))
    assert event["error"]["code"] == 400
    assert event["error"]["message"].startswith("input_ids: ")


def test_a_prompt_beyond_the_memory_refuses_its_batch(server: Server) -> None:
    body = {**generate_body("", NONE), "input_ids": [noise(10), noise(4000)]}
    del body["text"]
    assert refusal(lambda: server.post("/generate", body)).startswith("input_ids: ")
