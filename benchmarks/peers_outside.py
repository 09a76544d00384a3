"""Engines with environments of their own: making one, and running a job in it."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RUNNERS = {"kvpress": "peers_kvpress.py", "llama.cpp": "peers_llamacpp.py"}
PACKAGES = {
    "kvpress": ("kvpress==0.5.5",),
    # Compiled for this machine's CPU, as SGLang's kernels here are.
    "llama.cpp": ("llama-cpp-python==0.3.36", "--no-binary=llama-cpp-python"),
}
NATIVE = {"CMAKE_ARGS": "-DGGML_NATIVE=ON"}


def python_of(folder: Path) -> Path:
    return folder / "bin" / "python"


def install(engine: str, folder: Path) -> None:
    """An environment with the engine in it. What is there already is not made again: pip sees
    that, and ends what an interrupted run has left half done."""
    if not python_of(folder).exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [str(python_of(folder)), "-m", "pip", "install", *PACKAGES[engine]]
    subprocess.run(pip, check=True, env={**os.environ, **NATIVE}, stdout=sys.stderr)


def job_name(engine: str, job: dict[str, Any]) -> str:
    """The name under which a job's files lie in --work."""
    text = json.dumps(job, sort_keys=True)
    return hashlib.sha256((engine + text).encode()).hexdigest()[:16]


def outside(
    args: argparse.Namespace, engine: str, job: dict[str, Any], kept: bool = True
) -> dict[str, Any]:
    """What an engine's runner makes of a job.

    Args:
        kept: it stays in --work, for a run that is stopped. What was timed is timed again: its line
            says when and at which commit.
    """
    name = job_name(engine, job)
    asked, result = (args.work / f"{name}.{kind}.json" for kind in ("job", "result"))
    args.work.mkdir(parents=True, exist_ok=True)
    again = args.again or not kept
    if again:
        result.with_suffix(".part").unlink(missing_ok=True)
    if again or not result.exists():
        asked.write_text(json.dumps(job, sort_keys=True))
        runner = HERE / RUNNERS[engine]
        # Not this process's packages: PYTHONPATH would put them before the environment's own.
        env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        env |= {
            "OMP_NUM_THREADS": str(args.threads),
            "TQDM_DISABLE": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        }
        command = [str(python_of(args.folders[engine])), str(runner), str(asked), str(result)]
        subprocess.run(command, check=True, env=env, stdout=sys.stderr)
    found: dict[str, Any] = json.loads(result.read_text())
    return found
