"""What gates are trained on: a text with many passkeys, and an answer that copies them all.

As in DuoAttention (https://arxiv.org/abs/2410.10819, section 2.3), with the passkeys and the
words of `sglang_kv.calibration.passkey`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sglang_kv.calibration.passkey import ANSWER, DIGITS, NEEDLE, WORDS, Haystack, in_chat

INTRODUCTION = (
    "Several special magic numbers are hidden within the following text. Make sure to memorize "
    "them. I will quiz you about the numbers afterwards."
)
QUESTION = "What are the special magic numbers for {words} mentioned in the provided text?"


@dataclass(frozen=True)
class MultiPasskey:
    """A prompt with its whole answer, as tokens."""

    ids: tuple[int, ...]
    #: Positions whose next token is one of an answered number.
    predicting: tuple[int, ...]


def multi_samples(
    tokenizer: Any,
    text: str,
    *,
    seed: int,
    lengths: tuple[int, int],
    passkeys: int = 10,
    sinks: int = 64,
    recent: int = 256,
) -> Iterator[MultiPasskey]:
    """Endless samples, the same for the same seed.

    Each passkey stands at a sentence end of its own choice, after the ``sinks`` first tokens
    and more than ``recent`` tokens before the question: where a streaming head loses it. The
    answer names them in an order that has nothing to do with theirs in the text.

    Args:
        tokenizer: a fast tokenizer of transformers; its chat template is used if it has one.
        text: the haystack.
        seed: of all choices.
        lengths: least and most tokens of a sample; drawn evenly between them.
        passkeys: facts per sample.
        sinks, recent: tokens that streaming heads keep.

    Raises:
        ValueError: samples of that length have no place for the passkeys.
    """
    if not 1 <= passkeys <= len(WORDS):
        raise ValueError(f"passkeys: from 1 to {len(WORDS)}, got {passkeys}")
    rng = random.Random(seed)
    haystack = Haystack(text, tokenizer)
    while True:
        facts = {
            word: str(rng.randrange(10 ** (DIGITS - 1), 10**DIGITS))
            for word in rng.sample(WORDS, passkeys)
        }
        target = rng.randint(*lengths)
        overhead = len(_build(tokenizer, [], [0] * passkeys, facts).ids)
        sentences, sizes = haystack.passage(rng, target - overhead)
        before = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
        places = [i for i, n in enumerate(before) if n >= sinks and before[-1] - n >= recent]
        if not places:
            raise ValueError(
                f"a sample of {target} tokens has no place for {passkeys} passkeys beyond {sinks} "
                f"sinks and {recent} recent tokens"
            )
        yield _build(tokenizer, sentences, [rng.choice(places) for _ in facts], facts)


def _build(
    tokenizer: Any, sentences: list[str], depths: list[int], facts: dict[str, str]
) -> MultiPasskey:
    """``facts`` in the order of the answer, each before the sentence of its depth."""
    hidden: list[list[str]] = [[] for _ in range(len(sentences) + 1)]
    for depth, (word, value) in zip(depths, facts.items(), strict=True):
        hidden[depth].append(NEEDLE.format(word=word, value=value))
    pieces = [part for i, held in enumerate(hidden) for part in (*held, *sentences[i : i + 1])]
    question = QUESTION.format(words=", ".join(facts))
    whole = in_chat(tokenizer, f"{INTRODUCTION}\n\n{' '.join(pieces)}\n\n{question}")
    answered: list[range] = []
    for word, value in facts.items():
        whole += ("" if not answered else " ") + f"{ANSWER.format(word=word)} "
        answered.append(range(len(whole), len(whole) + len(value)))
        whole += f"{value}."
    encoded = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
    spans = encoded["offset_mapping"]
    predicting = tuple(
        i - 1
        for i, (start, stop) in enumerate(spans)
        if any(start < digits.stop and stop > digits.start for digits in answered)
    )
    # What follows the last number teaches nothing.
    return MultiPasskey(tuple(encoded["input_ids"][: predicting[-1] + 2]), predicting)
