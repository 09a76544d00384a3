"""What the speed benchmarks say of themselves: the model among it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_kv.benchmarks import decode_speed, step_time


class FakeServer:
    """Started, left, and nothing else."""

    log = "impl=HeadPageRadixCache"

    def __init__(self, model: str, *flags: str) -> None:
        pass

    def __enter__(self) -> FakeServer:
        return self

    def __exit__(self, *error: object) -> None:
        pass


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model of another shape than the demo's, as far as the arithmetic reads it."""
    folder = tmp_path / "Other-1B"
    folder.mkdir()
    config = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4}
    config |= {"num_key_value_heads": 2, "hidden_size": 512}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "a.safetensors").write_bytes(b"x" * 3000)
    (folder / "b.safetensors").write_bytes(b"x" * 4000)
    return folder


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The lines that a benchmark recorded; its servers are fake ones."""
    rows: list[dict[str, Any]] = []
    for module in (decode_speed, step_time):
        monkeypatch.setattr(module, "Server", FakeServer)
        monkeypatch.setattr(module, "read_bandwidth_gb_s", lambda: 10.0)
        monkeypatch.setattr(module, "record", lambda name, row: rows.append(row))
    return rows


def test_decode_speed_is_of_its_model(
    model: Path, recorded: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {"step_ms": 2.0, "decode_tok_s": 5.0, "prefill_tok_s": 7.0, "steps": 3}
    monkeypatch.setattr(decode_speed, "measure", lambda *_: found)
    monkeypatch.setattr(decode_speed, "run_batch", lambda *_: None)
    flags = ["--model", str(model), "--batch", "2", "--context", "160", "--steps", "32"]
    monkeypatch.setattr("sys.argv", ["decode_speed", *flags, "--arms", "none"])
    decode_speed.main()
    (row,) = recorded
    assert row["model"] == "Other-1B"
    # Weights once, and of each request 11 pages of 2 layers and 2 heads: K and V of 16 tokens, 128
    # values each in bf16.
    read = 7000 + 2 * (11 * 2 * 2) * (2 * 16 * 128 * 2)
    assert row["limit_step_ms"] == round(read / 10e9 * 1e3, 1)
    assert row["share_of_limit"] == round(read / 10e9 * 1e3 / 2.0, 3)


def test_decode_speed_asks_for_weights_that_it_cannot_see(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in model.glob("*.safetensors"):
        path.unlink()
    monkeypatch.setattr("sys.argv", ["decode_speed", "--model", str(model)])
    with pytest.raises(SystemExit):
        decode_speed.main()
    assert "--weight-bytes: " in capsys.readouterr().err


def test_step_time_is_of_its_model(
    model: Path, recorded: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_time, "measure", lambda *_: {"step_ms": 2.0})
    monkeypatch.setattr(step_time, "PY_SPY", SimpleNamespace(exists=lambda: True))
    flags = ["--model", str(model), "--batch", "2", "--context", "160", "--arms", "stock,none"]
    monkeypatch.setattr("sys.argv", ["step_time", *flags])
    step_time.main()
    assert [(row["arm"], row["model"], row["context"]) for row in recorded] == [
        ("stock", "Other-1B", 160),
        ("none", "Other-1B", 160),
    ]
