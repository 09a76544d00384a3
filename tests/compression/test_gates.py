"""Gates files in both formats, the package's own, and the choice of retrieval heads."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_kv.compression import Geometry, PolicyError, WindowPlan, parse_policy
from sglang_kv.compression.gates import (
    HeadGates,
    find_gates,
    gates_dir,
    has_gates,
    load_gates,
    model_hash,
    require_match,
    retrieval_heads,
    save_gates,
)

VALUES = np.array([[0.0, 0.25, 1.0], [0.5, 0.125, 0.75]], np.float32)
GATES = HeadGates(VALUES, "org/tiny", "training-free", "here", 64, 256, "sha256:0")


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def our_json(**changes: Any) -> str:
    return json.dumps({"model": "m", "method": "x", "gates": [[0.5, 1]], **changes})


def test_a_policys_sizes_are_its_own(tmp_path: Path) -> None:
    """Whatever the file says that its gates were found with."""
    (tmp_path / "config.json").write_text('{"sink_size": 128, "recent_size": 500}')
    write(tmp_path, "full_attention_heads.tsv", "0.0\t0.5\n0.25\t1.0\n")
    gates = load_gates(tmp_path)
    assert (gates.sinks, gates.recent) == (128, 500)
    for own, wanted in (({}, (64, 256)), ({"sinks": 4}, (4, 256)), ({"recent": 500}, (64, 500))):
        policy = parse_policy({"method": "duoattention", **own})
        plan = policy.plan(2000, Geometry(2, 2, 16, gates))
        assert isinstance(plan, WindowPlan)
        assert tuple(plan.window) == wanted


# -- HeadGates --


def test_gates_cannot_be_changed_and_are_their_own() -> None:
    values = VALUES.copy()
    gates = HeadGates(values, "m", "x", "s")
    with pytest.raises(ValueError, match="read-only"):
        gates.values[0, 0] = 1
    values[0, 0] = 0.9
    assert gates.values[0, 0] == 0
    assert gates.values.dtype == np.float32


def test_gates_are_equal_and_hashed_by_what_they_hold() -> None:
    same = HeadGates(VALUES.astype(np.float64), "m", "x", "s")
    gates = HeadGates(VALUES, "m", "x", "s")
    assert gates == same
    assert hash(gates) == hash(same)
    assert len({gates, same}) == 1
    assert gates != HeadGates(VALUES, "other", "x", "s")
    assert gates != HeadGates(VALUES.reshape(3, 2), "m", "x", "s")
    assert gates != HeadGates(1 - VALUES, "m", "x", "s")
    assert gates != VALUES.tolist()
    assert hash(HeadGates(VALUES * -0.0, "", "", "")) == hash(HeadGates(VALUES * 0, "", "", ""))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([0.5], r"here: expected \[layers, kv_heads\], got \(1,\)"),
        ([[]], "expected"),
        ([[0.5, float("nan")]], "layer 0 head 1: nan is not in"),
        ([[0.5], [1.5]], r"layer 1 head 0: 1.5 is not in \[0, 1\]"),
        ([[-0.5]], r"-0.5 is not in \[0, 1\]"),
    ],
)
def test_values_that_are_no_gates_are_refused(values: Any, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        HeadGates(np.array(values), "m", "x", "here")


# -- files --


def test_our_json_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "new" / "gates.json"
    day = datetime.date(2026, 1, 2)
    save_gates(path, GATES, parameters={"seed": 3}, date=day)
    held = json.loads(path.read_text())
    assert held["date"] == "2026-01-02"
    assert held["parameters"] == {"seed": 3}
    back = load_gates(path)
    assert back == HeadGates(VALUES, "org/tiny", "training-free", str(path), 64, 256, "sha256:0")
    # One line per layer.
    assert "    [0.0, 0.25, 1.0],\n    [0.5, 0.125, 0.75]\n" in path.read_text()


def test_values_are_rounded_in_files(tmp_path: Path) -> None:
    save_gates(tmp_path / "g.json", HeadGates(np.array([[1 / 3]]), "m", "x", "s"))
    assert json.loads((tmp_path / "g.json").read_text())["gates"] == [[0.33333]]


def test_mit_pattern_comes_back(tmp_path: Path) -> None:
    save_gates(tmp_path / "tiny.json", GATES, pattern=True)
    folder = tmp_path / "tiny"
    assert json.loads((folder / "config.json").read_text()) == {
        "sink_size": 64,
        "recent_size": 256,
    }
    # As the reference code reads it.
    tsv = folder / "full_attention_heads.tsv"
    np.testing.assert_array_equal(np.loadtxt(tsv, dtype=float, delimiter="\t"), VALUES)
    gates = load_gates(folder)
    np.testing.assert_array_equal(gates.values, VALUES)
    assert (gates.model, gates.sinks, gates.recent) == ("tiny", 64, 256)
    alone = load_gates(tsv)
    np.testing.assert_array_equal(alone.values, VALUES)
    assert (alone.model, alone.sinks, alone.recent) == ("tiny", None, None)


def test_mit_values_outside_are_clipped(tmp_path: Path) -> None:
    text = "1.0312e+00\t-0.002\n\n5e-1\t0\n"
    path = write(tmp_path, "model/full_attention_heads.tsv", text)
    assert load_gates(path.parent).values.tolist() == [[1, 0], [0.5, 0]]
    assert load_gates(str(path)).values.tolist() == [[1, 0], [0.5, 0]]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("g.json", "", "not JSON"),
        ("g.json", "[1]", "expected a JSON object"),
        ("g.json", "{}", "no 'gates' in it"),
        ("g.json", our_json(gates=[]), "no gates in it"),
        ("g.json", our_json(gates=[[], []]), "no gates in it"),
        ("g.json", our_json(gates=[0.5]), "expected one list of gates per layer"),
        ("g.json", our_json(gates={"a": 1}), "expected one list of gates per layer"),
        ("g.json", our_json(gates=[[1, 0], [1]]), "ragged rows: layer 1 has 1 heads"),
        ("g.json", our_json(gates=[[1, float("nan")]]), "layer 0 head 1: expected a number, got n"),
        ("g.json", our_json(gates=[[float("inf")]]), "layer 0 head 0: expected a number, got inf"),
        ("g.json", our_json(gates=[[10**400]]), "layer 0 head 0: expected a number"),
        ("g.json", our_json(gates=[[1, "x"]]), "layer 0 head 1: expected a number, got 'x'"),
        ("g.json", our_json(gates=[[True]]), "layer 0 head 0: expected a number, got True"),
        ("g.json", our_json(gates=[[1.25]]), "layer 0 head 0: 1.25 is not in"),
        ("g.json", our_json(model=3), "model: expected text, got 3"),
        ("g.json", our_json(sinks=-1), "sinks: expected a token count, got -1"),
        ("g.json", our_json(recent="256"), "recent: expected a token count"),
        ("g.tsv", "", "no gates in it"),
        ("g.tsv", "1\t0\n1\n", "ragged rows: layer 1 has 1 heads"),
        ("g.tsv", "1\tnan\n", "layer 0 head 1: expected a number, got nan"),
        ("g.tsv", "1\t0\n0\t1.2\n", r"layer 1 head 1: 1.2\d* is no gate in \[0, 1\]"),
        ("g.tsv", "-0.2\n", "layer 0 head 0: -0.2"),
        ("g.tsv", "1\n\nhead\n", "line 3: could not convert"),
    ],
)
def test_bad_files_are_refused_by_name(tmp_path: Path, name: str, text: str, message: str) -> None:
    path = write(tmp_path, name, text)
    with pytest.raises(PolicyError, match=message) as caught:
        load_gates(path)
    assert str(caught.value).startswith(f"--kv-gates: {path}: ")


@pytest.mark.parametrize("name", ["none.json", "none.tsv"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(PolicyError, match=f"^--kv-gates: .*{name}: no such file"):
        load_gates(tmp_path / name)


def test_a_folder_without_a_pattern_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match=r"full_attention_heads\.tsv: no such file"):
        load_gates(tmp_path)


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "g.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PolicyError, match=r"g\.json: cannot be read"):
        load_gates(tmp_path / "g.json")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "not JSON"),
        ('{"sink_size": 1.5}', "sink_size: expected a token count, got 1.5"),
        ('{"recent_size": true}', "recent_size: expected a token count, got True"),
    ],
)
def test_a_bad_pattern_config_is_refused(tmp_path: Path, config: str, message: str) -> None:
    write(tmp_path, "full_attention_heads.tsv", "1\t0\n")
    path = write(tmp_path, "config.json", config)
    with pytest.raises(PolicyError, match=message) as caught:
        load_gates(tmp_path)
    assert str(caught.value).startswith(f"--kv-gates: {path}: ")


# -- the package's own --


@pytest.mark.parametrize(
    "name",
    [
        "SmolLM2-135M-Instruct",
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        "/models/smollm2-135m-instruct/",
    ],
)
def test_the_demo_models_gates_are_found(name: str) -> None:
    gates = find_gates(name, 30, 3)
    assert gates is not None
    assert gates.values.shape == (30, 3)
    assert gates.values.max() == 1
    assert gates.model.endswith("SmolLM2-135M-Instruct")
    assert gates.model_hash.startswith("sha256:")
    assert retrieval_heads(gates, sparsity=0.5).sum() == 45


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("SmolLM2-135M-Instruct", (30, 9)),
        ("SmolLM2-135M-Instruct", (3, 30)),
        ("SmolLM2-135M", (30, 3)),
        ("other", (30, 3)),
        ("", (30, 3)),
    ],
)
def test_another_models_gates_are_not_found(name: str, shape: tuple[int, int]) -> None:
    assert find_gates(name, *shape) is None


# -- those that a user downloads --


@pytest.fixture
def downloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SGLANG_KV_CACHE_DIR", str(tmp_path))
    assert gates_dir() == tmp_path / "gates"
    return tmp_path / "gates"


@pytest.mark.parametrize(
    "name",
    [
        "Tiny-1B.json",
        "tiny-1b.tsv",
        "Tiny-1B/full_attention_heads.tsv",
        "Tiny-1B/lr=0.02-reg=0.05/full_attention_heads.tsv",  # as MIT's repository has them
    ],
)
def test_downloaded_gates_are_found_by_the_models_name(downloads: Path, name: str) -> None:
    write(downloads, "Other/full_attention_heads.tsv", "0\t0\n")
    assert find_gates("org/Tiny-1B", 1, 2) is None
    assert not has_gates("org/Tiny-1B")
    write(downloads, name, our_json() if name.endswith(".json") else "0.5\t1.0001\n")
    gates = find_gates("org/Tiny-1B", 1, 2)
    assert gates is not None
    assert gates.values.tolist() == [[0.5, 1]]
    assert has_gates("/models/tiny-1b/")
    with pytest.raises(PolicyError, match=r"for 1 layers of 2 KV heads, this model has 1 of 4$"):
        find_gates("org/Tiny-1B", 1, 4)


def test_downloaded_gates_come_before_the_packages(downloads: Path) -> None:
    rows = [[0.5, 0.5, 0.5]] * 30
    write(downloads, "SmolLM2-135M-Instruct.json", our_json(gates=rows))
    gates = find_gates("SmolLM2-135M-Instruct", 30, 3)
    assert gates is not None
    assert (gates.values == 0.5).all()
    assert not has_gates("")


def test_two_downloads_for_one_model_are_refused(downloads: Path) -> None:
    write(downloads, "tiny.json", our_json())
    write(downloads, "tiny/a/full_attention_heads.tsv", "1\t0\n")
    with pytest.raises(PolicyError, match=r"more than one for tiny: tiny/a, tiny\.json; name one"):
        find_gates("tiny", 1, 2)


def test_a_bad_download_is_refused_by_name(downloads: Path) -> None:
    path = write(downloads, "tiny.json", our_json(gates=[[2, 1]]))
    with pytest.raises(PolicyError, match=f"{path}: layer 0 head 0: 2"):
        find_gates("tiny", 1, 2)


# -- another model's --


def test_gates_match_by_shape_and_hash() -> None:
    require_match(GATES, 2, 3)
    require_match(GATES, 2, 3, "sha256:0")
    require_match(HeadGates(VALUES, "m", "x", "s"), 2, 3, "sha256:1")  # it does not say
    with pytest.raises(PolicyError, match=r"^--kv-gates: here holds gates for 2 layers of 3 KV"):
        require_match(GATES, 3, 2)
    with pytest.raises(PolicyError, match="here holds gates of org/tiny with other weights"):
        require_match(GATES, 2, 3, "sha256:1")


def test_a_models_hash_follows_its_content(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="holds no model"):
        model_hash(tmp_path)
    write(tmp_path, "config.json", "{}")
    write(tmp_path, "model.safetensors", "a")
    first = model_hash(tmp_path)
    assert model_hash(tmp_path) == first
    write(tmp_path, "README.md", "not part of it")
    assert model_hash(tmp_path) == first
    write(tmp_path, "model.safetensors", "b")
    assert model_hash(tmp_path) != first


# -- retrieval heads --


def test_sparsity_is_global() -> None:
    heads = retrieval_heads(GATES, sparsity=0.5)
    assert heads.dtype == np.bool_
    assert heads.tolist() == [[False, False, True], [True, False, True]]
    skewed = np.array([[0.1, 0.2], [0.8, 0.9]], np.float32)
    assert retrieval_heads(skewed, sparsity=0.5).tolist() == [[False, False], [True, True]]


def test_threshold_keeps_what_reaches_it() -> None:
    heads = retrieval_heads(GATES, threshold=0.5)
    assert heads.tolist() == [[False, False, True], [True, False, True]]
    assert retrieval_heads(GATES, threshold=0).all()
    # A gate equals the threshold that a file's decimal names.
    assert retrieval_heads(np.array([[0.1]], np.float32), threshold=0.1).all()


def test_the_ends_are_all_and_nothing() -> None:
    for values in (VALUES, np.zeros((4, 2), np.float32), np.ones((4, 2), np.float32)):
        assert retrieval_heads(values, sparsity=0).all()
        assert not retrieval_heads(values, sparsity=1).any()


@pytest.mark.parametrize(
    ("sparsity", "streaming"), [(0.25, 2), (0.75, 4), (0.1, 1), (0.05, 0), (5 / 12, 2), (0.5, 3)]
)
def test_counts_round_half_to_even(sparsity: float, streaming: int) -> None:
    assert (~retrieval_heads(VALUES, sparsity=sparsity)).sum() == streaming


def test_of_equal_gates_the_earlier_head_streams() -> None:
    heads = retrieval_heads(np.full((2, 2), 0.5, np.float32), sparsity=0.25)
    assert heads.tolist() == [[False, True], [True, True]]
    heads = retrieval_heads(np.array([[0, 1], [0, 1]], np.float32), sparsity=0.75)
    assert heads.tolist() == [[False, False], [False, True]]


@given(
    st.lists(st.lists(st.floats(0, 1, width=32), min_size=3, max_size=3), min_size=1, max_size=8),
    st.floats(0, 1),
)
def test_no_streaming_head_beats_a_retrieval_head(rows: list[list[float]], share: float) -> None:
    values = np.array(rows, np.float32)
    before = values.copy()
    heads = retrieval_heads(values, sparsity=share)
    np.testing.assert_array_equal(values, before)
    assert (~heads).sum() == round(share * values.size)
    if heads.any() and not heads.all():
        assert values[heads].min() >= values[~heads].max()


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({}, "either sparsity or threshold"),
        ({"sparsity": 0.5, "threshold": 0.5}, "either sparsity or threshold"),
        ({"sparsity": 1.1}, r"kv_compression.sparsity: must be in \[0, 1\], got 1.1"),
        ({"sparsity": float("nan")}, "kv_compression.sparsity: must be in"),
        ({"threshold": -0.1}, "kv_compression.threshold: must be in"),
        ({"threshold": "0.5"}, "kv_compression.threshold: expected a number, got '0.5'"),
        ({"sparsity": True}, "kv_compression.sparsity: expected a number, got True"),
    ],
)
def test_a_bad_choice_is_refused(choice: dict[str, Any], message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        retrieval_heads(GATES, **choice)
