"""Everything that only a GPU can settle, in one run of a few minutes.

    scripts/gpu_check.sh [--out FOLDER] [--seconds 440] [--dry]

Correctness of every kernel against the reference; decode in GB/s beside a measured device copy and
beside FlashInfer on the same K and V kept whole; prefill in TFLOP/s; a server where SGLang is
installed. One JSON file per part in FOLDER; a table last. A part that fails is reported and the
next one runs; the exit status is 1 if any failed. ``--dry`` runs what a CPU can, tiny.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from sglang_kv.benchmarks import gpu_kernels as kernels  # noqa: E402

BATCHES, LENGTHS, SHARES = (8, 16, 32, 64), (4096, 16384, 32768, 65536), (1, 4, 8)
#: The largest K and V of one measurement, in bytes.
LARGEST = 20e9
#: Of outputs of size one in bf16; sums of attention may add up to more, and are fp32.
TOLERANCE = 2e-2
#: Decode at 8 x 32K tokens is to reach this share of a copy.
GOAL = 0.85


class Check:
    """What has been found so far, and the time that is left."""

    def __init__(self, args: argparse.Namespace):
        self.out: Path = args.out
        self.deadline = time.monotonic() + args.seconds
        self.dry: bool = args.dry
        device = "cpu" if self.dry else "cuda"
        self.where = kernels.Where(
            device, torch.float32 if self.dry else torch.bfloat16, 2 if self.dry else 15
        )
        if self.dry:  # FlashInfer's layout in plain torch, in place of FlashInfer
            sys.path.insert(0, str(ROOT / "tests/support"))
            importlib.import_module("flashinfer_executor").install()
        self.found: dict[str, Any] = {}
        self.failed: list[str] = []
        self.paths = [p for p in kernels.PATHS if self._has(p)]

    def _has(self, path: str) -> bool:
        if path == "flashinfer":
            return self.dry or importlib.util.find_spec("flashinfer") is not None
        return not self.dry and (ROOT / "kernels/triton/attention.py").exists()

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


def correctness(check: Check) -> dict[str, float]:
    found: dict[str, float] = {}
    for path in check.paths:
        found.update(kernels.check_attention(check.where, path))
    if "triton" in check.paths:
        found.update(kernels.check_transfer(check.where))
    wrong = [name for name, distance in found.items() if not distance <= TOLERANCE]
    if wrong:
        raise AssertionError(f"not the reference: { {name: found[name] for name in wrong} }")
    return found


def copy(check: Check) -> float:
    return round(kernels.copy_gb_s(check.where), 1)


def decode(check: Check) -> list[dict[str, Any]]:
    batches, lengths = ((2,), (256,)) if check.dry else (BATCHES, LENGTHS)
    rows: list[dict[str, Any]] = []
    for batch in batches:
        for tokens in lengths:
            size = batch * tokens * kernels.KV_HEADS * kernels.HEAD_DIM * 4
            if size > LARGEST or check.left < 60:
                continue
            row: dict[str, Any] = {"batch": batch, "tokens": tokens}
            if not check.dry and "flashinfer" in check.paths:
                row["stock"] = round(kernels.stock_decode_gb_s(check.where, batch, tokens), 1)
            for share in SHARES:
                walked = 1e5 if check.dry else 4e8
                for path in check.paths:
                    speed = kernels.decode_gb_s(check.where, path, batch, tokens // share, walked)
                    row[f"{path} 1/{share}"] = round(speed, 1)
            rows.append(row)
            torch.cuda.empty_cache()
    return rows


def prefill(check: Check) -> list[dict[str, Any]]:
    shapes = ((32, 64),) if check.dry else ((2048, 2048), (2048, 32768), (8192, 8192))
    return [
        {"path": path, "chunk": chunk, "context": context, "tflop_s": round(speed, 2)}
        for path in check.paths
        for chunk, context in shapes
        for speed in [kernels.prefill_tflop_s(check.where, path, chunk, context)]
    ]


def planning(check: Check) -> dict[str, float]:
    if "flashinfer" not in check.paths:
        return {}
    return kernels.host_plan_ms(check.where, 16, 256 if check.dry else 4096)


def served(check: Check) -> dict[str, Any]:
    """A server with random weights in the shape of Llama-3.2-1B, dense and compressed."""
    if check.dry or importlib.util.find_spec("sglang") is None:
        return {"skipped": "needs a GPU and SGLang"}
    from sglang_kv.benchmarks.gpu_server import compare

    return compare(check.out, check.left)


def table(check: Check) -> str:
    found = check.found
    copied = found["copy"] if isinstance(found["copy"], float) else float("nan")
    lines = [f"device copy: {copied} GB/s", "decode, GB/s of K and V (share of the copy):"]
    rows = found["decode"] if isinstance(found["decode"], list) else []
    for row in rows:
        cells = [
            f"{name} {value:.0f} ({value / copied:.0%})"
            for name, value in row.items()
            if name not in ("batch", "tokens")
        ]
        lines.append(f"  {row['batch']:>3} x {row['tokens']:>6}: " + ", ".join(cells))
    for name in ("prefill", "planning", "served"):
        lines.append(f"{name}: {json.dumps(found[name])}")
    for row in rows:
        if (row["batch"], row["tokens"]) == (8, 32768):
            best = max(value for name, value in row.items() if name.endswith(" 1/1"))
            reached = "reached" if best >= GOAL * copied else "missed"
            lines.append(
                f"goal {GOAL:.0%} of the copy at 8 x 32768: {reached}, {best / copied:.0%}"
            )
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
    raise SystemExit(main())
