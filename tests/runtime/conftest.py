"""The servers that the runtime tests share.

Each takes gigabytes of memory, and a cold one over a minute of CPU to start, so a test names the
one it needs (`serving.uses_server`); pytest groups the tests by that, and one runs at a time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from warm import START_TIMEOUT_S, WarmServer

from sglang_kv.benchmarks.server import Server

SERVERS: dict[str, dict[str, Any]] = {
    # Memory for 2,992 tokens of full KV, far less than the model's context of 8,192.
    # Started as a user starts it: its three processes come up cold.
    "small": {
        "start": Server,
        "entry": "serve",
        "args": [
            *("--kv-compression", "none", "--kv-compression-min-keep", "32"),
            *("--max-total-tokens", "3000", "--chunked-prefill-size", "512"),
            *("--enable-metrics", "--decode-log-interval", "4"),
        ],
    },
    # How far it comes cold, test_startup.py shows; all the way, test_entry_points.py's slow test.
    "launched": {
        "start": WarmServer,
        "entry": "launch_server",
        "args": [
            *("--kv-compression", "streamingllm", "--kv-compression-allow", "streamingllm"),
            *("--kv-compression-config", json.dumps({"sinks": 4, "recent": 60})),
            *("--prefix-sharing", "tenant", "--tenant-header", "X-Tenant", "--enable-cache-report"),
            *("--max-total-tokens", "3000"),
        ],
    },
}


@pytest.fixture(scope="session")
def server(request: pytest.FixtureRequest, demo_model: Path) -> Iterator[Server]:
    config = SERVERS[request.param]
    with config["start"](
        demo_model,
        *config["args"],
        # An idle scheduler spins, and so do OpenMP's idle threads: both starve whatever shares
        # the cores, the client in this process first.
        "--sleep-on-idle",
        env={"OMP_WAIT_POLICY": "PASSIVE"},
        entry=config["entry"],
        start_timeout_s=START_TIMEOUT_S,
    ) as running:
        yield running


@pytest.fixture(scope="session")
def text_ids(root: Path, demo_model: Path) -> list[int]:
    """The demo's story, 5,900 tokens of the demo model's."""
    from transformers import AutoTokenizer

    text = next((root / "scripts/demo").glob("*.txt")).read_text()
    ids: list[int] = AutoTokenizer.from_pretrained(demo_model)(text)["input_ids"]
    return ids
