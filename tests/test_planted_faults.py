"""Faults that this kind of code is known for, planted: the checks that exist have to see them.

Each test runs a check of the suite again, with parameters that the suite runs it with (where it
passes), and with one fault in the product's code: now it has to fail.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from sglang_kv import drop, fold
from sglang_kv.compression import streamingllm
from sglang_kv.compression.plan import Window
from sglang_kv.kernels import scores

TESTS = Path(__file__).resolve().parent


@functools.cache
def module(name: str) -> ModuleType:
    """Another file of tests: they are no packages, so they have no name to import them by."""
    path = TESTS / name
    spec = importlib.util.spec_from_file_location(f"planted_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.layers.rotary_embedding import base

    monkeypatch.setattr(base, "_is_cpu", True)


def run(file: str, test: str, **parameters: Any) -> None:
    """A test as the suite runs it. LookupError if it is not run with these parameters."""
    check = getattr(module(file), test)
    for mark in check.pytestmark:
        names, values = mark.args
        wanted = (
            parameters[names] if isinstance(names, str) else tuple(parameters[n] for n in names)
        )
        if wanted not in list(values):
            raise LookupError(f"{test} is not run with {wanted}")
    check(**parameters)


def the_papers_loop(recent: int, chunk: int, trained: int | None) -> None:
    """StreamingLLM, ledger and kernels, against its paper's loop over a cache before RoPE."""
    sizes = {"page_size": 16, "sinks": 4, "recent": recent, "chunk": chunk, "trained": trained}
    file = "runtime/test_cache_positions.py"
    run(file, "test_the_papers_loop", scaling="none", **sizes)


def the_attention_received() -> None:
    """SnapKV's kept sets, from the real kernels' scores, against an oracle in plain torch."""
    file = "compression/test_kept_sets.py"
    run(file, "test_snapkv_keeps_what_the_oracle_keeps", group=3, page_size=16)


def h2os_loop() -> None:
    """H2O's kept sets of every decoded token, by mean scores, against the paper's loop."""
    file = "runtime/test_folds.py"
    run(file, "test_h2o_is_the_papers_loop", norm="mean", scores="all", fold_at=None)


def red(check: Callable[[], None]) -> None:
    with pytest.raises(AssertionError):
        check()


def windowed(monkeypatch: pytest.MonkeyPatch, **fault: Callable[[Window], int]) -> None:
    """StreamingLLM with another window than was asked for."""
    plan = streamingllm.window_plan

    def planted(geometry: Any, window: Window, *rest: Any) -> Any:
        wrong = window._replace(**{k: f(window) for k, f in fault.items()})
        return plan(geometry, wrong, *rest)

    monkeypatch.setattr(streamingllm, "window_plan", planted)


def test_dropped_sinks(monkeypatch: pytest.MonkeyPatch) -> None:
    windowed(monkeypatch, num_sinks=lambda window: 0)
    red(lambda: the_papers_loop(44, 13, None))


@pytest.mark.parametrize("by", [-1, 1])
def test_a_window_off_by_one(monkeypatch: pytest.MonkeyPatch, by: int) -> None:
    windowed(monkeypatch, window_left=lambda window: window.window_left + by)
    red(lambda: the_papers_loop(44, 13, None))


def first_of_group(q: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """One query head speaks for all of its KV head."""
    group = q.shape[1] // kv_heads
    return q[:, ::group].repeat_interleave(group, 1)


def other_group(q: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Query heads dealt out to KV heads in turn, in place of neighbours together."""
    return q.unflatten(1, (-1, kv_heads)).transpose(1, 2).flatten(1, 2)


@pytest.mark.parametrize("wrong", [first_of_group, other_group])
def test_a_wrong_reduction_over_the_gqa_group(
    monkeypatch: pytest.MonkeyPatch, wrong: Callable[[torch.Tensor, int], torch.Tensor]
) -> None:
    real = scores.load_kernels()

    def planted(q: Any, indptr: Any, first: Any, lse: Any, *rest: Any) -> None:
        kv_heads = rest[1].shape[-2]  # of the page table
        real.column_sums(
            wrong(q, kv_heads).contiguous(), indptr, first, wrong(lse, kv_heads).contiguous(), *rest
        )

    monkeypatch.setattr(scores, "load_kernels", lambda: SimpleNamespace(column_sums=planted))
    red(the_attention_received)


def test_positions_shifted_by_one_when_a_window_moves_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After a rebase the model is told a position too low by one."""
    rebase = drop.Dropper.rebase

    def planted(self: Any, state: Any, target: int) -> None:
        before = state.offset
        rebase(self, state, target)
        if state.offset != before:
            self.ledger.streams.offset[state.slot] += 1

    monkeypatch.setattr(drop.Dropper, "rebase", planted)
    red(lambda: the_papers_loop(28, 16, 96))


def test_positions_shifted_by_one_after_a_fold(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a fold keeps is taken for its neighbours from then on."""
    real = fold.KeptPositions

    def planted(positions: torch.Tensor, *rest: Any) -> Any:
        return real(positions + 1, *rest)

    monkeypatch.setattr(fold, "KeptPositions", planted)
    red(h2os_loop)
