"""A server with SGLang's routes as far as the throughput benchmark uses them, and no model.

It answers at once, counts like the real one, and can be told to misbehave.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from sglang_kv.compression import parse_policy

PAGES, PAGE_BYTES = 9000, 4096
CACHED = 8  # tokens of each prompt that it says it had


@dataclass
class FakeSGLang:
    """What it is, and what it was asked.

    Args:
        model: path of a tokenizer's folder.
        stock: without the plugin.
        ignores_policies: applies `none` to everything, and says so.
        never_drops: reports a policy and keeps everything.
        refuses: a method that is refused.
        longest: prompts of more tokens are refused.

    What is refused is a 400, and in a stream, as SGLang has it, a 200 and an event that is an
    error.
    """

    model: str
    stock: bool = False
    ignores_policies: bool = False
    never_drops: bool = False
    refuses: str | None = None
    longest: int | None = None
    url: str = ""
    asked: list[tuple[str, Any]] = field(default_factory=list)
    served: Counter[str] = field(default_factory=Counter)
    dropped: int = 0

    def bodies(self, path: str) -> list[dict[str, Any]]:
        return [body for asked, body in self.asked if asked == path]

    # -- answers --

    def get(self, path: str) -> str:
        if path == "/metrics":
            return self.metrics()
        backend = "torch_native" if self.stock else "sglang_kv"
        return json.dumps(
            {
                "/v1/models": {"data": [{"id": self.model}]},
                "/model_info": {"model_path": self.model, "tokenizer_path": self.model},
                "/server_info": {
                    "model_path": self.model,
                    "attention_backend": backend,
                    "radix_cache_backend": None if self.stock else "sglang_kv",
                    "max_total_num_tokens": 1600,
                    "internal_states": [{}],
                },
            }[path]
        )

    def metrics(self) -> str:
        lines = ["# HELP sglang:num_running_reqs x", 'sglang:num_running_reqs{tp="0"} 3.0']
        if self.stock:
            return "\n".join([*lines, 'sglang:kv_used_tokens{tp="0"} 100.0'])
        for name, value in (
            ("head_pages_total", PAGES),
            ("head_pages_used", 500),
            ("head_pages_evictable", 200),
            ("kv_bytes_total", PAGES * PAGE_BYTES),
            ("tokens_dropped_total", self.dropped),
        ):
            lines.append(f'sglang_kv:{name}{{tp="0"}} {float(value)}')
        for policy, count in self.served.items():
            lines.append(f'sglang_kv:requests_total{{tp="0",policy="{policy}"}} {float(count)}')
        return "\n".join(lines)

    def report(self, custom: dict[str, Any] | None) -> dict[str, Any] | None:
        """What it did with a request."""
        if self.stock:
            return None
        asked = (custom or {}).get("kv_compression", {"method": "none"})
        policy = parse_policy({"method": "none"} if self.ignores_policies else asked)
        self.served[policy.name] += 1
        if policy.name != "none" and not self.never_drops:
            self.dropped += 100
        return {"method": policy.name, "parameters": policy.parameters}

    def generate(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        sampling = body["sampling_params"]
        report = self.report(sampling.get("custom_params"))
        meta = {"prompt_tokens": len(body["input_ids"]), "cached_tokens": CACHED}
        if report:
            meta["kv_compression"] = report
        for count in range(1, sampling["max_new_tokens"] + 1):
            yield {"text": "a" * count, "meta_info": {**meta, "completion_tokens": count}}

    def chat(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        self.report(body.get("custom_params"))
        for _ in range(body["max_completion_tokens"]):
            yield {"choices": [{"delta": {"content": "a"}}]}
        prompt = sum(len(message["content"].split()) for message in body["messages"])
        usage = {"prompt_tokens": prompt, "completion_tokens": body["max_completion_tokens"]}
        yield {
            "choices": [],
            "usage": usage,
            "sglext": {"cached_tokens_details": {"device": CACHED}},
        }

    def method(self, body: dict[str, Any]) -> str | None:
        custom = body.get("custom_params") or body.get("sampling_params", {}).get("custom_params")
        found: str | None = (custom or {}).get("kv_compression", {}).get("method")
        return found

    def refusal(self, body: dict[str, Any]) -> str | None:
        """Why a request is refused, if it is."""
        if self.refuses and self.method(body) == self.refuses:
            return f"no {self.refuses} here"
        if self.longest and len(body.get("input_ids", ())) > self.longest:
            return "the prompt is too long"
        return None


def handler(fake: FakeSGLang) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_args: Any) -> None:
            pass

        def send(self, status: int, text: str) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def do_GET(self) -> None:
            self.send(200, fake.get(self.path))

        def do_POST(self) -> None:
            size = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(size) or "{}")
            path = self.path.partition("?")[0]
            with lock:
                fake.asked.append((path, body))
            if path == "/flush_cache":
                return self.send(200, "")
            said = fake.refusal(body)
            if said and not body.get("stream"):
                return self.send(400, said)
            with lock:
                answer = fake.generate if path == "/generate" else fake.chat
                events = [{"error": {"message": said}}] if said else list(answer(body))
            if not body.get("stream"):
                return self.send(200, json.dumps(events[-1]))
            lines = [f"data: {json.dumps(event)}\n\n" for event in events]
            return self.send(200, "".join([*lines, "data: [DONE]\n\n"]))

    lock = threading.Lock()
    return Handler


@contextmanager
def fake_sglang(model: str, **options: Any) -> Iterator[FakeSGLang]:
    fake = FakeSGLang(model, **options)
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler(fake))
    fake.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield fake
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
