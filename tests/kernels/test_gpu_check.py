"""The GPU run, as far as a CPU can take it: its parts run, and a wrong kernel is not passed."""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sglang_kv.benchmarks import (
    gpu_goals,
    gpu_kernels,
    gpu_scores,
    gpu_streams,
)
from sglang_kv.benchmarks.gpu_streams import Finding, Where
from sglang_kv.kernels import reference
from sglang_kv.kernels.flashinfer import wrappers

CPU = Where("cpu", torch.float32, 1)
#: Options of attention, and what ignoring one comes to.
IGNORED: dict[str, Any] = {
    "sink_q": None,
    "logits_soft_cap": 0.0,
    "layer_window_left": -1,
    "k_scale": 1.0,
    "v_scale": 1.0,
}


@pytest.fixture
def gpu_check(root: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    for name in ("decode_wrapper", "prefill_wrapper", "merge_state_in_place"):
        monkeypatch.setattr(wrappers, name, getattr(wrappers, name))  # put back afterwards
    spec = importlib.util.spec_from_file_location("gpu_check", root / "scripts/gpu_check.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_dry_run_passes(root: Path, tmp_path: Path) -> None:
    """Both paths, in a process of its own: Triton has to be told to interpret before it starts."""
    script = root / "scripts/gpu_check.py"
    done = subprocess.run(
        [sys.executable, str(script), "--dry", "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    lines = done.stdout.strip().splitlines()
    assert lines[-1] == "failed: nothing"
    goals = [line.split(":")[0] for line in lines if line.startswith("goal ")]
    bytes_predict = "goal within 15% of the time that bytes predict at 1 x 64"
    assert goals == ["goal 85% of the copy at 1 x 64", bytes_predict]
    found = json.loads((tmp_path / "correctness.json").read_text())
    assert all(apart <= most for apart, most in found.values())
    ops = ("decode", "extend", "decode scores", "column_sums", "append", "gather", "rotate")
    ops += ("turn_keys",)
    for start in (*(f"triton {op} " for op in ops), "flashinfer decode", "flashinfer extend"):
        assert any(name.startswith(start) for name in found), start
    row = json.loads((tmp_path / "decode.json").read_text())[0]
    assert {f"{path} 1/{n}" for path in ("flashinfer", "triton") for n in (1, 4, 8)} < set(row)
    assert len(json.loads((tmp_path / "graphs.json").read_text())) == 3


def test_the_cases_are_what_models_have() -> None:
    """Every group, head size, page size and dtype that the kernels say they serve."""
    cases = [*gpu_kernels.ATTENTION]
    assert {1, 3, 4, 5, 6, 7, 8, 16} == {case.group for case in cases}
    assert {64, 80, 96, 128, 256} == {case.head_dim for case in cases}
    assert {1, 16, 32} == {case.page_size for case in cases}
    eight_bits = {torch.float8_e4m3fn, torch.float8_e5m2}
    assert {None, torch.float16} | eight_bits == {case.dtype for case in cases}
    assert eight_bits < {case.dtype for case in gpu_scores.SUMMED}


class Kernels:
    """Stands for the Triton path: the reference, with one fault."""

    def __init__(self, fault: str = ""):
        self.fault = fault

    def __call__(self, name: str) -> Any:
        return {
            "attention": SimpleNamespace(decode=self.decode, extend=self.extend),
            "scores": SimpleNamespace(column_sums=self.column_sums),
            "transfer": SimpleNamespace(append=self.append, gather=self.gather),
            "rotate": self,
        }[name]

    def heed(self, options: dict[str, Any]) -> dict[str, Any]:
        """The options, without the one that is ignored."""
        ignored = {k: v for k, v in IGNORED.items() if k == self.fault and k in options}
        return options | ignored

    def decode(
        self,
        q: Tensor,
        streams: Any,
        layer: int,
        *,
        scores: Tensor | None = None,
        score_slots: Tensor | None = None,
        return_lse: bool = True,
        **options: Any,
    ) -> Any:
        out, lse = reference.decode(q, streams, layer, **self.heed(options))
        if scores is not None and self.fault != "no scores":
            for name in ("sink_q", "v_scale"):
                options.pop(name, None)
            first = torch.zeros(len(q), dtype=torch.int32)
            self.column_sums(q, None, first, lse, streams, layer, scores, score_slots, **options)
        return out.to(q.dtype), lse + (self.fault == "lse")

    def extend(
        self, q: Tensor, indptr: Tensor, streams: Any, layer: int, return_lse: bool, **options: Any
    ) -> Any:
        out, lse = reference.extend(q, indptr, streams, layer, **self.heed(options))
        if self.fault == "not a number":
            out[-1, -1, -1] = torch.nan
        return out.to(q.dtype), lse

    def column_sums(self, q: Tensor, indptr: Any, first: Tensor, *rest: Any, **options: Any) -> Any:
        if self.fault == "first query":
            first = torch.zeros_like(first)
        reference.column_sums(q, indptr, first, *rest, **self.heed(options))

    def append(self, k: Tensor, v: Tensor, *rest: Any, **scales: Any) -> None:
        reference.append(k, k if self.fault == "values" else v, *rest, **scales)

    def gather(self, pages: Tensor, *lists: Tensor) -> None:
        before = pages.clone()
        reference.gather(pages, *lists)
        if self.fault == "gathered values":
            pages[:, 1] = before[:, 1]

    def turned_queries(
        self, x: Tensor, positions: Tensor, table: Tensor, *, is_neox_style: bool
    ) -> Tensor:
        halves = is_neox_style or self.fault == "neighbours"
        out = reference.turned(x, table[positions][:, None], halves).to(x.dtype)
        return out * (1 + 2**-7) if self.fault == "one bit" else out

    def turn_keys(
        self, pages: Tensor, ids: Tensor, distance: int, table: Tensor, *, is_neox_style: bool
    ) -> None:
        ids, keys = ids.flatten(), pages[:, : 2 if self.fault == "turned values" else 1]
        exact = reference.turned(keys[ids].float(), table[distance], is_neox_style)
        keys[ids] = reference.as_stored(exact, 1.0, pages.dtype)


def wrong(gpu_check: ModuleType, monkeypatch: pytest.MonkeyPatch, fault: str) -> list[str]:
    """Names of the Triton path's checks that its fault does not pass."""
    monkeypatch.setattr(gpu_streams, "triton", Kernels(fault))
    check = SimpleNamespace(paths=["triton"], where=CPU)
    return [f.name for findings in gpu_check.checks(check) for f in findings if not f.right]


def test_right_kernels_pass(gpu_check: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    assert wrong(gpu_check, monkeypatch, "") == []


@pytest.mark.parametrize(
    ("fault", "caught"),
    [
        ("sink_q", ["triton decode group 3 head_dim 64 page 16 sink_q"]),
        (
            "logits_soft_cap",
            [
                "triton extend group 6 head_dim 80 page 16 soft cap 5",
                "triton column_sums group 3 head_dim 64 page 1 soft cap 5",
            ],
        ),
        (
            "layer_window_left",
            [
                "triton decode group 5 head_dim 128 page 16 layer window 25",
                "triton column_sums decode group 16 head_dim 80 page 32",
            ],
        ),
        (
            "k_scale",
            [
                "triton decode group 4 head_dim 128 page 16 float8_e4m3fn lse",
                "triton column_sums group 4 head_dim 64 page 16 float8_e5m2",
            ],
        ),
        ("v_scale", ["triton extend group 4 head_dim 128 page 1 float8_e5m2"]),
        ("no scores", ["triton decode scores group 4 head_dim 128 page 16"]),
        ("first query", ["triton column_sums group 8 head_dim 256 page 16"]),
        ("lse", ["triton decode group 4 head_dim 128 page 16 lse"]),
        ("not a number", ["triton extend group 4 head_dim 128 page 16"]),
        ("values", ["triton append decode head_dim 80 page 1 float16"]),
        ("gathered values", ["triton gather head_dim 96 page 32 float8_e4m3fn"]),
        ("neighbours", ["triton rotate neighbours 24 of 80 float16"]),
        ("one bit", ["triton rotate halves 128 of 128"]),
        ("turned values", ["triton turn_keys head_dim 64 float8_e4m3fn"]),
    ],
)
def test_each_fault_is_caught(
    gpu_check: ModuleType, monkeypatch: pytest.MonkeyPatch, fault: str, caught: list[str]
) -> None:
    found = wrong(gpu_check, monkeypatch, fault)
    for start in caught:
        assert any(name.startswith(start) for name in found), found
    assert len(found) < 60, "not what is at fault alone"


def test_a_wrong_kernel_fails_the_run(
    gpu_check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = gpu_streams.FlashInfer.run

    def wrong(self: gpu_streams.FlashInfer, *arguments: Any) -> object:
        out, lse = right(self, *arguments)
        return out * 1.1, lse

    monkeypatch.setattr(gpu_streams.FlashInfer, "run", wrong)
    check = gpu_check.Check(argparse.Namespace(out=tmp_path, seconds=60, dry=True))
    check.part("correctness", gpu_check.correctness, 0)
    assert check.failed == ["correctness"]
    assert "not the reference" in json.loads((tmp_path / "correctness.json").read_text())["error"]


def test_a_kernel_that_does_not_run_is_wrong() -> None:
    """And the next one runs."""

    def broken() -> Any:
        yield "", 0.0, 0.0
        raise RuntimeError("no such kernel")

    right, error = gpu_streams.findings("gather", broken)
    assert right.right
    assert error.name == "gather: RuntimeError: no such kernel"
    assert not error.right
    assert not Finding("", float("nan"), 1.0).right


def test_checks_that_time_did_not_allow_are_no_pass(
    gpu_check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_check, "checks", lambda check: iter([[Finding("first", 0, 0)]] * 3))
    check = gpu_check.Check(argparse.Namespace(out=tmp_path, seconds=190, dry=True))
    check.dry = False
    check.part("correctness", gpu_check.correctness, 0)
    assert check.failed == ["correctness"]
    assert "time for 1 checks only" in check.found["correctness"]["error"]


ROW = {"batch": 8, "tokens": 32768, "stock": 4e3, "flashinfer 1/1": 3500.0, "triton 1/1": 3000.0}


def test_goals_of_decode() -> None:
    row = {**ROW, "flashinfer 1/4": 2000.0, "triton graph 1/4": 3100.0, "triton 1/8": 3400.0}
    assert gpu_goals.goal_lines(row, 4000.0, (1, 4, 8)) == [
        "goal 85% of the copy at 8 x 32768: reached, 88%",
        "goal within 15% of the time that bytes predict at 8 x 32768: reached, "
        "1/4 takes 1.13 of it, 1/8 takes 1.03 of it",
    ]
    slow, late = gpu_goals.goal_lines({**row, "triton 1/8": 3000.0}, 4200.0, (1, 4, 8))
    assert slow.endswith("missed, 83%")
    assert "missed, 1/4 takes 1.13 of it, 1/8 takes 1.17 of it" in late
    _, some = gpu_goals.goal_lines({**ROW, "triton 1/4": 3e3}, 4000.0, (1, 4, 8))
    assert some.endswith("not measured")
    assert gpu_goals.goal_lines(None, 4000.0, (1, 4, 8)) == ["goals: their shape was not measured"]
