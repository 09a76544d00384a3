"""The GPU run, as far as a CPU can take it: its parts run, and a wrong kernel is not passed."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from sglang_kv.benchmarks import gpu_kernels
from sglang_kv.kernels.flashinfer import wrappers


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


def test_the_dry_run_passes(
    gpu_check: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu_check.main(["--dry", "--out", str(tmp_path)]) == 0
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert last == "failed: nothing"
    found = json.loads((tmp_path / "correctness.json").read_text())
    assert len(found) >= 20
    assert max(found.values()) < 1e-4  # fp32
    row = json.loads((tmp_path / "decode.json").read_text())[0]
    assert {"flashinfer 1/1", "flashinfer 1/4", "flashinfer 1/8"} < set(row)


def test_a_wrong_kernel_fails_the_run(
    gpu_check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = gpu_kernels.FlashInfer.run

    def wrong(self: gpu_kernels.FlashInfer, q: object, layer: int) -> object:
        out, lse = right(self, q, layer)  # type: ignore[arg-type]
        return out * 1.1, lse

    monkeypatch.setattr(gpu_kernels.FlashInfer, "run", wrong)
    check = gpu_check.Check(gpu_check.argparse.Namespace(out=tmp_path, seconds=60, dry=True))
    check.part("correctness", gpu_check.correctness, 0)
    assert check.failed == ["correctness"]
    assert "not the reference" in json.loads((tmp_path / "correctness.json").read_text())["error"]
