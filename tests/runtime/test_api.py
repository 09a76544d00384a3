"""A policy per request on every route, and the report of what was kept in the answer."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from serving import (
    NONE,
    PAGE_BYTES,
    STREAMING,
    STREAMS,
    chat,
    chat_body,
    completion_body,
    custom,
    flush,
    ledger,
    noise,
    report,
    uses_server,
)

from sglang_kv.benchmarks.server import Server, generate_body

pytestmark = uses_server("small")

CAPITAL = "The capital of France is"
ROUTES = {
    "/generate": generate_body,
    "/v1/chat/completions": chat_body,
    "/v1/completions": completion_body,
}


def applied(value: dict[str, Any]) -> dict[str, Any]:
    """The policy that a report says was applied, as a client would write it."""
    given = value["parameters"].items()
    parameters = {k: v for k, v in given if v is not None and k != "positions"}
    return {"method": value["method"], **parameters}


def report_of(event: dict[str, Any]) -> Any:
    """The report in an answer or a stream's event, of whatever route."""
    where = event.get("meta_info") or event.get("sglext") or {}
    return where.get("kv_compression")


def text_of(event: dict[str, Any]) -> str:
    """Text of an answer or a stream's event: all of it so far on /generate, else what is new."""
    if "text" in event:
        return str(event["text"])
    parts = [choice.get("message") or choice.get("delta") or choice for choice in event["choices"]]
    return "".join(part.get("content") or part.get("text") or "" for part in parts)


# What the report says --------------------------------------------------------------------------


def test_figures_of_a_compressed_prompt(server: Server) -> None:
    """Three of four new tokens have KV: 3,003 tokens, in 188 pages of 16 for a full stream.

    Kept are the page of the 4 sinks, and from that of position 3,003 - 252 = 2,751 on: pages 171
    to 187. That makes 18 pages in each of 30 x 3 streams.
    """
    answer = server.generate(noise(3000, seed=1), STREAMING, max_new_tokens=4, ignore_eos=True)
    figures = report(answer)
    assert applied(figures) == STREAMING
    assert figures["logical_tokens"] == 3003
    assert figures["kept_tokens"] == 4 + 252
    assert figures["kept_pages"] == 90 * 18
    assert figures["kept_bytes"] == 90 * 18 * 4096
    assert figures["freed_bytes"] == 90 * (188 - 18) * 4096
    assert "overridden" not in figures


def test_figures_of_an_uncompressed_prompt(server: Server) -> None:
    answer = server.generate(noise(1000, seed=2), NONE, max_new_tokens=4, ignore_eos=True)
    assert report(answer) == {
        "method": "none",
        "parameters": {},
        "logical_tokens": 1003,
        "kept_tokens": 1003,
        "kept_pages": 90 * 63,
        "kept_bytes": 90 * 63 * 4096,
        "freed_bytes": 0,
    }


def test_nothing_is_dropped_before_the_window_is_full(server: Server) -> None:
    figures = report(server.generate(noise(100, seed=3), STREAMING, max_new_tokens=1))
    assert (figures["logical_tokens"], figures["kept_tokens"]) == (100, 100)
    assert (figures["kept_pages"], figures["freed_bytes"]) == (7 * STREAMS, 0)


def test_the_window_moves_while_decoding(server: Server) -> None:
    policy = {"method": "streamingllm", "sinks": 4, "recent": 60}
    answer = server.generate(noise(70, seed=4), policy, max_new_tokens=50, ignore_eos=True)
    figures = report(answer)
    # 119 tokens in 8 pages; position 119 - 60 = 59 is in page 3, so pages 1 and 2 are gone.
    assert (figures["logical_tokens"], figures["kept_tokens"]) == (119, 64)
    assert figures["kept_pages"] == 6 * STREAMS
    assert figures["freed_bytes"] == 2 * STREAMS * PAGE_BYTES


def test_a_prompt_longer_than_the_memory_is_served_compressed(server: Server) -> None:
    figures = report(server.generate(noise(4000, seed=5), STREAMING, max_new_tokens=2))
    assert figures["logical_tokens"] == 4001
    assert figures["kept_bytes"] < figures["freed_bytes"] / 10


