"""Benchmarks without a server, each from its command line to its last line, at small sizes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from fake_server import Run, refused, runner
from tiny_model import TEXT, tiny_llama, tiny_tokenizer

from sglang_kv.benchmarks import (
    attention_mass,
    calibration,
    decode_kernel,
    prefix_gates,
    prefix_replay,
    radix_tree,
    window_pass,
)
from sglang_kv.benchmarks.common import PlainReads
from sglang_kv.benchmarks.prefix_text import TEXTS
from sglang_kv.compression.gates import HeadGates, save_gates


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    return runner(tmp_path / "results", monkeypatch)


@pytest.mark.parametrize(
    ("tokens", "queries"),
    [(64, 16), (70, 6), (65, 1), (20, 16), (9, 9)],
    ids=["whole", "short last chunk", "one token in it", "one chunk", "less than the window"],
)
def test_window_pass(run: Run, tokens: int, queries: int) -> None:
    sizes = ("--chunk", "32", "--layers", "200", "--kv-heads", "1", "--group", "2")
    small = ("--intermediate", "64", "--rounds", "1", "--queries", "16")
    (row,) = run(window_pass, "--tokens", str(tokens), *sizes, *small)
    assert (row["tokens"], row["queries"]) == (tokens, queries)
    assert row["window_ms"] > 0
    assert row["share_of_prefill"] > 0


def test_a_window_pass_over_nothing(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(window_pass, run, capsys, "--tokens", "0")
    assert "--tokens: must be at least 1, got 0" in said


def test_radix_tree(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(radix_tree, "PROMPT", 640)
    rows = run(radix_tree, "--nodes", "10", "40", "--repeats", "3")
    assert [row["prompt_tokens"] for row in rows] == [640, 640]
    assert 10 <= rows[0]["nodes"] < rows[1]["nodes"]
    for row in rows:
        parts = row["match_ms"] + row["insert_ms"]
        assert row["match_and_insert_worst_ms"] >= row["match_and_insert_ms"] > 0
        assert parts > 0
        assert row["evict_node_ms"] > 0


def test_no_repeats(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert "must be at least 1" in refused(radix_tree, run, capsys, "--repeats", "0")


@pytest.fixture
def reader_model(tmp_path: Path) -> Path:
    """A tiny model with a tokenizer of single characters, and gates in a file beside it."""
    folder = tmp_path / "tiny"
    tiny_llama().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    values = np.linspace(0, 1, 6, dtype=np.float32).reshape(3, 2)
    save_gates(tmp_path / "gates.json", HeadGates(values, "tiny", "made-up", "here"))
    return folder


def test_prefix_gates(run: Run, reader_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, _ = TEXTS["agents"]
    monkeypatch.setitem(prefix_gates.TEXTS, "agents", (make, (20_480,)))
    gates = str(reader_model.parent / "gates.json")
    flags = ("--model", str(reader_model), "--traffic", "agents", "--requests", "5")
    (row,) = run(prefix_gates, *flags, "--gates", gates)
    assert (row["arm"], row["gates"], row["requests"]) == ("agents 20480", "made-up", 5)
    hits = row["hit_tokens"]
    assert set(hits) >= {"calibrated gates", "all-one gates", "no attention", "lru", "optimum"}
    assert max(hits.values()) == hits["optimum"]
    assert 0 < hits["lru"] < row["prompt_tokens"]
    assert -1 <= row["gated_and_plain_correlate"] <= 1


def test_a_shared_beginning_is_read_once(reader_model: Path) -> None:
    """And what is read of a prompt does not depend on what was read before."""
    reader = prefix_gates.Reader(str(reader_model))
    prompt = np.random.default_rng(0).integers(1, 90, 120).tolist()
    reader.read(prompt)
    longer = [*prompt, *range(1, 41)]
    after = reader.read(longer)
    alone = prefix_gates.Reader(str(reader_model)).read(longer)
    np.testing.assert_allclose(after, alone, atol=1e-3)
    # Every query's weights sum to one: of 16 queries, and a group of 3.
    assert torch.tensor(alone).sum(-1).allclose(torch.full((3, 2), 16.0 * 3), atol=1e-3)


def test_a_model_without_gates(
    run: Run, reader_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(prefix_gates, run, capsys, "--model", str(reader_model))
    assert "--gates: give a file" in said


def test_prefix_replay(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    make, _ = prefix_replay.WORKLOADS["agents"]
    monkeypatch.setitem(prefix_replay.WORKLOADS, "agents", (make, (32_768,)))
    (row,) = run(prefix_replay, "--workloads", "agents", "--requests", "20")
    assert (row["arm"], row["requests"], row["held_out"]) == ("agents 32768", 20, False)
    assert max(row["hit_tokens"].values()) == row["hit_tokens"]["optimum"] > 0
    assert set(row["duoattention"]) == {"whole", "thinned", "thinned first"}


def test_attention_mass(run: Run, reader_model: Path, tmp_path: Path) -> None:
    book = tmp_path / "book.txt"
    book.write_text(TEXT)
    flags = ("--model", str(reader_model), "--text", str(book), "--context", "64")
    (row,) = run(attention_mass, *flags)
    assert (row["model"], row["text"], row["context"]) == ("tiny", "book.txt", 64)
    for name in ("top_20", "top_20_of_query"):  # the most attended fifth holds a fifth at least
        assert 0.19 < row[name] <= 1
    assert len(row["first_4_by_layer"]) == 3


def test_a_text_that_is_too_short(
    run: Run, reader_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "short.txt").write_text("Short.")
    flags = ("--model", str(reader_model), "--text", str(tmp_path / "short.txt"))
    said = refused(attention_mass, run, capsys, *flags)
    assert "--context: the text has 6 tokens, 2048 were asked for" in said


def test_decode_kernel(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_KV_CPU_ISA", "")  # put back in the end, as it was
    monkeypatch.setattr(decode_kernel, "SHAPES", ((2, 40), (1, 64)))
    monkeypatch.setattr(decode_kernel, "WALKED_BYTES", 1e5)
    monkeypatch.setattr(PlainReads, "BYTES", 2**22)
    try:
        rows = run(decode_kernel, "--seconds", "0")
    finally:
        decode_kernel.jit.load_kernels.cache_clear()
    built = ("native", "plain") if decode_kernel.jit.has_avx512() else ("native",)
    shapes = ("2 x 40", "1 x 64")
    assert [row["arm"] for row in rows] == [f"{isa}, {shape}" for isa in built for shape in shapes]
    assert all(row["rounds"] >= 5 and row["call_us"] > 0 for row in rows)


def test_a_calibration_report_becomes_lines(run: Run, tmp_path: Path) -> None:
    sizes = {"sparsity": 0.5, "sinks": 64, "recent": 256}
    report = {
        "model": "m", "hash": "sha256:0", "settings": {"samples": 1},
        "needles": [{"name": "trained", "hits": 3, **sizes}],
        "windows": [{"name": "trained", "hits": 2, **sizes}],
        "prefill": [],
        "full": {"hits": 4},
        "gates": [{"name": "trained", "method": "trained", "shares": [0.5]}],
        "agreement": [{"first": "trained", "second": "training-free", "rank": 0.9}],
        "recommended": 0.5, "window": [64, 256],
    }  # fmt: skip
    (tmp_path / "report.json").write_text(json.dumps(report))
    rows = run(calibration, "report", str(tmp_path))
    assert [(row["arm"], row["kind"]) for row in rows] == [
        ("trained 0.5 64+256", "needles"),
        ("trained 0.5 64+256", "windows"),
        ("full", "needles"),
        ("trained", "shares"),
        ("trained, training-free", "agreement"),
        ("trained", "chosen"),
    ]
    assert {row["model"] for row in rows} == {"m"}
