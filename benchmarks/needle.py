"""Needle in a haystack: a fact in a long text, asked for at the end.

Three kinds of needle, kept apart: a 7-digit number, a single word, and ``long``: the number's key
and the number in two sentences, further apart than a pooling kernel of 31 tokens is wide. Three
more have four numbers in one text: ``multikey`` (four keys, one asked for), ``multivalue`` (one
key) and ``multiquery`` (four keys, all asked for). The depth is that of the first; the others lie
anywhere, and a hit is all that was asked for.

Two columns: ``aware``, where the policy acts on the whole prompt, and ``agnostic``, where it folds
before the question (``fold_at``) and cannot know what will be asked.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sglang_kv.benchmarks.arms import Arm, Asker, fan_out
from sglang_kv.benchmarks.common import wilson
from sglang_kv.benchmarks.prompts import Chat, Haystack, build
from sglang_kv.benchmarks.server import generate_body

KINDS = ("number", "word", "long")
MULTIPLE = ("multikey", "multivalue", "multiquery")
ALL_KINDS = KINDS + MULTIPLE
#: Needles in a text of one of `MULTIPLE`.
FOUR = 4
COLUMNS = ("aware", "agnostic")

INTRO = (
    "A special magic {noun} is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {noun} afterwards."
)
NEEDLE = "The special magic {noun} for {key} is: {value}."
LONG_NEEDLE = (
    "There is a special magic {noun} for {key}, and it was written down with great care by the "
    "people who kept the book of names in the old hall beside the river. The special magic {noun} "
    "that they wrote down in the book on that day is: {value}."
)
QUESTION = "What is the special magic {noun} for {key} mentioned in the provided text?"
ANSWER_PREFIX = "The special magic {noun} for {key} mentioned in the provided text is"
SEVERAL_INTRO = (
    "Some special magic {noun}s are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {noun}s afterwards."
)
SEVERAL_QUESTION = (
    "What are all the special magic {noun}s for {key} mentioned in the provided text?"
)
SEVERAL_PREFIX = "The special magic {noun}s for {key} mentioned in the provided text are"

# Common words: one token each in most vocabularies, quoted or not.
KEYS, WORDS = (
    part.split()
    for part in (
        """
        anchor bakery basket beaver blanket bottle bucket cactus camera candle carpet compass
        cradle curtain engine feather goblet hammer helmet jacket kettle ladder magnet mirror
        muffin orchard oyster parrot pebble pencil pigeon pillow pumpkin ribbon rocket saddle
        salmon shovel tractor trumpet tunnel violin walnut wagon whistle zipper
        """,
        """
        amber apple banana bronze butterfly carrot cheese cherry chocolate cinnamon coffee
        copper coral cotton crystal desert diamond dolphin dragon eagle elephant falcon galaxy
        garlic ginger giraffe granite guitar hockey honey hurricane island jungle lantern leather
        lightning lizard mango marble meadow monkey mountain ocean olive palace panda peach pearl
        piano pirate planet potato purple rainbow silver spider tennis thunder tiger tomato turtle
        vanilla violet volcano whale yellow zebra
        """,
    )
)


@dataclass(frozen=True)
class Case:
    """One prompt and its answer. An outside engine needs only the ids and ``max_new_tokens``."""

    id: str
    prompt_ids: list[int]
    fold_at: int
    max_new_tokens: int
    values: tuple[str, ...]
    kind: str
    length: int
    depth: float

    @property
    def value(self) -> str:
        """The first, and for most kinds the only one."""
        return self.values[0]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def make_cases(
    chat: Chat,
    haystack: Haystack,
    lengths: Iterable[int],
    depths: Iterable[float],
    samples: int,
    seed: int,
    *,
    kinds: Iterable[str] = KINDS,
    max_new_tokens: int = 32,
    answer_prefix: bool = False,
    limit: int | None = None,
) -> list[Case]:
    """The grid, sample by sample, so that a limit or an early end leaves a smaller whole grid.

    Each case has a text, a key and a value of its own, drawn from its name and the seed.
    """
    grid = [
        (sample, length, depth, kind)
        for sample in range(samples)
        for length in lengths
        for depth in depths
        for kind in kinds
    ]
    keys, words = ([w for w in part if w not in haystack.text] for part in (KEYS, WORDS))
    cases = []
    for sample, length, depth, kind in grid[:limit]:
        name = f"{kind}-{length}-{depth:g}-{sample}-seed{seed}"
        rng = random.Random(name)
        noun = "word" if kind == "word" else "number"
        if kind in MULTIPLE:
            asked, values, needles = _several(rng, kind, keys)
        else:
            value = rng.choice(words) if kind == "word" else str(rng.randrange(10**6, 10**7))
            asked, values = rng.choice(keys), [value]
            pattern = LONG_NEEDLE if kind == "long" else NEEDLE
            needles = [pattern.format(noun=noun, key=asked, value=value)]
        fill = {"noun": noun, "key": asked}
        many = len(values) > 1
        intro = SEVERAL_INTRO if len(needles) > 1 else INTRO
        prefix = SEVERAL_PREFIX if many else ANSWER_PREFIX
        prompt = build(
            chat,
            haystack,
            rng,
            length,
            (SEVERAL_QUESTION if many else QUESTION).format(**fill),
            intro=intro.format(**fill),
            needle=needles[0],
            depth=depth,
            others=[(other, rng.random()) for other in needles[1:]],
            answer_prefix=prefix.format(**fill) if answer_prefix else "",
        )
        tokens = max_new_tokens * len(values)
        cases.append(
            Case(
                *(name, prompt.ids, prompt.question_at, tokens, tuple(values)),
                *(kind, length, depth),
            )
        )
    return cases


def _several(rng: random.Random, kind: str, keys: list[str]) -> tuple[str, list[str], list[str]]:
    """What is asked for, the values that answer it, and `FOUR` needles, an asked-for one first."""
    chosen = rng.sample(keys, FOUR)
    if kind == "multivalue":
        chosen = chosen[:1] * FOUR
    values = [str(number) for number in rng.sample(range(10**6, 10**7), FOUR)]
    pairs = zip(chosen, values, strict=True)
    needles = [NEEDLE.format(noun="number", key=key, value=value) for key, value in pairs]
    if kind == "multikey":
        return chosen[0], values[:1], needles
    if kind == "multivalue":
        return chosen[0], values, needles
    return ", ".join(chosen[:-1]) + f" and {chosen[-1]}", values, needles


def hit(values: Sequence[str], answer: str) -> bool:
    """Every value stands in the answer, in either case: RULER's metric, all or nothing."""
    return all(value.lower() in answer.lower() for value in values)


