"""docs/BENCHMARKS.md on what `sglang-kv bench` has recorded: a table per workload."""

from __future__ import annotations

import json

from sglang_kv.benchmarks import throughput
from sglang_kv.benchmarks.markdown import NOTHING
from sglang_kv.benchmarks.records import Row, commits, lines

#: What makes lines of one workload comparable.
SAME = ("device", "rate", "flags", "own_server", "seed")


def bench() -> str:
    """The newest line of each arm, of the server flags and seed that the newest line has."""
    workloads: dict[str, list[Row]] = {}
    for row in lines("throughput"):
        place = json.dumps([row["model"], row["workload"]], sort_keys=True)
        workloads.setdefault(place, []).append(row)
    if not workloads:
        return NOTHING
    parts = []
    for rows in workloads.values():
        last = rows[-1]
        rows = [row for row in rows if all(row.get(key) == last.get(key) for key in SAME)]
        newest = list({row["arm"]: row for row in rows}.values())
        env = last["environment"]
        where = env.get("gpu") or f"{env['cores']} cores of an {env['cpu']}"
        parts.append(
            f"{throughput.table(newest).strip()}\n\n{where}, sglang {env['versions']['sglang']}, "
            f"seed {last['seed']}; commits {commits(newest)}; one run of each arm."
        )
    return "\n\n".join(parts)
