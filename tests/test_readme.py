"""README and docs say what the benchmarks recorded and the registry has."""

from pathlib import Path

import pytest

from sglang_kv.benchmarks import report


@pytest.mark.parametrize("document", report.DOCUMENTS)
def test_tables_are_current(root: Path, document: str) -> None:
    text = (root / document).read_text()
    for name in report.DOCUMENTS[document]:
        assert f"<!-- {name} -->" in text
    assert report.render(text) == text, "run: python benchmarks/report.py --write"
