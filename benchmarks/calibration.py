"""How long a calibration takes, and what its report found, as lines of results.

    python benchmarks/calibration.py time MODEL --method trained --out gates.json
    python benchmarks/calibration.py report FOLDER

``time`` runs ``sglang-kv calibrate`` with its defaults for this machine's cores (more arguments go
to it as they are). With ``--minutes`` it stops the command after so long; the next run goes on, and
the line counts all of them. ``report`` takes a folder that ``sglang-kv calibrate-report`` wrote:
one line per row of its tables.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sglang_kv.benchmarks.common import record

NAME = "calibration"
#: A piece's time: wall and processor seconds.
Seconds = tuple[float, float]


def timed(command: list[str], limit: float | None) -> tuple[Seconds, bool]:
    """Run a command, for ``limit`` seconds at most; returns its time and whether it ended.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    begin, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    child = subprocess.Popen(command)
    ended = True
    try:
        child.wait(limit)
    except subprocess.TimeoutExpired:
        ended = False
        # A shell that starts this in the background has its children ignore SIGINT.
        child.send_signal(signal.SIGTERM)
        child.wait()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if ended and child.returncode:
        raise subprocess.CalledProcessError(child.returncode, command)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return (time.perf_counter() - begin, cpu), ended


def time_calibration(args: argparse.Namespace, more: list[str]) -> None:
    cores = len(os.sched_getaffinity(0))
    command = [sys.executable, "-m", "sglang_kv.cli", "calibrate", str(args.model)]
    command += ["--method", args.method, "--out", str(args.out), "--threads", str(cores), *more]
    pieces = args.out.with_name(args.out.name + ".seconds")
    held: list[Seconds] = json.loads(pieces.read_text()) if pieces.exists() else []
    seconds, ended = timed(command, 60 * args.minutes if args.minutes else None)
    held.append(seconds)
    if not ended:
        pieces.write_text(json.dumps(held))
        sys.exit(f"not done yet; {sum(wall for wall, _ in held):.0f} s so far")
    pieces.unlink(missing_ok=True)
    gates = json.loads(args.out.read_text())
    record(
        NAME,
        {
            "arm": args.method,
            "kind": "time",
            "model": gates["model"],
            "seconds": round(sum(wall for wall, _ in held), 1),
            "cpu_seconds": round(sum(cpu for _, cpu in held), 1),
            "pieces": len(held),
            "threads": cores,
            "parameters": gates["parameters"],
            "sinks": gates["sinks"],
            "recent": gates["recent"],
        },
    )


def rows(data: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One per line of a report's tables, each with its settings."""
    about = {"model": data["model"], "model_hash": data["hash"], "settings": data["settings"]}
    for kind in ("needles", "windows", "prefill"):
        for row in data[kind]:
            arm = f"{row['name']} {row['sparsity']:g} {row['sinks']}+{row['recent']}"
            yield {"arm": arm, "kind": kind, **row, **about}
    yield {"arm": "full", "kind": "needles", **data["full"], **about}
    for gates in data["gates"]:
        shares = {key: gates[key] for key in ("name", "method", "shares")}
        yield {"arm": gates["name"], "kind": "shares", **shares, **about}
    for pair in data["agreement"]:
        yield {
            "arm": f"{pair['first']}, {pair['second']}",
            "kind": "agreement",
            **pair,
            **about,
        }
    chosen = {key: data[key] for key in ("recommended", "window")}
    yield {"arm": data["gates"][0]["name"], "kind": "chosen", **chosen, **about}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    timing = commands.add_parser("time", help="time one calibration")
    timing.add_argument("model", type=Path)
    timing.add_argument("--method", default="trained")
    timing.add_argument("--out", type=Path, required=True, help="the gates file")
    timing.add_argument("--minutes", type=float, help="stop after so long; the next run goes on")
    report = commands.add_parser("report", help="a report's tables as lines of results")
    report.add_argument("folder", type=Path)
    args, more = parser.parse_known_args()
    if args.command == "time":
        time_calibration(args, more)
        return
    if more:
        parser.error(f"unknown arguments: {' '.join(more)}")
    for row in rows(json.loads((args.folder / "report.json").read_text())):
        record(NAME, row, show=False)


if __name__ == "__main__":
    main()
