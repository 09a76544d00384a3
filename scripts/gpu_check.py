"""Everything that only a GPU can settle, in one run of a few minutes.

    scripts/gpu_check.sh [--out FOLDER] [--seconds 440] [--dry]

Correctness of every kernel against the reference; decode in GB/s beside a measured device copy and
beside FlashInfer on the same K and V kept whole; prefill in TFLOP/s; a server where SGLang is
installed. One JSON file per part in FOLDER; a table and the goals last. A part that fails is
reported and the next one runs; the exit status is 1 if any failed. ``--dry`` runs everything but
the server on a CPU, tiny: FlashInfer's layout by an executor, Triton's kernels by its interpreter.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from sglang_kv.benchmarks import (  # noqa: E402
    gpu_goals,
    gpu_kernels,
    gpu_memory,
    gpu_scores,
    gpu_speed,
)
from sglang_kv.benchmarks.gpu_streams import (  # noqa: E402
    HEAD_DIM,
    KV_HEADS,
    PATHS,
    Finding,
    Where,
)

BATCHES, LENGTHS, SHARES = (8, 16, 32, 64), (4096, 16384, 32768, 65536), (1, 4, 8)
#: The shape that the goals are set for: measured first.
GOAL, DRY_GOAL = (8, 32768), (1, 64)
#: The largest K and V of one measurement, in bytes.
LARGEST = 20e9
#: Seconds that checks of correctness leave to what comes after them.
LEFT_TO_SPEED = 200


class Check:
    """What has been found so far, and the time that is left."""

    def __init__(self, args: argparse.Namespace):
        self.out: Path = args.out
        self.deadline = time.monotonic() + args.seconds
        self.dry: bool = args.dry
        device = "cpu" if self.dry else "cuda"
        self.where = Where(
            device, torch.float32 if self.dry else torch.bfloat16, 1 if self.dry else 15
        )
        if self.dry:  # FlashInfer's layout in plain torch, in place of FlashInfer
            sys.path.insert(0, str(ROOT / "tests/support"))
            importlib.import_module("flashinfer_executor").install()
            if self._has("triton"):
                importlib.import_module("quick_interpreter").swap_language_once()
        self.found: dict[str, Any] = {}
        self.failed: list[str] = []
        self.paths = [p for p in PATHS if self._has(p)]

    def _has(self, path: str) -> bool:
        if path == "flashinfer":
            return self.dry or importlib.util.find_spec("flashinfer") is not None
        if importlib.util.find_spec("triton") is None:
            return False
        # Without a GPU, only if Triton was told in time to interpret.
        return not self.dry or bool(importlib.import_module("triton").knobs.runtime.interpret)

    @property
    def goal(self) -> tuple[int, int]:
        """Requests and tokens that the goals are set for."""
        return DRY_GOAL if self.dry else GOAL

    @property
    def left(self) -> float:
        return self.deadline - time.monotonic()

    def part(self, name: str, make: Callable[[Check], Any], needs_s: float) -> None:
        """One part: its result, or why there is none, into the folder."""
        if self.left < needs_s and not self.dry:
            result: Any = {"skipped": f"{self.left:.0f} s left of the {needs_s:.0f} it needs"}
        else:
            begin = time.monotonic()
            try:
                result = make(self)
            except Exception as error:  # the other parts are worth having
                traceback.print_exc()
                result = {"error": f"{type(error).__name__}: {error}"}
                self.failed.append(name)
            print(f"{name}: {time.monotonic() - begin:.1f} s", flush=True)
        self.found[name] = result
        (self.out / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")


def environment(check: Check) -> dict[str, Any]:
    from importlib.metadata import PackageNotFoundError, version

    versions = {}
    for package in ("torch", "triton", "flashinfer-python", "sglang"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "absent"
    found: dict[str, Any] = {"versions": versions, "paths": check.paths, "dry": check.dry}
    if not check.dry:
        properties = torch.cuda.get_device_properties(0)
        found["gpu"] = {
            "name": properties.name,
            "bytes": properties.total_memory,
            "sms": properties.multi_processor_count,
            "capability": [properties.major, properties.minor],
        }
    return found


def checks(check: Check) -> Iterator[list[Finding]]:
    """Every kernel of every path. FlashInfer last: without its ready-made modules it compiles each
    for a minute, Triton for a second."""
    if "triton" in check.paths:
        yield from gpu_kernels.check_attention(check.where, "triton")
        yield from gpu_scores.check_scores(check.where)
        yield from gpu_memory.check_moves(check.where)
        yield from gpu_memory.check_rotate(check.where)
    if "flashinfer" in check.paths:
        yield from gpu_kernels.check_attention(check.where, "flashinfer")


def correctness(check: Check) -> dict[str, Any]:
    """How far each result is from the reference's, and how far it may be; what took too long to
    get to is a failure too."""
    found: list[Finding] = []
    late = False
    running = checks(check)
    for findings in running:
        found += findings
        if not check.dry and check.left < LEFT_TO_SPEED and next(running, None) is not None:
            late = True
            break
    result = {name: [apart, most] for name, apart, most in found}
    wrong = {finding.name: finding.distance for finding in found if not finding.right}
    if wrong:
        raise AssertionError(f"not the reference, of {len(found)}: {wrong}")
    if late:
        raise AssertionError(f"time for {len(found)} checks only, all right; the rest never ran")
    return result


def copy(check: Check) -> float:
    return round(gpu_speed.copy_gb_s(check.where), 1)


def decode(check: Check) -> list[dict[str, Any]]:
    shapes = [(batch, tokens) for batch in BATCHES for tokens in LENGTHS]
    shapes = [GOAL, *(shape for shape in shapes if shape != GOAL)]
    rows: list[dict[str, Any]] = []
    for batch, tokens in [DRY_GOAL] if check.dry else shapes:
        size = batch * tokens * KV_HEADS * HEAD_DIM * 4
        if not check.dry and (size > LARGEST or check.left < 60):
            continue
        row: dict[str, Any] = {"batch": batch, "tokens": tokens}
        if not check.dry and "flashinfer" in check.paths:
            row["stock"] = round(gpu_speed.stock_decode_gb_s(check.where, batch, tokens), 1)
        for share in SHARES:
            for path in check.paths:
                row[f"{path} 1/{share}"] = _speed(check, path, batch, tokens // share)
        rows.append(row)
        torch.cuda.empty_cache()
    return rows


def graphs(check: Check) -> dict[str, float]:
    """Decode at the goals' shape as a CUDA graph, which the Triton path is served as."""
    if "triton" not in check.paths:
        return {}
    batch, tokens = check.goal
    return {
        f"triton graph 1/{share}": _speed(check, "triton", batch, tokens // share, captured=True)
        for share in SHARES
    }


def _speed(check: Check, path: str, batch: int, tokens: int, *, captured: bool = False) -> float:
    walked = 1e5 if check.dry else 4e8
    speed = gpu_speed.decode_gb_s(
        check.where, path, batch, tokens, walked=walked, captured=captured
    )
    return float(f"{speed:.4g}")


def prefill(check: Check) -> list[dict[str, Any]]:
    shapes = ((8, 24),) if check.dry else ((2048, 2048), (2048, 32768), (8192, 8192))
    return [
        {"path": path, "chunk": chunk, "context": context, "tflop_s": round(speed, 2)}
        for path in check.paths
        for chunk, context in shapes
        for speed in [gpu_speed.prefill_tflop_s(check.where, path, chunk, context)]
    ]


def planning(check: Check) -> dict[str, float]:
    if "flashinfer" not in check.paths:
        return {}
    return gpu_speed.host_plan_ms(check.where, *((1, 64) if check.dry else (16, 4096)))


def served(check: Check) -> dict[str, Any]:
    """A server with random weights in the shape of Llama-3.2-1B, dense and compressed."""
    if check.dry or importlib.util.find_spec("sglang") is None:
        return {"skipped": "needs a GPU and SGLang"}
    from sglang_kv.benchmarks.gpu_server import compare

    return compare(check.out, check.left)


def table(check: Check) -> str:
    """What was found, on a few lines: the goals and what failed last."""
    found = check.found
    copied = found["copy"] if isinstance(found["copy"], float) else math.nan
    rows = [dict(row) for row in found["decode"]] if isinstance(found["decode"], list) else []
    goal = next((row for row in rows if (row["batch"], row["tokens"]) == check.goal), None)
    if goal is not None:
        goal |= {k: v for k, v in found["graphs"].items() if k.startswith("triton graph")}
    count = len(found["correctness"]) if "correctness" not in check.failed else 0
    lines = [
        f"correctness: {count} results are the reference's" if count else "correctness: failed"
    ]
    lines += [f"device copy: {copied} GB/s", "decode, GB/s of K and V (share of the copy):"]
    for row in rows:
        cells = [
            f"{name} {value:.0f} ({value / copied:.0%})"
            for name, value in row.items()
            if name not in ("batch", "tokens")
        ]
        lines.append(f"  {row['batch']:>3} x {row['tokens']:>6}: " + ", ".join(cells))
    for name in ("prefill", "planning", "served"):
        lines.append(f"{name}: {json.dumps(found[name])}")
    if check.dry:
        lines.append("a dry run: its figures mean nothing")
    lines += gpu_goals.goal_lines(goal, copied, SHARES)
    lines.append(f"failed: {', '.join(check.failed) or 'nothing'}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "gpu-check")
    parser.add_argument("--seconds", type=float, default=440)
    parser.add_argument("--dry", action="store_true", help="tiny, on the CPU")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    if not args.dry and not torch.cuda.is_available():
        parser.error("no CUDA device; --dry runs what a CPU can")
    check = Check(args)
    parts = (
        ("environment", environment, 0),
        ("correctness", correctness, 0),
        ("copy", copy, 0),
        ("planning", planning, 10),
        ("decode", decode, 60),
        ("graphs", graphs, 40),
        ("prefill", prefill, 30),
        ("served", served, 120),
    )
    for name, make, needs_s in parts:
        check.part(name, make, needs_s)
    summary = table(check)
    (args.out / "summary.txt").write_text(summary + "\n")
    print(summary)
    return 1 if check.failed else 0


if __name__ == "__main__":
    if "--dry" in sys.argv:
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
    raise SystemExit(main())
