"""The comparison with other engines, without running them: the model for llama.cpp, what kvpress is
asked for, jobs in other environments."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_model import tiny_llama

from sglang_kv.benchmarks import peers, peers_outside
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
    fake: Any = ModuleType("kvpress")
    fake.SnapKVPress = lambda **options: options
    monkeypatch.setitem(sys.modules, "kvpress", fake)
    make_press = load(Path(peers.__file__).with_name("peers_kvpress.py")).make_press
    for share in (0.5, 0.25, 0.16, 0.1, 0.05):
        _, press = peers.arms(share)["snapkv"]
        for tokens in range(200, 4100, 7):
            ratio = make_press({"press": press}, tokens)["compression_ratio"]
            assert int(tokens * (1 - ratio)) == int(share * tokens)


def test_a_press_has_the_policys_own_parameters() -> None:
    for policy, press in peers.arms(0.25).values():
        parameters = parse_policy(policy).parameters
        for theirs, ours in (("window_size", "window"), ("kernel_size", "kernel_size")):
            if press and theirs in press:
                assert press[theirs] == parameters[ours]
                assert parameters["pooling"] == "avg"  # the only one that kvpress has


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--part", "price"], "--part: 'price' is none of speed, quality"),
        (["--engines", "vllm"], "--engines: 'vllm' is none of stock"),
        (["--arms", "x"], "--arms: 'x' is none of none, snapkv"),
        (["--keep-ratio", "1"], "--keep-ratio must be between 0 and 1"),
        (["--batch", "0"], "--batch must be at least 1"),
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
