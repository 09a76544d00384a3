"""The comparison with other engines: what is measured again, and llama.cpp's runner."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tiny_model import tiny_llama

from sglang_kv.benchmarks import peers, peers_outside, peers_quality


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    tiny_llama(heads=8, kv_heads=2).save_pretrained(folder)
    return folder


def keys_of(model: Path, results: Path, *flags: str) -> list[str]:
    """The keys of the speed lines that a run adds; its measurements are made up."""
    before = results.read_text().splitlines() if results.exists() else []
    peers.main(["--model", str(model), "--results", str(results), "--part", "speed", *flags])
    return [json.loads(line)["key"] for line in results.read_text().splitlines()[len(before) :]]


def test_another_chunk_is_another_line(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "speed_of_server", lambda args, policy: {"step_ms": 1.0})
    monkeypatch.setattr(peers, "environment", lambda: {"commit": "c"})
    results, arms = tmp_path / "peers.jsonl", ("--arms", "none,snapkv")
    first = keys_of(tiny, results, *arms)
    assert len(set(first)) == 3  # stock, and two arms
    assert keys_of(tiny, results, *arms) == []
    other = keys_of(tiny, results, *arms, "--chunk", "512")
    assert len({*first, *other}) == 6


def test_another_text_or_chunk_is_another_comparison(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers_quality.Chat, "load", classmethod(lambda cls, model: None))
    monkeypatch.setattr(peers_quality, "make_cases", lambda args, chat: [])
    book = tmp_path / "book.txt"
    book.write_text("A book.")
    seen: list[dict[str, Any]] = []
    for flags in ([], ["--text", str(book)], ["--chunk", "512"]):
        args = peers.parse(["--model", str(tiny), *flags])
        args.engines = []
        monkeypatch.setattr(
            peers_quality, "summaries", lambda *_: {("sglang-kv", "none"): {"hits": 1}}
        )
        peers_quality.rows(args, lambda *about: seen.append(about[3]), lambda *_: None)  # type: ignore[arg-type, return-value]
    assert len({json.dumps(settings) for settings in seen}) == 3
    assert (seen[1]["text"], seen[2]["chunk"]) == ("book.txt", 512)


def test_a_timed_job_runs_every_time(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its line is dated and has a commit: an older result must not stand in for it."""
    runs: list[str] = []

    def run(command: list[str], **_: Any) -> None:
        runs.append(command[1])
        Path(command[3]).write_text(json.dumps({"n": len(runs)}))

    monkeypatch.setattr(peers_outside.subprocess, "run", run)
    args = peers.parse(["--model", str(tiny), "--work", str(tmp_path)])
    args.folders = {"kvpress": tmp_path}
    found = [peers_outside.outside(args, "kvpress", {}, kept)["n"] for kept in (True, True, False)]
    assert found == [1, 1, 2]
    calls: list[bool] = []
    monkeypatch.setattr(peers, "convert", lambda *_: None)
    monkeypatch.setattr(
        peers,
        "outside",
        lambda args, engine, job, kept=True: (
            calls.append(kept) or {"speed": {}, "versions": {}, "output_ids": []}
        ),
    )
    peers.speed_of_kvpress(args, "snapkv")
    peers.speed_of_llama_cpp(args)
    assert calls == [False, False]


def test_an_interrupted_installation_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> None:
        commands.append(command)
        if "venv" in command:
            python = peers_outside.python_of(Path(command[-1]))
            python.parent.mkdir(parents=True)
            python.touch()

    monkeypatch.setattr(peers_outside.subprocess, "run", run)
    for _ in range(2):
        peers_outside.install("kvpress", tmp_path / "env")
    assert ["venv" in command for command in commands] == [True, False, False]
    for command in commands[1:]:
        assert command[0] == str(peers_outside.python_of(tmp_path / "env"))
        assert command[-2:] == ["install", *peers_outside.PACKAGES["kvpress"]]


class FakeLlama(ModuleType):
    """llama.cpp's C functions, as far as the runner calls them: a batch has the room it was
    made with, and a context takes no more tokens at once than its ``n_batch``."""

    VOCABULARY = 7

    def __init__(self) -> None:
        super().__init__("llama_cpp")
        self.decoded: list[int] = []
        for name, value in {
            "model_n_layer": 2,
            "model_n_head_kv": 1,
            "model_n_embd": 16,
            "model_n_head": 2,
            "vocab_n_tokens": self.VOCABULARY,
            "print_system_info": b"fake",
        }.items():
            setattr(self, f"llama_{name}", lambda *_, value=value: value)
        for name in ("backend_init", "model_get_vocab", "memory_clear", "get_memory"):
            setattr(self, f"llama_{name}", lambda *_: None)

    def llama_model_default_params(self) -> Any:
        return SimpleNamespace()

    llama_context_default_params = llama_model_default_params

    def llama_model_load_from_file(self, path: bytes, options: Any) -> Any:
        return SimpleNamespace(path=path)

    def llama_init_from_model(self, model: Any, settings: Any) -> Any:
        self.settings = settings
        return settings

    def llama_batch_init(self, tokens: int, embd: int, sequences: int) -> Any:
        fields = {name: [0] * tokens for name in ("token", "pos", "n_seq_id", "logits")}
        return SimpleNamespace(**fields, seq_id=[[0] for _ in range(tokens)], n_tokens=0)

    def llama_decode(self, context: Any, batch: Any) -> int:
        self.decoded.append(batch.n_tokens)
        return int(batch.n_tokens > context.n_batch)

    def llama_get_logits_ith(self, context: Any, index: int) -> Any:
        return (ctypes.c_float * self.VOCABULARY)(0, 0, 0, 1)


@pytest.mark.parametrize(("chunk", "parts"), [(8, [8, 8, 4]), (2, [2] * 10), (64, [20])])
def test_llama_cpp_is_given_no_more_than_a_chunk(
    monkeypatch: pytest.MonkeyPatch, chunk: int, parts: list[int]
) -> None:
    fake = FakeLlama()
    monkeypatch.setitem(sys.modules, "llama_cpp", fake)
    path = Path(peers.__file__).with_name("peers_llamacpp.py")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    runner: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(runner)
    monkeypatch.setattr(runner, "version", lambda name: "1")
    job = {"gguf": "m.gguf", "prompts": [[1] * 20] * 3, "steps": 3, "threads": 1, "chunk": chunk}
    found = runner.run(job)
    assert fake.decoded[1:] == [*(parts * 3), 3, 3]
    assert fake.decoded[0] == min(max(chunk, 3), 32)  # the warm-up
    assert found["output_ids"] == [[3, 3, 3]] * 3
    assert found["kv_bytes"] == 3 * 22 * 2 * 8 * 2 * 2
