"""What a long run shows, and what it leaves behind so that a stopped one can go on."""

from __future__ import annotations

import sys
import time
import zipfile
from pathlib import Path
from typing import Any

from sglang_kv.compression.base import PolicyError


class Progress:
    """One line with the time left, on stderr.

    Args:
        total: units of the whole run.
        done: those that an earlier run did.
        unit: what is counted.
    """

    def __init__(self, total: int, done: int = 0, unit: str = "samples") -> None:
        self.total, self.before, self.unit = total, done, unit
        self.started = time.monotonic()

    def __call__(self, done: int, note: str = "") -> None:
        here = max(1, done - self.before)
        left = (time.monotonic() - self.started) / here * (self.total - done)
        end = "\n" if done == self.total else "\r"
        text = f"{done}/{self.total} {self.unit}{note}, {left:4.0f} s left "
        print(text, end=end, file=sys.stderr)
        sys.stderr.flush()


class Unfinished:
    """The state of a run that has not ended, in a file beside its result.

    Args:
        out: the result's file.
        run: everything that the result depends on; a state of another run is not taken.
    """

    def __init__(self, out: Path, run: dict[str, Any]) -> None:
        self.path, self.run = out.with_name(out.name + ".partial"), run

    def load(self) -> dict[str, Any] | None:
        """The state that was saved last; None: there is none.

        Raises:
            PolicyError: it belongs to another run, whose difference the message names, or is no
                such state.
        """
        import torch

        if not self.path.exists():
            return None
        if not zipfile.is_zipfile(self.path):  # as torch writes
            raise PolicyError(
                f"{self.path} is no state of a calibration; remove it, or give --restart"
            )
        held = torch.load(self.path, weights_only=True)
        before = held["run"]
        for key in [*self.run, *before]:
            if before.get(key) != self.run.get(key):
                raise PolicyError(
                    f"{self.path} was left by another run ({key}: {before.get(key)!r} there, "
                    f"{self.run.get(key)!r} here); remove it, or give --restart"
                )
        state: dict[str, Any] = held["state"]
        return state

    def save(self, state: dict[str, Any]) -> None:
        """Write the state; the file is whole at any moment."""
        import torch

        self.path.parent.mkdir(parents=True, exist_ok=True)
        fresh = self.path.with_name(self.path.name + ".new")
        torch.save({"run": self.run, "state": state}, fresh)
        fresh.replace(self.path)

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
