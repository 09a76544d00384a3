"""The catalogue, and the other places where configs come from."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from sglang_kv.planner.command import models_text
from sglang_kv.planner.find import catalogue, find_model
from sglang_kv.planner.units import PlanError

#: Full-attention layers, window layers, recurrent layers, and the widest KV layer's shape.
SHAPES = {
    "llama-2-7b": (32, 0, 0, "MHA, 32 KV heads x 128"),
    "llama-3-8b": (32, 0, 0, "GQA, 8 KV heads x 128"),
    "llama-3-70b": (80, 0, 0, "GQA, 8 KV heads x 128"),
    "llama-3.1-8b": (32, 0, 0, "GQA, 8 KV heads x 128"),
    "mistral-7b-v0.1": (0, 32, 0, "GQA, 8 KV heads x 128"),
    "mistral-7b-v0.3": (32, 0, 0, "GQA, 8 KV heads x 128"),
    "qwen2.5-7b": (28, 0, 0, "GQA, 4 KV heads x 128"),
    "qwen3-8b": (36, 0, 0, "GQA, 8 KV heads x 128"),
    "qwen3-next-80b-a3b": (12, 0, 36, "GQA, 2 KV heads x 256"),
    "qwen3.5-27b": (16, 0, 48, "GQA, 4 KV heads x 256"),
    "qwen3.8-27b": (16, 0, 48, "GQA, 4 KV heads x 256"),
    "gemma-3-12b": (8, 40, 0, "GQA, 8 KV heads x 256"),
    "gemma-3-27b": (10, 52, 0, "GQA, 16 KV heads x 128"),
    "gpt-oss-20b": (12, 12, 0, "GQA, 8 KV heads x 64"),
    "gpt-oss-120b": (18, 18, 0, "GQA, 8 KV heads x 64"),
    "deepseek-v3": (0, 0, 0, "latent of 512 + 64"),
    "nemotron-h-8b": (4, 0, 24, "GQA, 8 KV heads x 128"),
    "jamba-v0.1": (4, 0, 28, "GQA, 8 KV heads x 128"),
    "smollm2-135m-instruct": (30, 0, 0, "GQA, 3 KV heads x 64"),
}


@pytest.mark.parametrize("name", catalogue())
def test_shapes(name: str) -> None:
    model = find_model(name)
    full, windows, states, shape = SHAPES[name]
    assert (len(model.full), len(model.sliding), len(model.states)) == (full, windows, states)
    assert shape in model.summary()


@pytest.mark.parametrize("name", catalogue())
def test_entries_say_where_they_are_from(name: str) -> None:
    entry = catalogue()[name]
    assert entry["source"]
    assert entry["checked"]  # what its numbers were compared with, field by field
    assert all(source.startswith("https://") for source in entry["source"] + entry["checked"])
    assert "parameters" not in entry or "parameters" in entry["unchecked"]
    assert f"https://huggingface.co/{entry['hub']}/blob/main/config.json" in entry["source"]
    model = find_model(name)
    assert model.parameters
    assert model.context


@pytest.mark.parametrize("text", ["llama-3-8b", "Meta-Llama-3-8B", "meta-llama/Meta-Llama-3-8B"])
def test_names(text: str) -> None:
    model = find_model(text)
    assert (model.name, model.path) == ("llama-3-8b", "meta-llama/Meta-Llama-3-8B")


def test_the_list() -> None:
    text = models_text()
    assert all(f"| {name} " in text for name in catalogue())


def test_the_demo_model_is_the_catalogue_s(demo_model: Path) -> None:
    found, listed = find_model(str(demo_model)), find_model("smollm2-135m-instruct")
    assert found.caches == listed.caches
    assert found.parameters == listed.parameters


def test_a_folder_or_its_config(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    file = folder / "config.json"
    file.write_text(json.dumps(catalogue()["qwen3-8b"]["config"]))
    for path in (folder, file):
        model = find_model(str(path))
        assert (model.name, model.path, len(model.full)) == ("mine", str(path), 36)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not JSON"),
        ("[1]", "expected a JSON object"),
        ('{"a": NaN}', "model_type is missing"),
        ("\0\1", "not JSON"),
        ("[" * 100_000, "not JSON: nested too deeply"),
    ],
)
def test_broken_files(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(PlanError, match=message) as caught:
        find_model(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_a_folder_without_a_config(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"^MODEL: .* holds no config.json$"):
        find_model(str(tmp_path))


@pytest.mark.parametrize(
    ("beside", "dtype"),
    [
        ({"quantization": {"quant_algo": "FP8"}}, "fp8"),
        ({"quantization": {"quant_algo": "NVFP4"}}, "unknown"),
        ({}, "unknown"),
        ([], "unknown"),
    ],
)
def test_weights_that_a_file_beside_the_config_says_are_quantized(
    tmp_path: Path, beside: Any, dtype: str
) -> None:
    """ModelOpt's hf_quant_config.json, whose config.json still says bfloat16."""
    (tmp_path / "config.json").write_text(json.dumps(catalogue()["qwen3-8b"]["config"]))
    assert find_model(str(tmp_path)).weight_dtype is None
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(beside))
    assert find_model(str(tmp_path)).weight_dtype == dtype


@pytest.mark.parametrize("text", ["~no_such_user/model", "x" * 5000, "a\0b"])
def test_what_cannot_be_a_path(text: str) -> None:
    with pytest.raises(PlanError, match=r"^MODEL: .* is no path, no name on the hub"):
        find_model(text)


def test_an_unknown_name() -> None:
    with pytest.raises(PlanError, match=r"^MODEL: 'llama-9' is no path, no name on the hub"):
        find_model("llama-9")


def hub(monkeypatch: pytest.MonkeyPatch, download: Any) -> None:
    module = types.ModuleType("huggingface_hub")
    module.hf_hub_download = download  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    monkeypatch.setattr("socket.getaddrinfo", lambda *_args: [])


def test_a_name_on_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """From the cache if it is there, else from the hub; only config.json."""
    asked = []

    def download(repo: str, file: str, local_files_only: bool = False) -> str:
        asked.append((repo, file, local_files_only))
        if local_files_only:
            raise OSError("not cached")
        (tmp_path / "c.json").write_text(json.dumps(catalogue()["qwen3-8b"]["config"]))
        return str(tmp_path / "c.json")

    hub(monkeypatch, download)
    assert find_model("some/model").path == "some/model"
    assert asked == [("some/model", "config.json", True), ("some/model", "config.json", False)]


def test_a_hub_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(repo: str, file: str, local_files_only: bool = False) -> str:
        raise OSError("no route to host\nand more")

    hub(monkeypatch, download)
    with pytest.raises(PlanError, match=r"^MODEL: some/model: .*\(no route to host\); give a path"):
        find_model("some/model")

    def no_network(*_args: object) -> None:
        raise OSError("no name")

    monkeypatch.setattr("socket.getaddrinfo", no_network)
    monkeypatch.delenv("HTTPS_PROXY", raising=False)
    monkeypatch.delenv("https_proxy", raising=False)
    monkeypatch.delenv("ALL_PROXY", raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "https://hub.example")
    with pytest.raises(PlanError, match=r"\(hub.example cannot be reached\); give a path$"):
        find_model("some/model")


def test_without_huggingface_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(PlanError, match=r"huggingface_hub, which could .* is not installed"):
        find_model("some/model")
