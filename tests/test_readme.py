"""The README says what the benchmarks recorded and the registry has."""

from pathlib import Path

from sglang_kv.benchmarks import report


def test_tables_are_current(root: Path) -> None:
    text = (root / "README.md").read_text()
    for name in report.SECTIONS:
        assert f"<!-- {name} -->" in text
    assert report.render(text) == text, "run: python benchmarks/report.py --write"