def test_an_answer_is_cut_to_what_fits_beside_its_prompt(server: Server) -> None:
    """Nothing is refused, and nobody waits: the answer ends where the memory does."""
    answer = server.generate(noise(2980), NONE, max_new_tokens=500, ignore_eos=True)
    assert answer["meta_info"]["finish_reason"]["type"] == "length"
    assert 1 <= answer["meta_info"]["completion_tokens"] <= 2992 - 2980 + 1
    assert report(answer)["logical_tokens"] <= 2992


def test_the_last_free_slot_still_gives_an_answer(server: Server) -> None:
    answer = server.generate(noise(2991), NONE, max_new_tokens=5, ignore_eos=True)
    assert answer["meta_info"]["completion_tokens"] == 1


# Where a policy may stand ----------------------------------------------------------------------


@pytest.mark.parametrize("policy", [NONE, STREAMING], ids=lambda policy: policy["method"])
@pytest.mark.parametrize("route", ROUTES)
def test_each_route_takes_a_policy(server: Server, route: str, policy: Any) -> None:
    answer = server.post(route, ROUTES[route](CAPITAL, policy))
    assert applied(report_of(answer)) == policy


@pytest.mark.parametrize("policy", [NONE, STREAMING], ids=lambda policy: policy["method"])
@pytest.mark.parametrize("route", ROUTES)
def test_a_stream_ends_with_its_one_report(server: Server, route: str, policy: Any) -> None:
    whole = text_of(server.post(route, ROUTES[route](CAPITAL, policy)))
    events = list(server.stream(route, ROUTES[route](CAPITAL, policy)))
    reports = [report_of(event) for event in events]
    assert reports[:-1] == [None] * (len(events) - 1)
    assert applied(reports[-1]) == policy
    # Nothing of the answer is lost for it. A busy server sends several tokens in one event.
    texts = [text_of(event) for event in events]
    assert (texts[-1] if route == "/generate" else "".join(texts)) == whole


def test_the_usage_chunk_stays_the_last_of_a_chat_stream(server: Server) -> None:
    body = chat_body(CAPITAL, STREAMING, stream_options={"include_usage": True})
    *_, own, usage = server.stream("/v1/chat/completions", body)
    assert (own["choices"], applied(report_of(own))) == ([], STREAMING)
    assert usage["usage"]["completion_tokens"] == 4


def test_without_a_policy_the_servers_default_applies(server: Server) -> None:
    assert applied(report(server.generate(CAPITAL))) == NONE
    assert applied(report_of(chat(server, CAPITAL))) == NONE
    assert applied(report_of(chat(server, CAPITAL, **custom(None)))) == NONE


@pytest.mark.parametrize(
    ("spec", "same_as"),
    [
        ("none", NONE),
        ("streamingllm", {"method": "streamingllm", "sinks": 4, "recent": 1020}),
        ({"method": "streamingllm", "budget": 256}, STREAMING),
        ({"method": "streamingllm", "sinks": 0, "recent": 64}, None),
        ({"method": "streamingllm", "sinks": 63, "recent": 1}, None),
        # Wider than any prompt: nothing to drop, and nothing wrong either.
        ({"method": "streamingllm", "sinks": 2**31 - 1, "recent": 2**31 - 1}, None),
    ],
    ids=str,
)
def test_ways_to_write_a_policy(server: Server, spec: Any, same_as: Any) -> None:
    assert applied(report(server.generate(CAPITAL, spec))) == (same_as or spec)


# Several at once -------------------------------------------------------------------------------


def test_requests_of_one_batch_keep_their_policies(server: Server) -> None:
    policies = [STREAMING, NONE, None]
    params = [generate_body(CAPITAL, policy)["sampling_params"] for policy in policies]
    answers = server.post("/generate", {"text": [CAPITAL] * 3, "sampling_params": params})
    assert [applied(report(answer)) for answer in answers] == [STREAMING, NONE, NONE]
    assert {answer["text"] for answer in answers} == {answers[0]["text"]}


