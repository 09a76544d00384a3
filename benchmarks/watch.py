"""What a server says of itself while it is under load, and whether it ran what it was asked to."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_kv.benchmarks.arms import Remote
from sglang_kv.benchmarks.proof import NotProved
from sglang_kv.benchmarks.server import Server

OURS = "sglang_kv:"
RETRACTED = "sglang:num_retracted_requests_total"
SETTLE_S = 1.0
TREE = "Tree cache initialized:"
_SAMPLE = re.compile(r"([^{\s#]+)(?:\{(.*)\})? (\S+)")
# A prefill's line counts the requests that it admits beside those that run.
_RUNNING = re.compile(r"(?:#new-seq: (\d+),.*)?#running-req: (\d+)")


class Metrics:
    """One reading of ``/metrics``."""

    def __init__(self, text: str):
        self._samples = [
            (match[1], match[2] or "", float(match[3]))
            for match in map(_SAMPLE.match, text.splitlines())
            if match
        ]

    @classmethod
    def of(cls, server: Server) -> Metrics:
        return cls(server.get("/metrics"))

    @property
    def ours(self) -> bool:
        """Whether the server runs with KV compression."""
        return any(name.startswith(OURS) for name, _, _ in self._samples)

    def total(self, name: str, **labels: str) -> float:
        """Sum of a metric's samples that carry ``labels``; 0 where there is none yet."""
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        return sum(
            value
            for found, held, value in self._samples
            if found == name and all(label in held.split(",") for label in wanted)
        )


@dataclass
class Use:
    """Memory and requests at one moment; pages are None where the server has no head pages."""

    running: float
    kv_bytes: float
    head_pages: float | None

    @classmethod
    def read(cls, metrics: Metrics, token_bytes: int) -> Use:
        """What running requests hold: pages that only the prefix cache keeps are not counted.

        Args:
            token_bytes: K and V of one token of the whole model, for servers that count tokens.
        """
        running = metrics.total("sglang:num_running_reqs")
        if not metrics.ours:
            return cls(running, metrics.total("sglang:kv_used_tokens") * token_bytes, None)
        total = metrics.total(f"{OURS}head_pages_total")
        used = metrics.total(f"{OURS}head_pages_used")
        held = max(0.0, used - metrics.total(f"{OURS}head_pages_evictable"))
        page_bytes = metrics.total(f"{OURS}kv_bytes_total") / total
        return cls(running, held * page_bytes, held)


@dataclass
class Watch:
    """Samples a server's metrics from the time it is entered until it is left."""

    server: Server
    token_bytes: int
    interval_s: float = 0.5
    samples: list[Use] = field(default_factory=list)
    _done: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None
    _log_from: int = 0
    _retracted: float = 0

    def __enter__(self) -> Watch:
        self._retracted = Metrics.of(self.server).total(RETRACTED)
        self._log_from = len(log_of(self.server) or "")
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        assert self._thread is not None
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        while True:  # one at least, however short the load
            self.samples.append(Use.read(Metrics.of(self.server), self.token_bytes))
            if self._done.wait(self.interval_s):
                return

    def row(self) -> dict[str, Any]:
        """Peaks and means; the log, where it can be read, knows of peaks between two samples."""
        log = (log_of(self.server) or "")[self._log_from :]
        logged = [int(new or 0) + int(running) for new, running in _RUNNING.findall(log)]
        busy = [use for use in self.samples if use.running]
        counted = [use.running for use in busy]
        held = [use.kv_bytes for use in busy]
        pages = [use.head_pages for use in busy if use.head_pages is not None]
        return {
            "running_at_once": int(max([0, *counted, *logged])),
            "running_mean": mean(counted),
            "kv_bytes": {"peak": int(max(held, default=0)), "mean": mean(held)},
            "head_pages": {"peak": int(max(pages)), "mean": mean(pages)} if pages else None,
            "retracted": int(Metrics.of(self.server).total(RETRACTED) - self._retracted),
            "samples": len(self.samples),
        }


def mean(values: list[float]) -> float:
    return round(sum(values) / len(values), 2) if values else 0.0


def log_of(server: Server) -> str | None:
    """The server's log; None where it is not ours to read."""
    return None if isinstance(server, Remote) else server.log


