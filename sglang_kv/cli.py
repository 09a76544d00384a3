"""``sglang-kv``: what this installation can do, without starting a server."""

from __future__ import annotations

import argparse
import dataclasses

import sglang_kv
from sglang_kv.compression.base import Compressor, methods


def method_table() -> str:
    """The methods as a Markdown table, from the registry."""
    lines = ["| method | idea | parameters (default) | paper |", "|---|---|---|---|"]
    for name, cls in methods().items():
        lines.append(f"| `{name}` | {cls.idea} | {_parameters(cls)} | {cls.paper or '-'} |")
    return "\n".join(lines)


def _parameters(cls: type[Compressor]) -> str:
    fields = [
        f"`{f.name}` ({f.default}): {f.metadata.get('doc', '')}" for f in dataclasses.fields(cls)
    ]
    fields += [f"or `{alias}`: {doc}" for alias, doc in cls.aliases.items()]
    return "; ".join(fields) or "-"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="sglang-kv", description=__doc__)
    parser.add_argument("--version", action="version", version=sglang_kv.__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("methods", help="the compression methods and their parameters")
    parser.parse_args(argv)
    print(method_table())


if __name__ == "__main__":
    main()