@dataclass(frozen=True)
class Answer:
    """What one arm said to one case; ``memory`` is the share of the KV bytes that it kept."""

    case: str
    column: str
    hit: bool
    memory: float | None = None


def run(
    ask: Asker, chat: Chat, cases: list[Case], arms: list[Arm], parallel: int = 1
) -> dict[str, list[Answer]]:
    """Every case with every arm, all arms of a case in turn: they share its dense prefix."""
    plan = [(arm, column) for arm in arms for column in COLUMNS if arm.has(column)]

    def one(case: Case) -> list[tuple[str, Answer]]:
        found = []
        for arm, column in plan:
            policy = arm.policy if column == "aware" else arm.at(case.fold_at)
            body = generate_body(case.prompt_ids, policy, max_new_tokens=case.max_new_tokens)
            got = ask(f"needle {arm.name} {column} {case.id}", body, lambda raw: {})
            answer = chat.decode(got["output_ids"])
            found.append(
                (arm.name, Answer(case.id, column, hit(case.values, answer), got["memory"]))
            )
        return found

    ask.start("needle", len(cases) * len(plan))
    answers: dict[str, list[Answer]] = {arm.name: [] for arm in arms}
    for found in fan_out(one, cases, parallel):
        for name, answer in found:
            answers[name].append(answer)
    return answers


def score_answers(
    chat: Chat, cases: list[Case], lines: Iterable[dict[str, Any]], column: str = "aware"
) -> list[Answer]:
    """Answers of an outside engine, ``{id, output_ids}`` each (``column`` if not aware)."""
    values = {case.id: case.values for case in cases}
    answers = []
    for line in lines:
        if line["id"] not in values:
            raise ValueError(f"{line['id']}: not a case of these lengths, depths, samples and seed")
        said = chat.decode(list(line["output_ids"]))
        at = line.get("column", column)
        answers.append(Answer(line["id"], at, hit(values[line["id"]], said)))
    return answers


def summarize(cases: list[Case], answers: list[Answer], full: list[Answer]) -> dict[str, Any]:
    """Hits of an arm, alone and paired with the full cache's on the same cases."""
    by_id = {case.id: case for case in cases}
    full_hit = {answer.case: answer.hit for answer in full}
    memory = [answer.memory for answer in answers if answer.memory is not None]

    def group(key: Callable[[Case], tuple[Any, ...]], names: tuple[str, ...]) -> list[Any]:
        parts: dict[tuple[Any, ...], list[Answer]] = {}
        for answer in answers:
            at = (answer.column, *key(by_id[answer.case]))
            parts.setdefault(at, []).append(answer)
        return [
            dict(zip(("column", *names), at, strict=True)) | count(part, full_hit)
            for at, part in parts.items()
        ]

    return {
        "memory": round(sum(memory) / len(memory), 4) if memory else None,
        "summary": group(lambda case: (case.kind,), ("kind",)),
        "cells": group(
            lambda case: (case.kind, case.length, case.depth), ("kind", "length", "depth")
        ),
    }


def count(answers: list[Answer], full_hit: dict[str, bool]) -> dict[str, Any]:
    """Hits of n, and of the hits that the full cache has, those that the arm keeps."""
    hits, n = sum(answer.hit for answer in answers), len(answers)
    of_full = [answer.hit for answer in answers if full_hit.get(answer.case)]
    return {
        "n": n,
        "hits": hits,
        "interval": wilson(hits, n),
        "full_hits": len(of_full),
        "kept": sum(of_full),
        "kept_interval": wilson(sum(of_full), len(of_full)),
    }
