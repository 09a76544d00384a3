"""What flags and an engine's arguments amount to, and which are refused by name."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_kv.compression import Geometry, PolicyError, parse_policy
from sglang_kv.compression.gates import find_gates, load_gates, model_hash
from sglang_kv.config import Options
from sglang_kv.flags import add_flags, options_from_flags
from sglang_kv.kernel_paths import AUTO, FLASHINFER, TRITON, choose
from sglang_kv.presets import PRESETS
from sglang_kv.startup import DEFAULT_ORDER

ON = ["--kv-compression", "streamingllm"]
CONFIG = "--kv-compression-config"
DEMO, OTHER = "models/SmolLM2-135M-Instruct", "models/another"


def options(*argv: str, model: str = OTHER) -> Options:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-path")
    add_flags(parser)
    return options_from_flags(parser.parse_args(["--model-path", model, *argv]))


@pytest.fixture
def gates_file(tmp_path: Path) -> str:
    path = tmp_path / "gates.json"
    path.write_text(json.dumps({"gates": [[0.25] * 3] * 30}))
    return str(path)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--kv-preset", "agent", CONFIG, '{"window": 4}'], "kv_compression.window: unknown"),
        (["--kv-preset", "copy", CONFIG, '{"kernel_size": 4}'], "kv_compression.kernel_size: must"),
        (["--kv-preset", "copy", CONFIG, '{"method": "h2o"}'], f"{CONFIG}: holds parameters only"),
        (["--kv-preset", "copy", CONFIG, "[]"], f"{CONFIG}: expected a JSON object"),
        (
            ["--kv-preset", "agent", CONFIG, '{"budget": 10}', "--kv-compression-min-keep", "64"],
            "kv_compression.budget: 'streamingllm' keeps 10 tokens, below",
        ),
        ([*ON, "--kv-gates", "FOLDER/ragged.json"], ".*ragged rows: layer 1 has 1 heads"),
        ([*ON, "--kv-gates", "FOLDER/high.json"], r".*head 1: 1.5 is not in \[0, 1\]"),
        ([*ON, "--kv-gates", "FOLDER"], ".*full_attention_heads.tsv: no such file"),
        *(
            ([*ON, "--kv-pressure-floor", floor], "--kv-pressure-floor: must be above 0 and at")
            for floor in ("0", "2", "-0.5", "nan", "inf")
        ),
    ],
)
def test_flags_that_cannot_be_had(tmp_path: Path, argv: list[str], message: str) -> None:
    (tmp_path / "ragged.json").write_text('{"gates": [[0, 1], [1]]}')
    (tmp_path / "high.json").write_text('{"gates": [[0, 1.5]]}')
    with pytest.raises(PolicyError, match=f"^{message}"):
        options(*(word.replace("FOLDER", str(tmp_path)) for word in argv))


@pytest.mark.parametrize(
    "argv",
    [
        ["--kv-preset", "no_such"],
        ["--kv-pressure", "none"],
        ["--kv-pressure-floor", "half"],
        ["--kv-pressure-floor", ""],
    ],
)
def test_flags_that_argparse_refuses(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        options(*argv)
    assert f"argument {argv[0]}: invalid " in capsys.readouterr().err


def test_help_says_what_presets_were_tuned_on() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    text = " ".join(parser.format_help().split())
    for name, preset in PRESETS.items():
        assert f"{name}: {preset.purpose} (tuned on {preset.tuned_on})" in text


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_a_policy(name: str, gates_file: str) -> None:
    """With gates: those that are shipped, or the operator's. Either policy can be had."""
    preset, gates = PRESETS[name], find_gates(DEMO, 30, 3)
    assert gates is not None
    found = options("--kv-preset", name).default_policy
    assert found == parse_policy(preset.without_gates)
    found.plan(1000, Geometry(30, 3, 16))
    for given in (
        options("--kv-preset", name, model=DEMO),
        options("--kv-preset", name, "--kv-gates", gates_file),
    ):
        assert given.default_policy == parse_policy(preset.with_gates)
        given.default_policy.plan(1000, Geometry(30, 3, 16, gates))
    assert given.gates == gates_file


