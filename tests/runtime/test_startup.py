"""What stops a server at its start, each with one clear message: bad flags, settings that would go
wrong with compression, and a plugin that did not take."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from warm import CPU, launcher

from sglang_kv.compression import Geometry, PolicyError, parse_policy
from sglang_kv.compression.gates import find_gates, load_gates, model_hash
from sglang_kv.config import Options
from sglang_kv.flags import add_flags, options_from_flags
from sglang_kv.kernel_paths import AUTO, FLASHINFER, TRITON, choose
from sglang_kv.presets import PRESETS
from sglang_kv.startup import DEFAULT_ORDER

ON = ["--kv-compression", "streamingllm"]
CONFIG = "--kv-compression-config"
COMBINED = "--kv-compression cannot be combined with: "

#: Arguments, and what the last line of the output says.
BAD_FLAGS: dict[str, tuple[list[str], str]] = {
    "unknown method": (["--kv-compression", "no_such"], "invalid choice: 'no_such'"),
    "config is no JSON": ([*ON, CONFIG, "{recent: 4}"], f"{CONFIG}: not JSON"),
    "config is no object": ([*ON, CONFIG, "[4]"], f"{CONFIG}: expected a JSON object"),
    "config file is missing": ([*ON, CONFIG, "@no_such.json"], "no_such.json"),
    "unknown key in config": ([*ON, CONFIG, '{"window": 4}'], "kv_compression.window: unknown"),
    "bad value in config": ([*ON, CONFIG, '{"recent": 0}'], "kv_compression.recent: must be"),
    "config without method": ([CONFIG, '{"recent": 4}'], f"{CONFIG} needs --kv-compression"),
    "unknown method to allow": (
        [*ON, "--kv-compression-allow", "none,no_such"],
        "--kv-compression-allow: unknown method 'no_such'",
    ),
    "override by nobody": ([*ON, "--kv-compression-override", "nobody"], "invalid choice"),
    "min-keep is no number": ([*ON, "--kv-compression-min-keep", "few"], "invalid int value"),
    "min-keep is negative": ([*ON, "--kv-compression-min-keep", "-1"], "min-keep: must not be"),
    "default below min-keep": (
        [*ON, CONFIG, '{"recent": 10}', "--kv-compression-min-keep", "64"],
        "keeps 14 tokens, below",
    ),
    "preset and method": ([*ON, "--kv-preset", "agent"], "--kv-preset: give either --kv-preset or"),
    "gates file is missing": ([*ON, "--kv-gates", "no_such.json"], "no_such.json: no such file"),
    "gates are no JSON": ([*ON, "--kv-gates", __file__], "test_startup.py: not JSON"),
    "unknown pressure": ([*ON, "--kv-pressure", "drop"], "invalid choice: 'drop'"),
    "pressure floor is no share": (
        [*ON, "--kv-pressure", "evict", "--kv-pressure-floor", "nan"],
        "--kv-pressure-floor: must be above 0 and at most 1, got nan",
    ),
    "sharing by nobody known": ([*ON, "--prefix-sharing", "some"], "invalid choice: 'some'"),
    "header without tenants": (
        [*ON, "--tenant-header", "X-Tenant"],
        "--tenant-header needs --prefix-sharing tenant",
    ),
    "sharing without method": (
        ["--prefix-sharing", "off"],
        "--prefix-sharing needs --kv-compression METHOD",
    ),
    "thinning without method": (
        ["--prefix-thinning"],
        "--prefix-thinning needs --kv-compression METHOD",
    ),
    "virtual tokens are negative": ([*ON, "--kv-virtual-tokens", "-1"], "virtual-tokens: must not"),
}

REFUSED: dict[str, tuple[list[str], str]] = {
    "speculation": (["--speculative-algorithm", "NGRAM"], "speculative decoding"),
    "mixed chunks": (["--enable-mixed-chunk"], "--enable-mixed-chunk"),
    "attention backend": (
        ["--attention-backend", "torch_native"],
        "--attention-backend torch_native (leave it out)",
    ),
    "prefill backend": (["--prefill-attention-backend", "torch_native"], "--prefill-attention"),
    "page size": (["--page-size", "64"], "--page-size 64 (1, 16 and 32 are supported)"),
    "tree": (["--radix-cache-backend", "python"], "--radix-cache-backend python"),
    "eviction order": (
        ["--radix-eviction-policy", "priority"],
        "--radix-eviction-policy priority (there are importance, lru, lfu, slru, cost)",
    ),
    "hierarchical cache": (["--enable-hierarchical-cache"], "--enable-hierarchical-cache"),
    "disaggregation": (["--disaggregation-mode", "prefill"], "prefill/decode disaggregation"),
    "tokenizer workers": (["--tokenizer-worker-num", "2"], "--tokenizer-worker-num above 1"),
    "embeddings": (["--is-embedding"], "embedding models"),
    "Triton on a CPU": (["--attention-backend", "triton"], "--attention-backend triton"),
}

BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "wrong SGLang": (
        {"before": "import sglang_kv.plugin as p; p.SGLANG_VERSION = '0.5.22'"},
        "sglang-kv: needs sglang==0.5.22, found 0.5.23; the server stops rather than serve "
        "uncompressed",
    ),
    "hook without a target": (
        {
            "before": "from sglang_kv.hooks import HOOKS\n"
            "HOOKS.append(('sglang.srt.server_args.no_such_function', print, 'AFTER'))"
        },
        "sglang-kv: not installed: sglang.srt.server_args.no_such_function; the server stops",
    ),
    "hook without a module": (
        {
            "before": "from sglang_kv.hooks import HOOKS\n"
            "HOOKS.append(('sglang.srt.no_such_module.function', print, 'AFTER'))"
        },
        "sglang-kv: not installed: sglang.srt.no_such_module.function; the server stops",
    ),
    "registration fails": (
        {
            "before": "import sglang_kv.plugin as p\n"
            "def broken(): raise LookupError('no such hook')\n"
            "p._all_hooks = broken"
        },
        "sglang-kv: the plugin failed to install",
    ),
    "plugin left out": (
        {"env": {"SGLANG_PLUGINS": "another"}},
        "unrecognized arguments: --kv-compression",
    ),
    "options that are no JSON": ({"env": {"SGLANG_KV_OPTIONS": "{"}}, "SGLANG_KV_OPTIONS"),
    "unknown option": (
        {"env": {"SGLANG_KV_OPTIONS": '{"metod": "none"}'}},
        "SGLANG_KV_OPTIONS: unknown option 'metod'",
    ),
}

GOOD: dict[str, list[str]] = {
    "none": ["--kv-compression", "none"],
    "every flag": [
        *ON,
        *(CONFIG, '{"recent": 100}', "--kv-compression-allow", "none, streamingllm"),
        *("--kv-compression-min-keep", "64", "--kv-compression-override", "server"),
        *("--kv-virtual-tokens", "100000", "--page-size", "32"),
        *("--prefix-sharing", "tenant", "--tenant-header", "X-Tenant", "--prefix-thinning"),
        *("--radix-eviction-policy", "importance"),
    ],
    "preset": [
        *("--kv-preset", "document", CONFIG, '{"threshold": 0.3}'),
        *("--kv-pressure", "evict", "--kv-pressure-floor", "1"),
    ],
    "stock": [],
    "help": ["--help"],
}


@pytest.fixture(scope="module")
def starts(
    root: Path, demo_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[int, str]]:
    base = ["--model-path", str(demo_model), "--device", "cpu"]
    cases: dict[str, dict[str, Any]] = {}
    for name, (argv, _) in BAD_FLAGS.items():
        cases[name] = {"argv": [*base, *argv]}
    for name, (argv, _) in REFUSED.items():
        cases[name] = {"argv": [*base, *ON, *argv]}
    for name, (how, _) in BROKEN.items():
        cases[name] = {"argv": [*base, *ON], **how}
    for name, argv in GOOD.items():
        cases[name] = {"argv": [*base, *argv]}
    folder = tmp_path_factory.mktemp("starts")
    (folder / "cases").write_text(json.dumps(cases))
    script = str(root / "tests/support/fork_starts.py")
    status, output = launcher().run(
        [script], folder / "output", env={**os.environ, **CPU}, stdin=str(folder / "cases")
    )
    assert status == 0, output[-4000:]
    found: dict[str, tuple[int, str]] = json.loads(output.splitlines()[-1])
    return found


def stopped(start: tuple[int, str], message: str) -> None:
    status, output = start
    assert status != 0, output
    assert message in output.strip().splitlines()[-1], output


@pytest.mark.parametrize("name", BAD_FLAGS)
def test_bad_flags_stop_the_server(starts: dict[str, tuple[int, str]], name: str) -> None:
    stopped(starts[name], BAD_FLAGS[name][1])


@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_would_go_wrong(starts: dict[str, tuple[int, str]], name: str) -> None:
    stopped(starts[name], COMBINED)
    assert REFUSED[name][1] in starts[name][1].strip().splitlines()[-1]


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_plugin_stops_the_server(starts: dict[str, tuple[int, str]], name: str) -> None:
    stopped(starts[name], BROKEN[name][1])


@pytest.mark.parametrize("name", GOOD)
def test_good_flags_pass(starts: dict[str, tuple[int, str]], name: str) -> None:
    assert starts[name][0] == 0, starts[name][1]


def test_help_tells_of_the_flags(starts: dict[str, tuple[int, str]]) -> None:
    text = starts["help"][1]
    for flag in ("", "-config", "-allow", "-min-keep", "-override"):
        assert f"\n  --kv-compression{flag} " in text
    for flag in ("virtual-tokens", "preset", "gates", "pressure", "pressure-floor"):
        assert f"\n  --kv-{flag} " in text
    for flag in ("prefix-sharing", "tenant-header", "prefix-thinning"):
        assert f"\n  --{flag} " in text
    assert "streamingllm: attention sinks" in " ".join(text.split())


def test_launch_server_has_the_plugin_from_a_cold_start(demo_model: Path, tmp_path: Path) -> None:
    """Those above, and the tests' server of that kind, are forks that have all imports."""
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(demo_model)]
    done = subprocess.run(
        [*command, "--device", "cpu", *ON, *REFUSED["page size"][0]],
        cwd=tmp_path,
        env={**os.environ, **CPU},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode != 0
    assert COMBINED + REFUSED["page size"][1] in done.stderr


# What the flags amount to ----------------------------------------------------------------------

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
    ],
)
def test_which_kernels_run(
    backend: str, device: str, head_dim: int, group: int, path: str, caplog: Any
) -> None:
    caplog.set_level("INFO")
    assert choose(backend, torch.device(device), head_dim, group, torch.bfloat16) == path
    assert [r.message.split(":")[0] for r in caplog.records] == ["sglang-kv"]


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
