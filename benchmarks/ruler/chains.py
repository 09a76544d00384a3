"""RULER's variable tracking: a chain of assignments in noise."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from string import ascii_uppercase

from sglang_kv.benchmarks.generated import Question, Sample
from sglang_kv.benchmarks.ruler.niah import NOISE

HOPS = 4
INTRO = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
QUESTION = "Question: Find all variables that are assigned the value {value} in the text above."
PREFIX = (
    "Answer: According to the chain(s) of variable assignment in the text above, {count} "
    "variables are assigned the value {value}, they are:"
)


def variable_tracking(rng: random.Random, size: int, sentences: Sequence[str]) -> Sample:
    """One chain of `HOPS` hops, after a short worked example with shorter names."""
    names, value, text = _chain(rng, size, 5)
    shown, shown_value, shown_text = _chain(rng, 5, 3)
    count = HOPS + 1
    example = "\n".join(
        (
            INTRO + shown_text,
            QUESTION.format(value=shown_value),
            f"{PREFIX.format(count=count, value=shown_value)} {' '.join(shown)}",
        )
    )
    question = Question(
        QUESTION.format(value=value), PREFIX.format(count=count, value=value), tuple(names)
    )
    return Sample(f"{example}\n\n{INTRO}{text}", (question,))


def _chain(rng: random.Random, size: int, letters: int) -> tuple[list[str], str, str]:
    names: list[str] = []
    while len(names) <= HOPS:
        name = "".join(rng.choices(ascii_uppercase, k=letters))
        if name not in names:
            names.append(name)
    value = str(rng.randrange(10**4, 10**5))
    steps = [f"VAR {names[0]} = {value}"]
    steps += [f"VAR {b} = VAR {a}" for a, b in pairwise(names)]
    # In order, wherever they stand; from the back, so that places stay what they were.
    pieces = [NOISE] * size
    places = sorted(rng.randint(0, size) for _ in steps)
    for place, step in reversed(list(zip(places, steps, strict=True))):
        pieces.insert(place, step)
    return names, value, "\n".join(pieces)
