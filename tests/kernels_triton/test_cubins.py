"""Kernels compiled for GPUs that are not here: what they take may not grow unnoticed.

A few of them; `benchmarks/triton_cubins.py` compiles all, and records what is compared with here.
"""

import json
from dataclasses import replace
from typing import Any

import pytest

from sglang_kv.benchmarks.common import RESULTS
from sglang_kv.benchmarks.triton_cubins import ARCHITECTURES, CASES, Case, measure, resources
from sglang_kv.kernels.triton.launch import Launch

#: Registers and shared memory may grow by this share before it counts; spills may not.
TOLERANCE = 0.1

FEW = [
    (80, Case("decode", dtype="float8_e4m3fn")),
    (90, Case("decode")),
    (90, Case("extend", head_dim=64, group=3)),
    (90, Case("append", dtype="float8_e4m3fn")),
    (90, Case("gather")),
    (90, Case("turned_queries")),
    (100, Case("column_sums", head_dim=64)),
    (100, Case("turn_keys", dtype="float8_e5m2")),
]


@pytest.fixture(scope="module")
def recorded() -> dict[int, dict[str, dict[str, int]]]:
    """The last line of each architecture."""
    lines = (RESULTS / "triton_cubins.jsonl").read_text().splitlines()
    rows: list[dict[str, Any]] = [json.loads(line) for line in lines]
    return {row["arch"]: row["kernels"] for row in rows}


def regressions(found: dict[str, int], before: dict[str, int]) -> list[str]:
    """What a kernel takes more of than it did."""
    worse = [
        f"{name} {found[name]}, was {before[name]}"
        for name in ("registers", "shared_bytes")
        if found[name] > before[name] * (1 + TOLERANCE)
    ]
    if found["spilled_bytes"] > before["spilled_bytes"]:
        worse.append(f"spilled_bytes {found['spilled_bytes']}, was {before['spilled_bytes']}")
    return worse


@pytest.mark.parametrize(("arch", "case"), FEW, ids=lambda value: str(value).replace(" ", "-"))
def test_kernels_take_no_more_than_recorded(
    recorded: dict[int, dict[str, dict[str, int]]], arch: int, case: Case
) -> None:
    assert case in CASES
    for name, found in measure(case, arch).items():
        assert not regressions(found, recorded[arch][name]), name


def test_everything_is_recorded(recorded: dict[int, dict[str, dict[str, int]]]) -> None:
    """Each case, on each architecture; and 16-bit attention up to 128 dimensions spills nowhere."""
    for arch in ARCHITECTURES:
        names = {f"{ran.kernel.__name__} {case}" for case in CASES for ran in case.launches(arch)}
        assert set(recorded[arch]) == names
        for name, kernel in recorded[arch].items():
            if name.startswith(("attend_split", "merge_splits", "add_")):
                assert kernel["spilled_bytes"] == 0, (arch, name)


def test_a_regression_is_seen() -> None:
    """The assembler's own words for a kernel that is given too few registers."""
    (launch,) = Case("gather").launches(90)
    before = resources(launch, 90)
    assert regressions(before, before) == []
    squeezed = replace(launch, arguments={**launch.arguments, "TOKENS": 256})
    assert isinstance(squeezed, Launch)
    worse = regressions(resources(squeezed, 90, maxnreg=32), before)
    assert any(line.startswith("spilled_bytes") for line in worse)
