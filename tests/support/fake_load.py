"""In place of SGLang's load generator, whose import takes many seconds: requests one by one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from sglang_kv.benchmarks import throughput, under_load, watch
from sglang_kv.benchmarks.arms import Remote
from sglang_kv.benchmarks.load import extra_body


def drive(url: str, model: str, requests: Any, policy: Any, **_: Any) -> dict[str, Any]:
    server = Remote(url)
    for request in requests:
        body = extra_body(policy, request.output_tokens, chat=False)
        server.post("/generate", {"input_ids": request.prompt, **body})
    latency = {"mean": 1.0, "p50": 1.0, "p99": 1.0}
    return {
        "loop": "none",
        "completed": len(requests),
        "failed": 0,
        "hit_rate": 0.0,
        "requests_per_s": 1.0,
        "output_tok_s": 1.0,
        "itls": [[0.1] * 8],
        "ttft_ms": latency,
        "tpot_ms": latency,
    }


def install(put: Callable[[Any, str, Any], None] = setattr) -> None:
    """Also for a server that counts at once and need not be waited for."""
    put(under_load, "drive", drive)
    put(throughput, "import_load_generator", lambda: None)
    put(watch, "SETTLE_S", 0.0)
    put(under_load, "Watch", partial(watch.Watch, interval_s=0.02))
