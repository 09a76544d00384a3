"""``sglang-kv plan`` as one types it: tables, flags to paste, and one clear line per mistake."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_kv import cli
from sglang_kv.compression import parse_policy
from sglang_kv.compression.base import methods
from sglang_kv.planner.command import output
from sglang_kv.planner.units import show_bytes


def rows(text: str) -> dict[str, list[str]]:
    """A Markdown table's rows by their first cell."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: row[1:] for row in cells}


# What comes out ----------------------------------------------------------------------------------


def test_a_sweep_over_contexts_and_methods() -> None:
    text = output(
        *("llama-3-8b", "--context", "8k,32k,128k", "--method", "all"),
        *("--assume-sparsity", "0.5", "--device", "h100"),
    )
    parts = [rows(part) for part in text.split("\n\n")]
    heads = [next(iter(part)) for part in parts]
    assert heads == ["per request", "prefill peak", "requests that fit"]
    for part in parts:
        assert list(part)[2:] == list(methods())
    assert parts[0]["none"] == ["1 GiB", "4 GiB", "16 GiB"]
    assert parts[0]["snapkv"] == ["256 MiB"] * 3
    assert parts[1]["snapkv"][2] == "16.25 GiB"


def test_one_context_is_one_table() -> None:
    text = output("llama-3-8b", "--context", "128k", "--method", "none,snapkv", "--device", "h100")
    assert rows(text)["snapkv"] == ["256 MiB", "16.25 GiB", "174"]


def test_models_side_by_side() -> None:
    """VRAM of models x contexts in FP16."""
    text = output("llama-2-7b,llama-3-8b,deepseek-v3", "--context", "8k,128k", "--kv-dtype", "fp16")
    assert rows(text)["llama-2-7b"] == ["4 GiB", "64 GiB"]
    assert rows(text)["deepseek-v3"] == ["549 MiB", "8.58 GiB"]


def test_what_cannot_be_had_is_a_dash_and_a_reason() -> None:
    text = output("llama-3-8b", "--context", "8k,32k", "--method", "all")
    assert rows(text)["duoattention"] == ["-", "-"]
    assert text.count("- --method duoattention: needs head gates") == 1
    windowed = output("gemma-3-27b", "--context", "8k", "--method", "none,snapkv")
    assert "'snapkv' needs full attention in every layer" in windowed


def test_a_preset_is_a_method() -> None:
    text = output("smollm2-135m-instruct", "--context", "4k", "--method", "none,copy")
    (name,) = [row for row in rows(text) if row.startswith("snapkv (keep_ratio 0.16")]
    assert "head_budgets gates" in name


def test_a_policy_as_json() -> None:
    spec = {"method": "snapkv", "budget": 1024}
    one = output("llama-3-8b", "--context", "32k", "--method", json.dumps(spec))
    two = output(
        *("llama-3-8b", "--context", "32k", "--method", "snapkv"),
        *("--method-config", '{"budget": 1024}'),
    )
    assert one == two
    assert "policy snapkv (budget 1024)" in one
    assert "1,024 tokens per head, mean" in one


def test_parameters_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text('{"budget": 1024}')
    text = output(
        *("llama-3-8b", "--context", "32k", "--method", "snapkv"),
        *("--method-config", f"@{path}"),
    )
    assert "policy snapkv (budget 1024)" in text


def test_json_of_a_sweep() -> None:
    held = json.loads(
        output("llama-3-8b", "--context", "8k,32k", "--method", "none,duoattention", "--json")
    )
    assert [(row["row"], row["prompt_tokens"]) for row in held] == [
        ("none", 8192),
        ("none", 32768),
        ("duoattention", 8192),
        ("duoattention", 32768),
    ]
    assert held[1]["per_request"]["kv"] == 4 * 2**30
    assert "needs head gates" in held[2]["refused"]


def test_gates_from_a_file(tmp_path: Path) -> None:
    """A published pattern, or one of our own."""
    path = tmp_path / "gates.json"
    path.write_text(json.dumps({"gates": [[1, 1, 1, 1, 0, 0, 0, 0]] * 32}))
    text = output(
        "llama-3-8b", "--context", "128k", "--method", "duoattention", "--gates", str(path)
    )
    assert "8.02 GiB" in text
    assert "gates are assumed" not in text


