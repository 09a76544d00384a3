"""``sglang-kv``: methods and their parameters, calibration of head gates, plans, benchmarks."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

import sglang_kv
from sglang_kv.benchmarks import quality
from sglang_kv.calibration.command import add_commands
from sglang_kv.compression.base import methods
from sglang_kv.planner import command
from sglang_kv.presets import PRESETS

#: Commands with arguments of their own, and what they are for. Imported when they are run: they
#: bring SGLang.
BENCHMARKS = {
    "bench": ("throughput", "requests per second, latencies and memory of every method"),
}


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line that starts with the flag, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message.removeprefix('argument ')}\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse, but ``--reserve -1GB`` is a value, and a command names what it does not
        know itself."""
        found, unknown = super().parse_known_args(_joined(args), namespace)
        if unknown:
            self.error(f"unknown arguments: {' '.join(unknown)}")
        return found, unknown


def _joined(args: Sequence[str] | None) -> list[str]:
    """A flag and a negative size after it in one word: only of plain numbers does argparse know."""
    joined: list[str] = []
    for word in sys.argv[1:] if args is None else args:
        last = joined[-1] if joined else ""
        if re.match(r"-[\d.]+[A-Za-z]", word) and last.startswith("--") and "=" not in last:
            joined[-1] = f"{last}={word}"
        else:
            joined.append(word)
    return joined


def method_table() -> str:
    """The methods as a Markdown table, from the registry."""
    lines = ["| method | keeps | what it costs | paper |", "|---|---|---|---|"]
    for name, cls in methods().items():
        lines.append(f"| `{name}` | {cls.idea} | {cls.cost} | {_link(cls.paper)} |")
    return "\n".join(lines)


def parameter_tables() -> str:
    """Each method's parameters as a Markdown table."""
    parts = []
    for name, cls in methods().items():
        rows = [
            (f"`{f.name}`", f"`{f.default}`", f.metadata.get("doc", ""))
            for f in dataclasses.fields(cls)
        ]
        rows += [(f"`{alias}`", "", doc) for alias, doc in cls.aliases.items()]
        lines = [f"### {name}", "", cls.idea[0].upper() + cls.idea[1:] + ".", ""]
        if rows:
            lines += ["| parameter | default | |", "|---|---|---|"]
            lines += [f"| {' | '.join(row)} |" for row in rows]
        parts.append("\n".join(lines).rstrip())
    return "\n\n".join(parts)


def preset_table() -> str:
    """The presets as a Markdown table."""
    lines = ["| preset | for | policy | tuned on |", "|---|---|---|---|"]
    for name, preset in PRESETS.items():
        policy = f"`{json.dumps(preset.with_gates)}`"
        if preset.without_gates != preset.with_gates:
            policy += f"; without head gates `{json.dumps(preset.without_gates)}`"
        lines.append(f"| `{name}` | {preset.purpose} | {policy} | {preset.tuned_on} |")
    return "\n".join(lines)


def _link(url: str) -> str:
    return f"[{url.rsplit('/', 1)[-1]}]({url})" if url else "-"


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] in BENCHMARKS:
        module, _ = BENCHMARKS[argv[0]]
        import_module(f"sglang_kv.benchmarks.{module}").main(argv[1:])
        return
    parser = Parser(prog="sglang-kv", description=__doc__)
    parser.add_argument("--version", action="version", version=sglang_kv.__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    methods_parser = commands.add_parser("methods", help="the methods and their parameters")
    methods_parser.set_defaults(run=print_methods)
    for name, (_, purpose) in BENCHMARKS.items():
        commands.add_parser(name, help=purpose)
    add_commands(commands)
    command.add_parser(commands)
    quality.add_parser(commands)
    args = parser.parse_args(argv)
    if status := args.run(args):
        raise SystemExit(status)


def print_methods(_args: argparse.Namespace) -> None:
    print(method_table(), parameter_tables(), preset_table(), sep="\n\n")


if __name__ == "__main__":
    main()
