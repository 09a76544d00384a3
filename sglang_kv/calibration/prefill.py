"""Dense or windowed prefill: two ways to let heads stream, and how far apart their figures are."""

from __future__ import annotations

from typing import Any

import numpy as np

from sglang_kv.calibration.needles import Trials

#: All heads see everything up to the question; then streaming heads are cut.
DENSE = "dense"
#: Streaming heads see sinks and recent tokens in the whole text, as on the server.
WINDOWED = "windowed"


def compare(trials: Trials, other: Trials) -> list[dict[str, Any]]:
    """One row per arm that was tried by both prefills, over the texts that both tried.

    ``here`` and ``there`` are passkeys found; ``only_here`` and ``only_there`` count texts that
    just one of the two finds; ``likelihood`` is the mean log-likelihood by each.
    """
    rows = []
    for arm in dict.fromkeys(trial.arm for trial in trials.rows.values()):
        pairs = [
            (trial, other.rows[trial.key]) for trial in trials.of(arm) if trial.key in other.rows
        ]
        if not pairs or not arm.sparsity:
            continue
        found = np.array([[one.found for one in pair] for pair in pairs])
        likelihood = np.mean([[one.likelihood for one in pair] for pair in pairs], axis=0)
        rows.append(
            {
                "name": arm.name,
                "sparsity": arm.sparsity,
                "sinks": arm.sinks,
                "recent": arm.recent,
                "tried": len(pairs),
                "here": int(found[:, 0].sum()),
                "there": int(found[:, 1].sum()),
                "only_here": int((found[:, 0] & ~found[:, 1]).sum()),
                "only_there": int((found[:, 1] & ~found[:, 0]).sum()),
                "likelihood": [round(float(value), 3) for value in likelihood],
            }
        )
    return rows
