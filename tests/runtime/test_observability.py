"""What operators see: metrics, SGLang's own numbers and the log tell of memory, not of names."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from serving import (
    NONE,
    PAGE_BYTES,
    STREAMING,
    STREAMS,
    eventually,
    flush,
    ledger,
    noise,
    uses_server,
)

from sglang_kv.benchmarks.server import Server, generate_body

pytestmark = uses_server("small")

TOTAL = 187 * STREAMS  # 2,992 tokens


@pytest.fixture(autouse=True)
def empty(server: Server) -> None:
    flush(server)
    eventually(lambda: metric(server, "head_pages_used") == 0)


def metric(server: Server, name: str, **labels: str) -> float:
    return server.metric(f"sglang_kv:{name}", **labels)


def become(server: Server, wanted: dict[str, float]) -> None:
    """Wait for these metrics to have these values: they are set one by one, and late."""

    def found() -> dict[str, float]:
        return {name: server.metric(name) for name in wanted}

    with suppress(AssertionError):
        eventually(lambda: found() == wanted)
    assert found() == wanted


def load(server: Server) -> dict[str, Any]:
    """SGLang's answer to load balancers."""
    (found,) = json.loads(server.get("/v1/loads"))["loads"]
    return dict(found)


@contextmanager
def decoding(server: Server, prompt_tokens: int, policy: dict[str, Any]) -> Iterator[None]:
    """A long answer is under way; afterwards its client hangs up."""
    body = generate_body(noise(prompt_tokens), policy, max_new_tokens=2000, ignore_eos=True)
    events = server.stream("/generate", body)
    try:
        next(events)
        yield
    finally:
        events.close()  # type: ignore[attr-defined]


def test_gauges_during_a_request_and_after(server: Server) -> None:
    with decoding(server, 1000, NONE):
        eventually(
            lambda: (
                metric(server, "head_pages_used") >= 63 * STREAMS
                and metric(server, "running_requests", policy="none") == 1
            )
        )
        used = metric(server, "head_pages_used")
        assert used <= 187 * STREAMS
        assert used % STREAMS == 0
        assert metric(server, "head_pages_total") == TOTAL
        assert metric(server, "kv_bytes_total") == TOTAL * PAGE_BYTES
        assert metric(server, "running_requests") == 1
    # Its client has gone: nothing is in use, and what is left is the prefix cache's.
    eventually(lambda: not ledger(server)["requests_by_policy"])
    cached = ledger(server)["used_pages"]
    assert cached > 0
    become(
        server,
        {
            "sglang_kv:running_requests": 0,
            "sglang_kv:head_pages_used": cached,
            "sglang_kv:head_pages_evictable": cached,
            "sglang_kv:head_pages_free": TOTAL - cached,
            "sglang_kv:kv_bytes_used": cached * PAGE_BYTES,
        },
    )


def test_counters_of_a_compressed_request(server: Server) -> None:
    """One request, one fold, and its tokens are added to what the scheduler had counted."""

    def counters() -> list[float]:
        requests = metric(server, "requests_total", policy="streamingllm")
        return [requests, metric(server, "folds_total"), metric(server, "tokens_dropped_total")]

    server.generate(noise(10), STREAMING, max_new_tokens=1)  # so that the label exists
    now = ledger(server)
    before = [now["requests_total"]["streamingllm"], now["folds"], now["dropped_tokens"]]
    eventually(lambda: counters() == pytest.approx(before, abs=0.01, rel=0))
    server.generate(noise(1500, seed=1), STREAMING, max_new_tokens=1)
    # 94 pages of which 17 stay: sinks, and the window from position 1,500 - 252 = 1,248 on.
    wanted = [before[0] + 1, before[1] + 1, before[2] + (94 - 18) * 16]
    eventually(lambda: counters() == pytest.approx(wanted, abs=0.01, rel=0))


def test_sglangs_own_numbers_are_physical(server: Server) -> None:
    """1,000 tokens are a third of this memory, but little of the ledger of names."""
    with decoding(server, 1000, NONE):
        eventually(
            lambda: (
                server.metric("sglang:token_usage") > 0.3
                and server.metric("sglang:num_used_tokens") >= 1000
            )
        )
        assert server.metric("sglang:token_usage") <= 1
        assert server.metric("sglang:max_total_num_tokens") == 2992
        now = load(server)
        assert now["max_total_num_tokens"] == now["memory"]["token_capacity"] == 2992
        assert 1000 <= now["num_used_tokens"] <= 2992
        assert 0.3 < now["token_usage"] <= 1
        info = json.loads(server.get("/server_info"))
        assert info["max_total_num_tokens"] == 2992
        assert info["internal_states"][0]["memory_usage"]["token_capacity"] == 2992
        assert ledger(server)["requests_by_policy"] == {"none": 1}
    eventually(lambda: server.metric("sglang:token_usage") == 0)


def test_a_compressed_request_uses_little_of_the_memory(server: Server) -> None:
    """2,000 tokens would be two thirds of it; 256 and the page around them are a tenth."""
    with decoding(server, 2000, STREAMING):
        eventually(lambda: server.metric("sglang:num_running_reqs") == 1)
        eventually(lambda: 0 < server.metric("sglang:token_usage") < 0.15)
        # Told every few steps: the last reading may be of the prefill, whose chunks take more.
        eventually(lambda: 0 < load(server)["num_used_tokens"] < 400)
    eventually(lambda: server.metric("sglang:token_usage") == 0)


def test_the_decode_log_line_has_the_head_pages(server: Server) -> None:
    server.generate(noise(500, seed=2), NONE, max_new_tokens=12, ignore_eos=True)
    line = re.compile(
        r"Decode batch.*token usage: 0\.17, head pages: (2880|2970)/16830 \(0\.00 evictable\)"
    )
    eventually(lambda: line.search(server.log) is not None)


def test_the_log_has_the_plan_and_it_came_true(server: Server) -> None:
    assert "KV plan: 22.5 KiB per token, 65.74 MiB for 2,992 tokens." in server.log
    assert "`sglang-kv plan` does not hold for this server" not in server.log


def test_after_a_flush_nothing_is_used(server: Server) -> None:
    server.generate(noise(500, seed=3), NONE, max_new_tokens=2)
    server.generate(noise(500, seed=4), STREAMING, max_new_tokens=2)
    assert ledger(server)["used_pages"] > 0
    flush(server)
    assert ledger(server)["used_pages"] == 0
    names = ("head_pages_used", "head_pages_evictable", "kv_bytes_used", "running_requests")
    become(
        server,
        {
            **{f"sglang_kv:{name}": 0 for name in names},
            "sglang_kv:head_pages_free": TOTAL,
            "sglang:token_usage": 0,
        },
    )
    eventually(lambda: load(server)["num_used_tokens"] == 0)
