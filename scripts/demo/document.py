"""Request bodies and the result table of ask_document.sh. Standard library only."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path
from typing import Any

QUESTION = "What is the name of the solicitor who moved out yesterday?"
COLUMN = 36


def body(document: str, policy: str) -> dict[str, Any]:
    content = f"{document.strip()}\n\n{QUESTION}"
    request: dict[str, Any] = {
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_tokens": 40,
        # One line: a model of this size goes on inventing after it has answered.
        "stop": ["\n"],
    }
    if policy:
        request["custom_params"] = {"kv_compression": json.loads(policy)}
    return request


def find_report(answer: Any) -> dict[str, Any]:
    """The server's account of what it kept, wherever the API puts its extension fields."""
    if isinstance(answer, dict):
        report = answer.get("kv_compression")
        if isinstance(report, dict) and "kept_tokens" in report:
            return report
        children = list(answer.values())
    else:
        children = answer if isinstance(answer, list) else []
    return next(filter(None, map(find_report, children)), {})


def table(*answers: dict[str, Any]) -> str:
    reports = [find_report(answer) for answer in answers]
    rows = {
        "": [policy_name(report) for report in reports],
        "answer": [answer["choices"][0]["message"]["content"].strip() for answer in answers],
        "logical tokens": [number(report, "logical_tokens") for report in reports],
        "kept tokens": [number(report, "kept_tokens") for report in reports],
        "pages": [number(report, "kept_pages") for report in reports],
        "bytes": [size(report.get("kept_bytes")) for report in reports],
    }
    lines = [f"Question: {QUESTION}", ""]
    for name, cells in rows.items():
        wrapped = [textwrap.wrap(cell, COLUMN) or [""] for cell in cells]
        for i in range(max(map(len, wrapped))):
            parts = [column[i] if i < len(column) else "" for column in wrapped]
            label = name if i == 0 else ""
            lines.append(f"{label:16}" + "  ".join(f"{part:{COLUMN}}" for part in parts).rstrip())
    note = (
        'The landlord says it about 600 tokens before the end: "his name was William Morris. He '
        'was a solicitor". A policy that keeps the first and the newest tokens can answer only '
        "because it stands so late; a fact in the middle of the story would be lost to it."
    )
    return "\n".join([*lines, "", textwrap.fill(note, 92)])


def policy_name(report: dict[str, Any]) -> str:
    if not report:
        return "(the server reports no policy)"
    given = {k: v for k, v in (report.get("parameters") or {}).items() if v is not None}
    return " ".join([report["method"], *(f"{key}={value}" for key, value in given.items())])


def number(report: dict[str, Any], key: str) -> str:
    value = report.get(key)
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.1f}"


def size(count: int | None) -> str:
    return "-" if count is None else f"{count:,} ({count / 2**20:,.1f} MiB)"


if __name__ == "__main__":
    command, *arguments = sys.argv[1:]
    if command == "body":
        document, policy = arguments
        print(json.dumps(body(Path(document).read_text(encoding="utf-8"), policy)))
    else:
        print(table(*(json.loads(Path(answer).read_text()) for answer in arguments)))