@pytest.mark.parametrize(
    ("name", "changes", "wanted"),
    [
        ("agent", {"budget": 512}, {"method": "streamingllm", "sinks": 4, "budget": 512}),
        ("agent", {"sinks": 8}, {"method": "streamingllm", "sinks": 8, "budget": 4096}),
        ("document", {"budget": 512}, {"method": "pyramidkv", "budget": 512}),
        ("document", {"keep_ratio": 0.5}, {"method": "pyramidkv", "keep_ratio": 0.5}),
        ("document", {"beta": 2}, {"method": "pyramidkv", "keep_ratio": 0.25, "beta": 2}),
        (
            "copy",
            {"budget": 512, "window": 8},
            {"method": "snapkv", "budget": 512, "window": 8, "kernel_size": 31},
        ),
    ],
)
def test_a_config_changes_a_preset(name: str, changes: Any, wanted: Any) -> None:
    """A budget stands in place of the preset's share of the prompt, and the other way round."""
    found = options("--kv-preset", name, CONFIG, json.dumps(changes))
    assert found.default_policy == parse_policy(wanted)


def test_recent_replaces_a_presets_budget() -> None:
    found = options("--kv-preset", "agent", CONFIG, '{"recent": 100}').default_policy
    assert found == parse_policy({"method": "streamingllm", "sinks": 4, "recent": 100})


def test_a_threshold_replaces_a_presets_sparsity() -> None:
    argv = ["--kv-preset", "document", CONFIG, '{"threshold": 0.7}']
    assert options(*argv, model=DEMO).default_policy == parse_policy(
        {"method": "duoattention", "threshold": 0.7}
    )


def test_pressure_is_sglangs_own_unless_told() -> None:
    assert (options(*ON).pressure, options(*ON).pressure_floor) == ("retract", 0.25)
    given = options(*ON, "--kv-pressure", "evict", "--kv-pressure-floor", "0.5")
    assert (given.pressure, given.pressure_floor) == ("evict", 0.5)


def test_gates_of_another_model_are_refused(tmp_path: Path) -> None:
    """Once the model's shape is known, which its weights are not needed for."""
    pytest.importorskip("sglang")
    from sglang_kv.hooks import _gates as gates_of

    class Config:
        model_path, num_hidden_layers = DEMO, 30

        def get_total_num_kv_heads(self) -> int:
            return 3

    config = Config()
    assert gates_of(Options(), config) == find_gates(DEMO, 30, 3)
    path = tmp_path / "gates.json"
    path.write_text(json.dumps({"gates": [[0.5, 0.5]] * 24}))
    with pytest.raises(PolicyError, match=r"^--kv-gates: .* 24 layers of 2 KV heads, .* 30 of 3$"):
        gates_of(Options(method="none", gates=str(path)), config)
    config.model_path = OTHER
    assert gates_of(Options(), config) is None


def test_gates_of_other_weights_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("sglang")
    from sglang_kv.hooks import _gates as gates_of

    class Config:
        model_path, num_hidden_layers = str(tmp_path), 1

        def get_total_num_kv_heads(self) -> int:
            return 2

    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_text("weights")
    held = {"gates": [[0.5, 1]], "model": "tiny", "model_hash": model_hash(tmp_path)}
    path = tmp_path / "gates.json"
    path.write_text(json.dumps(held))
    options = Options(method="none", gates=str(path))
    assert gates_of(options, Config()) == load_gates(path)
    (tmp_path / "model.safetensors").write_text("other weights")
    with pytest.raises(PolicyError, match=r"^--kv-gates: .* gates of tiny with other weights"):
        gates_of(options, Config())
    path.write_text(json.dumps({**held, "model_hash": ""}))
    assert gates_of(options, Config()) == load_gates(path)


