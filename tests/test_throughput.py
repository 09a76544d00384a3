"""The throughput benchmark without a model: workloads, the load, proofs, resuming, errors.

tests/test_packaging.py runs it from an installed wheel.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_load
import pytest
from fake_sglang import CACHED, PAGE_BYTES, fake_sglang

from sglang_kv.benchmarks import throughput, under_load, watch
from sglang_kv.benchmarks.arms import Remote
from sglang_kv.benchmarks.load import AllFailed, drive, extra_body, figures
from sglang_kv.benchmarks.server import Server
from sglang_kv.benchmarks.under_load import Target, server_flags, speed_over_time
from sglang_kv.benchmarks.watch import Counters, NotProved, prove_engine
from sglang_kv.benchmarks.workloads import (
    QUICK,
    WORKLOADS,
    Workload,
    make_requests,
    parse_workload,
)

WINDOW = {"method": "streamingllm", "sinks": 4, "recent": 60}
ARM = f"window={json.dumps(WINDOW)}"


def encode(text: str) -> list[int]:
    """Ids of characters: no word is one token."""
    return [ord(letter) for letter in text]


# Workloads


@pytest.mark.parametrize("name", ["random", "document", "shared", "stream"])
def test_prompts_have_the_length_they_say(name: str) -> None:
    workload = QUICK[name]
    made = make_requests(workload, encode, 7)
    assert len(made) == workload.requests
    assert all(len(request.prompt) == request.prompt_tokens for request in made)
    assert max(r.prompt_tokens + r.output_tokens for r in made) <= workload.longest
    assert made == make_requests(workload, encode, 7)
    assert made != make_requests(workload, encode, 8)


def test_only_a_group_shares_its_beginning() -> None:
    workload = Workload("shared", requests=6, context=200, output=8, question=50, groups=3)
    prompts = [tuple(r.prompt) for r in make_requests(workload, encode, 0)]  # type: ignore[arg-type]
    assert len({p[:200] for p in prompts}) == 3
    assert len(set(prompts)) == 6
    assert [p[:200] for p in prompts[:3]] == [p[:200] for p in prompts[3:]]
    documents = make_requests(QUICK["document"], encode, 0)
    assert len({tuple(r.prompt[:40]) for r in documents}) == len(documents)  # type: ignore[arg-type]


def test_an_agents_session_is_rounds_of_messages() -> None:
    workload = QUICK["agent"]
    for session in make_requests(workload, encode, 0):
        roles = [[message["role"] for message in part] for part in session.prompt]  # type: ignore[index, union-attr]
        assert roles == [["system", "user"], *[["user"]] * (workload.turns - 1)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("chat", "expected one of random, document"),
        ("document:size=3", "'size' is none of requests, context"),
        ("document:context=-1", "context must be a whole number of at least 1, got '-1'"),
        ("stream:output=1", "output must be a whole number of at least 2"),
        ("document:turns=2", "only an agent's session has turns"),
    ],
)
def test_a_bad_workload_is_named(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_workload(text)


def test_a_size_replaces_the_default() -> None:
    assert parse_workload("document:context=4000,requests=2").label() == (
        "document:requests=2,context=4000,output=64,question=0,groups=1,turns=1"
    )


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "give --model or --base-url"),
        (["--model", "m", "--arms", "snap"], "--arms: 'snap' is none of stock, none"),
        (["--model", "m", "--budgets", "4,1"], "--budgets must be whole numbers above 1"),
        (["--model", "m", "--rate", "0"], "--rate must be above 0"),
        (["--model", "m", "--pool-mib", "-3"], "--pool-mib must be above 0"),
        (["--model", "m", "--device", "tpu"], "--device must be cpu or cuda"),
        (["--model", "m", "--dtype", "int8"], "--dtype: 'int8': expected one of auto"),
        (["--model", "m", "--server-args=--kv-cache-dtype nvfp4"], "--kv-cache-dtype: 'nvfp4'"),
        (["--model", "m", "--server-args=--kv-cache-dtype"], "--server-args: "),
        (["--model", "m", "--server-args=--dtype half"], "--dtype is a flag of this command"),
        (["--model", "m", "--arm", "x={}"], "a policy is an object with a method"),
        (["--model", "m", "--arm", 'x={"method": "snapkv", "keep": 1}'], "keep"),
    ],
)
def test_a_bad_flag_is_named(
    flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        throughput.parse(flags)
    assert said in capsys.readouterr().err


# What is sent, and what comes back


def test_a_policy_does_not_cost_the_other_sampling_parameters() -> None:
    """SGLang's load generator replaces `sampling_params` by what a request adds."""
    body = extra_body(WINDOW, 17, chat=False)["sampling_params"]
    assert body["max_new_tokens"] == 17
    assert body["ignore_eos"] is True
    assert body["custom_params"] == {"kv_compression": WINDOW}
    assert extra_body(WINDOW, 17, chat=True) == {"custom_params": {"kv_compression": WINDOW}}
    assert "custom_params" not in extra_body(None, 17, chat=False)["sampling_params"]


