"""The README's example prints what the README says."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path


def test_the_example_runs(root: Path) -> None:
    text = (root / "radix/README.md").read_text(encoding="utf-8")
    code, expected = (
        re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)[0]
        for language in ("python", "text")
    )
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(code, {})
    assert said.getvalue() == expected


def test_every_file_has_a_line(root: Path) -> None:
    text = (root / "radix/README.md").read_text(encoding="utf-8")
    for path in (root / "radix").glob("*.py"):
        assert f"`{path.name}`" in text, path.name
