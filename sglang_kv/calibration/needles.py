"""Passkeys found under gates, random gates and inverted gates: what a report's tables count.

One passkey is hidden in a text and asked for; it is found iff greedy decoding writes its number
after the answer's first words, which are given. Only passkeys that the full cache finds are
tried with the others, so every figure is a share of the full cache's.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sglang_kv.calibration.passkey import Passkey, samples
from sglang_kv.compression.gates import Heads, Values, retrieval_heads

#: Seeds of the texts are this far from a calibration's.
SEED_OFFSET = 1_000_000
#: Texts tried, at most, for each that the full cache answers.
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


Answer = Callable[[Passkey, Heads, int, int], tuple[bool, float]]


def run(
    trials: Trials,
    arms: list[Arm],
    answer: Answer,
    texts: Callable[[int, int], Iterator[Passkey]],
    heads: Callable[[Arm, int], Heads],
    *,
    lengths: Iterable[int],
    seeds: Iterable[int],
    count: int,
    deadline: float = float("inf"),
    progress: Callable[[int], None] = lambda done: None,
) -> None:
    """Try every arm on ``count`` texts per length and seed that the full cache answers.

    Round by round over lengths and seeds, so that an early end leaves a smaller whole grid.

    Args:
        trials: what is there already is not tried again.
        arms: beside the full cache.
        answer: tries one text with some retrieval heads, sinks and recent tokens.
        texts: the texts of a length and a seed, always the same.
        heads: an arm's retrieval heads for a seed.
        lengths, seeds, count: the grid.
        deadline: `time.monotonic` at which to stop.
        progress: called with the number of trials that the grid has so far.
    """
    full = Arm(FULL, 0.0, 0, 1)
    done = 0
    streams = {
        (length, seed): enumerate(itertools.islice(texts(length, seed), TRIES * count))
        for length in lengths
        for seed in seeds
    }
    for _ in range(count):
        for (length, seed), stream in streams.items():
            for index, text in stream:

                def found(
                    arm: Arm,
                    at: tuple[int, int, int] = (length, seed, index),
                    text: Passkey = text,
                ) -> bool:
                    held = trials.rows.get((arm, *at))
                    if held is None:
                        right, likelihood = answer(text, heads(arm, at[1]), arm.sinks, arm.recent)
                        held = Trial(arm, *at, right, round(likelihood, 4))
                        trials.add(held)
                    return held.found

                if time.monotonic() > deadline:
                    return
                if not found(full):
                    continue
                for arm in arms:
                    if time.monotonic() > deadline:
                        return
                    found(arm)
                    done += 1
                    progress(done)
                break


def texts_of(
    tokenizer: Any, text: str, windows: Iterable[tuple[int, int]]
) -> Callable[[int, int], Iterator[Passkey]]:
    """Texts whose passkey lies where even the largest of the windows loses it."""
    windows = list(windows)
    sinks, recent = (max(window[i] for window in windows) for i in (0, 1))

    def texts(length: int, seed: int) -> Iterator[Passkey]:
        return samples(
            tokenizer,
            text,
            seed=SEED_OFFSET + seed,
            lengths=(length, length),
            sinks=sinks,
            recent=recent,
        )

    return texts
