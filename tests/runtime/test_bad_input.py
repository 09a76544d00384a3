"""A bad policy is refused with HTTP 400 and the parameter's name, and leaves nothing behind."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from serving import (
    NONE,
    STREAMING,
    chat,
    chat_body,
    completion_body,
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


def snapkv(**parameters: Any) -> dict[str, Any]:
    return {"method": "snapkv", **parameters}


def pyramidkv(**parameters: Any) -> dict[str, Any]:
    return {"method": "pyramidkv", **parameters}


def counts(server: Server) -> dict[str, Any]:
    """The ledger without the spread of importance, a gauge that may be some seconds old."""
    found = ledger(server)
    del found["prefixes"]["importance"]
    return found


@pytest.fixture(scope="module", autouse=True)
def nothing_is_left_behind(server: Server) -> Iterator[None]:
    """After all that these tests did, the next request is served and nobody holds a page.

    What a refused request held, nothing could have taken from it since: one look at the end is
    enough.
    """
    yield
    assert "Paris" in server.generate(CAPITAL, STREAMING, max_new_tokens=4)["text"]
    now = ledger(server)
    assert not now["requests_by_policy"]
    assert now["used_pages"] == now["evictable_pages"]


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
    # --kv-compression-min-keep 32
    (streaming(sinks=4, recent=27), "kv_compression.recent: 'streamingllm' keeps 31 tokens, below"),
    (streaming(budget=31), "kv_compression.budget: 'streamingllm' keeps 31 tokens, below"),
    # What would do nothing.
    (snapkv(interval=64), "kv_compression.interval: has no effect without decode_budget"),
    (pyramidkv(beta=20, delta=8), "kv_compression.beta: give either beta or delta"),
    # One of each kind, for each method; tests/compression/test_bad_parameters.py has all of them.
    (snapkv(budget=31, window=8), "kv_compression.budget: 'snapkv' keeps 31 tokens, below"),
    (snapkv(budget=128, keep_ratio=0.5), "kv_compression.budget: give either budget or keep_rat"),
    (snapkv(kernel_size=4), "kv_compression.kernel_size: must be odd, got 4"),
    (snapkv(window=128, budget=128), "kv_compression.budget: 128 leaves no token beside window"),
    (snapkv(keep_ratio=-0.5), "kv_compression.keep_ratio: must be at least 0"),
    (snapkv(keep_ratio=True), "kv_compression.keep_ratio: expected a number, got bool True"),
    (snapkv(pooling=["avg"]), "kv_compression.pooling: must be one of avg, max, got ['avg']"),
    (snapkv(share="layer", head_budgets="gates"), "kv_compression.share: 'layer' gives all heads"),
    (pyramidkv(head_budgets="gates"), "kv_compression.head_budgets: 'gates' splits the whole"),
    (pyramidkv(budget=128, delta=1000), "kv_compression.delta: 1000 leaves the last layer less"),
    (pyramidkv(beta=0.9), "kv_compression.beta: must be at least 1"),
    (pyramidkv(beta=10**30), "kv_compression.beta: must be less than 2**31"),
    ({"method": "h2o", "budget": 128, "heavy": 64}, "kv_compression.budget: give either budget or"),
    ({"method": "h2o", "interval": 0}, "kv_compression.interval: must be at least 1, got 0"),
    ({"method": "h2o", "scores": "some"}, "kv_compression.scores: must be one of all, window, got"),
    ({"method": "duoattention", "sparsity": 1.5}, "kv_compression.sparsity: must be at most 1"),
    (
        {"method": "duoattention", "sparsity": 0.5, "threshold": 0.5},
        "kv_compression.threshold: give either sparsity or threshold",
    ),
    ({"method": "duoattention", "budget": 320}, "kv_compression.budget: unknown parameter"),
]


@pytest.mark.parametrize(("policy", "message"), BAD, ids=[str(policy) for policy, _ in BAD])
def test_generate_refuses(server: Server, policy: Any, message: str) -> None:
    before = counts(server)
    assert refusal(lambda: server.generate(CAPITAL, policy)).startswith(message)
    assert counts(server) == before


@pytest.mark.parametrize(("policy", "message"), BAD, ids=[str(policy) for policy, _ in BAD])
def test_chat_refuses(server: Server, policy: Any, message: str) -> None:
    before = counts(server)
    assert refusal(lambda: chat(server, CAPITAL, policy)).startswith(message)
    assert counts(server) == before


def test_completions_refuse(server: Server) -> None:
    body = completion_body(CAPITAL, {"method": "no_such_method"})
    assert "kv_compression.method" in refusal(lambda: server.post("/v1/completions", body))


def raw(server: Server, route: str, body: str) -> tuple[int, str]:
    """What a body that is no JSON of Python's own making is answered with."""
    request = urllib.request.Request(
        server.url + route, body.encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=600) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e400", "-1e400", "9" * 5000])
