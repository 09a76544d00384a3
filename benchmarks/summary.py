"""The lines of one folder as tables: what `scripts/reproduce.sh --quick` and `--model` measured.

    python -m sglang_kv.benchmarks.summary FOLDER

The newest line of each arm of each benchmark. Quality lines have the tables of
`sglang-kv quality --report`; of others each figure that is a number or a name is a column.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sglang_kv.benchmarks import tables
from sglang_kv.benchmarks.markdown import head

#: Said of a line elsewhere, or of all lines alike.
LEFT_OUT = ("benchmark", "arm", "key", "seed")


def table(rows: list[dict[str, Any]]) -> str:
    """A Markdown table: a row for the newest line of each arm, a column for each plain figure."""
    newest = {row["arm"]: row for row in rows}
    names = [
        name
        for name in dict.fromkeys(name for row in newest.values() for name in row)
        if name not in LEFT_OUT
        and any(isinstance(row.get(name), int | float | str) for row in newest.values())
    ]
    lines = head("arm", *names)
    for arm, row in newest.items():
        shown = (row.get(name) for name in names)
        cells = [str(v) if isinstance(v, int | float | str) else "-" for v in shown]
        lines.append(f"| {' | '.join([arm, *cells])} |")
    return "\n".join(lines)


def summary(folder: Path) -> str:
    """A section for each file of lines.

    Raises:
        ValueError: the folder has none.
    """
    files = sorted(folder.glob("*.jsonl"))
    if not files:
        raise ValueError(f"{folder}: no lines of results")
    parts = []
    for file in files:
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        shown = tables.table(rows) if file.stem == "quality" else table(rows)
        parts.append(f"## {file.stem}\n\n{shown}\n")
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    try:
        print(summary(args.folder))
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
