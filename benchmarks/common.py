"""What every benchmark shares: the record of where it ran, and one JSON line per result."""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import os
import platform
import shutil
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

#: Where lines go; the documents are made of those in the checkout.
RESULTS = Path(
    os.environ.get("SGLANG_KV_RESULTS") or Path(__file__).resolve().parent / "results"
).absolute()


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
        "gpu": _gpu_model(),
        "python": platform.python_version(),
    }


class PlainReads:
    """Sums over 1 GB of int64, a thread per core (numpy frees the lock): what memory gives."""

    BYTES = 2**30

    def __init__(self) -> None:
        cores = len(_affinity())
        self._parts = np.array_split(np.ones(self.BYTES // 8, dtype=np.int64), cores)
        self._threads = ThreadPoolExecutor(cores)

    def seconds(self) -> float:
        """How long reading all of it takes."""
        start = time.perf_counter()
        list(self._threads.map(np.sum, self._parts))
        return time.perf_counter() - start

    def close(self) -> None:
        self._threads.shutdown()


def read_bandwidth_gb_s(seconds: float = 1.0) -> float:
    """Sustained memory reads of all cores, in 1e9 bytes/s, at best: the limit a decode step has."""
    with contextlib.closing(PlainReads()) as reads:
        best = float("inf")
        deadline = time.perf_counter() + seconds
        while time.perf_counter() < deadline or best == float("inf"):
            best = min(best, reads.seconds())
    return PlainReads.BYTES / best / 1e9


def wilson(hits: int, n: int, z: float = 1.959964) -> list[float] | None:
    """Wilson's 95 % interval of a share, None for no trial; rounded to four places."""
    if n == 0:
        return None
    share, z2 = hits / n, z * z / n
    middle = (share + z2 / 2) / (1 + z2)
    half = z / (1 + z2) * math.sqrt(share * (1 - share) / n + z2 / n / 4)
    return [round(max(0.0, middle - half), 4), round(min(1.0, middle + half), 4)]


def record(
    name: str, row: dict[str, Any], path: Path | None = None, show: bool = True
) -> dict[str, Any]:
    """Append one line to ``results/NAME.jsonl`` (or to ``path``), print it, and return it."""
    path = path or RESULTS / f"{name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    full = {"benchmark": name, **row, "environment": environment()}
    line = json.dumps(full)
    with path.open("a") as file:
        file.write(line + "\n")
    if show:
        print(line, flush=True)
    return full


def results_file(name: str) -> Path:
    """Where a benchmark's lines go: into the checkout, else into the folder it is run in.

    An installed package is no place for them. ``$SGLANG_KV_RESULTS`` names another folder.
    """
    in_checkout = (Path(__file__).resolve().parent.parent / "pyproject.toml").exists()
    chosen = in_checkout or "SGLANG_KV_RESULTS" in os.environ
    return (RESULTS if chosen else Path.cwd()) / f"{name}.jsonl"


def _gpu_model() -> str | None:
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    names = subprocess.run(query, capture_output=True, text=True).stdout.split("\n")
    return names[0].strip() or None


def _affinity() -> set[int]:
    return os.sched_getaffinity(0)


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor()
