"""RULER's eight needle tasks: a kind of haystack, and how many keys, values and questions."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sglang_kv.benchmarks.generated import Question, Sample
from sglang_kv.benchmarks.ruler.vocabulary import number, phrases, uuid

#: RULER's filler sentence.
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
#: Essay needles stand at some of these places, of the text's length.
DEPTHS = [i / 39 for i in range(40)]

INTRO = (
    "Some special magic {kind} are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards."
)
NEEDLE = "One of the special magic {kind} for {key} is: {value}."
QUESTION = "What are all the special magic {kind} for {query} mentioned in the provided text?"
PREFIX = "The special magic {kind} for {query} mentioned in the provided text are"
# With one answer, both are in the singular.
QUESTION_ONE = "What is the special magic {one} for {query} mentioned in the provided text?"
PREFIX_ONE = "The special magic {one} for {query} mentioned in the provided text is"


@dataclass(frozen=True)
class Needles:
    """One needle task.

    Args:
        haystack: ``noise`` (one sentence, repeated), ``essay``, or ``needles`` (nothing else).
        keys: how many; those that are not asked for distract.
        values: per key.
        queries: keys asked for in one question.
        uuid_keys, uuid_values: 32 hexadecimal digits in place of a phrase or seven digits.
    """

    haystack: str
    keys: int = 1
    values: int = 1
    queries: int = 1
    uuid_keys: bool = False
    uuid_values: bool = False

    def __call__(self, rng: random.Random, size: int, sentences: Sequence[str]) -> Sample:
        count = max(self.keys, size) if self.haystack == "needles" else self.keys
        keys = [uuid(rng) for _ in range(count)] if self.uuid_keys else phrases(rng, count)
        value: Callable[[random.Random], str] = uuid if self.uuid_values else number
        values = {key: tuple(value(rng) for _ in range(self.values)) for key in keys}
        kind = "uuids" if self.uuid_values else "numbers"
        needles = [NEEDLE.format(kind=kind, key=k, value=v) for k in keys for v in values[k]]
        rng.shuffle(needles)
        if self.haystack == "needles":
            text = "\n".join(needles)
        elif self.haystack == "noise":
            text = "\n".join(_insert(rng, [NOISE] * size, needles))
        else:
            text = " ".join(_insert(rng, _deal(rng, sentences, size), needles))
        context = INTRO.format(kind=kind) + "\n\n" + text
        return Sample(context, tuple(self._questions(rng, kind, values)))

    def _questions(
        self, rng: random.Random, kind: str, values: dict[str, tuple[str, ...]]
    ) -> list[Question]:
        """As many as there are groups of keys to ask for, each key at most once."""
        keys = list(values)
        rng.shuffle(keys)
        found = []
        for i in range(0, len(keys) - self.queries + 1, self.queries):
            asked = keys[i : i + self.queries]
            answers = tuple(value for key in asked for value in values[key])
            query = asked[0] if len(asked) == 1 else ", ".join(asked[:-1]) + f", and {asked[-1]}"
            fill = {"kind": kind, "one": kind[:-1], "query": query}
            one = len(answers) == 1
            question, prefix = (QUESTION_ONE, PREFIX_ONE) if one else (QUESTION, PREFIX)
            found.append(Question(question.format(**fill), prefix.format(**fill), answers))
        return found


def _insert(rng: random.Random, filler: list[str], needles: list[str]) -> list[str]:
    """Needles between the pieces, at different depths where there are enough."""
    few = len(needles) <= len(DEPTHS)
    depths = rng.sample(DEPTHS, len(needles)) if few else [rng.random() for _ in needles]
    placed = sorted(zip(depths, needles, strict=True), key=lambda pair: pair[0], reverse=True)
    pieces = list(filler)
    for depth, needle in placed:
        pieces.insert(round(depth * len(filler)), needle)
    return pieces


def _deal(rng: random.Random, sentences: Sequence[str], size: int) -> list[str]:
    """So many sentences in their order, from anywhere in the text on, round and round."""
    start = rng.randrange(len(sentences))
    return [sentences[(start + i) % len(sentences)] for i in range(size)]
