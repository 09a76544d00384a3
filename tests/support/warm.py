"""Servers and programs that start without their imports: forks of `warm_launcher.py`."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sglang_kv.benchmarks.server import Server, die_with_parent

#: A server that hangs is noticed late; a busy machine may first compile the kernels for minutes.
START_TIMEOUT_S = 1800

LAUNCHER = Path(__file__).with_name("warm_launcher.py")

# Of SGLang's three processes, and of `sglang serve`. Not `sglang.launch_server`, which is a main
# module, nor anything of ours: that is loaded by SGLang as a plugin.
MODULES = (
    "sglang.cli.main",
    "sglang.cli.serve",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.managers.scheduler",
    "sglang.srt.models.registry",  # imports every model
)

# What SGLang and the libraries below it read while they load.
CPU = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_WAIT_POLICY": "PASSIVE"}


def read_at_import(env: Mapping[str, str]) -> dict[str, str]:
    """The part of an environment that the launcher's imports have settled for its forks."""
    heads = ("OMP_", "KMP_", "GOMP_", "MKL_", "OPENBLAS_", "LD_", "MALLOC_")
    return {k: v for k, v in env.items() if k.startswith(heads) or k in CPU}


class Launcher:
    """The process with the imports; `launcher` is the one of a run."""

    def __init__(self, modules: Sequence[str] = MODULES) -> None:
        self._env = {**os.environ, **CPU}
        self._lock = threading.Lock()
        self._said = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, str(LAUNCHER), *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            cwd=tempfile.gettempdir(),
            env=self._env,
            text=True,
            preexec_fn=die_with_parent,
        )
        atexit.register(self.stop)
        self._answer()

    def start(
        self,
        argv: Sequence[str],
        log: str,
        *,
        env: Mapping[str, str],
        module: str | None = None,
        cwd: str | None = None,
        stdin: str | None = None,
        children: int = 0,
    ) -> Program:
        """Run ``argv``, whose first word is a script unless ``module`` is given.

        Args:
            argv: the program's `sys.argv`.
            log: file that its output is appended to.
            env: its whole environment.
            cwd: its folder, by default the one for temporary files.
            stdin: file that it reads.
            children: how many of those that it spawns start without imports, too.

        Raises:
            ValueError: ``env`` differs from the launcher's in what the imports have read.
        """
        if read_at_import(env) != read_at_import(self._env):
            raise ValueError(
                f"env: {read_at_import(env)} cannot follow the imports, which were made with "
                f"{read_at_import(self._env)}"
            )
        request = {
            "argv": list(argv),
            "module": module,
            "log": log,
            "env": dict(env),
            "cwd": cwd or tempfile.gettempdir(),
            "stdin": stdin,
            "children": children,
        }
        return Program(self, self.ask(request)["pid"])

    def run(
        self, argv: Sequence[str], log: Path, *, timeout_s: float = 1800, **options: Any
    ) -> tuple[int, str]:
        """As `start`, to its end: the exit status, and the output that ``log`` holds then."""
        log.touch()  # whatever happens, it can be read
        program = self.start(argv, str(log), **options)
        try:
            return program.wait(timeout_s), log.read_text(errors="replace")
        except subprocess.TimeoutExpired:
            os.kill(program.pid, signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError):  # it did not lead a group yet
                os.killpg(program.pid, signal.SIGKILL)
            raise TimeoutError(f"{argv[0]} runs for {timeout_s} s:\n{log.read_text()}") from None

    def ask(self, request: dict[str, Any]) -> Any:
        with self._lock:
            assert self._process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # `_answer` says why
                self._process.stdin.write(json.dumps(request) + "\n")
                self._process.stdin.flush()
            return self._answer()

    def stop(self) -> None:
        """End it, and with it all that still runs."""
        self._process.kill()
        self._process.wait()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait()
            self._said.seek(0)
            raise RuntimeError(f"the launcher ended, status {status}:\n{self._said.read()[-4000:]}")
        return json.loads(line)


class Program:
    """As much of `subprocess.Popen` as `Server` needs."""

    def __init__(self, launcher: Launcher, pid: int):
        self._launcher = launcher
        self.pid = pid

    def poll(self) -> int | None:
        status: int | None = self._launcher.ask({"poll": self.pid})["status"]
        return status

    def wait(self, timeout_s: float | None = None) -> int:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while (status := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout_s or 0)
            time.sleep(0.05)
        return status


@functools.cache
def launcher() -> Launcher:
    """The one of this run, started on first use."""
    return Launcher()


class WarmServer(Server):
    """A `Server` whose three processes start without their imports.

    How users start one is what cold `Server`s test.
    """

    def __init__(self, *args: Any, start_timeout_s: float = START_TIMEOUT_S, **options: Any):
        super().__init__(*args, start_timeout_s=start_timeout_s, **options)

    def _start(self, command: list[str], env: dict[str, str], log: Any) -> Any:
        module, argv = None, command
        if command[1] == "-m":
            module, argv = command[2], command[2:]
        # Of a server's children one schedules, one detokenizes.
        return launcher().start(argv, log.name, env=env, module=module, children=2)

    def stop(self) -> None:
        """End every process at once: asked to, SGLang waits five seconds for a GPU to settle."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.group, signal.SIGKILL)
        super().stop()