def test_prompt_tokens_are_those_of_requests_that_were_served() -> None:
    raw = {
        "completed": 2, "duration": 2.0, "total_output_tokens": 40, "request_throughput": 1.0,
        "output_throughput": 20.0, "input_lens": [10, 20, 30], "errors": ["", "no", ""],
        "itls": [], "cache_report": {"cache_hit_rate_pct": 12.5},
    }  # fmt: skip
    for name in ("ttft", "tpot", "itl", "e2e_latency"):
        raw |= {f"mean_{name}_ms": 2.0, f"median_{name}_ms": 1.0, f"p99_{name}_ms": 3.0}
    found = figures(raw)
    assert (found["prompt_tokens"], found["failed"], found["error"]) == (40, 1, "no")
    assert found["total_tok_s"] == 40.0
    assert found["hit_rate"] == 0.125
    assert found["e2e_ms"] == {"mean": 2.0, "p50": 1.0, "p99": 3.0}


def test_speed_over_time_sees_a_stream_slow_down() -> None:
    assert speed_over_time([0.01] * 50 + [0.02] * 50)["last_to_first"] == 0.5
    assert speed_over_time([0.01] * 100)["last_to_first"] == 1.0


def test_every_arm_gets_the_same_memory_and_a_longer_context_where_needed(tmp_path: Path) -> None:
    args = throughput.parse(["--model", "m", "--workload", "document:context=6000"])
    geometry: Any = SimpleNamespace()
    target = Target("m", token_bytes=23040, geometry=geometry, trained=8192)
    flags, env = server_flags(args, target)
    assert flags[flags.index("--max-total-tokens") + 1] == str(4 * 6064 + 4096)
    assert "--context-length" not in flags
    assert not env
    args = throughput.parse(
        ["--model", "m", "--workload", "stream:output=20000", "--pool-mib", "90"]
    )
    flags, env = server_flags(args, target)
    assert int(flags[flags.index("--max-total-tokens") + 1]) * 23040 <= 90 * 2**20
    assert flags[flags.index("--context-length") + 1] == str(20256 + 64)
    assert env == {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}


def test_sglangs_load_generator_runs_on_uvloop_and_sends_what_it_is_given(
    demo_model: Path,
) -> None:
    """By itself it runs asyncio's own loop."""
    before = asyncio.get_event_loop_policy()
    model = str(demo_model)
    with fake_sglang(model, refuses="h2o") as fake:
        workload = Workload("document", requests=3, context=120, output=4)
        found = drive(fake.url, model, make_requests(workload, encode, 0), WINDOW)
        sessions = Workload("agent", requests=2, context=40, output=3, question=9, turns=3)
        chat = drive(fake.url, model, make_requests(sessions, encode, 0), WINDOW)
        generated, chats = fake.bodies("/generate"), fake.bodies("/v1/chat/completions")
        with pytest.raises(AllFailed, match="no token came"):
            drive(fake.url, model, make_requests(workload, encode, 0), {"method": "h2o"})
    assert found["loop"] == chat["loop"] == "uvloop.Loop"
    assert asyncio.get_event_loop_policy() is before
    assert (found["completed"], found["failed"], found["output_tokens"]) == (3, 0, 12)
    assert found["prompt_tokens"] == 360
    assert found["hit_rate"] == round(CACHED / 120, 4)
    for latency in ("ttft_ms", "e2e_ms"):
        assert 0 < found[latency]["p50"] <= found[latency]["p99"]
    # An answer comes in one piece, so the time between its tokens may round to nothing.
    for latency in ("tpot_ms", "itl_ms"):
        assert 0 <= found[latency]["p50"] <= found[latency]["p99"]
    assert [len(gaps) for gaps in found["itls"]] == [3] * 3
    assert len(generated) == 3  # no warm-up of its own
    for body in generated:
        assert body["sampling_params"] == extra_body(WINDOW, 4, chat=False)["sampling_params"]
        assert len(body["input_ids"]) == 120
    # A session is a chat that grows by its answer and the next question.
    assert chat["completed"] == 2 * 3
    assert sorted(len(body["messages"]) for body in chats) == [2, 2, 4, 4, 6, 6]
    assert all(body["custom_params"] == {"kv_compression": WINDOW} for body in chats)
    assert all(body["max_completion_tokens"] == 3 for body in chats)


