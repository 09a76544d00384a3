"""What the documents' Markdown tables share."""

from __future__ import annotations

#: Where no benchmark has recorded a line.
NOTHING = "(no results recorded yet)"


def head(*names: str) -> list[str]:
    """The first two lines of a table."""
    return ["| " + " | ".join(names) + " |", "|---" * len(names) + "|"]
