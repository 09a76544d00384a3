"""``sglang-kv calibrate``: what it writes, stopped runs, and what it refuses."""

from __future__ import annotations

import argparse
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sglang_kv import cli
from sglang_kv.calibration import checks, run
from sglang_kv.calibration.attention import UnsupportedModelError, require_supported
from sglang_kv.calibration.prefix import require_positions
from sglang_kv.calibration.progress import Unfinished
from sglang_kv.compression.gates import load_gates, model_hash

SIZES = {
    "trained": ["--lengths", "1100", "1200", "--passkeys", "2", "--steps", "4", "--samples", "2"],
    "training-free": ["--lengths", "700", "800", "--samples", "3"],
    "mean-attention": ["--lengths", "700", "800", "--samples", "3"],
}


def options(common: list[str], method: str, *more: str) -> list[str]:
    window = ["--sinks", "8", "--recent", "64", "--dtype", "float32"]
    return ["calibrate", *common, "--method", method, *SIZES[method], *window, *more]


@pytest.mark.parametrize("method", SIZES)
def test_the_command_writes_gates(
    common: list[str], method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "tiny.json"
    cli.main(options(common, method, "--out", str(out), "--pattern"))
    printed = capsys.readouterr()
    assert printed.out == f"{out}\n"
    assert "s left" in printed.err
    gates = load_gates(out)
    assert gates.values.shape == (3, 2)
    assert (gates.model, gates.method, gates.sinks, gates.recent) == ("tiny", method, 8, 64)
    assert gates.model_hash == model_hash(common[0])
    held = json.loads(out.read_text())["parameters"]
    assert held["seed"] == 0
    assert held["text"] == "text.txt"
    np.testing.assert_array_equal(load_gates(out.with_suffix("")).values, gates.values)
    assert sorted(path.name for path in out.parent.iterdir()) == ["tiny", "tiny.json"]
    again = tmp_path / "again.json"
    cli.main(options(common, method, "--out", str(again)))
    assert again.read_text() == out.read_text()


class Stopped(Exception):
    pass


@pytest.mark.parametrize("method", SIZES)
def test_a_stopped_command_goes_on_to_the_same_file(
    common: list[str], method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, out = tmp_path / "whole.json", tmp_path / "out.json"
    cli.main(options(common, method, "--out", str(whole)))
    shown: list[int] = []

    def stop(self: Any, done: int, note: str = "") -> None:
        shown.append(done)
        if done == 2 and len(shown) == 2:
            raise Stopped

    monkeypatch.setattr(run.Progress, "__call__", stop)
    with pytest.raises(Stopped):
        cli.main(options(common, method, "--out", str(out)))
    assert not out.exists()
    with pytest.raises(SystemExit, match=r"out.json.partial was left by another run \(seed: 0"):
        cli.main(options(common, method, "--out", str(out), "--seed", "1"))
    cli.main(options(common, method, "--out", str(out)))
    assert out.read_bytes() == whole.read_bytes()
    assert shown[:3] == [1, 2, 3]  # nothing was done twice
    assert not list(tmp_path.glob("*.partial"))


def test_restart_forgets_an_unfinished_run(common: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    Unfinished(out, {"seed": 7}).save({})
    cli.main(options(common, "training-free", "--out", str(out), "--restart"))
    assert sorted(path.name for path in tmp_path.glob("out*")) == ["out.json"]


def test_another_model_does_not_go_on(folder: Path, common: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    unfinished = Unfinished(out, {"method": "training-free", "model_hash": "sha256:0"})
    unfinished.save({"done": 1})
    with pytest.raises(SystemExit, match=r"left by another run .model_hash: 'sha256:0' there"):
        cli.main(options(common, "training-free", "--out", str(out)))


@pytest.mark.parametrize(
    ("dtype", "device", "has_bf16", "wanted"),
    [
        ("auto", "cpu", False, "float32"),
        ("auto", "cpu", True, "bfloat16"),
        ("auto", "cuda", False, "bfloat16"),
        ("bfloat16", "cpu", False, "bfloat16"),
        ("float32", "cuda", True, "float32"),
    ],
)
def test_the_dtype_is_one_that_the_device_is_fast_with(
    dtype: str, device: str, has_bf16: bool, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "library_has_bf16", lambda: has_bf16)
    assert run.dtype_of(argparse.Namespace(dtype=dtype, device=device)) == wanted


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (["--recent", "900"], "--lengths: 700 tokens leave no place for a passkey beyond 8 sinks"),
        (["--lengths", "900", "800"], "--lengths: LEAST"),
        (["--lengths", "900", "5000"], "--lengths: 5000 tokens are more than this model's 4096"),
        (["--recent", "0"], "--recent: at least 1"),
        (["--samples", "0"], "--samples: must be at least 1"),
        (["--samples", "1e3"], "--samples: invalid count value"),
        (["--seed", "-1"], "--seed: must be in"),
        (["--learning-rate", "nan"], "--learning-rate: must be a number"),
        (["--learning-rate", "0"], "--learning-rate: must be above 0"),
        (["--l1", "-1"], "--l1: must be a number of at least 0"),
        (["--passkeys", "1000"], "--passkeys: from 1 to"),
        (["--model-id", ""], "--model-id: must not be empty"),
        (["--text", "none.txt"], "--text: none.txt: no such file"),
        (["--text", "."], "--text: . is a folder"),
        (["--out", "."], "--out: . is a folder"),
        (["--out", "/proc/gates.json"], "--out: cannot write into /proc"),
    ],
)
def test_what_cannot_be_done_is_said_at_once(
    common: list[str],
    tmp_path: Path,
    change: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run, "load_model", lambda *_: pytest.fail("the model was loaded"))
    with pytest.raises(SystemExit):
        cli.main(options(common, "training-free", "--out", str(tmp_path / "out.json"), *change))
    assert said in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "out.json").exists()


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"", "is empty"), (b"\xff\xfe\x00", "can't decode"), (b"three short words", None)],
)
def test_texts_that_are_none(
    common: list[str],
    tmp_path: Path,
    content: bytes,
    said: str | None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A short one is a warning."""
    text = tmp_path / "odd.txt"
    text.write_bytes(content)
    if said is None:
        checks.check_text(text, text)
        assert f"--text: {text} has 3 words and will be repeated" in capsys.readouterr().err
        return
    with pytest.raises(checks.Refused, match=f"--text: {text}.*{said}"):
        checks.check_text(text, text)


def test_no_state_of_a_run(common: list[str], tmp_path: Path) -> None:
    (tmp_path / "out.json.partial").write_text("junk")
    with pytest.raises(SystemExit, match=r"out.json.partial is no state .* or give --restart"):
        cli.main(options(common, "training-free", "--out", str(tmp_path / "out.json")))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_run_says_how_to_go_on(
    common: list[str],
    tmp_path: Path,
    number: signal.Signals,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    # What a shell starts in the background has SIGINT ignored, and leaves it so.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(run, "calibrate", lambda args: os.kill(os.getpid(), number))
    with pytest.raises(SystemExit) as ended:
        cli.main(options(common, "training-free", "--out", str(tmp_path / "out.json")))
    assert ended.value.code == 130
    assert "calibrate: stopped; the same command goes on" in capsys.readouterr().err
    assert handlers == (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))


def test_no_gpu_is_said(folder: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(ValueError, match="--device: cuda: torch finds no GPU"):
        run.load_model(folder, "cuda", "float32")


def test_a_folder_without_a_model_is_named(
    common: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main(["calibrate", str(tmp_path), *common[1:], "--out", str(tmp_path / "out.json")])
    assert "is no folder of a model" in capsys.readouterr().err
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SystemExit):
        cli.main(["calibrate", str(tmp_path), *common[1:], "--out", str(tmp_path / "out.json")])
    assert "holds no weights" in capsys.readouterr().err


def test_the_command_line_needs_no_torch(run_python: Callable[..., str]) -> None:
    code = (
        "import sys\nfrom sglang_kv import cli\n"
        "try: cli.main(['calibrate', '--help'])\nexcept SystemExit: pass\n"
        "print([name for name in ('torch', 'transformers', 'matplotlib') if name in sys.modules])"
    )
    assert run_python(code).endswith("[]")


# -- models whose attention is another --


def small(kind: str, **changes: Any) -> Any:
    import transformers

    sizes = {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    config = getattr(transformers, f"{kind}Config")(**{**sizes, **changes})
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval()


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Qwen3", "Gemma", "Phi3"])
def test_common_models_are_supported(kind: str) -> None:
    changes = {"head_dim": 8} if kind in ("Qwen3", "Gemma") else {}
    if kind == "Phi3":
        changes = {"pad_token_id": 0}
    require_supported(small(kind, **changes))


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Qwen3", "Gemma", "Phi3"])
def test_common_models_take_positions(kind: str) -> None:
    changes = {"head_dim": 8} if kind in ("Qwen3", "Gemma") else {}
    if kind == "Phi3":
        changes = {"pad_token_id": 0}
    require_positions(small(kind, **changes))


def test_a_model_that_overlooks_positions_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small("Llama", hidden_size=64, initializer_range=0.5)
    forward = model.base_model.forward
    monkeypatch.setattr(
        model.base_model, "forward", lambda position_ids=None, **rest: forward(**rest)
    )
    with pytest.raises(UnsupportedModelError, match="llama: calibration needs a model that takes"):
        require_positions(model)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("Mistral", {"sliding_window": 16}, "no attention with sliding_window"),
        ("Gemma2", {"head_dim": 8}, "no attention with"),
        ("Bloom", {"n_head": 4, "n_layer": 2}, "bloom: calibration reaches 0 of its 2 layers"),
    ],
)
def test_other_attention_is_refused_by_name(kind: str, changes: Any, message: str) -> None:
    model = small(kind, **changes)
    with pytest.raises(UnsupportedModelError, match=message):
        require_supported(model)
