"""The comparison with other engines, without running them: the model for llama.cpp, what kvpress is
asked for, jobs in other environments."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_model import tiny_llama

from sglang_kv.benchmarks import beside, needle, peers, peers_outside, peers_quality, records
from sglang_kv.benchmarks.gguf_model import convert
from sglang_kv.compression import parse_policy


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    tiny_llama(heads=8, kv_heads=2).save_pretrained(folder)
    return folder


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_the_gguf_holds_the_same_weights(
    tiny: Path, tmp_path: Path, root: Path, dtype: str
) -> None:
    """Read back with the script that unpacks upstream's own GGUF of the demo model."""
    import gguf

    demo = load(root / "scripts/demo_model.py")
    reader = gguf.GGUFReader(convert(tiny, tmp_path / "m.gguf", dtype))
    config = demo_config(demo, reader)
    narrow = {"bf16": torch.bfloat16, "f16": torch.float16}[dtype]
    expected = tiny_llama(heads=8, kv_heads=2).state_dict()
    found = {}
    for tensor in reader.tensors:
        weight = torch.tensor(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
        heads = {"attn_q": 8, "attn_k": 2}.get(tensor.name.split(".")[-2])
        name = "lm_head.weight" if tensor.name == "output.weight" else None
        name = name or demo.hugging_face_name(tensor.name)
        found[name] = demo.halves_from_pairs(weight, heads) if heads else weight
    assert found.keys() == expected.keys()
    for name, weight in found.items():
        wanted = expected[name] if weight.ndim == 1 else expected[name].to(narrow).float()
        assert torch.equal(weight, wanted), name
    assert config["num_hidden_layers"] == 3
    assert config["num_key_value_heads"] == 2
    assert config["head_dim"] == 8
    assert config["rope_theta"] == 10000.0


def demo_config(demo: ModuleType, reader: Any) -> dict[str, Any]:
    """Its sizes, by the demo's reader, which also wants a tokenizer's."""

    class Lenient:
        def get_field(self, name: str) -> Any:
            found = reader.get_field(name)
            return found if found is not None else SimpleNamespace(contents=lambda: None)

    config: dict[str, Any] = demo.model_config(Lenient())
    return config


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"architectures": ["Qwen3ForCausalLM"]}, "expected a LlamaForCausalLM"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1.0}}, "scaled rotary"),
    ],
)
def test_another_kind_of_model_is_refused(
    tiny: Path, tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    config = json.loads((tiny / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=said):
        convert(tmp_path, tmp_path / "m.gguf")


def test_kvpress_keeps_as_many_tokens_as_the_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    """kvpress keeps `int(tokens * (1 - ratio))`, and its floats fall short of what one means."""
    runner = load_runner(monkeypatch, SnapKVPress=lambda **options: options)
    for share in (0.5, 0.25, 0.16, 0.1, 0.05):
        press = peers_quality.arms(share)["snapkv"].press
        for tokens in range(200, 4100, 7):
            ratio = runner.make_press(press, tokens)["compression_ratio"]
            assert int(tokens * (1 - ratio)) == int(share * tokens)


def load_runner(monkeypatch: pytest.MonkeyPatch, **presses: Any) -> Any:
    """kvpress's runner, with these for kvpress."""
    fake: Any = ModuleType("kvpress")
    fake.__dict__.update(presses)
    utils: Any = ModuleType("kvpress.utils")
    utils.get_prerope_query_states = None
    monkeypatch.setitem(sys.modules, "kvpress", fake)
    monkeypatch.setitem(sys.modules, "kvpress.utils", utils)
    return load(Path(peers.__file__).with_name("peers_kvpress.py"))


def test_a_press_has_the_policys_own_parameters() -> None:
    for pair in peers_quality.arms(0.25).values():
        parameters = parse_policy(pair.at(1000)).parameters
        for theirs, ours in (("window_size", "window"), ("kernel_size", "kernel_size")):
            if pair.press and theirs in pair.press:
                assert pair.press[theirs] == parameters[ours]
                assert parameters["pooling"] == "avg"  # the only one that kvpress has
    streaming = peers_quality.arms(0.16)["streamingllm"].at(2050)
    assert (streaming["budget"], streaming["fold_at"]) == (328, 2050)


class HalfPress:
    """A press that keeps every second token: in the manner of kvpress, by hooks."""

    def forward_hook(self, module: Any, _args: Any, kwargs: Any, output: Any) -> Any:
        layer = kwargs["past_key_values"].layers[module.layer_idx]
        if layer.keys.shape[2] == kwargs["hidden_states"].shape[1]:
            layer.keys, layer.values = layer.keys[:, :, ::2], layer.values[:, :, ::2]
        return output

    @contextlib.contextmanager
    def __call__(self, model: Any) -> Iterator[None]:
        attention = [layer.self_attn for layer in model.model.layers]
        hooks = [a.register_forward_hook(self.forward_hook, with_kwargs=True) for a in attention]
        yield
        for hook in hooks:
            hook.remove()


class LatePress(HalfPress):
    """One that does something else when its hook is called after the forward."""

    @contextlib.contextmanager
    def __call__(self, model: Any) -> Iterator[None]:
        yield


def test_presses_share_a_prefill(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each arm's answer is that of a prefill with its press in place, decoded alone."""
    runner = load_runner(monkeypatch, HalfPress=HalfPress, LatePress=LatePress)
    presses = {"none": None, "half": {"class": "HalfPress"}, "again": {"class": "HalfPress"}}
    job = {"model": str(tiny), "dtype": "float32", "presses": presses}
    engine = runner.Engine(job)
    ids = torch.arange(40)[None]
    with torch.inference_mode():
        engine.check(ids)
        found = engine.answers(engine.dense(ids), 6)
        alone = engine.answers_alone(ids, 6)
        late = runner.Engine(job | {"presses": {"late": {"class": "LatePress"}}})
        with pytest.raises((AssertionError, RuntimeError)):
            late.check(ids)
    assert found == alone
    assert found["half"] == found["again"]


def test_a_stopped_runner_goes_on(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = load_runner(monkeypatch, HalfPress=HalfPress)
    monkeypatch.setattr(runner, "version", lambda name: "1")
    job = {"model": str(tiny), "dtype": "float32", "threads": 1, "tensors": None, "speed": None}
    job["presses"] = {"none": None, "half": {"class": "HalfPress"}}
    job["answers"] = [
        {"id": str(n), "prompt_ids": list(range(n, n + 30)), "max_new_tokens": 3} for n in range(3)
    ]
    whole = runner.run(job, tmp_path / "whole")
    lines = (tmp_path / "whole").read_text().splitlines()
    assert len(lines) == 3
    assert [(a["id"], a["arm"]) for a in whole["answers"]] == [
        (str(n), arm) for n in range(3) for arm in ("none", "half")
    ]
    (tmp_path / "part").write_text("\n".join(lines[:2]) + "\n")
    done: list[str] = []
    made = runner.Engine.case
    monkeypatch.setattr(
        runner.Engine,
        "case",
        lambda self, case, check: done.append(case["id"]) or made(self, case, check),
    )
    assert runner.run(job, tmp_path / "part") == whole
    assert done == ["2"]


def test_speed_holds_what_the_press_leaves(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = load_runner(monkeypatch, HalfPress=HalfPress)
    monkeypatch.setattr(runner, "version", lambda name: "1")
    job = {"model": str(tiny), "dtype": "float32", "threads": 1, "tensors": None, "answers": []}
    job["speed"] = {"prompts": [list(range(40))] * 2, "steps": 5}
    job["presses"] = {"half": {"class": "HalfPress"}}
    found = runner.run(job, tmp_path / "part")["speed"]
    # Two requests, K and V of 3 layers and 2 heads of 8: 20 tokens of the prompt, 4 decoded.
    assert found["kv_bytes"] == 2 * 2 * 3 * 2 * 8 * 4 * (20 + 4)
    assert found["decode_tok_s"] == pytest.approx(2e3 / found["step_ms"], rel=0.1)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--part", "price"], "--part: 'price' is none of speed, quality"),
        (["--engines", "vllm"], "--engines: 'vllm' is none of stock"),
        (["--arms", "x"], "--arms: 'x' is none of none, snapkv"),
        (["--keep-ratio", "1"], "--keep-ratio must be between 0 and 1"),
        (["--batch", "0"], "--batch must be at least 1"),
        (["--words", "-1"], "--words: expected a count, or 2 with commas, got '-1'"),
        (["--samples", "1,2,3"], "--samples: expected a count, or 2 with commas"),
        (["--kvpress", "nowhere"], "--kvpress: nowhere is no environment; --install makes it"),
    ],
)
def test_a_bad_flag_is_named(
    tiny: Path, flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        peers.parse(["--model", str(tiny), *flags])
    assert said in capsys.readouterr().err


def test_engines_without_an_environment_are_left_out(tiny: Path) -> None:
    assert peers.parse(["--model", str(tiny)]).engines == ["stock", "sglang-kv"]


def test_a_job_runs_in_the_other_environment_once(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = tmp_path / "runner.py"
    runner.write_text(
        "import json, os, sys\n"
        "job = json.load(open(sys.argv[1]))\n"
        "env = {key: os.environ.get(key) for key in ('PYTHONPATH', 'OMP_NUM_THREADS')}\n"
        "open('runs', 'a').write('x')\n"
        "json.dump({**job, **env, 'python': sys.executable}, open(sys.argv[2], 'w'))\n"
    )
    environment = tmp_path / "environment"
    (environment / "bin").mkdir(parents=True)
    (environment / "bin" / "python").symlink_to(sys.executable)
    monkeypatch.setitem(peers_outside.RUNNERS, "kvpress", str(runner))
    monkeypatch.setenv("PYTHONPATH", "here")
    monkeypatch.chdir(tmp_path)
    options = ["--kvpress", str(environment), "--work", str(tmp_path / "work"), "--threads", "3"]
    args = peers.parse(["--model", str(tiny), *options])
    for _ in range(2):
        found = peers_outside.outside(args, "kvpress", {"n": 1})
    assert found["n"] == 1
    assert found["PYTHONPATH"] is None
    assert found["OMP_NUM_THREADS"] == "3"
    assert found["python"] == str(environment / "bin" / "python")
    assert Path("runs").read_text() == "x"
    peers_outside.outside(args, "kvpress", {"n": 2})
    assert Path("runs").read_text() == "xx"


class Words:
    """A chat whose ids are characters."""

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


def test_only_prompts_that_every_full_cache_answers_are_compared() -> None:
    about = {"prompt_ids": [], "fold_at": 0, "max_new_tokens": 4, "length": 9, "depth": 0.5}
    cases = [
        needle.Case(id=name, values=(name,), kind="number", **about) for name in ("1", "2", "3")
    ]

    def lines(*said: str) -> list[dict[str, Any]]:
        pairs = zip("123", said, strict=True)
        return [{"id": name, "output_ids": [ord(c) for c in text]} for name, text in pairs]

    answers = {
        ("kvpress", "none"): lines("1", "2", "-"),
        ("sglang-kv", "none"): lines("1", "-", "3"),
        ("kvpress", "snapkv"): lines("-", "2", "3"),
        ("sglang-kv", "snapkv"): lines("1", "2", "."),
    }
    rows = peers_quality.summaries(Words(), cases, answers)  # type: ignore[arg-type]
    found = {at: (row["hits"], row["kept"], row["full_hits"]) for at, row in rows.items()}
    assert found == {
        ("kvpress", "none"): (2, 1, 1),
        ("sglang-kv", "none"): (2, 1, 1),
        ("kvpress", "snapkv"): (2, 0, 1),
        ("sglang-kv", "snapkv"): (2, 1, 1),
    }
    assert rows["sglang-kv", "snapkv"]["same_answers"] == 1
    assert rows["kvpress", "snapkv"]["kinds"]["number"]["kept"] == 0


def test_tables_set_engines_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "FOLDER", tmp_path)
    assert beside.quality() == beside.kept() == beside.speed() == beside.NOTHING
    where = {
        "cores": 1,
        "cpu": "CPU",
        "versions": {"sglang": "1"},
        "commit": "c",
        "date": "2026-01-01T",
    }
    about = {"model": "m", "seed": 0, "environment": where}
    counts = {"n": 4, "hits": 3, "full_hits": 3, "kept_interval": [0.44, 1.0], "same_answers": 2}

    def row(part: str, engine: str, arm: str, limit: int, **more: Any) -> dict[str, Any]:
        settings = {"dtype": "float32", "limit": limit}
        return {"part": part, "engine": engine, "arm": arm, "settings": settings, **about, **more}

    def found(kept: int) -> dict[str, Any]:
        return {**counts, "kept": kept, "kinds": {"number": {**counts, "kept": kept}}}

    sets = {"prompts": 4, "sets": 40, "equal": 39, "rounding": 1, "tokens": 400, "exchanged": 2}
    measured = {
        "decode_tok_s": 12.34,
        "prefill_tok_s": 1000.0,
        "kv_bytes": 2**21,
        "peak_rss_bytes": 2**30,
    }
    rows = [
        row("quality", "kvpress", "snapkv", 2, **found(0)),  # of an older, smaller run
        row("quality", "sglang-kv", "snapkv", 4, **found(3)),
        row("quality", "kvpress", "snapkv", 4, **found(2)),
        row("kept", "kvpress", "snapkv", 4, **sets, gap=3e-7),
        row("speed", "stock", "none", 4, **measured),
        row("speed", "kvpress", "h2o", 4, failed="no room"),
    ]
    (tmp_path / "peers.jsonl").write_text("".join(json.dumps(line) + "\n" for line in rows))
    assert "| 3/3 | 44% - 100% | 2/3 | 44% - 100% | 3/3; 2/3 | 2/4 |" in beside.quality()
    assert "| 4 | 39/40 | 2 of 400 | 1/1 | 3.0e-07 |" in beside.kept()
    assert "| stock | - | 12.3 tok/s | 1,000 tok/s | 2 MiB | 1,024 MiB |" in beside.speed()
    assert "| kvpress | `h2o` | no room |" in beside.speed()
    weights = {"weights": "f16", "kv_dtype": "f16", "versions": {"llama-cpp-python": "9.9"}}
    rows = [row("speed", "llama.cpp", "none", 4, **measured, **weights)]
    (tmp_path / "peers.jsonl").write_text("".join(json.dumps(line) + "\n" for line in rows))
    assert "| llama.cpp | weights in f16, KV in f16 | 12.3 tok/s |" in beside.speed()
    assert "sglang 1, llama-cpp-python 9.9, commit c" in beside.speed()
