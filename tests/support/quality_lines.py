"""Lines as `benchmarks/quality.py` records them, with counts of a test's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sglang_kv.benchmarks.common import wilson
from sglang_kv.benchmarks.records import DEMO

Line = dict[str, Any]


def write(folder: Path, name: str, *rows: Line) -> None:
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def line(suite: str, arm: str, policy: Line, *, commit: str = "abc", **more: Any) -> Line:
    """What every line of a suite has."""
    env = {"commit": commit, "date": "2026-01-02T03:04:05Z", "cpu": "AMD EPYC", "cores": 2}
    env["versions"] = {"sglang": "0.5.23"}
    about = {"suite": suite, "arm": arm, "policy": policy, "model": DEMO, "seed": 0}
    about |= {"memory": 0.25, "settings": {"text": "a.txt"}, "environment": env}
    return {**about, **more}


def needle(
    arm: str,
    policy: Line,
    hits: dict[int, tuple[int, int]],
    *,
    kind: str = "number",
    column: str = "aware",
    **more: Any,
) -> Line:
    """``hits``: kept and all of the full cache's, by prompt length; two depths where it can be."""

    def counted(kept: int, full: int) -> Line:
        counts = {"n": full, "hits": kept, "full_hits": full, "kept": kept}
        found = {"kind": kind, "column": column, **counts}
        return {**found, "interval": wilson(kept, full), "kept_interval": wilson(kept, full)}

    cells = [
        {**counted(*part), "length": length, "depth": depth}
        for length, (kept, full) in hits.items()
        for depth, part in ((0.1, (min(kept, 1), 1)), (0.9, (kept - min(kept, 1), full - 1)))
    ]
    kept, full = (sum(found[i] for found in hits.values()) for i in (0, 1))
    found = line("needle", arm, policy, summary=[counted(kept, full)], cells=cells)
    found["settings"] = {"text": "a.txt", "lengths": list(hits)}
    return {**found, **more}


def fidelity(arm: str, policy: Line, *cells: Line, **more: Any) -> Line:
    return line("fidelity", arm, policy, cells=list(cells), **more)


def agreed(length: int, agreed: int, tokens: int, *, column: str = "aware", **more: Any) -> Line:
    """A cell of `fidelity`; ``kl`` and ``kl_interval`` are of the caller's."""
    cell: Line = {"column": column, "length": length, "n": 3, "tokens": tokens, "agreed": agreed}
    cell |= {"interval": wilson(agreed, tokens), "kl": 0.01, "divergence": 4.3, "same_answers": 1}
    return {**cell, **more}


def perplexity(arm: str, policy: Line, ratios: dict[int, float], **more: Any) -> Line:
    """Perplexities beside 10, within 1 %, by text length."""
    summary = [
        {"length": n, "n": 2 * n, "ppl": 10 * ratio, "full_ppl": 10.0, "ratio": ratio}
        | {"ratio_interval": [ratio - 0.01, ratio + 0.01]}
        for n, ratio in ratios.items()
    ]
    cells = [{**cell, "from": 0, "to": cell["length"]} for cell in summary]
    return {**line("perplexity", arm, policy, summary=summary, cells=cells), **more}