def peak_rss_bytes(server: Server) -> int:
    """Most memory that was ever resident in one of the server's processes: its scheduler."""
    found = [0]
    for process in Path("/proc").glob("[0-9]*"):
        try:
            fields = (process / "stat").read_text().rsplit(")", 1)[1].split()
            if int(fields[2]) == server.group:
                match = re.search(r"VmHWM:\s+(\d+) kB", (process / "status").read_text())
                found.append(int(match[1]) * 1024 if match else 0)
        except OSError:  # it has ended meanwhile
            continue
    return max(found)


def information(server: Server) -> dict[str, Any]:
    """``/server_info``."""
    found: dict[str, Any] = json.loads(server.get("/server_info"))
    return found


def pool_bytes(server: Server, token_bytes: int) -> int:
    """Bytes of the KV memory that the server has."""
    metrics = Metrics.of(server)
    if metrics.ours:
        return int(metrics.total(f"{OURS}kv_bytes_total"))
    return int(information(server)["max_total_num_tokens"]) * token_bytes


def prove_engine(server: Server, compressing: bool) -> dict[str, Any]:
    """That the server is stock SGLang, or has the plugin at work: by its settings, its metrics
    and, where there is one, its log.

    Raises:
        NotProved: they say otherwise, or differ.
    """
    info, ours = information(server), Metrics.of(server).ours
    seen = {
        "attention_backend": info.get("attention_backend"),
        "radix_cache_backend": info.get("radix_cache_backend"),
        "kv_metrics": ours,
    }
    says = [ours, seen["attention_backend"] == "sglang_kv"]
    log = log_of(server)
    if log is not None:
        line = next((line for line in log.splitlines() if TREE in line), "")
        seen["tree"] = line.partition(TREE)[2].strip() or None
        if not info.get("disable_radix_cache"):
            says.append("impl=HeadPageRadixCache" in line)
    if set(says) != {compressing}:
        wanted = "sglang-kv" if compressing else "stock SGLang"
        raise NotProved(f"this is not {wanted}: {seen}")
    return {"engine": "sglang_kv" if compressing else "stock", **seen}


@dataclass
class Counters:
    """Requests and dropped tokens of a method, counted by the server between two moments."""

    method: str
    requests: float
    dropped: float

    @classmethod
    def read(cls, server: Server, method: str) -> Counters:
        metrics = Metrics.of(server)
        return cls(
            method,
            metrics.total(f"{OURS}requests_total", policy=method),
            metrics.total(f"{OURS}tokens_dropped_total"),
        )

    @classmethod
    def settled(cls, server: Server, method: str, patience_s: float = 30) -> Counters:
        """A reading of all that was served before. An idle server exports it twice a second.

        Raises:
            NotProved: it does not become idle.
        """
        last: Counters | None = None

        def unchanged() -> bool:
            nonlocal last
            before, last = last, cls.read(server, method)
            return before == last

        if not wait_for(unchanged, patience_s, every_s=SETTLE_S):
            raise NotProved(f"{server.url} serves others, too: {last}")
        assert last is not None
        return last

    def prove(
        self, server: Server, served: range, drops: bool | None, patience_s: float = 10
    ) -> dict[str, Any]:
        """That since then it served so many requests, and dropped tokens if it had to.

        Args:
            served: what the count may be.
            drops: whether tokens must be dropped (True), must not (False), or may (None).

        Raises:
            NotProved: the server's counters say otherwise.
        """
        seen: dict[str, Any] = {}

        def agrees() -> bool:
            now = Counters.settled(server, self.method)
            seen["requests"] = int(now.requests - self.requests)
            seen["tokens_dropped"] = round(now.dropped - self.dropped)
            return seen["requests"] in served and (
                drops is None or (seen["tokens_dropped"] > 0) == drops
            )

        if not wait_for(agrees, patience_s):
            expected = {True: "some", False: "no", None: "any"}[drops]
            raise NotProved(
                f"{self.method}: expected {served.start} to {served.stop - 1} requests and "
                f"{expected} dropped tokens, but the server counted {seen}"
            )
        return seen


def wait_for(holds: Callable[[], bool], patience_s: float, every_s: float = 0.2) -> bool:
    deadline = time.monotonic() + patience_s
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(every_s)
    return True
