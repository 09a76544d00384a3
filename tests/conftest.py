"""Shared by all tests: where the project is, the demo model, and which tests need what."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parent.parent

# The same examples in every run, so that a change fails by what it changed, and none fails for its
# time. Other examples: pytest --hypothesis-profile search
SLOW_IS_FINE = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("search", **SLOW_IS_FINE)
settings.register_profile("tests", derandomize=True, **SLOW_IS_FINE)
settings.load_profile("tests")


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The demo model's folder, built on first use."""
    spec = importlib.util.spec_from_file_location("demo_model", ROOT / "scripts/demo_model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    folder: Path = module.ensure_demo_model()
    return folder


@pytest.fixture
def run_python(tmp_path: Path) -> Callable[..., str]:
    """Runs code in a fresh interpreter far from the checkout; returns what it printed."""

    def run(code: str, *, python: str = sys.executable, cwd: Path = tmp_path, **env: str) -> str:
        clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH",)}
        clean.pop("SGLANG_USE_CPU_ENGINE", None)
        done = subprocess.run(
            [python, "-c", code],
            cwd=cwd,
            env={**clean, **env},
            capture_output=True,
            text=True,
            timeout=900,  # imports take minutes of a busy machine's time
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    return run


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if shutil.which("nvidia-smi"):
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
