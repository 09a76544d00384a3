"""Every way to start SGLang applies the policies.

That it is stock SGLang without the flag, test_equivalence.py shows.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from serving import NONE, STREAMING, chat, noise, refusal, report, uses_server
from warm import CPU, launcher

from sglang_kv.benchmarks.server import Server

CAPITAL = "The capital of France is"
WINDOW = {"sinks": 4, "recent": 60}


def on_server(name: str) -> Any:
    def mark(test: Any) -> Any:
        for each in uses_server(name):
            test = each(test)
        return test

    return mark


def tree_cache(server: Server) -> str:
    """The prefix cache that the log says is in use."""
    found = re.search(r"Tree cache initialized: .*impl=(\w+)", server.log)
    assert found is not None
    return found[1]


# sglang serve ----------------------------------------------------------------------------------


@on_server("small")
def test_sglang_serve(server: Server) -> None:
    assert server.command[1] == "serve"
    assert tree_cache(server) == "HeadPageRadixCache"
    assert report(server.generate(CAPITAL))["method"] == "none"
    assert report(server.generate(CAPITAL, STREAMING))["method"] == "streamingllm"


# python -m sglang.launch_server ----------------------------------------------------------------


@on_server("launched")
def test_launch_server_with_a_default_policy(server: Server) -> None:
    assert server.command[2] == "sglang.launch_server"
    figures = report(server.generate(noise(400), max_new_tokens=2))
    assert figures["method"] == "streamingllm"
    assert figures["parameters"].items() >= WINDOW.items()
    assert (figures["logical_tokens"], figures["kept_tokens"]) == (401, 64)


@pytest.mark.server
@pytest.mark.slow
def test_launch_server_comes_up_cold(demo_model: Path) -> None:
    flags = ["--kv-compression", "streamingllm", "--max-total-tokens", "3000", "--sleep-on-idle"]
    with Server(demo_model, *flags, entry="launch_server") as server:
        assert report(server.generate(CAPITAL))["method"] == "streamingllm"


@on_server("launched")
def test_a_request_may_choose_other_parameters(server: Server) -> None:
    figures = report(server.generate(noise(400), STREAMING, max_new_tokens=2))
    assert (figures["logical_tokens"], figures["kept_tokens"]) == (401, 256)


@on_server("launched")
def test_a_method_that_the_server_does_not_allow_is_refused(server: Server) -> None:
    for send in (lambda: server.generate(CAPITAL, NONE), lambda: chat(server, CAPITAL, NONE)):
        message = refusal(send)
        assert message.startswith("kv_compression.method: 'none' is not allowed on this server")
        assert "(allowed: streamingllm)" in message


# Engines ---------------------------------------------------------------------------------------

ENGINES = """
import json, os, sys

WINDOW = {"sinks": 4, "recent": 60}

def reports(engine, *customs):
    # Of a request that names no policy, of one that asks for none, and of others.
    params = {"max_new_tokens": 2, "temperature": 0}
    prompt = list(range(1000, 1400))
    answers = [
        engine.generate(input_ids=prompt, sampling_params={**params, "custom_params": custom})
        for custom in (None, {"kv_compression": {"method": "none"}}, *customs)
    ]
    engine.shutdown()
    return [answer["meta_info"].get("kv_compression") for answer in answers]

if __name__ == "__main__":
    import sglang
    from sglang_kv.engine import Engine

    common = {"model_path": sys.argv[1], "device": "cpu", "max_total_tokens": 3000}
    found = {}
    # Gates by which no head retrieves, unlike those that are shipped for the model.
    with open("gates.json", "w") as file:
        json.dump({"gates": [[0, 0, 0]] * 30}, file)
    ours = {"kv_compression": "streamingllm", "kv_compression_config": WINDOW}
    more = {"kv_gates": "gates.json", "kv_pressure": "evict"}
    gated = {"method": "duoattention", "threshold": 0.5, **WINDOW}
    scored = {"method": "snapkv", "budget": 64}
    customs = ({"kv_compression": gated}, {"kv_compression": scored, "kv_pressure": "evict"})
    found["ours"] = reports(Engine(**ours, **more, **common), *customs)
    options = {"method": "streamingllm", "config": WINDOW, "override": "server"}
    os.environ["SGLANG_KV_OPTIONS"] = json.dumps(options)
    found["environment"] = reports(sglang.Engine(**common))
    print("REPORTS", json.dumps(found))
"""


def run_cold(argv: list[str], log: Path, **options: Any) -> tuple[int, str]:
    with log.open("w") as output:
        command = [sys.executable, *argv]
        done = subprocess.run(command, stdout=output, stderr=output, timeout=1800, **options)
    return done.returncode, log.read_text()


def run_warm(argv: list[str], log: Path, **options: Any) -> tuple[int, str]:
    # Two for an engine; its end is the end of all children.
    return launcher().run(argv, log, children=2, **options)


@pytest.fixture(scope="module", params=[run_warm, pytest.param(run_cold, marks=pytest.mark.slow)])
def engine_reports(
    request: pytest.FixtureRequest, demo_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Any:
    """What two engines of one program report, one after the other.

    In a file of its own, because SGLang's children import the main module. Cold it is five times
    SGLang's imports: the servers above show that children come up cold, and
    test_cpu_standin.py that programs reach the engine.
    """
    script = tmp_path_factory.mktemp("engines") / "engines.py"
    script.write_text(ENGINES)
    _, output = request.param(
        [str(script), str(demo_model)],
        script.with_suffix(".log"),
        env={**os.environ, **CPU},
        cwd=str(script.parent),
    )
    lines = [line for line in output.splitlines() if line.startswith("REPORTS ")]
    assert lines, output[-6000:]
    return json.loads(lines[0].removeprefix("REPORTS "))


@pytest.mark.server
def test_our_engine_takes_the_options_as_arguments(engine_reports: Any) -> None:
    default, chosen, gated, scored = engine_reports["ours"]
    assert (default["method"], default["kept_tokens"]) == ("streamingllm", 64)
    assert (chosen["method"], chosen["kept_tokens"]) == ("none", 401)
    assert (gated["method"], gated["kept_tokens"]) == ("duoattention", 64)
    assert (scored["method"], scored["kept_tokens"]) == ("snapkv", 65)


@pytest.mark.server
def test_sglangs_engine_takes_them_from_the_environment(engine_reports: Any) -> None:
    """Here with the server's word above the client's: the report says that it was overridden."""
    default, replaced = engine_reports["environment"]
    assert (default["method"], default["kept_tokens"]) == ("streamingllm", 64)
    assert "overridden" not in default
    assert (replaced["method"], replaced["kept_tokens"]) == ("streamingllm", 64)
    assert replaced["overridden"] is True
