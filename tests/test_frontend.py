"""Every request of a frontend program carries the policy of the place where it was written."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import sglang as sgl

from sglang_kv.frontend import KVRuntimeEndpoint, kv_policy

BASE = {"method": "streamingllm", "sinks": 4, "recent": 508}
SNAPKV = {"method": "snapkv", "budget": 512}


class FakeServer(ThreadingHTTPServer):
    """Answers like SGLang, and notes the text and the policy of each request."""

    daemon_threads = True
    request_queue_size = 128  # a batch connects all at once

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.seen: list[tuple[Any, Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def policies(self) -> list[Any]:
        return [policy for _, policy in self.seen]


class Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.answer(json.dumps({"model_path": "fake"}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        custom = body["sampling_params"].get("custom_params") or {}
        self.server.seen.append((body.get("text"), custom.get("kv_compression")))
        meta = {
            "prompt_tokens": 4,
            "input_token_logprobs": [[-1.0, 5, "a"], [-2.0, 6, "b"]],
            "output_token_logprobs": [],
        }
        one = {"text": "!", "meta_info": meta}
        if body.get("stream"):
            self.answer(f"data: {json.dumps(one)}\n\ndata: [DONE]\n\n")
        elif isinstance(body.get("text", []), list):
            self.answer(json.dumps([one] * len(body.get("text") or body["input_ids"])))
        else:
            self.answer(json.dumps(one))

    def answer(self, text: str) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@sgl.function
def every_kind_of_request(s: Any) -> None:
    s += "A text that is long enough to be committed."
    s += sgl.gen("one", max_tokens=4)
    s += sgl.select("two", ["yes", "no"])
    s += sgl.select("three", ["a", "b"], choices_method=sgl.unconditional_likelihood_normalized)
    s.sync()  # SGLang commits a fork's text only when there is some by then
    forks = s.fork(2)
    forks += sgl.gen("four", max_tokens=4)
    forks.join()


def test_all_requests_carry_the_policy_of_the_endpoint(server: FakeServer) -> None:
    backend = KVRuntimeEndpoint(server.url, BASE)
    state = every_kind_of_request.run(backend=backend)
    state.sync()
    assert state.error() is None
    backend.cache_prefix("a prefix")
    # gen; warm and score of select; the same and the unconditional scores; commit; two forks.
    assert len(server.seen) == 1 + 2 + 3 + 1 + 2 + 1
    assert all(policy == BASE for policy in server.policies)


def test_streams_and_images_carry_it_too(server: FakeServer) -> None:
    backend = KVRuntimeEndpoint(server.url, BASE)

    @sgl.function
    def program(s: Any) -> None:
        s += "Hello"
        s += sgl.gen("one", max_tokens=4)

    state = program.run(backend=backend, stream=True)
    assert "".join(state.text_iter()) == "Hello!"
    backend.fill_image(state.stream_executor)
    assert server.policies == [BASE, BASE]


@pytest.mark.parametrize("policy", [None, {"method": "none"}])
def test_no_policy_is_not_the_policy_none(server: FakeServer, policy: Any) -> None:
    every_kind_of_request.run(backend=KVRuntimeEndpoint(server.url, policy)).sync()
    assert all(seen == policy for seen in server.policies)


def test_a_derived_endpoint_leaves_the_first_alone(server: FakeServer) -> None:
    backend = KVRuntimeEndpoint(server.url, BASE)
    derived = backend.with_policy(**SNAPKV)
    assert (backend.kv_compression, derived.kv_compression) == (BASE, SNAPKV)
    assert derived.with_policy().kv_compression is None
    every_kind_of_request.run(backend=derived).sync()
    assert all(policy == SNAPKV for policy in server.policies)


@sgl.function
def nested(s: Any) -> None:
    s += "0"
    s += sgl.gen("a")
    with kv_policy(s, **SNAPKV):
        s += sgl.gen("b")
        with kv_policy(s, method="none"):
            s += sgl.user(sgl.gen("c"))
        s += sgl.gen("d")
        with kv_policy(s):
            s += sgl.gen("e")
        s.sync()
        forks = s.fork(2)
        forks += sgl.gen("f")
        forks.join()
    s += sgl.gen("g")


@pytest.mark.parametrize("use_thread", [True, False])
def test_blocks_nest_in_program_order(server: FakeServer, use_thread: bool) -> None:
    backend = KVRuntimeEndpoint(server.url, BASE)
    state = nested.run(backend=backend, use_thread=use_thread)
    state.sync()
    assert state.error() is None
    none = {"method": "none"}
    inner = [BASE, SNAPKV, none, SNAPKV, None, SNAPKV, SNAPKV, SNAPKV, BASE]
    assert server.policies == inner
    plain = state.text()
    assert plain.count("!") == 6  # no text was added by the blocks
    assert state.stream_executor.backend is backend


def test_programs_of_a_batch_do_not_mix(server: FakeServer) -> None:
    @sgl.function
    def program(s: Any, budget: int) -> None:
        s += f"{budget}:"
        with kv_policy(s, method="snapkv", budget=budget):
            s += sgl.gen("a")
        s += sgl.gen("b")

    backend = KVRuntimeEndpoint(server.url, BASE)
    budgets = [64 * i for i in range(1, 17)]
    for state in program.run_batch([{"budget": b} for b in budgets], backend=backend):
        state.sync()
        assert state.error() is None
    assert len(server.seen) == 2 * len(budgets)
    for text, policy in server.seen:
        first = text.endswith(":")
        expected = {"method": "snapkv", "budget": int(text.split(":")[0])} if first else BASE
        assert policy == expected


def test_the_block_ends_when_its_body_raises(server: FakeServer) -> None:
    @sgl.function
    def program(s: Any) -> None:
        with pytest.raises(KeyError), kv_policy(s, **SNAPKV):
            raise KeyError
        s += sgl.gen("a")

    program.run(backend=KVRuntimeEndpoint(server.url, BASE)).sync()
    assert server.policies == [BASE]


def test_mistakes_are_named(server: FakeServer) -> None:
    with pytest.raises(ValueError, match="method"):
        KVRuntimeEndpoint(server.url, {"budget": 512})

    @sgl.function
    def program(s: Any) -> None:
        with kv_policy(s, **SNAPKV):
            s += sgl.gen("a")

    with pytest.raises(TypeError, match="KVRuntimeEndpoint"):
        program.run(backend=sgl.RuntimeEndpoint(server.url))