@pytest.mark.parametrize("key", ["budget", "keep_ratio", "head_floor", "beta"])
def test_numbers_that_are_none(server: Server, key: str, number: str) -> None:
    before = counts(server)
    custom = f'{{"kv_compression": {{"method": "pyramidkv", "{key}": {number}}}}}'
    for route, body in {
        "/generate": f'{{"text": "a", "sampling_params": {{"custom_params": {custom}}}}}',
        "/v1/completions": f'{{"model": "m", "prompt": "a", "custom_params": {custom}}}',
    }.items():
        status, message = raw(server, route, body)
        assert status in (400, 422), message
        assert f"kv_compression.{key}: " in message or "JSON" in message.upper(), message
    assert counts(server) == before


@pytest.mark.parametrize(
    ("pressure", "message"),
    [
        ("evict", "kv_pressure: this server was started without --kv-pressure evict"),
        ("drop", "kv_pressure: must be evict or retract, got 'drop'"),
        ("", "kv_pressure: must be evict or retract, got ''"),
        (True, "kv_pressure: must be evict or retract, got True"),
        (1, "kv_pressure: must be evict or retract, got 1"),
        (["retract"], "kv_pressure: must be evict or retract, got ['retract']"),
        ({"evict": 1}, "kv_pressure: must be evict or retract, got {'evict': 1}"),
        ("x" * 10_000, "kv_pressure: must be evict or retract, got 'xxx"),
    ],
    ids=lambda value: str(value)[:20],
)
@pytest.mark.parametrize("policy", [None, STREAMING], ids=["default", "own policy"])
def test_a_pressure_that_cannot_be_had(
    server: Server, policy: Any, pressure: Any, message: str
) -> None:
    before = counts(server)
    custom = {"kv_pressure": pressure, **({} if policy is None else {"kv_compression": policy})}
    for route, body in {
        "/generate": {"text": CAPITAL, "sampling_params": {"custom_params": custom}},
        "/v1/chat/completions": {**chat_body(CAPITAL), "custom_params": custom},
        "/v1/completions": {**completion_body(CAPITAL), "custom_params": custom},
    }.items():
        said = refusal(lambda route=route, body=body: server.post(route, body))
        assert said.startswith(message), route
        assert len(said) < 300
    assert counts(server) == before


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
    message = refusal(lambda: server.generate(CAPITAL, streaming(budget=31)))
    assert "keeps 31 tokens" in message
    assert "--kv-compression-min-keep 32" in message


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            pyramidkv(budget=64, window=16),
            "kv_compression.budget: 'pyramidkv' leaves head 0 of layer 29 with 18 tokens, below",
        ),
        (
            snapkv(budget=40, window=8, granularity="page"),
            "kv_compression.budget: 'snapkv' leaves head 0 of layer 0 with 28 tokens, below",
        ),
        (
            {"method": "h2o", "budget": 47, "granularity": "page"},
            "kv_compression.budget: 'h2o' leaves head 0 of layer 0 with 28 tokens, below",
        ),
    ],
    ids=str,
)
def test_the_least_holds_for_every_layer_and_head(
    server: Server, spec: dict[str, Any], message: str
) -> None:
    """Which a policy does not say by itself; 300 tokens, the last page with 12 of 16."""
    said = refusal(lambda: server.generate(noise(300, seed=900), spec))
    assert said.startswith(message)
    # A prompt of which nothing is dropped may have it, if no later fold would drop too much.
    if spec["method"] != "h2o":
        assert "Paris" in server.generate(CAPITAL, spec, max_new_tokens=4)["text"]


@pytest.mark.parametrize("params", [["kv_compression"], "kv_compression", 7], ids=str)
def test_custom_params_are_an_object(server: Server, params: Any) -> None:
    body = generate_body(CAPITAL)
    body["sampling_params"]["custom_params"] = params
    assert "custom_params" in refusal(lambda: server.post("/generate", body))


@pytest.mark.parametrize("key", ["kv_compresion", "kv_preset", "kv_" + "x" * 10_000])
def test_a_key_that_nobody_knows(server: Server, key: str) -> None:
    body = generate_body(CAPITAL)
    body["sampling_params"]["custom_params"] = {key: "copy", "another's": 1}
    said = refusal(lambda: server.post("/generate", body))
    assert said.startswith("custom_params: 'kv_")
    assert said.endswith("is unknown, expected kv_compression, kv_pressure, kv_prefix")
    body["sampling_params"]["custom_params"] = {"another's": 1}
    assert "Paris" in server.post("/generate", body)["text"]


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
