"""Two pytests at once count, print and end as one would."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FILES = {
    "good": "import pytest\ndef test_a(): pass\ndef test_b(): pytest.skip('not here')\n",
    "fails": "def test_c(): assert 1 == 2, 'planted'\ndef test_d(): pass\n",
    "breaks": "import pytest\n@pytest.fixture\ndef x(): raise OSError\ndef test_e(x): pass\n",
}
# Programs that end as a pytest may, without its start, which takes seconds.
ENDS = {
    "passes": "print('..\\n3 passed, 9 deselected, 1 warning in 0.10s')",
    "killed": "import os, signal; print('...', flush=True); os.kill(os.getpid(), signal.SIGKILL)",
    "silent": "print('...')",
    "empty": "print('no tests ran in 0.01s'); raise SystemExit(5)",
    "long": "print('1 failed, 20 passed, 2 errors in 700.12s (0:11:40)'); raise SystemExit(1)",
}


def both(root: Path, folder: Path, *names: str) -> tuple[int, list[str]]:
    commands = []
    for name in names:
        (folder / f"test_{name}.py").write_text(FILES.get(name, ""))
        run = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null", f"test_{name}.py"]
        commands.append([sys.executable, *(["-Sc", ENDS[name]] if name in ENDS else run)])
    code = "import run_tests, sys; sys.exit(run_tests.run(*eval(sys.argv[1])))"
    done = subprocess.run(
        [sys.executable, "-c", code, repr(commands)],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": str(root / "scripts"),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        },
        capture_output=True,
        text=True,
        timeout=600,
    )
    return done.returncode, done.stdout.splitlines()


@pytest.mark.parametrize(
    ("names", "counted"),
    [(("good", "good"), "2 passed, 2 skipped in "), (("passes", "passes"), "6 passed in ")],
)
def test_what_passes(root: Path, tmp_path: Path, names: tuple[str, str], counted: str) -> None:
    status, lines = both(root, tmp_path, *names)
    assert status == 0, lines
    assert lines[-1].startswith(counted)


@pytest.mark.parametrize(
    ("names", "counted"),
    [
        (("passes", "long"), "1 failed, 23 passed, 2 errors in "),
        (("long", "passes"), "1 failed, 23 passed, 2 errors in "),
        # Whatever the status, a run that does not count was stopped half-way.
        (("passes", "killed"), "3 passed in "),
        (("killed", "passes"), "3 passed in "),
        (("passes", "silent"), "3 passed in "),
        (("silent", "passes"), "3 passed in "),
        (("passes", "empty"), "3 passed in "),
        (("empty", "empty"), "no tests ran in "),
    ],
)
def test_what_does_not(root: Path, tmp_path: Path, names: tuple[str, str], counted: str) -> None:
    status, lines = both(root, tmp_path, *names)
    assert status != 0, lines
    assert lines[-1].startswith(counted)


def test_failures_are_shown(root: Path, tmp_path: Path) -> None:
    """Those of either run."""
    status, lines = both(root, tmp_path, "breaks", "fails")
    assert status == 1
    assert lines[-1].startswith("1 failed, 1 passed, 1 error in ")
    assert any("AssertionError: planted" in line for line in lines)
    assert sum(line.startswith("FAILED test_fails.py::test_c") for line in lines) == 1
    assert sum(line.startswith("ERROR test_breaks.py::test_e") for line in lines) == 1