def test_where_kv_outgrows_the_weights() -> None:
    found = rows(output("llama-3.1-8b", "--context", "8k", "--show", "outgrow"))
    tokens = {int(k): int(v[0].replace(",", "")) for k, v in list(found.items())[2:]}
    weights, token = 2 * 8_030_261_248, 128 * 2**10
    for requests, least in tokens.items():
        assert (least - 1) * requests * token <= weights < least * requests * token
    windowed = rows(output("mistral-7b-v0.1", "--context", "8k", "--show", "outgrow"))
    assert windowed["1"] == ["never"]


def test_kinds_of_attention() -> None:
    found = rows(output("llama-3-8b", "--context", "128k", "--show", "attention"))
    assert found["MHA, 32 KV heads"] == ["512 KiB", "64 GiB"]
    assert found["GQA, 8 KV heads (this model)"] == ["128 KiB", "16 GiB"]
    assert found["MQA, 1 KV head"] == ["16 KiB", "2 GiB"]
    assert found["MLA, latent of 512 + 64"] == ["36 KiB", "4.5 GiB"]
    plain = rows(output("llama-2-7b", "--context", "4k", "--show", "attention"))
    assert "MHA, 32 KV heads (this model)" in plain


def test_reserving_against_paging() -> None:
    """16 GiB per request for a conversation of 2K tokens."""
    text = output(*("llama-3.1-8b", "--context", "2k,128k", "--show", "paging", "--device", "h100"))
    assert rows(text)["2K"] == ["16 GiB", "256 MiB", "98%", "3", "238"]
    assert rows(text)["128K"] == ["16 GiB", "16 GiB", "0%", "3", "3"]


def test_the_command_to_paste() -> None:
    text = output(
        *("llama-3-8b", "--context", "8k", "--method", "snapkv", "--page-size", "32"),
        *("--method-config", '{"keep_ratio": 0.25}', "--tp-size", "2", "--device", "h100"),
    )
    words = shlex.split(text.splitlines()[-1])
    flags = dict(zip(words[2::2], words[3::2], strict=True))
    assert words[:2] == ["sglang", "serve"]
    assert flags["--model-path"] == "meta-llama/Meta-Llama-3-8B"
    assert (flags["--page-size"], flags["--tp-size"]) == ("32", "2")
    policy = {"method": flags["--kv-compression"], **json.loads(flags["--kv-compression-config"])}
    assert parse_policy(policy) == parse_policy({"method": "snapkv", "keep_ratio": 0.25})
    # The pool holds what was planned: 8K tokens dense, and copies of a quarter.
    running, pool = int(flags["--max-running-requests"]), int(flags["--max-total-tokens"])
    assert pool == (running - 1) * 2048 + 8192 + 2048


@pytest.mark.parametrize("method", [name for name in methods() if name != "duoattention"])
def test_the_command_names_the_policy_that_was_planned(method: str) -> None:
    words = shlex.split(
        output("llama-3-8b", "--context", "8k", "--method", method).splitlines()[-1]
    )
    assert ("--kv-compression" in words) == (method != "none")
    assert "--kv-compression-config" not in words  # defaults stay unsaid


def test_cautions() -> None:
    def notes(*argv: str) -> list[str]:
        return re.findall(r"^Note: (.*)$", output(*argv), flags=re.M)

    assert notes("llama-3.1-8b", "--context", "8k") == []
    assert notes("llama-3.1-8b", "--context", "8k", "--kv-dtype", "int8") == [
        "SGLang has no int8 KV cache."
    ]
    snapkv = ("llama-3.1-8b", "--context", "8k", "--method", "snapkv")
    assert notes(*snapkv, "--kv-dtype", "fp8") == []
    assert "16 bits, or in fp8" in notes(*snapkv, "--kv-dtype", "fp4")[0]
    assert "1, 16 or 32" in notes(*snapkv, "--page-size", "64")[0]
    assert "full attention only" in notes("qwen3.8-27b", "--method", "snapkv")[0]
    assert "8,192 positions" in notes("llama-3-8b", "--context", "128k")[0]


