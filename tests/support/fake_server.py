"""In place of a server that a benchmark starts: it answers at once, and says what it was asked.

It stands where `Server` does, so that a benchmark's ``main`` runs to its end without a model.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from sglang_kv.benchmarks import common
from sglang_kv.benchmarks.proof import parameters_of

#: Runs a benchmark's ``main`` with flags; the lines that it recorded.
Run = Callable[..., list[dict[str, Any]]]


class FakeServer:
    """Greedy answers of token 7.

    Subclasses say what else it is to do; ``started`` has every one that was started.
    """

    started: ClassVar[list[FakeServer]] = []
    #: Seconds between the tokens of a stream.
    step_s = 0.0
    #: Of ``metric``, by name.
    metrics: ClassVar[dict[str, float]] = {}
    scheduler_pid = os.getpid()

    def __init__(self, model: str, *flags: str, **_options: Any) -> None:
        self.model, self.flags = model, list(flags)
        self.asked: list[dict[str, Any] | None] = []  # the policy of each request
        self.prompts: list[list[int]] = []
        self.flushed = 0
        ours = "--kv-compression" in flags
        self.logged = [f"impl={'HeadPageRadixCache' if ours else 'RadixCache'}"]
        self.started.append(self)

    def __enter__(self) -> FakeServer:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    @property
    def log(self) -> str:
        return "\n".join(self.logged)

    def flag(self, name: str) -> str:
        """What a flag of the command line was given."""
        return self.flags[self.flags.index(name) + 1]

    def flush(self) -> None:
        self.flushed += 1

    def metric(self, name: str) -> float:
        return self.metrics[name]

    def generate(
        self, prompt: list[int], policy: dict[str, Any] | None = None, **options: Any
    ) -> dict[str, Any]:
        self.asked.append(policy)
        self.prompts.append(prompt)
        applied = policy or {"method": "none"}
        report = {"method": applied["method"], "parameters": parameters_of(applied)}
        return {
            "output_ids": [7] * options["max_new_tokens"],
            "meta_info": {"kv_compression": report},
        }

    def stream(self, path: str, body: dict[str, Any], timeout_s: float = 0) -> Iterator[Any]:
        assert path == "/generate"
        sampling = body["sampling_params"]
        self.asked.append(sampling.get("custom_params", {}).get("kv_compression"))
        self.prompts.append(body["input_ids"])
        for count in range(sampling["max_new_tokens"]):
            time.sleep(self.step_s)
            yield {"output_ids": [7] * (count + 1)}


def runner(results: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """What runs one benchmark's ``main``, whose lines go to a file in ``results``."""
    monkeypatch.setattr(common, "RESULTS", results)
    monkeypatch.setattr(FakeServer, "started", [])

    def run(module: Any, *flags: str) -> list[dict[str, Any]]:
        monkeypatch.setattr(sys, "argv", [module.__name__, *flags])
        if hasattr(module, "read_bandwidth_gb_s"):
            monkeypatch.setattr(module, "read_bandwidth_gb_s", lambda: 10.0)
        module.main()
        (file,) = results.glob("*.jsonl")
        return [json.loads(line) for line in file.read_text().splitlines()]

    return run


def refused(module: Any, run: Run, capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """What a benchmark says of flags that it refuses."""
    with pytest.raises(SystemExit):
        run(module, *flags)
    return capsys.readouterr().err
