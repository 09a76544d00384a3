"""The prefix tree in a running server: hits like stock's, tenants apart, figures for operators."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from array import array
from typing import Any

import pytest
from serving import NONE, STREAMING, eventually, flush, ledger, noise, uses_server
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

from sglang_kv.benchmarks.server import Server, generate_body
from sglang_kv.radix.dump import as_text


def on_server(name: str) -> Any:
    def mark(test: Any) -> Any:
        for each in uses_server(name):
            test = each(test)
        return test

    return mark


def cached(answer: Any) -> int:
    return int(answer["meta_info"]["cached_tokens"])


@on_server("small")
def test_plain_requests_hit_what_stock_sglangs_tree_has(server: Server) -> None:
    """Three sessions of three turns behind one system prompt, and a one-off document between."""
    flush(server)
    # Of the scheduler itself: the metric may not have heard of the last requests yet.
    hits = ledger(server)["prefixes"]["hit_tokens"].get("none", 0)
    stock = RadixCache.create_simulated(page_size=16)
    system, total = noise(290), 0
    sessions: list[list[int]] = [[*system, *noise(20, seed)] for seed in (1, 2, 3)]
    for turn in range(3):
        for prompt in (*sessions, noise(150, 10 + turn)):
            match = stock.match_prefix(MatchPrefixParams(key=key_of(prompt[:-1])))
            answer = server.generate(prompt, max_new_tokens=6, ignore_eos=True)
            assert cached(answer) == match.device_prefix_len
            total += cached(answer)
            computed = [*prompt, *answer["output_ids"][:-1]]
            stock.insert(InsertParams(key=key_of(computed)))
        for index, session in enumerate(sessions):
            sessions[index] = [*session, *noise(25, 100 * turn + index)]
    assert total > 2000
    eventually(lambda: hits_of(server) == hits + total)
    (state,) = json.loads(server.get("/server_info"))["internal_states"]
    text = as_text(state["prefix_tree"])
    assert text.startswith("importance: ")
    assert "[0, 288)  resident" in text
    assert state["kv_compression"]["prefixes"]["hit_tokens"]["none"] == hits + total
    # Its spread is taken anew every few seconds.
    eventually(lambda: sum(n > 0 for n in ledger(server)["prefixes"]["importance"].values()) > 1)


@on_server("small")
@pytest.mark.parametrize("policy", [NONE, STREAMING], ids=lambda policy: policy["method"])
def test_sglangs_own_sessions_go_on_where_they_ended(
    server: Server, policy: dict[str, Any]
) -> None:
    """Not the streaming ones: each turn's prompt is put together by SGLang, and then looked up."""
    flush(server)
    session = server.post("/open_session", {"capacity_of_str_len": 100_000, "timeout": 600})

    def turn(ids: list[int], after: str | None, **how: Any) -> tuple[Any, int]:
        params = {"id": session, "rid": after, **how}
        options = {"max_new_tokens": 9, "ignore_eos": True, "session_params": params}
        answer = server.generate(ids, policy, **options)
        assert answer["meta_info"]["kv_compression"]["method"] == policy["method"]
        return answer["meta_info"]["id"], cached(answer)

    first, hit = turn(noise(303, 1), None)
    assert hit == 0
    second, hit = turn(noise(41, 2), first)
    # Of 303 tokens and 9 of the answer the last is not computed: 19 whole pages.
    assert hit == 304
    _, hit = turn(noise(20, 3), second)
    assert hit == (303 + 9 + 41 + 9 - 1) // 16 * 16
    # Back to the first turn, without its answer: a prefix that full attention computed serves, and
    # an end of a window does not, which lies behind the answer.
    _, hit = turn(noise(33, 4), first, drop_previous_output=True)
    assert hit == (303 // 16 * 16 if policy is NONE else 256)


def key_of(ids: list[int]) -> RadixKey:
    return RadixKey(array("q", ids))


def hits_of(server: Server) -> float:
    return server.metric("sglang_kv:prefix_hit_tokens_total", policy="none")


def send(server: Server, path: str, body: Any, tenant: str | None) -> tuple[int, Any]:
    headers = {"Content-Type": "application/json"}
    if tenant is not None:
        headers["X-Tenant"] = tenant
    request = urllib.request.Request(server.url + path, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=600) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


@on_server("launched")
def test_tenants_share_with_themselves_alone(server: Server) -> None:
    shared = 192  # up to where the same prompt had ended, in whole pages

    def hit(tenant: str | None, **more: Any) -> int:
        body = generate_body(noise(200), max_new_tokens=2, **more)
        status, answer = send(server, "/generate", body, tenant)
        assert status == 200
        return cached(answer)

    assert hit("one") == 0
    assert hit("one") == shared
    assert hit("two") == 0
    assert hit("two", cache_salt="one") == 0  # a salt narrows
    assert hit("two") == shared
    assert hit(None) == hit(None) == hit(None, cache_salt="x", extra_key="one") == 0
    # Several prompts, several samples and OpenAI's endpoints come from whoever sent them.
    body = generate_body(noise(200), max_new_tokens=2)
    several = {**body, "input_ids": [noise(200)] * 2}
    assert [cached(each) for each in send(server, "/generate", several, "one")[1]] == [shared] * 2
    samples = {**body, "sampling_params": {**body["sampling_params"], "n": 2, "temperature": 1}}
    assert [cached(each) for each in send(server, "/generate", samples, "two")[1]] == [shared] * 2
    plain = {"model": "default", "prompt": noise(200), "max_tokens": 2}
    for tenant, expected in (("one", shared), ("three", 0)):
        usage = send(server, "/v1/completions", plain, tenant)[1]["usage"]
        details = usage["prompt_tokens_details"] or {"cached_tokens": 0}
        assert details["cached_tokens"] == expected
    # A tenant flushes its own.
    assert send(server, "/flush_prefixes", {}, "one") == (200, {"flushed": True})
    assert send(server, "/flush_prefixes", {}, None)[0] == 400
    assert (hit("one"), hit("two")) == (0, shared)


@on_server("launched")
@pytest.mark.parametrize("value", ["one", ":one"])
def test_no_body_names_a_tenant(server: Server, value: str) -> None:
    body = generate_body(noise(50), max_new_tokens=2)
    body["sampling_params"]["custom_params"] = {"sglang_kv_tenant": value}
    status, answer = send(server, "/generate", body, "one")
    assert status == 400
    assert "sglang_kv_tenant: cannot be set by a request" in json.dumps(answer)
