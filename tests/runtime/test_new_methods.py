"""A method that comes in one file is covered by what runs for every method, without an edit."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_kv.compression.base import methods

#: Run with the toys in the registry: the laws, pages of 8 bits, the planner's arithmetic.
EVERYBODYS = (
    "tests/runtime/test_laws.py",
    "tests/runtime/test_fp8_pages.py::test_every_method",
    "tests/planner/test_engine.py",
)
PRINT = """
import random
import toy_methods
from policies import all_variants, full_budget, random_policy, variants
rng = random.Random(0)
drawn = [random_policy(rng) for _ in range(300)]
for name in ("toy-best", "toy-recent"):
    keys = {key for spec in drawn if spec["method"] == name for key in spec}
    full = min(full_budget(name).amounts.values())
    print(name, len(variants(name)), full, sorted(keys - {"method"}))
"""


def run(root: Path, *arguments: str) -> str:
    paths = [str(root), str(root / "tests/support")]
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        cwd=root,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs SGLang")
def test_the_laws_run_for_a_new_method(root: Path) -> None:
    said = run(
        root,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "toy_methods",
        "-rA",
        *EVERYBODYS,
    )
    made = {tuple(found) for found in re.findall(r"^COLLECTED (\S+?)::(\w+)\[(.*)\]", said, re.M)}
    passed = {tuple(found) for found in re.findall(r"^PASSED (\S+?)::(\w+)\[(.*)\]", said, re.M)}
    assert passed < made
    for name in ("toy-best", "toy-recent"):
        for file in EVERYBODYS:
            ours = {test for path, test, of in passed if path == file.split("::")[0] and name in of}
            assert ours, file
        laws = {of for path, _, of in made if path == EVERYBODYS[0] and name in of}
        assert len(laws) >= 3, "parameters without a policy of their own"
    assert len({test for path, test, _ in passed if path == EVERYBODYS[0]}) >= 12
    assert "failed" not in said.splitlines()[-1]


def test_a_new_methods_parameters_are_drawn(root: Path) -> None:
    """All of them, whatever their names; and a full budget is one."""
    best, recent = run(root, "-c", PRINT).splitlines()
    assert re.fullmatch(r"toy-best [5-9] 10000 \['gate', 'listeners', 'order', 'room'\]", best), (
        best
    )
    assert re.fullmatch(r"toy-recent [2-9] 20000 \['head', 'tail'\]", recent), recent


def test_they_are_not_in_this_process() -> None:
    assert not any(name.startswith("toy") for name in methods())