def test_each_of_n_samples_is_reported(server: Server) -> None:
    body = generate_body(CAPITAL, STREAMING, temperature=1)
    body["sampling_params"]["n"] = 2
    assert [applied(report(one)) for one in server.post("/generate", body)] == [STREAMING] * 2


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions"])
def test_n_choices_have_a_list_of_reports(server: Server, route: str) -> None:
    body = {**ROUTES[route](CAPITAL, STREAMING), "n": 2}
    answer = server.post(route, body)
    assert len(answer["choices"]) == 2
    assert [applied(one) for one in report_of(answer)] == [STREAMING] * 2
    *_, last = server.stream(route, body)
    assert [applied(one) for one in report_of(last)] == [STREAMING] * 2


def test_prompts_of_one_completion_have_a_list_of_reports(server: Server) -> None:
    answer = server.post("/v1/completions", completion_body([CAPITAL, "Once upon"], STREAMING))
    assert [applied(one) for one in report_of(answer)] == [STREAMING] * 2


def test_compressed_and_full_prompts_decode_side_by_side(server: Server) -> None:
    """What is kept of a request does not depend on its neighbours or on their policies."""
    prompts = [noise(200 + 50 * i, seed=10 + i) for i in range(4)]
    policies = [STREAMING, NONE, {"method": "streamingllm", "budget": 64}, NONE]
    options = {"max_new_tokens": 6, "ignore_eos": True}
    alone = [
        server.generate(prompt, policy, **options)
        for prompt, policy in zip(prompts, policies, strict=True)
    ]
    together: list[Any] = [None] * 4

    def ask(i: int) -> None:
        together[i] = server.generate(prompts[i], policies[i], **options)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [report(answer) for answer in together] == [report(answer) for answer in alone]


# Memory that a prefix seems to promise ----------------------------------------------------------


def test_a_prefix_that_the_cache_holds_is_no_memory_to_reuse(server: Server) -> None:
    """A compressed request drops the prefix it shares with the prefix cache: no page gets free.

    In each stream its prompt needs a window of 18 pages and chunks of 32, whatever it drops of the
    16 that it shares. The rest of the memory is the cache's, to be emptied 10 pages at a time.
    """
    flush(server)
    prompt = noise(1400, seed=20)
    server.generate(prompt, STREAMING, max_new_tokens=1)
    others = {**generate_body([], NONE, max_new_tokens=1)}
    server.post("/generate", {**others, "input_ids": [noise(160, seed=i) for i in range(30, 47)]})
    again = server.generate(prompt, STREAMING, max_new_tokens=1)
    assert again["meta_info"]["cached_tokens"] == 1392  # where it ended before
    assert report(again)["logical_tokens"] == 1400


def serve_beside(server: Server, document: list[int], prompt: list[int]) -> None:
    """``prompt`` compressed while the answer to ``document`` grows by 100 uncompressed tokens."""
    options: dict[str, Any] = {"ignore_eos": True, "max_new_tokens": 100}
    events = server.stream("/generate", generate_body(document, NONE, **options))
    next(events)
    answer = server.generate(prompt, STREAMING, max_new_tokens=1)
    assert report(answer)["logical_tokens"] == len(prompt)
    *_, last = events
    assert report(last)["logical_tokens"] == len(document) + 99
    now = ledger(server)
    assert now["used_pages"] == now["evictable_pages"]


def test_a_prefix_that_others_read_is_no_memory_to_reuse(server: Server) -> None:
    """As above, with the shared 16 pages read by a running request that holds 143 and will grow.

    44 pages are free: enough for what the second request adds at once, not for its next chunk.
    """
    flush(server)
    document = noise(2288, seed=21)
    serve_beside(server, document, document[:256] + noise(1144, seed=22))


def test_a_prefix_of_its_own_is_no_memory_to_reuse_either(server: Server) -> None:
    """58 pages are free, and a window and a chunk are 51; but the 16 pages of the prompt's
    beginning go to the prefix cache when the window leaves them."""
    flush(server)
    serve_beside(server, noise(2050, seed=23), noise(1400, seed=24))
