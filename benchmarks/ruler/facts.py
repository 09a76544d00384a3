"""RULER's two question-answering tasks, from invented facts in place of SQuAD and HotpotQA.

Every document is about one person or one town that exists nowhere, so no model knows an answer.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from sglang_kv.benchmarks.generated import Question, Sample
from sglang_kv.benchmarks.ruler.vocabulary import FAMILY, GIVEN, RIVERS, TOWNS, TRADES

TASK = (
    "Answer the question based on the given documents. Only give me the answer and do not output "
    "any other words."
)
#: Questions to one set of documents, where several are asked.
MOST_QUESTIONS = 8


@dataclass(frozen=True)
class Person:
    name: str
    town: str
    year: int
    trade: str

    def document(self) -> str:
        return (
            f"{self.name} was born in {self.town} in {self.year} and learned the trade of a "
            f"{self.trade} there. Little else is known about the family, which left no letters."
        )


def _people(rng: random.Random, count: int) -> list[Person]:
    names = [f"{given} {family}" for given in GIVEN for family in FAMILY]
    if count > len(names):
        raise ValueError(f"{count} documents were asked for, there are {len(names)} people")
    towns = rng.sample(TOWNS, count)
    return [
        Person(name, town, rng.randint(1601, 1899), rng.choice(TRADES))
        for name, town in zip(rng.sample(names, count), towns, strict=True)
    ]


def one_document(rng: random.Random, size: int, sentences: Sequence[str]) -> Sample:
    """qa_1: the answer stands in one document (SQuAD's part)."""
    people = _people(rng, size)
    asked = rng.sample(people, min(len(people), MOST_QUESTIONS))
    questions = [(f"In which town was {p.name} born?", p.town) for p in asked]
    return _sample(rng, [person.document() for person in people], questions)


def two_documents(rng: random.Random, size: int, sentences: Sequence[str]) -> Sample:
    """qa_2: it takes one document to know which other one to read (HotpotQA's part)."""
    people = _people(rng, -(-size // 2))
    documents, questions = [], []
    for i, person in enumerate(people):
        river = RIVERS[rng.randrange(len(RIVERS))]
        documents += [
            person.document(),
            f"{person.town} is a small town on the river {river}. Its market is held on Thursdays, "
            f"and its church was finished in {rng.randint(1100, 1599)}.",
        ]
        if i < MOST_QUESTIONS:
            ask = f"On which river does the town lie in which {person.name} was born?"
            questions.append((ask, river))
    return _sample(rng, documents, questions)


def _sample(
    rng: random.Random, documents: list[str], questions: Sequence[tuple[str, str]]
) -> Sample:
    rng.shuffle(documents)
    listed = "\n\n".join(f"Document {i}:\n{text}" for i, text in enumerate(documents, 1))
    return Sample(
        f"{TASK}\n\nThe following are given documents.\n\n{listed}",
        tuple(
            Question(f"{TASK}\n\nQuestion: {text}", "Answer:", (answer,))
            for text, answer in questions
        ),
    )
