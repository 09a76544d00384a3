"""Starts SGLang's server up to the loading of the model, once per case, each in a fork of one
process, because a start changes globals. It is itself run by `warm.Launcher`, without imports.

Reads cases from stdin as JSON, `{name: {"argv": [...], "before": code, "env": {...}}}`, and prints
`{name: [exit status, output]}` on its last line.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback

# What the plugin's hooks import as well.
import sglang.launch_server
import sglang.srt.entrypoints.http_server
import sglang.srt.managers.scheduler  # noqa: F401
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import prepare_server_args


def start(argv: list[str]) -> None:
    """As `sglang.launch_server` does."""
    load_plugins()
    prepare_server_args(argv).resolve_once()


def status_of(case: dict[str, object]) -> int:
    """The exit status that the interpreter would give, its message printed."""
    try:
        os.environ.update(case.get("env", {}))  # type: ignore[call-overload]
        exec(str(case.get("before", "")))
        start(case["argv"])  # type: ignore[arg-type]
        return 0
    except SystemExit as stop:
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
            return 1
        return stop.code or 0


def attempt(case: dict[str, object]) -> tuple[int, str]:
    with tempfile.TemporaryFile("w+") as output:
        child = os.fork()
        if child == 0:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            status = 1
            try:
                status = status_of(case)
            finally:  # a child never goes on as its parent
                if sys.exc_info()[0]:
                    traceback.print_exc()  # as the interpreter would, which `_exit` leaves out
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        _, status = os.waitpid(child, 0)
        output.seek(0)
        return os.waitstatus_to_exitcode(status), output.read()


if __name__ == "__main__":
    cases = json.load(sys.stdin)
    # Those that change what is loaded, or with what, come first: the others share one loading,
    # which takes seconds and in which nothing of theirs has a part.
    early = {name: case for name, case in cases.items() if case.keys() - {"argv"}}
    found = {name: attempt(case) for name, case in early.items()}
    load_plugins()
    found |= {name: attempt(case) for name, case in cases.items() if name not in early}
    print(json.dumps(found))
