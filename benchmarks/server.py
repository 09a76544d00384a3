"""Start an SGLang server, talk to it, stop it: for benchmarks and tests alike."""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def free_port() -> int:
    """A port that nobody listens on.

    A server takes it only once its model is loaded. So it lies below those that the kernel deals
    out meanwhile, to clients and to whoever asks for any.

    Raises:
        OSError: a hundred ports are all taken.
    """
    for port in random.sample(range(20_000, 32_000), 100):
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port
    raise OSError("no free port among a hundred from 20000 to 32000")


def die_with_parent() -> None:
    """A killed test run must not leave a server behind: it would eat a core for ever."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


class HTTPError(Exception):
    """The server answered with an error status."""

    def __init__(self, status: int, body: str):
        super().__init__(f"HTTP {status}: {body}")
        self.status = status
        self.body = body


class Server:
    """An SGLang server on this machine, in a process group of its own.

    Args:
        model: path or name.
        args: flags of ``sglang serve``.
        env: extra environment.
        entry: how to start it, ``sglang serve`` or ``launch_server``.
        device: "cpu" or "cuda".
    """

    def __init__(
        self,
        model: str | Path,
        *args: str,
        env: dict[str, str] | None = None,
        entry: str = "serve",
        start_timeout_s: float = 600,
        device: str = "cpu",
    ):
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = tempfile.NamedTemporaryFile("w+", suffix=".log", delete=False)  # noqa: SIM115
        head = {
            "serve": [str(Path(sys.executable).with_name("sglang")), "serve"],
            "launch_server": [sys.executable, "-m", "sglang.launch_server"],
        }[entry]
        self.command = [*head, "--model-path", str(model), "--device", device]
        self.command += ["--host", "127.0.0.1", "--port", str(self.port), *args]
        on_cpu = {"SGLANG_USE_CPU_ENGINE": "1"} if device == "cpu" else {}
        whole_env = {**os.environ, **on_cpu, **(env or {})}
        self._process = self._start(self.command, whole_env, self._log)
        with contextlib.ExitStack() as unless_it_is_up:
            unless_it_is_up.callback(self.stop)
            self._wait(start_timeout_s)
            unless_it_is_up.pop_all()

    def _start(self, command: list[str], env: dict[str, str], log: Any) -> Any:
        """Start the process; what `Server` needs of `subprocess.Popen` is what it returns."""
        return subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            # Far from any checkout: what runs is what is installed.
            cwd=tempfile.gettempdir(),
            env=env,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )

    def _wait(self, timeout_s: float) -> None:
        # SGLang answers requests before its own warm-up is done; this line ends it.
        deadline = time.monotonic() + timeout_s
        while "ready to roll" not in self.log:
            if not self.alive:
                raise RuntimeError(f"the server did not start:\n{self.log[-4000:]}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"no server after {timeout_s} s:\n{self.log[-4000:]}")
            time.sleep(0.2)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def group(self) -> int:
        """The process group that all its processes are in."""
        return self._process.pid

    @property
    def scheduler_pid(self) -> int:
        """The process that runs the model: by far the largest of the server's."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                fields = (process / "stat").read_text().rsplit(")", 1)[1].split()
                if int(fields[2]) == self.group:
                    found.append((resident(int(process.name)), int(process.name)))
            except OSError:  # it has ended meanwhile
                continue
        return max(found)[1]

    @property
    def log(self) -> str:
        return Path(self._log.name).read_text(errors="replace")

    def stop(self) -> None:
        """End every process that this server started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(60)
        self._log.close()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.stop()

    # -- requests --

    def post(self, path: str, body: dict[str, Any], timeout_s: float = 600) -> Any:
        request = urllib.request.Request(
            self.url + path,
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise HTTPError(error.code, error.read().decode()) from None

    def get(self, path: str, timeout_s: float = 300) -> str:
        with urllib.request.urlopen(self.url + path, timeout=timeout_s) as answer:
            return str(answer.read().decode())

    def stream(self, path: str, body: dict[str, Any], timeout_s: float = 600) -> Iterator[Any]:
        """The server-sent events of a streaming request."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        try:
            text = json.dumps({**body, "stream": True})
            connection.request("POST", path, text, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            if answer.status != 200:
                raise HTTPError(answer.status, answer.read().decode())
            for line in answer:
                if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                    yield json.loads(line[6:])
        finally:
            connection.close()

    def generate(
        self, prompt: str | list[int], policy: dict[str, Any] | None = None, **options: Any
    ) -> Any:
        """``/generate``, greedy unless told otherwise; ``policy`` is the request's own."""
        return self.post("/generate", generate_body(prompt, policy, **options))

    def flush(self, patience_s: int = 30) -> None:
        """Empty the prefix cache, as between the arms of a benchmark.

        SGLang refuses while anything runs. A request whose answer has come still does for a moment,
        until the scheduler's next turn; so it is asked to wait.
        """
        path = f"/flush_cache?timeout={patience_s}"
        request = urllib.request.Request(self.url + path, method="POST")
        with urllib.request.urlopen(request, timeout=patience_s + 60):
            pass

    def metric(self, name: str, **labels: str) -> float:
        """Sum of a metric's samples that carry ``labels``."""
        total, found = 0.0, False
        for line in self.get("/metrics").splitlines():
            match = re.match(r"([^{\s]+)(?:\{(.*)\})? (\S+)", line)
            if match is None or match[1] != name:
                continue
            if all(f'{k}="{v}"' in (match[2] or "") for k, v in labels.items()):
                total, found = total + float(match[3]), True
        if not found:
            raise KeyError(f"no metric {name} {labels}")
        return total


def resident(pid: int) -> int:
    """A process's resident memory in bytes; 0 when it is ending."""
    match = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(match[1]) * 1024 if match else 0


def generate_body(
    prompt: str | list[int], policy: dict[str, Any] | None = None, **options: Any
) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": 16}
    for key in list(options):
        if key in ("max_new_tokens", "ignore_eos", "temperature", "stop", "min_new_tokens"):
            sampling[key] = options.pop(key)
    if policy is not None:
        sampling["custom_params"] = {"kv_compression": policy}  # type: ignore[assignment]
    field = "text" if isinstance(prompt, str) else "input_ids"
    return {field: prompt, "sampling_params": sampling, **options}
