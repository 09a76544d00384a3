"""Passkey samples: a fact hidden in a long text, and a question whose answer copies it."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

INTRODUCTION = (
    "A special magic number is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the number afterwards."
)
NEEDLE = "The special magic number for {word} is: {value}."
QUESTION = "What is the special magic number for {word} mentioned in the provided text?"
ANSWER = "The special magic number for {word} mentioned in the provided text is"
DIGITS = 7
_NOUNS = """
anchor basket bridge candle canyon carpet castle cherry circus copper cotton desert dragon
engine falcon feather forest garden glacier guitar hammer harbor island jacket jungle kettle
ladder lantern lemon lizard magnet marble meadow mirror needle orchard oyster paddle parrot
pebble pepper pillow planet pocket puzzle rabbit ribbon rocket saddle shadow silver spider
summer sunset temple thunder ticket tunnel turtle velvet violin walnut window winter
"""
WORDS = tuple(_NOUNS.split())


@dataclass(frozen=True)
class Passkey:
    """A prompt with its answer, as tokens, and where in it the parts are.

    The last token of ``ids`` is the last of the answer's value. Ranges index ``ids``.
    """

    ids: tuple[int, ...]
    needle: range  # the sentence that holds the fact
    value: range  # its number
    question: range  # from the question's first token to the last before the answer's number
    answer: range  # the number again, as the answer

    @property
    def predicting(self) -> range:
        """Positions whose next token is one of the answer's number."""
        return range(self.answer.start - 1, self.answer.stop - 1)


class Haystack:
    """The sentences of a text, cut into passages of a wished length in tokens."""

    def __init__(self, text: str, tokenizer: Any) -> None:
        parts = re.split(r"(?<=[.!?])[\"')]*\s+", " ".join(text.split()))
        self.sentences = [part for part in parts if part]
        if not self.sentences:
            raise ValueError("the haystack text is empty")
        self._tokens = [len(ids) for ids in _encode(tokenizer, self.sentences)["input_ids"]]

    def passage(self, rng: random.Random, tokens: int) -> tuple[list[str], list[int]]:
        """Consecutive sentences from a random start, at most ``tokens`` long, and their lengths.

        A text that is too short starts over.
        """
        at = rng.randrange(len(self.sentences))
        sentences: list[str] = []
        lengths: list[int] = []
        while sum(lengths) + self._tokens[at] <= tokens:
            sentences.append(self.sentences[at])
            lengths.append(self._tokens[at])
            at = (at + 1) % len(self.sentences)
        return sentences, lengths


def samples(
    tokenizer: Any,
    text: str,
    *,
    seed: int,
    lengths: tuple[int, int],
    sinks: int = 64,
    recent: int = 256,
) -> Iterator[Passkey]:
    """Endless samples, the same for the same seed.

    The needle lies where a streaming head loses it: after the ``sinks`` first tokens, and
    more than ``recent`` tokens before the question.

    Args:
        tokenizer: a fast tokenizer of transformers; its chat template is used if it has one.
        text: the haystack.
        seed: of all choices.
        lengths: least and most tokens of a sample; drawn evenly between them.
        sinks: first tokens that streaming heads keep.
        recent: newest tokens that streaming heads keep.
    """
    for (sample,) in quizzes(
        tokenizer, text, seed=seed, lengths=lengths, passkeys=1, sinks=sinks, recent=recent
    ):
        yield sample


def quizzes(
    tokenizer: Any,
    text: str,
    *,
    seed: int,
    lengths: tuple[int, int],
    passkeys: int,
    sinks: int = 64,
    recent: int = 256,
) -> Iterator[list[Passkey]]:
    """Endless texts with ``passkeys`` facts each, every one asked for on its own.

    The samples of a text are the same up to the question. Arguments as for `samples`.

    Raises:
        ValueError: samples of that length have no place for a needle.
    """
    if not 1 <= passkeys <= len(WORDS):
        raise ValueError(f"passkeys: from 1 to {len(WORDS)}, got {passkeys}")
    rng = random.Random(seed)
    haystack = Haystack(text, tokenizer)
    while True:
        facts: dict[str, str] = {}
        while len(facts) < passkeys:
            word = rng.choice(WORDS)
            facts[word] = str(rng.randrange(10 ** (DIGITS - 1), 10**DIGITS))
        needles = [NEEDLE.format(word=word, value=value) for word, value in facts.items()]
        target = rng.randint(*lengths)
        # The words differ a little in length.
        overhead = max(
            len(_build(tokenizer, " ".join(needles), *asked).ids)
            for asked in zip(needles, *zip(*facts.items(), strict=True), strict=True)
        )
        sentences, sizes = haystack.passage(rng, target - overhead)
        before = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
        places = [i for i, n in enumerate(before) if n >= sinks and before[-1] - n >= recent]
        if not places:
            raise ValueError(
                f"a sample of {target} tokens has no place for the needle beyond {sinks} sinks "
                f"and {recent} recent tokens"
            )
        hidden: list[list[str]] = [[] for _ in before]
        for needle in needles:
            hidden[rng.choice(places)].append(needle)
        pieces = [part for i, held in enumerate(hidden) for part in (*held, *sentences[i : i + 1])]
        yield [
            _build(tokenizer, " ".join(pieces), needle, word, value)
            for needle, (word, value) in zip(needles, facts.items(), strict=True)
        ]


def _build(tokenizer: Any, context: str, needle: str, word: str, value: str) -> Passkey:
    question = QUESTION.format(word=word)
    prompt = in_chat(tokenizer, f"{INTRODUCTION}\n\n{context}\n\n{question}")
    whole = f"{prompt}{ANSWER.format(word=word)} {value}"
    encoded = _encode(tokenizer, whole, return_offsets_mapping=True)
    offsets = encoded["offset_mapping"]

    def tokens(start: int, stop: int) -> range:
        held = [i for i, (a, b) in enumerate(offsets) if a < stop and b > start]
        return range(held[0], held[-1] + 1)

    at = whole.index(needle)
    digits = at + needle.index(value)
    answer = tokens(len(whole) - len(value), len(whole))
    asked = tokens(whole.rindex(question), len(whole)).start
    return Passkey(
        ids=tuple(encoded["input_ids"]),
        needle=tokens(at, at + len(needle)),
        value=tokens(digits, digits + len(value)),
        question=range(asked, answer.start),
        answer=answer,
    )


def in_chat(tokenizer: Any, prompt: str) -> str:
    """A user's message as the model sees it, up to where its answer begins."""
    if not getattr(tokenizer, "chat_template", None):
        return f"{prompt}\n"
    chat = [{"role": "user", "content": prompt}]
    # `enable_thinking` concerns the templates that know it: answers begin at once here.
    return str(
        tokenizer.apply_chat_template(
            chat, tokenize=False, add_generation_prompt=True, enable_thinking=False
        )
    )


def _encode(tokenizer: Any, text: str | list[str], **options: Any) -> Any:
    return tokenizer(text, add_special_tokens=False, **options)