def test_weights() -> None:
    assert "7.48 GiB" in output("llama-3-8b", "--context", "8k", "--weight-dtype", "fp8")
    assert "not known" in output("gpt-oss-20b", "--context", "8k")
    given = output("gpt-oss-20b", "--context", "8k", "--weights", "16GB", "--device", "24GB")
    assert "It fits " in given
    counted = output(
        *("gpt-oss-20b", "--context", "8k", "--parameters", "20B", "--weight-dtype", "fp4")
    )
    assert show_bytes(20 * 10**9 * 9 // 16) in counted


def test_requests_that_do_not_fit() -> None:
    text = output("llama-3-8b", "--context", "128k", "--requests", "16", "--device", "h100")
    assert "It fits 3 requests at once." in text
    assert "Of 16, 13 wait." in text


def test_no_command_where_not_one_fits() -> None:
    text = output("llama-3-8b", "--context", "1m", "--device", "h100")
    assert "It fits 0 requests at once." in text
    assert text.splitlines()[-1] == "No command: not one such request fits."
    held = json.loads(output("llama-3-8b", "--context", "1m", "--device", "h100", "--json"))
    assert (held["fits"]["requests"], held["serve"]) == (0, None)


def test_windows_alone() -> None:
    """No row of what grows where nothing does."""
    text = output("mistral-7b-v0.1", "--context", "32k")
    assert re.findall(r"^KV of one token  +(.*)$", text, re.M) == [
        "128 KiB  in the first 4,096 tokens"
    ]


def test_help_teaches_the_formula_in_five_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["plan", "--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    taught = text[text.index("KV bytes = 2 (K and V)") : text.index("positional arguments")]
    assert len(taught.strip().splitlines()) == 5
    for word in ("layers that keep KV", "KV heads", "window", "MLA", "TP size", "requests"):
        assert word in taught


def test_a_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.png"
    output("llama-3-8b", "--context", "8k,32k", "--method", "none,snapkv", "--plot", str(path))
    assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match=r"^--plot: .*: is a folder$"):
        output("llama-3-8b", "--context", "8k,32k", "--plot", str(tmp_path))


# Mistakes ----------------------------------------------------------------------------------------

ONE = ["llama-3-8b", "--context", "8k"]
MISTAKES: dict[str, tuple[list[str], str]] = {
    "no model": ([], "MODEL: missing"),
    "unknown model": (["llama-9", "--context", "8k"], "MODEL: 'llama-9' is no path"),
    "no context": (["llama-3-8b,qwen3-8b"], "--context: missing"),
    "context is zero": (["llama-3-8b", "--context", "0"], "--context: must be at least 1, got 0"),
    "context is negative": (["llama-3-8b", "--context=-8k"], "--context: must be at least 1"),
    "context is no number": (["llama-3-8b", "--context", "much"], "--context: expected tokens"),
    "context has an unknown unit": (["llama-3-8b", "--context", "8q"], "--context: expected tok"),
    "context has thousands": (
        ["llama-3-8b", "--context", "131,072"],
        "--context: '131,072' is one number or several; write 131072, or '131, 072' with spaces",
    ),
    "context has 5,000 digits": (["llama-3-8b", "--context", "9" * 5000], "--context: expected t"),
    "context is half a token": (["llama-3-8b", "--context", "0.3"], "--context: '0.3' is not a"),
    "context is huge": (["llama-3-8b", "--context", "9" * 30], "--context: must be at most 2,147"),
    "empty context": (["llama-3-8b", "--context", "8k,,1k"], "--context: an empty item"),
    "new tokens are negative": ([*ONE, "--new-tokens=-1"], "--new-tokens: must be at least 0"),
    "no requests": ([*ONE, "--requests", "0"], "--requests: must be at least 1, got 0"),
    "negative requests": ([*ONE, "--requests=-3"], "--requests: must be at least 1, got -3"),
    "requests are a word": ([*ONE, "--requests", "many"], "--requests: expected a whole number"),
    "page size zero": ([*ONE, "--page-size", "0"], "--page-size: must be at least 1"),
    "chunk is negative": ([*ONE, "--chunk=-1"], "--chunk: must be at least 0"),
    "TP zero": ([*ONE, "--tp-size", "0"], "--tp-size: must be at least 1"),
    "TP does not divide": ([*ONE, "--tp-size", "3"], "--tp-size: 8 KV heads cannot be split over"),
    "TP does not copy": (
        [*ONE, "--tp-size", "12"],
        "--tp-size: 12 devices cannot share 8 KV heads",
    ),
    "TP beyond the heads": ([*ONE, "--tp-size", "64"], "--tp-size: 32 query heads cannot be split"),
    "TP does not divide a latent's heads": (
        ["deepseek-v3", "--context", "8k", "--tp-size", "7"],
        "--tp-size: 128 query heads cannot be split over 7",
    ),
    "TP beyond the heads of windows": (
        ["mistral-7b-v0.1", "--context", "8k", "--tp-size", "64"],
        "--tp-size: 32 query heads cannot be split over 64",
    ),
    "unknown KV dtype": ([*ONE, "--kv-dtype", "fp3"], "--kv-dtype: unknown dtype 'fp3' (known: bf"),
    "fp32 KV": ([*ONE, "--kv-dtype", "fp32"], "--kv-dtype: unknown dtype 'fp32'"),
    "unknown state dtype": ([*ONE, "--state-dtype", "fp8"], "--state-dtype: unknown dtype 'fp8'"),
    "unknown weight dtype": ([*ONE, "--weight-dtype", "q4"], "--weight-dtype: unknown dtype 'q4'"),
    "unknown device": ([*ONE, "--device", "gpu"], "--device: unknown device 'gpu'; write its mem"),
    "device without a unit": ([*ONE, "--device", "80"], "--device: no unit in '80'"),
    "device in G": ([*ONE, "--device", "80G"], "--device: unknown unit 'G' in '80G'"),
    "device in stones": ([*ONE, "--device", "80st"], "--device: unknown unit 'st'"),
    "device of nothing": ([*ONE, "--device", "0GB"], "--device: a device needs memory"),
    "device is negative": ([*ONE, "--device=-80GB"], "--device: must not be negative"),
    "device is negative, two words": ([*ONE, "--device", "-80GB"], "--device: must not be neg"),
    "device is empty": ([*ONE, "--device", ""], "--device: unknown device ''"),
    "weights are empty": ([*ONE, "--weights", ""], "--weights: expected a size"),
    "device has 5,000 digits": ([*ONE, "--device", "9" * 5000 + "GB"], "--device: expected a si"),
    "device is absurd": ([*ONE, "--device", "9" * 30 + "GB"], "is more than any machine has"),
    "weights do not fit": ([*ONE, "--device", "t4"], "--device: 16 GB do not hold the weights"),
    "weights without a unit": ([*ONE, "--weights", "54"], "--weights: no unit in '54'"),
    "weights unknown": (
        ["gpt-oss-20b", "--context", "8k", "--device", "h100"],
        "--weights: not known for gpt-oss-20b; give --weights SIZE",
    ),
    "parameters are a word": ([*ONE, "--parameters", "lots"], "--parameters: expected parameters"),
    "parameters are absurd": ([*ONE, "--parameters", "9" * 30], "is no model's number of param"),
    "parameters have 5,000 digits": ([*ONE, "--parameters", "9" * 5000], "--parameters: expected"),
    "an argument too many": ([*ONE, "more"], "unknown arguments: more"),
    "an unknown flag": ([*ONE, "--batch", "8"], "unknown arguments: --batch 8"),
    "a flag without its value": (["llama-3-8b", "--context"], "--context: expected one argument"),
    "unknown view": ([*ONE, "--show", "all"], "--show: invalid choice: 'all'"),
    "reserve of another view": ([*ONE, "--max-context", "8k"], "--max-context: belongs to --show"),
    "json of the list": (["--list", "--json"], "--json: there is none of --list"),
    "reserve is negative": ([*ONE, "--reserve=-1GB"], "--reserve: must not be negative"),
    "unknown method": ([*ONE, "--method", "magic"], "--method: unknown method 'magic'"),
    "method without gates": (
        [*ONE, "--method", "duoattention"],
        "--method duoattention: needs head gates, and none are known for llama-3-8b; make them "
        "with `sglang-kv calibrate` or take a published pattern, and give --gates FILE; or "
        "plan with --assume-sparsity SHARE",
    ),
    "budgets without gates": (
        [*ONE, "--method", '{"method": "snapkv", "head_budgets": "gates"}'],
        "--method snapkv: needs head gates, and none are known for llama-3-8b",
    ),
    "assumed for a threshold": (
        [
            *ONE,
            "--method",
            '{"method": "duoattention", "threshold": 0.5}',
            "--assume-sparsity",
            "1",
        ],
        "--assume-sparsity: stands in place of gates, which threshold needs",
    ),
    "assumed too much": ([*ONE, "--assume-sparsity", "2"], "--assume-sparsity: must be between 0"),
    "assumed NaN": ([*ONE, "--assume-sparsity", "nan"], "--assume-sparsity: must be between 0"),
    "gates are missing": ([*ONE, "--gates", "no_such.json"], "--gates: no_such.json: no such"),
    "bad parameter": (
        [*ONE, "--method", "snapkv", "--method-config", '{"budget": -1}'],
        "kv_compression.budget: must be at least 2, got -1",
    ),
    "unknown parameter": (
        [*ONE, "--method", "snapkv", "--method-config", '{"sinks": 4}'],
        "kv_compression.sinks: unknown parameter of 'snapkv'",
    ),
    "config is no JSON": (
        [*ONE, "--method", "snapkv", "--method-config", "{"],
        "--method-config: not JSON",
    ),
    "config is a list": (
        [*ONE, "--method", "snapkv", "--method-config", "[]"],
        "--method-config: expected a JSON object",
    ),
    "config names a method": (
        [*ONE, "--method", "snapkv", "--method-config", '{"method": "h2o"}'],
        "--method-config: holds parameters only; the method is --method's",
    ),
    "config file is missing": (
        [*ONE, "--method", "snapkv", "--method-config", "@no_such"],
        "--method-config: no_such: No such file",
    ),
    "config of two methods": (
        [*ONE, "--method", "snapkv,h2o", "--method-config", "{}"],
        "--method: --method-config takes one, got 2",
    ),
    "config is too deep": (
        [*ONE, "--method", "snapkv", "--method-config", "[" * 100_000],
        "--method-config: not JSON: nested too deeply",
    ),
    "MLA has no heads to gate": (
        ["deepseek-v3", "--method", "duoattention"],
        "--method duoattention: deepseek-v3 keeps one latent per token and layer (MLA)",
    ),
    "MLA cannot be compressed": (
        ["deepseek-v3", "--method", "snapkv"],
        "--method snapkv: deepseek-v3 keeps one latent per token and layer (MLA)",
    ),
    "unequal heads on two devices": (
        [*ONE, "--method", "duoattention", "--assume-sparsity", "0.5", "--tp-size", "2"],
        "kv_compression.method: 'duoattention' gives heads unequal memory",
    ),
    "json of a view": ([*ONE, "--show", "outgrow", "--json"], "--json: there is none of --show"),
    "plot of one plan": ([*ONE, "--plot", "x.png"], "--plot: needs a sweep"),
    "two contexts in detail": (
        ["llama-3-8b", "--context", "8k,16k", "--show", "plan"],
        "--context: --show plan takes one, got 2",
    ),
    "more than is reserved": (
        ["llama-3-8b", "--context", "16k", "--show", "paging"],
        "--context: 16,384 is more than the 8,192 that are reserved",
    ),
    "attention without attention": (
        ["deepseek-v3", "--show", "attention"],
        "--show attention: deepseek-v3 has no layer of full attention",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv, message = MISTAKES[name]
    with pytest.raises(SystemExit) as stopped:
        cli.main(["plan", *argv])
    printed = capsys.readouterr()
    assert stopped.value.code == 2
    assert printed.out == ""
    assert message in printed.err
    assert printed.err.startswith("sglang-kv plan: ")
    assert len(printed.err.splitlines()) == 1


def test_a_plot_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(
        ValueError, match=r"^--plot: needs matplotlib: pip install 'sglang-kv\[bench"
    ):
        output("llama-3-8b", "--context", "8k,32k", "--plot", "x.png")


# Where it runs -----------------------------------------------------------------------------------


def test_it_needs_neither_torch_nor_sglang(run_python: Callable[..., str], root: Path) -> None:
    """Every method planned, in a fresh interpreter where none of them can be imported."""
    code = (
        "import sys\n"
        f"sys.path.insert(0, {str(root)!r})\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('torch', 'sglang', 'transformers'):\n"
        "            raise ImportError(name)\n"
        "sys.meta_path.insert(0, Block())\n"
        "from sglang_kv.planner.command import output\n"
        "text = output('smollm2-135m-instruct', '--context', '4k', '--method', 'all')\n"
        "import sglang_kv.planner.server\n"
        "print(all(n not in sys.modules for n in ('torch', 'sglang', 'transformers')))\n"
        "print(text)\n"
    )
    first, *text = run_python(code).splitlines()
    assert first == "True"
    assert list(rows("\n".join(text)))[2:] == list(methods())


def test_as_a_command(root: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "sglang_kv.cli", "plan", "llama-9"],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
