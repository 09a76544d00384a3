"""The tests under interpreted/, in a process of their own that interprets Triton kernels."""

import os
import re
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent / "interpreted"


def test_kernels_under_the_interpreter() -> None:
    """`TRITON_INTERPRET=1 pytest tests/kernels_triton/interpreted` shows each by name."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(FOLDER)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=FOLDER.parent.parent.parent,
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stdout[-10_000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed, done.stdout
    assert int(passed[1]) >= 80
