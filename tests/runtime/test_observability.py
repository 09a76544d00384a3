"""What operators see: metrics, SGLang's own numbers and the log tell of memory, not of names."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
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


def in_use(server: Server) -> bool:
    return metric(server, "head_pages_used") > metric(server, "head_pages_evictable")


def test_gauges_during_a_request_and_after(server: Server) -> None:
    with decoding(server, 1000, NONE):
        eventually(lambda: metric(server, "head_pages_used") >= 63 * STREAMS)
        used = metric(server, "head_pages_used")
        assert used <= 187 * STREAMS
        assert used % STREAMS == 0
        assert metric(server, "head_pages_total") == TOTAL
        assert metric(server, "kv_bytes_total") == TOTAL * PAGE_BYTES
        eventually(lambda: metric(server, "running_requests", policy="none") == 1)
        assert metric(server, "running_requests") == 1
    # Its client has gone: nothing is in use, and what is left is the prefix cache's.
    eventually(lambda: not in_use(server))
    eventually(lambda: metric(server, "running_requests") == 0)
    assert metric(server, "head_pages_used") == metric(server, "head_pages_evictable") > 0
    assert metric(server, "head_pages_free") == TOTAL - metric(server, "head_pages_used")
    assert metric(server, "kv_bytes_used") == metric(server, "head_pages_used") * PAGE_BYTES


def test_counters_of_a_compressed_request(server: Server) -> None:
    def counters() -> tuple[float, float, float]:
        requests = metric(server, "requests_total", policy="streamingllm")
        return requests, metric(server, "folds_total"), metric(server, "tokens_dropped_total")

    server.generate(noise(10), STREAMING, max_new_tokens=1)  # so that the label exists
    eventually(lambda: counters() is not None)
    before = counters()
    server.generate(noise(1500, seed=1), STREAMING, max_new_tokens=1)
    # 94 pages of which 17 stay: sinks, and the window from position 1,500 - 252 = 1,248 on.
    eventually(lambda: counters()[2] >= before[2] + (94 - 18) * 16)
    after = counters()
    assert (after[0] - before[0], after[1] - before[1]) == (1, 1)
    assert after[2] - before[2] == (94 - 18) * 16


def test_sglangs_own_numbers_are_physical(server: Server) -> None:
    """1,000 tokens are a third of this memory, but little of the ledger of names."""
    with decoding(server, 1000, NONE):
        eventually(lambda: server.metric("sglang:token_usage") > 0.3)
        assert server.metric("sglang:token_usage") <= 1
        assert server.metric("sglang:num_used_tokens") >= 1000
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
        assert load(server)["num_used_tokens"] < 400
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
    eventually(lambda: ledger(server)["used_pages"] == 0)
    eventually(lambda: metric(server, "head_pages_used") == 0)
    assert metric(server, "head_pages_free") == TOTAL
    assert metric(server, "head_pages_evictable") == metric(server, "kv_bytes_used") == 0
    assert server.metric("sglang:token_usage") == 0
    assert load(server)["num_used_tokens"] == 0
