"""Small words for talking to a test server."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from typing import Any

import pytest

from sglang_kv.benchmarks.server import HTTPError, Server

Policy = dict[str, Any]

NONE: Policy = {"method": "none"}
STREAMING: Policy = {"method": "streamingllm", "sinks": 4, "recent": 252}

#: The demo model's 30 layers of 3 KV heads, and a page of 16 tokens at head_dim 64 in bf16.
STREAMS, PAGE_TOKENS, PAGE_BYTES = 90, 16, 4096


def uses_server(name: str) -> list[pytest.MarkDecorator]:
    """Marks for tests whose ``server`` is the one of that name in tests/runtime/conftest.py."""
    which = pytest.mark.parametrize("server", [name], indirect=True, scope="session")
    return [pytest.mark.server, which]


def noise(count: int, seed: int = 0) -> list[int]:
    """Token ids that no other seed shares a prefix with."""
    rng = random.Random(seed)
    return [rng.randrange(100, 40_000) for _ in range(count)]


def words(count: int) -> str:
    """A text of about as many tokens."""
    return " word" * count


def custom(policy: Any) -> dict[str, Any]:
    return {"custom_params": {"kv_compression": policy}}


def chat_body(text: str, policy: Any = None, **options: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    body = {"model": "demo", "messages": messages, "temperature": 0, "max_tokens": 4, **options}
    return body if policy is None else {**body, **custom(policy)}


def completion_body(prompt: Any, policy: Any = None, **options: Any) -> dict[str, Any]:
    body = {"model": "demo", "prompt": prompt, "temperature": 0, "max_tokens": 4, **options}
    return body if policy is None else {**body, **custom(policy)}


def chat(server: Server, text: str, policy: Any = None, **options: Any) -> Any:
    return server.post("/v1/chat/completions", chat_body(text, policy, **options))


def report(answer: Any) -> dict[str, Any]:
    """The report in an answer of ``/generate`` or `Engine`."""
    found: dict[str, Any] = answer["meta_info"]["kv_compression"]
    return found


def refusal(send: Callable[[], Any]) -> str:
    """The message of the HTTP 400 that ``send`` is answered with."""
    with pytest.raises(HTTPError) as caught:
        send()
    assert caught.value.status == 400, caught.value
    body = json.loads(caught.value.body)
    message: str = body["error"]["message"] if "error" in body else body["message"]
    return message


def ledger(server: Server) -> dict[str, Any]:
    """The physical ledger, asked of the scheduler itself: no waiting for a metric."""
    found: dict[str, Any] = json.loads(server.get("/server_info"))["internal_states"][0][
        "kv_compression"
    ]
    return found


def flush(server: Server) -> None:
    """Empty the prefix cache, once all that runs has ended."""
    server.flush(patience_s=120)


def eventually(holds: Callable[[], bool], timeout_s: float = 120) -> None:
    """Metrics follow the ledger with a delay; one that was never set is not there yet."""
    deadline = time.monotonic() + timeout_s
    while True:
        missing = None
        try:
            if holds():
                return
        except KeyError as error:
            missing = error
        assert time.monotonic() < deadline, f"it never came true; {missing or 'all metrics there'}"
        time.sleep(0.2)