@pytest.mark.parametrize(("device", "served"), [("cpu", True), ("cuda", True), ("xpu", False)])
def test_devices_and_kv_dtypes(device: str, served: bool) -> None:
    pytest.importorskip("sglang")
    from sglang_kv.startup import _problems

    class Args:
        attention_backend, radix_cache_backend, kv_cache_dtype = AUTO, AUTO, "auto"
        prefill_attention_backend = decode_attention_backend = None
        disaggregation_mode, pp_size, tokenizer_worker_num, page_size = "null", 1, 1, 16
        radix_eviction_policy = DEFAULT_ORDER

        def __getattr__(self, name: str) -> Any:
            return False  # every switch

    args = Args()
    args.device = device
    assert [p.split(" ")[1] for p in _problems(args)] == ([] if served else [device])
    for dtype in ("fp8_e4m3", "fp8_e5m2", "bf16"):
        args.kv_cache_dtype = dtype
        assert [p.split(" ")[1] for p in _problems(args)] == ([] if served else [device])
    args.kv_cache_dtype = "mxfp8"
    known = "(there are auto, bf16, bfloat16, fp8_e4m3, fp8_e5m2)"
    assert _problems(args)[-1] == f"--kv-cache-dtype mxfp8 {known}"


@pytest.mark.parametrize(
    ("backend", "device", "head_dim", "group", "path"),
    [
        (AUTO, "cpu", 64, 3, "cpp"),
        (FLASHINFER, "cpu", 64, 3, FLASHINFER),  # where it fails, on the wrapper itself
        (AUTO, "cpu", 80, 3, "cpp"),
        (AUTO, "cuda", 64, 3, FLASHINFER),
        (AUTO, "cuda", 80, 3, TRITON),
        (AUTO, "cuda", 64, 17, TRITON),
        (TRITON, "cuda", 64, 3, TRITON),
        (FLASHINFER, "cuda", 128, 8, FLASHINFER),
    ],
)
def test_which_kernels_run(
    backend: str, device: str, head_dim: int, group: int, path: str, caplog: Any
) -> None:
    caplog.set_level("INFO")
    assert choose(backend, torch.device(device), head_dim, group, torch.bfloat16) == path
    (said,) = [r.message for r in caplog.records]
    assert said.startswith("sglang-kv: attention by ")
    assert said.endswith(
        f"everything else by {'C++' if device == 'cpu' else 'Triton'}, on {device}"
    )
    lacks = path == TRITON and backend == AUTO
    assert ("FlashInfer has no kernel for" in said) is lacks


@pytest.mark.parametrize(
    ("backend", "head_dim", "group", "message"),
    [
        (FLASHINFER, 80, 1, "FlashInfer has no kernel for head_dim 80"),
        (FLASHINFER, 64, 17, "FlashInfer has no kernel for 17 query heads"),
        (TRITON, 64, 1, "Triton's kernels need a GPU"),
    ],
)
def test_kernels_that_cannot_serve_are_refused(
    backend: str, head_dim: int, group: int, message: str
) -> None:
    with pytest.raises(ValueError, match=f"--attention-backend {backend}: {message}"):
        choose(backend, torch.device("cpu"), head_dim, group, torch.bfloat16)


# Engine's arguments ----------------------------------------------------------------------------


def test_an_engines_arguments_are_options(gates_file: str) -> None:
    pytest.importorskip("sglang")
    from sglang_kv.engine import ARGUMENTS, options_in_environment

    given = {"kv_compression": "duoattention", "kv_gates": gates_file, "kv_pressure": "evict"}
    with options_in_environment({ARGUMENTS[name]: value for name, value in given.items()}):
        found = Options.from_env()
    assert (found.method, found.gates, found.pressure) == ("duoattention", gates_file, "evict")
    assert Options.from_env() == Options()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"pressure": "drop"}, "--kv-pressure: expected evict or retract, got 'drop'"),
        ({"pressure": None}, "--kv-pressure: expected evict or retract, got None"),
        ({"pressure_floor": 0}, "--kv-pressure-floor: must be above 0"),
        ({"pressure_floor": "0.5"}, "--kv-pressure-floor: must be above 0"),
        ({"gates": "no_such.json"}, "--kv-gates: no_such.json: no such file"),
    ],
    ids=str,
)
def test_an_engines_bad_arguments(given: dict[str, Any], message: str) -> None:
    """Refused in the caller's process, before anything is started."""
    pytest.importorskip("sglang")
    from sglang_kv.engine import options_in_environment

    with (
        pytest.raises(PolicyError, match=f"^{message}"),
        options_in_environment({"method": "none", **given}),
    ):
        pass
    assert Options.from_env() == Options()
