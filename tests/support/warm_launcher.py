"""A process that has imported SGLang once and forks programs from it, for tests only.

    python warm_launcher.py MODULE...

One server is three processes, and each spends half a minute of CPU on its imports. A program forked
from here starts with them done. All else is as after a cold start: the program has a fork, a
session and an environment of its own, is run from its file or module like any other main module,
and loads plugins and parses flags itself. Its children too are what multiprocessing's `spawn` makes
of them (see `Spares`).

Reads one request a line from stdin, answers each by a line on stdout (`warm.Launcher` is the other
end) and ends with its stdin.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import json
import os
import runpy
import signal
import socket
import sys
import threading
from collections.abc import Callable
from multiprocessing import util
from pathlib import Path
from typing import Any, NoReturn

Job = Callable[[], None]


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


# Children of a program -------------------------------------------------------------------------


class Spares:
    """Children that a program forks before it does anything, for `spawn` to use one by one.

    `spawn` starts a fresh interpreter, which reads from a pipe what to run. A spare is a process as
    fresh but for the imports; it runs the same code of multiprocessing's on the same pipe. It is
    the program's own child, so that waiting, signals and process trees are as ever. When all are
    gone, `spawn` starts interpreters again.
    """

    def __init__(self) -> None:
        self._free: list[tuple[int, socket.socket]] = []
        self._spawn_cold = util.spawnv_passfds

    def fork(self, count: int) -> Job | None:
        """Make the spares. Returns in each of them, too, with what it is to do."""
        for _ in range(count):
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            pid = os.fork()
            if pid == 0:
                ours.close()
                for _, other in self._free:
                    other.close()
                return spare(theirs)
            theirs.close()
            self._free.append((pid, ours))
        util.spawnv_passfds = self._spawn  # type: ignore[attr-defined]
        return None

    def _spawn(self, path: bytes, args: list[str], fds: list[int]) -> int:
        # multiprocessing starts its resource tracker with this function as well.
        if "--multiprocessing-fork" not in args:
            return int(self._spawn_cold(path, args, fds))
        # [python, options ..., "-c", "from multiprocessing.spawn import ...", words ...]
        _, code, *words = args[args.index("-c") :]
        order = {"code": code, "words": words, "fds": fds}
        order |= {"env": dict(os.environ), "cwd": os.getcwd()}
        text = json.dumps(order).encode()
        while self._free:
            pid, control = self._free.pop(0)
            # A program that ends its children ends its spares with them.
            with control, contextlib.suppress(ConnectionError):
                socket.send_fds(control, [text], fds)
                return pid
        return int(self._spawn_cold(path, args, fds))


def spare(control: socket.socket) -> Job:
    """Wait to be needed; a spare that no one needed ends with its program."""
    text, received, _, _ = socket.recv_fds(control, 1 << 20, 64)
    if not text:
        os._exit(0)
    order = json.loads(text)
    control.close()
    # What is pickled names descriptors by number, so each takes the number it has in the parent:
    # first all move out of the way, lest one overwrite another.
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD, 512) for fd in received]
    for fd in received:
        os.close(fd)
    for fd, number in zip(moved, order["fds"], strict=True):
        os.dup2(fd, number)
        os.close(fd)
    os.environ.clear()
    os.environ.update(order["env"])
    os.chdir(order["cwd"])
    sys.argv = ["-c", *order["words"]]
    return lambda: exec(order["code"], {"__name__": "__main__"})


# Programs --------------------------------------------------------------------------------------


def program(request: dict[str, Any]) -> Job:
    """In a fresh fork: become the program that was asked for."""
    os.setsid()
    die_with_parent()
    log = os.open(request["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    source = os.open(request["stdin"] or os.devnull, os.O_RDONLY)
    for fd, numbers in ((source, [0]), (log, [1, 2])):
        for number in numbers:
            os.dup2(fd, number)
        os.close(fd)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    extra = [
        p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p not in ("", *sys.path)
    ]
    sys.path[:0] = extra
    sys.argv = list(request["argv"])
    job = Spares().fork(request["children"])
    if job is not None:
        return job
    return lambda: run_main(request["module"])


def run_main(module: str | None) -> None:
    """Run `sys.argv` as `python -m module ...` would, or its first word as a script."""
    if module is not None:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        return
    script = sys.argv[0]
    # As `python script` has it; a console script lies where nothing is imported from.
    sys.path.insert(0, str(Path(script).resolve().parent))
    runpy.run_path(script, run_name="__main__")


# The launcher ----------------------------------------------------------------------------------


def preload(modules: list[str]) -> None:
    # A program that runs from elsewhere finds no module of the tests'.
    folder = str(Path(__file__).resolve().parent)
    sys.path[:] = [path for path in sys.path if path != folder]
    for name in modules:
        __import__(name)
    # A thread does not survive a fork, and what it held stays locked.
    assert threading.active_count() == 1, threading.enumerate()
    gc.collect()
    gc.freeze()  # so that the forks' collections do not copy the pages


def status_of(pid: int, ended: dict[int, int]) -> int | None:
    if pid not in ended:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found == 0:
            return None
        ended[pid] = os.waitstatus_to_exitcode(status)
    return ended[pid]


def serve() -> Job:
    """Answer requests; returns only in forks, with what they are to do."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    preload(sys.argv[1:])
    ended: dict[int, int] = {}
    answer: dict[str, Any] = {"ready": os.getpid()}
    while True:
        print(json.dumps(answer), file=answers, flush=True)
        line = sys.stdin.readline()
        if not line:
            finish()
        request = json.loads(line)
        if "poll" in request:
            answer = {"status": status_of(request["poll"], ended)}
            continue
        pid = os.fork()
        if pid == 0:
            answers.close()
            return program(request)
        answer = {"pid": pid}


def finish() -> NoReturn:
    os._exit(0)  # what the imports registered for the end of a server is none of ours


if __name__ == "__main__":
    serve()()
