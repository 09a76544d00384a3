"""What stops a server at its start, each with one clear message: bad flags, settings that would go
wrong with compression, and a plugin that did not take."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from warm import CPU, launcher

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
    "recompute cost alone": [*ON, "--radix-eviction-policy", "cost"],
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
