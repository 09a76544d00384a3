"""Benchmarks of a server, each from its command line to its last recorded line, without a server.

What they talk to is replaced: the server that they start, and py-spy.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest
from fake_server import FakeServer, Run, refused, runner

from sglang_kv.benchmarks import concurrency, decode_speed, pressure, step_time, summary
from sglang_kv.benchmarks.server import HTTPError


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    return runner(tmp_path / "results", monkeypatch)


# Through a server


class Steady(FakeServer):
    step_s = 0.01


def test_decode_speed(run: Run, demo_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_speed, "Server", Steady)
    sizes = ("--batch", "2", "--context", "512", "--steps", "20")
    arms = ("stock", "none", "snapkv 1/4")
    rows = run(decode_speed, "--model", str(demo_model), *sizes, "--arms", ",".join(arms))
    assert [row["arm"] for row in rows] == list(arms)
    assert [row["proved"] for row in rows] == ["stock", "sglang_kv", "sglang_kv"]
    for row in rows:
        assert 2 <= row["steps"] <= 20  # those in which not all decode are left out
        assert row["step_ms"] >= 10
        assert row["decode_tok_s"] == pytest.approx(2e3 / row["step_ms"], rel=0.01)
        assert row["share_of_limit"] > 0
    stock, none, snapkv = FakeServer.started
    assert stock.flag("--attention-backend") == "torch_native"
    assert none.flag("--kv-compression") == "none"
    # Two that warm up, then the batch, of prompts with nothing in common.
    assert stock.asked == [None] * 4
    assert snapkv.asked == [{"method": "snapkv", "keep_ratio": 0.25}] * 4
    assert [len(prompt) for prompt in none.prompts] == [64, 64, 512, 512]
    assert len({tuple(prompt) for prompt in none.prompts[2:]}) == 2


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--arms", "none,snapkv 1/3"], "--arms: 'snapkv 1/3' is none of stock, none"),
        (["--steps", "1"], "--steps: must be at least 2, got 1"),
    ],
)
def test_an_unknown_arm_is_not_measured_as_stock(
    run: Run, capsys: pytest.CaptureFixture[str], flags: list[str], said: str
) -> None:
    assert said in refused(decode_speed, run, capsys, "--model", "m", *flags)


def test_step_time(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    loop = "Scheduler.event_loop_overlap (scheduler.py:1);ModelRunner.forward (model_runner.py:2)"
    stacks = [f"{loop};apply (unquant.py:1) 3", f"{loop};decode (attention.py:9) 1"]
    monkeypatch.setattr(step_time, "Server", Steady)
    monkeypatch.setattr(step_time, "PY_SPY", tmp_path)

    def sample(pid: int, seconds: int, rate: int) -> list[str]:
        assert (seconds, rate) == (2, 20)
        time.sleep(0.5)  # steps go on meanwhile
        return stacks

    monkeypatch.setattr(step_time, "sample", sample)
    sizes = ("--batch", "2", "--context", "64", "--seconds", "1", "--tokens", "400")
    sizes += ("--sampled-seconds", "2")
    rows = run(step_time, "--model", "m", *sizes, "--arms", "stock,none")
    assert [row["arm"] for row in rows] == ["stock", "none"]
    for row in rows:
        assert row["samples"] == 4
        assert row["sampled_step_ms"] > 0
        parts = row["parts_ms"]
        assert parts["linear layers"] == pytest.approx(3 * parts["attention"], abs=0.1)
        assert sum(parts.values()) == pytest.approx(row["step_ms"], abs=0.2)
    assert [server.asked for server in FakeServer.started] == [[None] * 2, [{"method": "none"}] * 2]


def test_an_answer_that_ends_while_it_is_sampled(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(step_time, "Server", Steady)
    monkeypatch.setattr(step_time, "PY_SPY", tmp_path)
    monkeypatch.setattr(step_time, "sample", lambda *_: [])
    with pytest.raises(SystemExit, match="raise --tokens"):
        run(
            step_time,
            *("--model", "m", "--batch", "1", "--context", "64", "--seconds", "1"),
            *("--tokens", "40", "--arms", "none"),
        )


class Crowded(FakeServer):
    """The evicting one answers otherwise from its fourth token on; the retracting ones retract."""

    def generate(self, prompt: list[int], policy: Any = None, **options: Any) -> dict[str, Any]:
        answer = super().generate(prompt, policy, **options)
        report = answer["meta_info"]["kv_compression"]
        if "--kv-pressure" in self.flags:
            answer["output_ids"][3:] = [9] * len(answer["output_ids"][3:])
            report["evicted_tokens"] = 5
        elif self.flag("--max-total-tokens") == "73":
            self.logged.append("KV cache pool is full. Retract requests.")
        return answer


def test_pressure(run: Run, demo_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pressure, "Server", Crowded)
    sizes = ("--requests", "2", "--prompt", "100", "--new-tokens", "10")
    rows = run(pressure, "--model", str(demo_model), *sizes, "--arms", "evict", "retract")
    # The reference runs in any case, and first.
    found = {row["arm"]: row for row in rows}
    assert list(found) == [pressure.REFERENCE, "retract", "evict"]
    assert [row["pool_tokens"] for row in rows] == [220 + 2048, 73, 73]
    assert [row["same_answer_until"] for row in rows] == [1.0, 1.0, 0.3]
    assert [row["tokens_evicted"] for row in rows] == [0, 0, 10]
    assert [row["retractions_logged"] for row in rows] == [0, 4, 0]  # two of them warm up
    assert found["retract"]["ratio_to_retract"] == 1
    reference, _, evict = FakeServer.started
    assert evict.flag("--kv-pressure-floor") == "0.25"
    assert [len(prompt) for prompt in reference.prompts] == [64, 64, 100, 100]
    assert sorted(reference.prompts) == sorted(evict.prompts)
    assert reference.prompts[2] != reference.prompts[3]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--requests", "3", "--prompt", "90000"], "3 passages of 90000 tokens"),
        (["--requests", "0"], "--requests: must be at least 1"),
        (["--new-tokens", "0"], "--new-tokens: must be at least 1"),
    ],
)
def test_pressure_needs_different_prompts(
    run: Run, demo_model: Path, capsys: pytest.CaptureFixture[str], flags: list[str], said: str
) -> None:
    assert said in refused(pressure, run, capsys, "--model", str(demo_model), *flags)


class Counting(FakeServer):
    """Its metrics say five at once, its answers take a moment."""

    metrics: ClassVar = {"sglang:num_running_reqs": 5.0, "sglang_kv:running_requests": 5.0}

    def generate(self, prompt: list[int], policy: Any = None, **options: Any) -> dict[str, Any]:
        time.sleep(0.05)
        return super().generate(prompt, policy, **options)


def test_concurrency_by_shape(run: Run, demo_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random weights under the model's name, so that arms by gates find theirs."""
    monkeypatch.setattr(concurrency, "Server", Counting)
    sizes = ("--pool", "1200", "--context", "200", "--new-tokens", "4", "--shape-only")
    arms = "stock,none,copy 1/2,duoattention 0.5"
    rows = run(concurrency, "--model", str(demo_model), *sizes, "--arms", arms)
    assert [row["arm"] for row in rows] == arms.split(",")
    assert {row["running_at_once"] for row in rows} == {5}
    assert all(row["shape_only"] and row["model"] == demo_model.name for row in rows)
    stock, ours = FakeServer.started
    assert {Path(server.model).name for server in (stock, ours)} == {demo_model.name}
    assert not Path(ours.model).exists()  # removed in the end
    assert (stock.flushed, ours.flushed) == (1, 3)
    # As many as fit, and three that wait.
    assert len(stock.prompts) == rows[0]["predicted"] + 3
    assert ours.asked[-1] == {"method": "duoattention", "sparsity": 0.5}


