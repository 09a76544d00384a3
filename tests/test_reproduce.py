"""scripts/reproduce.sh with a Python that only notes what it is asked to run."""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sglang_kv.benchmarks import headline, peers, quality_options, throughput
from sglang_kv.benchmarks.methods import arms

FAKE = """#!{python} -S
import json, os, sys
words = sys.argv[1:]
if words[0] == "-c":
    print(os.environ["GATES"])
elif words[0].endswith("demo_model.py"):
    print({model!r})
else:
    with open({calls!r}, "a") as file:
        file.write(json.dumps([words, os.environ.get("SGLANG_KV_RESULTS")]) + "\\n")
    sys.exit(words[1].split(".")[-1] == os.environ.get("FAILS"))
"""


@dataclass
class Call:
    """A benchmark that was started, and where its lines go; None: to the documents' results."""

    name: str
    flags: list[str]
    results: str | None

    def flag(self, name: str) -> str:
        return self.flags[self.flags.index(name) + 1]


class Script:
    """The script, and what it ran since it was last asked."""

    def __init__(self, root: Path, folder: Path, model: Path):
        self.root, self.folder, self.calls = root, folder, folder / "calls.jsonl"
        self.venv = folder / "venv"
        (self.venv / "bin").mkdir(parents=True)
        python = self.venv / "bin" / "python"
        text = FAKE.format(python=sys.executable, calls=str(self.calls), model=str(model))
        python.write_text(text)
        python.chmod(0o755)
        digest = hashlib.sha256((root / "pyproject.toml").read_bytes()).hexdigest()
        (self.venv / ".sglang_kv_stamp").write_text(f"{digest} {root}\nbench,demo\n")

    def __call__(
        self,
        *flags: str,
        ends: int = 0,
        gates: str = "yes",
        cwd: Path | None = None,
        **env: str,
    ) -> list[Call]:
        self.calls.unlink(missing_ok=True)
        done = subprocess.run(
            [str(self.root / "scripts" / "reproduce.sh"), *flags],
            env=os.environ
            | {"SGLANG_KV_VENV": str(self.venv), "SGLANG_KV_CACHE_DIR": str(self.folder / "cache")}
            | {"GATES": gates, **env},
            capture_output=True,
            text=True,
            cwd=cwd,
        )
        assert done.returncode == ends, done.stderr
        self.said = done.stderr
        lines = self.calls.read_text().splitlines() if self.calls.exists() else []
        found = [json.loads(line) for line in lines]
        assert all(words[0] == "-m" for words, _ in found)
        return [Call(words[1].split(".")[-1], words[2:], results) for words, results in found]


@pytest.fixture
def script(root: Path, tmp_path: Path, demo_model: Path) -> Script:
    return Script(root, tmp_path, demo_model)


class Parsed(Exception):
    """The flags are as the benchmark wants them."""


def parse(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a benchmark's own parser its flags; SystemExit where it refuses them."""
    module = importlib.import_module(f"sglang_kv.benchmarks.{call.name}")
    # What `calibration` does not know is for the command that it starts.
    method = "parse_known_args" if call.name == "calibration" else "parse_args"
    original = getattr(argparse.ArgumentParser, method)

    def parse_flags(self: argparse.ArgumentParser, argv: Any = None, *rest: Any) -> Any:
        raise Parsed(self, original(self, argv, *rest))

    with monkeypatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, method, parse_flags)
        patch.setattr(sys, "argv", [call.name, *call.flags])
        with pytest.raises(Parsed) as parsed:
            module.main()
    parser, args = parsed.value.args
    if call.name == "quality":
        with monkeypatch.context() as patch:  # the script installs the extra, these tests do not
            patch.setattr("importlib.util.find_spec", lambda name: name)
            quality_options.check(parser, args)
    elif call.name in ("peers", "throughput"):
        {"peers": peers, "throughput": throughput}[call.name].check(args)
    elif call.name in ("concurrency", "decode_speed"):
        known = arms(args.context) if call.name == "concurrency" else arms(args.context, (4,))
        assert set(args.arms.split(",")) <= {"stock", *known}


