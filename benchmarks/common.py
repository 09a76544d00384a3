"""What every benchmark shares: the record of where it ran, and one JSON line per result."""

from __future__ import annotations

import datetime
import json
import platform
import subprocess
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

RESULTS = Path(__file__).resolve().parent / "results"


def environment() -> dict[str, Any]:
    """Commit, versions and hardware of this run."""
    here = Path(__file__).resolve().parent
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True
    ).stdout.strip()
    dirty = subprocess.run(
        ["git", "status", "--porcelain", "--", "..", ":!results"],
        cwd=here,
        capture_output=True,
        text=True,
    ).stdout.strip()
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "commit": (commit or "unknown") + ("+dirty" if dirty else ""),
        "versions": {name: version(name) for name in ("sglang", "sglang-kv", "torch")},
        "cpu": _cpu_model(),
        "cores": len(_affinity()),
        "python": platform.python_version(),
    }


def read_bandwidth_gb_s(seconds: float = 1.0) -> float:
    """Sustained memory reads of all cores, in 1e9 bytes/s: the limit a decode step has.

    A sum over 1 GB of int64, split over one thread per core (numpy releases the lock).
    """
    from concurrent.futures import ThreadPoolExecutor

    cores = len(_affinity())
    parts = np.array_split(np.ones(2**27, dtype=np.int64), cores)
    with ThreadPoolExecutor(cores) as threads:
        best = float("inf")
        deadline = time.perf_counter() + seconds
        while time.perf_counter() < deadline or best == float("inf"):
            start = time.perf_counter()
            list(threads.map(np.sum, parts))
            best = min(best, time.perf_counter() - start)
    return 2**30 / best / 1e9


def record(name: str, row: dict[str, Any]) -> None:
    """Append one line to ``results/NAME.jsonl`` and print it."""
    RESULTS.mkdir(exist_ok=True)
    line = json.dumps({"benchmark": name, **row, "environment": environment()})
    with (RESULTS / f"{name}.jsonl").open("a") as file:
        file.write(line + "\n")
    print(line, flush=True)


def _affinity() -> set[int]:
    import os

    return os.sched_getaffinity(0)


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor()
