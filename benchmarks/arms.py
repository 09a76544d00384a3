"""What the quality suites share: arms, answered requests kept on disk, progress.

A policy is per request, so one server answers for all arms.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO, TypeVar

from sglang_kv.benchmarks.proof import NotProved, Proofs, prove_policy
from sglang_kv.benchmarks.server import HTTPError, Server
from sglang_kv.compression import PolicyError, parse_policy

FULL = "none"

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class Arm:
    """A policy under the name that it has in the results."""

    name: str
    policy: dict[str, Any] = field(hash=False)
    only: str | None = None  # the one column to run

    @classmethod
    def parse(cls, text: str) -> Arm:
        """``name={"method": ...}``, or ``name@aware=`` or ``name@agnostic=`` for one column."""
        name, _, policy = text.partition("=")
        name, _, only = name.partition("@")
        if not name or not policy or only not in ("", "aware", "agnostic"):
            raise ValueError(f"{text!r}: expected name={{...}} or name@COLUMN={{...}}")
        arm = cls(name, json.loads(policy), only or None)
        if not isinstance(arm.policy, dict) or "method" not in arm.policy:
            raise ValueError(f"{name}: a policy is an object with a method, got {policy}")
        parse_policy(arm.policy)
        return arm

    @property
    def streaming(self) -> bool:
        """Whether it acts while the prompt streams, not once on a dense prompt."""
        return not parse_policy(self.policy).scores_tokens

    def at(self, position: int) -> dict[str, Any]:
        """The policy, taking hold at this position of the prompt."""
        return {**self.policy, "fold_at": position}

    def with_known_tokens(self, prompt_tokens: int) -> dict[str, Any]:
        """The policy for a prompt that further known tokens follow, as if they were decoded.

        A method that acts once takes hold at the prompt's end, as it would by itself.
        """
        if self.streaming or "fold_at" in self.policy:
            return self.policy
        return self.at(prompt_tokens)

    def has(self, column: str) -> bool:
        """Whether the arm has an ``agnostic`` column: it takes ``fold_at``, and sets none."""
        if self.only is not None and column != self.only:
            return False
        if column == "aware":
            return True
        if "fold_at" in self.policy:
            return False
        try:
            parse_policy(self.at(1))
        except PolicyError:
            return False
        return True


class Remote(Server):
    """A server that already runs."""

    def __init__(self, url: str):
        self.url = url.rstrip("/")

    def stop(self) -> None:
        """It is not ours to end."""


class Progress:
    """One line on standard error: how far, how fast, time left."""

    def __init__(self, label: str, total: int, out: TextIO = sys.stderr):
        self._label, self._total, self._out = label, total, out
        self._done = self._asked = 0
        self._start = self._shown = time.monotonic()

    def step(self, asked: bool, what: str) -> None:
        self._done += 1
        self._asked += asked
        now = time.monotonic()
        terminal = self._out.isatty()
        if self._done < self._total and now - self._shown < (0.2 if terminal else 15):
            return
        self._shown = now
        each = (now - self._start) / max(1, self._asked)
        line = f"{self._label} {self._done}/{self._total}, {each:.1f} s each, "
        line += f"{clock(each * max(0, self._total - self._done))} left; {what}"
        self._out.write(f"\r\x1b[K{line[:150]}" if terminal else f"{line}\n")
        if terminal and self._done >= self._total:
            self._out.write("\n")
        self._out.flush()


def clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{rest:02}s"


class Asker:
    """Sends requests, and remembers each answer in ``FOLDER/answers.jsonl``.

    A request that was answered before is not sent again. Its key is a digest of everything in
    it and of ``identity`` (model and code), so a changed prompt or policy is a new request.
    Only what proved to be of the policy that was asked for is an answer.
    """

    def __init__(self, server: Server, folder: Path, identity: dict[str, Any]):
        self._server, self._identity = server, identity
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "answers.jsonl"
        self._known = dict(read_answers(self._path))
        self._lock = threading.Lock()
        self._progress: Progress | None = None
        self._proofs = Proofs()

    def start(self, label: str, total: int) -> None:
        """A suite begins: its progress, and its proofs."""
        self._progress, self._proofs = Progress(label, total), Proofs()

    def proof(self, policy: dict[str, Any]) -> dict[str, Any]:
        """Method and parameters that this suite's answers to a policy reported, and how many did.

        Raises:
            NotProved: the suite has none.
        """
        return self._proofs.of(policy)

    def __call__(
        self, what: str, body: dict[str, Any], reduce: Callable[[Any], dict[str, Any]]
    ) -> dict[str, Any]:
        """The answer's ids, the memory its policy kept, and what ``reduce`` takes from it."""
        key = self._key(what, body)
        answer = self._known.get(key)
        asked = answer is None
        if answer is None:
            try:
                raw = self._server.post("/generate", body, timeout_s=3600)
            except HTTPError as error:
                raise SystemExit(f"\n{what}: {error}") from None
            answer = {"output_ids": raw["output_ids"], "memory": memory(raw, body), **reduce(raw)}
            line = json.dumps({"key": key, "what": what, "answer": answer})
            with self._lock, self._path.open("a") as file:
                self._known[key] = answer
                file.write(line + "\n")
        with self._lock:
            self._proofs.add(policy_of(body))
            if self._progress:
                self._progress.step(asked, what)
        return answer

    def _key(self, what: str, body: dict[str, Any]) -> str:
        text = json.dumps([self._identity, what, body], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]


def work_folder() -> Path:
    """Outside any checkout: files there would mark its commit as changed."""
    cache = os.environ.get("SGLANG_KV_CACHE_DIR") or Path.home() / ".cache" / "sglang_kv"
    return Path(cache).expanduser() / "quality"


def read_answers(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The answers on disk; a last line that a kill cut short is cut off, and asked again."""
    if not path.exists():
        return
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        path.write_bytes(whole)
    for line in whole.decode().splitlines():
        row = json.loads(line)
        yield row["key"], row["answer"]


def policy_of(body: dict[str, Any]) -> dict[str, Any]:
    """The policy that a request's body asks for."""
    found: dict[str, Any] = body["sampling_params"]["custom_params"]["kv_compression"]
    return found


def memory(raw: dict[str, Any], body: dict[str, Any]) -> float:
    """Share of the dense KV bytes that were kept.

    An answer of another method, or of other parameters than were asked for, ends the run.
    """
    try:
        report = prove_policy(raw, policy_of(body))
    except NotProved as error:
        raise SystemExit(f"\n{error}") from None
    assert report is not None
    dense = report["kept_bytes"] + report["freed_bytes"]
    kept: float = report["kept_bytes"] / dense if dense else 1.0
    return kept


def fan_out(work: Callable[[T], R], items: Sequence[T], parallel: int) -> Iterator[R]:
    """``work`` on every item, ``parallel`` at a time, results in order."""
    if parallel <= 1:
        yield from map(work, items)
        return
    with ThreadPoolExecutor(parallel) as threads:
        yield from threads.map(work, items)