def test_a_refused_request_is_not_counted(
    run: Run, demo_model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Refusing(Counting):
        def generate(self, prompt: list[int], policy: Any = None, **options: Any) -> Any:
            raise HTTPError(400, "no room")

    monkeypatch.setattr(concurrency, "Server", Refusing)
    sizes = ("--pool", "1200", "--context", "200", "--new-tokens", "4")
    with pytest.raises(HTTPError, match="no room"):
        run(concurrency, "--model", str(demo_model), *sizes, "--arms", "none")
    assert not (tmp_path / "results").exists()


# What was recorded apart from the documents


def test_a_summary_shows_the_newest_line_of_each_arm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [
        {"benchmark": "speed", "arm": "a", "step_ms": 1.0, "policy": {"method": "none"}},
        {"benchmark": "speed", "arm": "b", "step_ms": 2.5, "note": "slow"},
        {"benchmark": "speed", "arm": "a", "step_ms": 3.0, "samples": [1]},
    ]
    (tmp_path / "speed.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr(sys, "argv", ["summary", str(tmp_path)])
    summary.main()
    printed = capsys.readouterr().out
    assert printed.splitlines()[2:] == [
        "| arm | step_ms | note |",
        "|---|---|---|",
        "| a | 3.0 | - |",
        "| b | 2.5 | slow |",
        "",
    ]


def test_a_summary_of_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["summary", str(tmp_path)])
    with pytest.raises(SystemExit):
        summary.main()
    assert "no lines of results" in capsys.readouterr().err
