"""Kernels compiled for GPUs that are not here: what they take may not grow unnoticed.

Every op, and every feature of one, is compiled for one of the architectures, so that what no longer
compiles is seen; `benchmarks/triton_cubins.py` compiles all for all, and records what is compared
with here.
"""

import json
from dataclasses import fields, replace
from typing import Any

import pytest

from sglang_kv.benchmarks.common import RESULTS
from sglang_kv.benchmarks.triton_cubins import ARCHITECTURES, CASES, Case, measure, resources
from sglang_kv.kernels.triton.launch import Launch

#: Registers and shared memory may grow by this share before it counts; spills may not.
TOLERANCE = 0.1

FEW = [
    (80, Case("decode", dtype="float8_e4m3fn")),
    (80, Case("decode", page_size=1)),
    (80, Case("extend", dtype="float16")),
    (80, Case("column_sums", dtype="float8_e4m3fn")),
    (80, Case("append", option="decode")),
    (80, Case("append", dtype="float8_e5m2")),
    (80, Case("gather", head_dim=80)),
    (80, Case("turn_keys", dtype="float8_e4m3fn")),
    (90, Case("decode")),
    (90, Case("decode", option="scores")),
    (90, Case("decode", head_dim=96)),
    (90, Case("extend", head_dim=64, group=3)),
    (90, Case("column_sums", option="decode")),
    (90, Case("append", dtype="float8_e4m3fn")),
    (90, Case("gather")),
    (90, Case("turn_keys")),
    (90, Case("turned_queries")),
    (100, Case("decode", option="sink_q")),
    (100, Case("decode", group=7)),
    (100, Case("extend", option="soft_cap")),
    (100, Case("column_sums", head_dim=64)),
    (100, Case("column_sums", head_dim=256)),
    (100, Case("append")),
    (100, Case("turn_keys", dtype="float8_e5m2")),
]


def features(cases: list[Case]) -> dict[str, set[object]]:
    """The values of each field of a case."""
    return {field.name: {getattr(case, field.name) for case in cases} for field in fields(Case)}


def kernels(cases: list[Case]) -> set[str]:
    return {ran.kernel.__name__ for case in cases for ran in case.launches(90)}


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


def test_the_few_are_of_every_kind() -> None:
    """Each op, kernel and feature of all cases is compiled here; attention and what scores,
    appends and turns keys, on each architecture."""
    few = [case for _, case in FEW]
    assert features(few) == features(CASES)
    assert kernels(few) == kernels(CASES)
    for arch in ARCHITECTURES:
        ops = {case.op for at, case in FEW if at == arch}
        assert ops >= {"decode", "extend", "column_sums", "append", "turn_keys"}


def test_everything_is_recorded(recorded: dict[int, dict[str, dict[str, int]]]) -> None:
    """Each case, on each architecture; and 16-bit attention up to 128 dimensions spills nowhere."""
    for arch in ARCHITECTURES:
        names = {f"{ran.kernel.__name__} {case}" for case in CASES for ran in case.launches(arch)}
        assert names <= set(recorded[arch])  # which may have more: kernels that are gone
        for name in names:
            kernel = recorded[arch][name]
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