def needle_arms(call: Call) -> set[str]:
    given = [call.flags[i + 1] for i, flag in enumerate(call.flags) if flag == "--arm"]
    return {"none", *(arm.partition("=")[0].partition("@")[0] for arm in given)}


def test_the_headline_is_all_of_readme(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = script()
    assert [call.name for call in calls] == [
        *("quality", "decode_speed", "concurrency", "report", "quality")
    ]
    for call in calls:
        parse(call, monkeypatch)
        assert call.results is None
    needle, speed, concurrency, written, maps = calls
    assert {arm for _, arm in headline.ARMS.values() if arm} <= needle_arms(needle)
    for call in (speed, concurrency):
        assert set(call.flag("--arms").split(",")) == set(headline.ARMS)
        assert call.flag("--context") == "4000"
    assert "--shape-only" not in concurrency.flags  # README shows the model's own weights
    assert written.flags == ["--write", "--plots"]
    assert maps.flags == ["--report", "--heat-maps", "docs/heat-maps"]
    # Again: what is done is not done again.
    assert [call.name for call in script()] == ["report", "quality"]
    assert "speed: done before" in script.said


def test_the_full_run_has_every_benchmark_with_flags_that_it_takes(
    script: Script, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    book = tmp_path / "book.txt"
    book.write_text("A book.")
    calls = script("--full")
    without = {call.name for call in calls}
    assert not without & {"endless_stream", "peers"}
    assert "endless: left out: needs --text" in script.said
    more = script("--full", "--text", book.name, "--kvpress", script.venv.name, cwd=tmp_path)
    assert [call.name for call in more] == [
        *("endless_stream", "endless_stream", "peers", "peers", "report", "quality")
    ]
    for call in (*calls, *more):
        parse(call, monkeypatch)
    assert more[0].flag("--text") == str(book)
    assert without >= {
        *("decode_shapes", "attention_mass", "pressure", "prefix_replay", "prefix_orders"),
        *("prefix_gates", "radix_tree", "calibration", "throughput", "decode_kernel"),
    }
    suites = {call.flag("--suite") for call in calls if "--suite" in call.flags}
    assert suites == {"needle", "ruler", "standins", "fidelity", "perplexity"}
    counted = [call.flag("--arms").split(",") for call in calls if call.name == "concurrency"]
    assert {arm for part in counted for arm in part} == {"stock", *arms(4000)}


def test_a_quick_run_leaves_the_documents_alone(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = script("--quick")
    for call in calls:
        parse(call, monkeypatch)
        assert call.results is not None
        assert call.results.startswith(str(script.folder / "cache"))
    assert [call.name for call in calls] == [
        *("quality", "decode_speed", "decode_shapes", "concurrency", "attention_mass", "summary")
    ]
    assert calls[-1].flags == [calls[0].results]


def test_another_model_leaves_the_documents_alone(script: Script, demo_model: Path) -> None:
    calls = script("--model", "org/other", gates="")
    assert [call.name for call in calls] == ["quality", "decode_speed", "concurrency", "summary"]
    assert all(call.results == calls[-1].flags[0] for call in calls)
    assert all(call.flag("--model") == "org/other" for call in calls[:-1])
    # Without gates, no arm that goes by them; and its state is not the demo model's.
    text = json.dumps([call.flags for call in calls])
    assert "duoattention" not in text
    assert "copy" not in text
    assert len(script()) == 5


def test_a_part_that_fails_is_named_and_the_others_run(script: Script) -> None:
    calls = script(ends=1, FAILS="decode_speed")
    assert [call.name for call in calls][1:3] == ["decode_speed", "concurrency"]
    assert "speed: FAILED" in script.said
    assert "failed: speed" in script.said
    assert [call.name for call in script()] == ["decode_speed", "report", "quality"]


def test_a_part_of_another_size(script: Script) -> None:
    script("--only", "ruler", ends=1)
    assert "--only: ruler: expected some of needle speed concurrency report" in script.said
