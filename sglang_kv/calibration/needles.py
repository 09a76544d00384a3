"""Passkeys found under gates, random gates and inverted gates: what a report's tables count.

Passkeys are hidden in a text and asked for, one at a time; one is found iff greedy decoding
writes its number after the answer's first words, which are given. Only passkeys that the full
cache finds are tried with the others, so every figure is a share of the full cache's.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sglang_kv.calibration.passkey import Passkey, quizzes
from sglang_kv.compression.gates import Heads, Values, retrieval_heads

#: Seeds of the texts are this far from a calibration's.
SEED_OFFSET = 1_000_000
#: Passkeys tried, at most, for each that the full cache finds.
TRIES = 4

FULL, RANDOM, INVERTED = "full", "random", "inverted"


@dataclass(frozen=True)
class Arm:
    """One way to choose streaming heads.

    Args:
        name: of the gates: a file's, or `FULL`, `RANDOM`, `INVERTED`.
        sparsity: share of streaming heads.
        sinks: first tokens that they keep.
        recent: newest tokens that they keep.
        digest: of the gates that it goes by, so that a file that has changed is tried again.
    """

    name: str
    sparsity: float
    sinks: int
    recent: int
    digest: str = ""

    def heads(self, gates: dict[str, Values], main: str, seed: int) -> Heads:
        """Its retrieval heads, [layers, kv_heads]; random ones are drawn anew for each seed."""
        if self.name == INVERTED:
            values = np.subtract(1, gates[main], dtype=np.float32)
        elif self.name == RANDOM:
            draw = np.random.default_rng(seed).random(gates[main].shape)
            values = np.asarray(draw, np.float32)
        else:
            values = gates[main if self.name == FULL else self.name]
        return retrieval_heads(values, sparsity=self.sparsity)


def digest_of(values: Values) -> str:
    return hashlib.sha256(np.ascontiguousarray(values, np.float32).tobytes()).hexdigest()[:12]


@dataclass(frozen=True)
class Trial:
    """What one arm did with one text; ``likelihood``: mean log-likelihood of the number."""

    arm: Arm
    length: int
    seed: int
    index: int
    found: bool
    likelihood: float

    @property
    def key(self) -> tuple[Any, ...]:
        return (self.arm, self.length, self.seed, self.index)


class Trials:
    """All trials of a report, kept in a file of one JSON line each."""

    def __init__(self, path: Path, about: dict[str, Any]) -> None:
        """``about``: what trials depend on beside their own fields; others are not taken."""
        self.path, self.about = path, about
        self.rows: dict[tuple[Any, ...], Trial] = {}
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        for line in lines:
            held = json.loads(line)
            if held.pop("about") == about:
                trial = Trial(arm=Arm(**held.pop("arm")), **held)
                self.rows[trial.key] = trial

    def add(self, trial: Trial) -> None:
        self.rows[trial.key] = trial
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"about": self.about, **asdict(trial)}) + "\n")

    def of(self, arm: Arm, **wanted: Any) -> list[Trial]:
        return [
            trial
            for trial in self.rows.values()
            if trial.arm == arm and all(getattr(trial, k) == v for k, v in wanted.items())
        ]


#: Tries one passkey with several retrieval heads, sinks and recent tokens.
Answer = Callable[[Passkey, list[tuple[Heads, int, int]]], list[tuple[bool, float]]]


def run(
    trials: Trials,
    arms: list[Arm],
    answer: Answer,
    texts: Callable[[int, int], Iterator[list[Passkey]]],
    heads: Callable[[Arm, int], Heads],
    *,
    lengths: Iterable[int],
    seeds: Iterable[int],
    count: int,
    deadline: float = float("inf"),
    progress: Callable[[int], None] = lambda done: None,
) -> None:
    """Try all arms on ``count`` passkeys per length and seed that the full cache finds.

    Text by text in turns over lengths and seeds, so that an early end leaves a smaller whole grid.

    Args:
        trials: what is there already is not tried again.
        arms: beside the full cache.
        answer: tries them on one passkey.
        texts: the texts of a length and a seed, always the same: the passkeys of each.
        heads: an arm's retrieval heads for a seed.
        lengths, seeds, count: the grid.
        deadline: `time.monotonic` at which to stop.
        progress: called with the number of trials that the grid has so far.
    """
    full = Arm(FULL, 0.0, 0, 1)
    done = 0

    def take(wanted: list[Arm], length: int, seed: int, index: int, passkey: Passkey) -> None:
        missing = [arm for arm in wanted if (arm, length, seed, index) not in trials.rows]
        if not missing:
            return
        said = answer(passkey, [(heads(arm, seed), arm.sinks, arm.recent) for arm in missing])
        for arm, (right, likelihood) in zip(missing, said, strict=True):
            trials.add(Trial(arm, length, seed, index, right, round(likelihood, 4)))

    @dataclass
    class Cell:
        texts: Iterator[list[Passkey]]
        tried: int = 0
        found: int = 0

    cells = {(length, seed): Cell(texts(length, seed)) for length in lengths for seed in seeds}
    while cells:
        for at, cell in list(cells.items()):
            text = next(cell.texts, [])
            for passkey in text:
                if cell.found == count or cell.tried == TRIES * count:
                    break
                if time.monotonic() > deadline:
                    return
                index = cell.tried
                cell.tried += 1
                take([full], *at, index, passkey)
                if not trials.rows[full, *at, index].found:
                    continue
                cell.found += 1
                if time.monotonic() > deadline:
                    return
                take(arms, *at, index, passkey)
                done += len(arms)
                progress(done)
            if not text or cell.found == count or cell.tried == TRIES * count:
                del cells[at]


def texts_of(
    tokenizer: Any, text: str, windows: Iterable[tuple[int, int]], passkeys: int
) -> Callable[[int, int], Iterator[list[Passkey]]]:
    """Texts whose passkeys lie where even the largest of the windows loses them."""
    windows = list(windows)
    sinks, recent = (max(window[i] for window in windows) for i in (0, 1))

    def texts(length: int, seed: int) -> Iterator[list[Passkey]]:
        return quizzes(
            tokenizer,
            text,
            seed=SEED_OFFSET + seed,
            lengths=(length, length),
            passkeys=passkeys,
            sinks=sinks,
            recent=recent,
        )

    return texts