def test_what_is_refused_in_a_stream_was_not_served(demo_model: Path) -> None:
    """SGLang says 200 and sends an error: its load generator takes that for a served request."""
    model = str(demo_model)
    short, long = (
        make_requests(Workload("document", requests=2, context=size, output=4), encode, size)
        for size in (100, 200)
    )
    with fake_sglang(model, stock=True, longest=150) as fake:
        found = drive(fake.url, model, [*short, *long], None)
    assert (found["completed"], found["failed"], found["output_tokens"]) == (2, 2, 8)
    assert found["prompt_tokens"] == 200
    assert "no token came" in found["error"]


@pytest.mark.parametrize(
    ("dtype", "more", "size"),
    [
        ("auto", "", 23040),
        ("bfloat16", "--log-level info", 23040),
        ("float32", "", 2 * 23040),
        ("auto", "--kv-cache-dtype fp8_e4m3", 23040 // 2),
        ("float32", "--kv-cache-dtype=fp8_e5m2", 23040 // 2),
        ("float32", "--kv-cache-dtype auto", 2 * 23040),
    ],
)
def test_a_token_is_as_large_as_the_flags_make_it(
    demo_model: Path, dtype: str, more: str, size: int
) -> None:
    """30 layers of 3 heads of 64, K and V: 11,520 values."""
    args = throughput.parse(["--model", "m", "--dtype", dtype, f"--server-args={more}"])
    target = Target.of(str(demo_model), args.dtype, args.kv_cache_dtype)
    assert target.token_bytes == size


# Proofs, against a server that counts


@pytest.fixture
def quick_load(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_load.install(monkeypatch.setattr)


def bench(url: str, results: Path, *flags: str) -> list[dict[str, Any]]:
    small = ["--workload", "document:requests=3,context=128,output=4"]
    throughput.main(["--base-url", url, "--results", str(results), *small, *flags])
    return [json.loads(line) for line in results.read_text().splitlines()]


@pytest.mark.usefixtures("quick_load")
def test_lines_say_what_ran_and_are_not_made_twice(demo_model: Path, tmp_path: Path) -> None:
    results = tmp_path / "lines.jsonl"
    with fake_sglang(str(demo_model)) as fake:
        none, window = bench(fake.url, results, "--arms", "none", "--arm", ARM)
        flushed = [i for i, (path, _) in enumerate(fake.asked) if path == "/flush_cache"]
        # One request and then two warm an arm up, the cache is flushed, and the load begins.
        assert flushed == [3, 3 + 1 + 3 + 3]
        asked = len(fake.asked)
        assert len(bench(fake.url, results, "--arms", "none", "--arm", ARM)) == 2
        assert len(fake.asked) == asked
        assert len(bench(fake.url, results, "--arms", "none", "--again")) == 3
        assert len(bench(fake.url, results, "--arms", "none", "--seed", "1")) == 4
    assert (none["arm"], window["arm"]) == ("none", "window")
    assert none["proved"]["tokens_dropped"] == 0
    assert window["proved"]["tokens_dropped"] > 0
    assert window["proved"]["requests"] == 3
    assert window["proved"]["policy"]["parameters"]["recent"] == 60
    assert window["head_pages"]["peak"] == 300
    assert window["kv_bytes"]["peak"] == 300 * PAGE_BYTES
    assert window["running_at_once"] == 3
    assert none["model"] == demo_model.name
    assert {"commit", "versions", "cpu"} <= none["environment"].keys()


@pytest.mark.usefixtures("quick_load")
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ({"ignores_policies": True}, "asked for streamingllm"),
        ({"never_drops": True}, "some dropped tokens"),
        ({"stock": True}, "no arm is left"),
    ],
)
def test_an_arm_that_did_not_run_ends_the_run(
    demo_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: dict[str, Any],
    said: str,
) -> None:
    prove = under_load.Counters.prove
    monkeypatch.setattr(
        under_load.Counters, "prove", lambda *args, **options: prove(*args, **options, patience_s=0)
    )
    with (
        fake_sglang(str(demo_model), **fault) as fake,
        pytest.raises(SystemExit, match=said),
    ):
        bench(fake.url, tmp_path / "lines.jsonl", "--arm", ARM, "--arms", "window")
    assert not (tmp_path / "lines.jsonl").exists()


@pytest.mark.usefixtures("quick_load")
def test_a_refused_arm_is_a_line_of_its_own(demo_model: Path, tmp_path: Path) -> None:
    with fake_sglang(str(demo_model), refuses="streamingllm") as fake:
        window, none = bench(
            fake.url, tmp_path / "lines.jsonl", "--arm", ARM, "--arms", "window,none"
        )
    assert window["refused"] == "HTTP 400: no streamingllm here"
    assert none["completed"] == 3
    assert "| window | refused: HTTP 400" in throughput.table([window, none])


@pytest.mark.parametrize("stock", [True, False])
def test_prompts_that_are_refused_in_the_stream_are_a_refused_line(
    demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stock: bool
) -> None:
    """With SGLang's own load generator: the warm-up's prompts are served, the others are not."""
    monkeypatch.setattr(watch, "SETTLE_S", 0.0)
    results = tmp_path / "lines.jsonl"
    with fake_sglang(str(demo_model), stock=stock, longest=300) as fake:
        flags = ["--base-url", fake.url, "--results", str(results), "--arms", "stock,none"]
        throughput.main([*flags, "--workload", "document:requests=2,context=400,output=4"])
    (line,) = map(json.loads, results.read_text().splitlines())
    assert line["arm"] == ("stock" if stock else "none")
    assert "no token came" in line["refused"]
    assert "output_tok_s" not in line


@pytest.mark.usefixtures("quick_load")
def test_stock_sglang_is_the_stock_arm(demo_model: Path, tmp_path: Path) -> None:
    with fake_sglang(str(demo_model), stock=True) as fake:
        (line,) = bench(fake.url, tmp_path / "lines.jsonl")
        bodies = fake.bodies("/generate")
    assert line["arm"] == "stock"
    assert line["policy"] is None
    assert line["head_pages"] is None
    assert line["kv_bytes"]["peak"] == 100 * line["token_bytes"]
    assert line["pool_bytes"] == 1600 * line["token_bytes"]
    assert not any("custom_params" in body["sampling_params"] for body in bodies)


def test_a_server_that_serves_others_proves_nothing(
    demo_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "SETTLE_S", 0.0)
    with fake_sglang(str(demo_model)) as fake:
        before = Counters.settled(Remote(fake.url), "snapkv")
        for method in ("snapkv", "none", "snapkv"):
            fake.report({"kv_compression": {"method": method}})
        with pytest.raises(NotProved, match="expected 1 to 1 requests"):
            before.prove(Remote(fake.url), range(1, 2), drops=True, patience_s=0)
        assert before.prove(Remote(fake.url), range(2, 3), drops=True)["requests"] == 2


class Logged(Server):
    """A server with a log, without the process that writes it."""

    log = ""

    def __init__(self, url: str, log: str):
        self.url, self.log = url, log


def test_the_log_has_its_say(demo_model: Path) -> None:
    """A server whose metrics are ours and whose tree is not: a plugin that half failed."""
    with fake_sglang(str(demo_model)) as fake:
        for tree, compressing, holds in (
            ("impl=HeadPageRadixCache", True, True),
            ("impl=UnifiedRadixCache", True, False),
            ("impl=HeadPageRadixCache", False, False),
        ):
            server = Logged(fake.url, f"Tree cache initialized: source=registry {tree}\n")
            if holds:
                assert prove_engine(server, compressing)["engine"] == "sglang_kv"
            else:
                with pytest.raises(NotProved, match="this is not"):
                    prove_engine(server, compressing)


def test_all_workloads_have_a_quick_form() -> None:
    assert WORKLOADS.keys() == QUICK.keys()
    assert all(QUICK[name].longest < WORKLOADS[name].longest for name in QUICK)
