"""The traffic that the throughput benchmark sends, made from a seed.

    document                        8,000 tokens and a short answer, each its own document
    document:context=4000,requests=4    the same, other sizes

Prompts are common words in random order: every token decodes to text, so that the load generator
sees each one arrive, and nothing but what a workload shares on purpose is in two prompts.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

# Frequent English words, one token each in most vocabularies.
_WORDS = """
    about after again air all along also always and another any around ask away back because
    before began below between big book both boy came can carry change children city close come
    could country cut day did different does down each earth eat end enough even every eye face
    family far father feet few find first follow food found four from get girl give good great
    group grow had hand hard has head hear help her here high him his home house how idea into
    just keep kind know land large last later learn leave left letter life light line list little
    live long look made make many may mean men might mile more most mother mountain move much must
    name near need never new next night number off often old once one only open other our out over
    own page paper part people place plant play point press question quick read really right river
    run said same saw say school sea second see seem sentence set she should show side small some
    song soon sound spell stand start state still stop story study such sun take talk tell than
    that their them then there these they thing think this those thought three through time too
    took tree try turn two under until use very walk want was watch water way well went were what
    when where which while white who why will with without word work world would write year you
    young
"""
VOCABULARY = _WORDS.split()


@dataclass(frozen=True)
class Workload:
    """Sizes of one kind of traffic.

    Args:
        name: its kind, a key of ``WORKLOADS``.
        requests: how many, or how many sessions of an agent.
        context: tokens of a prompt; of ``shared``, of the part that a group shares; of an
            ``agent``, of a session's first message.
        output: tokens of an answer.
        question: tokens of a prompt's own part (``shared``), or of a later turn (``agent``).
        groups: different shared parts.
        turns: of a session.
    """

    name: str
    requests: int
    context: int
    output: int
    question: int = 0
    groups: int = 1
    turns: int = 1

    @property
    def longest(self) -> int:
        """Tokens of its longest request, the answer included.

        Of an agent's session by estimate: the chat template's own tokens are not counted.
        """
        return self.context + self.turns * self.output + self.question * max(1, self.turns - 1)

    @property
    def budgeted(self) -> int:
        """Tokens that a method told to keep so many keeps a share of."""
        if self.name in ("agent", "stream"):  # they grow long in the course of it
            return self.longest
        return self.context + self.question

    @property
    def is_chat(self) -> bool:
        return self.name == "agent"

    def label(self) -> str:
        sizes = {key: value for key, value in asdict(self).items() if key != "name"}
        return f"{self.name}:" + ",".join(f"{key}={value}" for key, value in sizes.items())


#: As on a 2-core CPU with a small model; other machines give other sizes.
WORKLOADS = {
    w.name: w
    for w in (
        Workload("random", requests=16, context=2048, output=128),
        Workload("document", requests=8, context=8000, output=64),
        Workload("shared", requests=24, context=2000, output=64, question=64, groups=3),
        Workload("agent", requests=4, context=1500, output=48, question=250, turns=6),
        Workload("stream", requests=1, context=256, output=4096),
    )
}
#: Every workload in minutes, to see that all of it works.
QUICK = {
    "random": replace(WORKLOADS["random"], requests=4, context=256, output=16),
    "document": replace(WORKLOADS["document"], requests=3, context=1000, output=16),
    "shared": replace(WORKLOADS["shared"], requests=6, context=256, output=8, question=16),
    "agent": replace(WORKLOADS["agent"], requests=2, context=200, output=8, question=40, turns=3),
    "stream": replace(WORKLOADS["stream"], context=64, output=200),
}


def parse_workload(text: str, quick: bool = False) -> Workload:
    """``NAME`` or ``NAME:size=N,...``.

    Raises:
        ValueError: naming the workload or size that is wrong.
    """
    name, _, sizes = text.partition(":")
    known = QUICK if quick else WORKLOADS
    if name not in known:
        raise ValueError(f"--workload {name!r}: expected one of {', '.join(known)}")
    allowed = [f.name for f in fields(Workload) if f.name != "name"]
    changes: dict[str, Any] = {}
    for part in sizes.split(",") if sizes else []:
        size, _, value = part.partition("=")
        if size not in allowed:
            raise ValueError(f"--workload {name}: {size!r} is none of {', '.join(allowed)}")
        least = 0 if size == "question" else 2 if size == "output" else 1
        if not value.isdecimal() or int(value) < least:
            raise ValueError(
                f"--workload {name}: {size} must be a whole number of at least {least}, "
                f"got {value!r}"
            )
        changes[size] = int(value)
    workload = replace(known[name], **changes)
    if workload.turns > 1 and not workload.is_chat:
        raise ValueError(f"--workload {name}: only an agent's session has turns")
    return workload


@dataclass(frozen=True)
class Request:
    """One request of the load generator: ids, or the messages of a session's rounds."""

    prompt: list[int] | list[list[dict[str, str]]]
    prompt_tokens: int
    output_tokens: int
    #: For a single `/generate` in its place: a session has some of its own.
    ids: list[int]


class Words:
    """Random words in a tokenizer's tokens, to an exact length."""

    def __init__(self, encode: Callable[[str], list[int]], rng: random.Random):
        self._encode, self.rng = encode, rng

    def ids(self, tokens: int) -> list[int]:
        ids: list[int] = []
        while len(ids) < tokens:
            words = self.rng.choices(VOCABULARY, k=max(8, tokens - len(ids)))
            ids += self._encode(" " + " ".join(words))
        return ids[:tokens]

    def text(self, tokens: int) -> str:
        """About so many tokens: one word for each."""
        return " ".join(self.rng.choices(VOCABULARY, k=tokens))


def make_requests(
    workload: Workload, encode: Callable[[str], list[int]], seed: int
) -> list[Request]:
    """The requests of a workload; the same seed makes the same ones.

    Args:
        encode: a text's token ids, without special tokens.
    """
    words = Words(encode, random.Random(f"{seed} {workload.label()}"))
    return MAKERS[workload.name](workload, words)


def _single(ids: list[int], output_tokens: int) -> Request:
    return Request(ids, len(ids), output_tokens, ids)


def _random(workload: Workload, words: Words) -> list[Request]:
    """Lengths uniform from an eighth of each size up to it."""
    made = []
    for _ in range(workload.requests):
        context = words.rng.randint(max(1, workload.context // 8), workload.context)
        output = words.rng.randint(max(2, workload.output // 8), workload.output)
        made.append(_single(words.ids(context), output))
    return made


def _distinct(workload: Workload, words: Words) -> list[Request]:
    return [_single(words.ids(workload.context), workload.output) for _ in range(workload.requests)]


def _shared(workload: Workload, words: Words) -> list[Request]:
    """Requests of all groups in turn, so that a shared part is still there when it is used."""
    groups = [words.ids(workload.context) for _ in range(workload.groups)]
    return [
        _single(groups[i % workload.groups] + words.ids(workload.question), workload.output)
        for i in range(workload.requests)
    ]


def _agent(workload: Workload, words: Words) -> list[Request]:
    """Sessions: one task, then what a tool returned, turn after turn."""
    made = []
    for _ in range(workload.requests):
        rounds = [
            [
                {"role": "system", "content": words.text(workload.context // 2)},
                {"role": "user", "content": words.text(workload.context - workload.context // 2)},
            ]
        ]
        for _ in range(workload.turns - 1):
            rounds.append([{"role": "user", "content": words.text(workload.question)}])
        ids = words.ids(workload.context)
        made.append(Request(rounds, workload.context, workload.output, ids))
    return made


MAKERS: dict[str, Callable[[Workload, Words], list[Request]]] = {
    "random": _random,
    "document": _distinct,
    "shared": _shared,
    "agent": _agent,
    "stream": _distinct,
}
