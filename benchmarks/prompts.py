"""Prompts of an exact length in tokens: a chat template around a text and a question.

The pieces are encoded on their own and joined as ids, so that every length and the position
where the question begins are exact, whatever the tokenizer would have merged across a seam.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from sglang_kv.benchmarks.grammar import grammar_text

STORY = Path(__file__).resolve().parent.parent / "scripts" / "demo" / "red_headed_league.txt"

_MARK = "\x00user\x00"
# The end of a sentence, but not of a title or an initial, before the next one begins.
_END = re.compile(
    r"""(?<!\bMr)(?<!\bMrs)(?<!\bDr)(?<!\bSt)(?<!\b[A-Z])([.!?]["')]*)\s+(?=["'(A-Z])"""
)
_LAST = re.compile(r"""[.!?]["')]*$""")


def load_text(path: Path | None = None) -> str:
    """A text file; by default the public-domain story of the demo, or, where the package is
    installed without it, a text of the seeded grammar."""
    if path is None and not STORY.exists():
        return grammar_text()
    return (path or STORY).read_text(encoding="utf-8")


def text_name(path: Path | None = None) -> str:
    """What results call the text that `load_text` gives."""
    if path is None and not STORY.exists():
        return "grammar"
    return (path or STORY).name


def paragraphs(text: str) -> list[list[str]]:
    """The sentences of each paragraph (line), in order; no headings and the like."""
    lines = (line.strip() for line in text.splitlines())
    return [_END.sub(r"\1" + "\x00", line).split("\x00") for line in lines if _LAST.search(line)]


class Chat:
    """A tokenizer, and what its chat template puts before and after one user message.

    A model without a chat template gets the message as plain text after its usual first token.
    """

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        if getattr(tokenizer, "chat_template", None):
            # `enable_thinking` concerns the templates that know it: answers are short here.
            frame = tokenizer.apply_chat_template(
                [{"role": "user", "content": _MARK}],
                tokenize=False,
                add_generation_prompt=True,
                enable_thinking=False,
            )
            head, tail = frame.split(_MARK)
            self.head, self.tail = self.encode(head), self.encode(tail)
        else:
            self.head, self.tail = list(tokenizer("")["input_ids"]), self.encode("\n")

    @classmethod
    def load(cls, model: str) -> Chat:
        from transformers import AutoTokenizer

        return cls(AutoTokenizer.from_pretrained(model))

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: list[int], special: bool = False) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=not special))


@dataclass(frozen=True)
class Cut:
    """Exactly so many tokens of text, and the positions at which a sentence ends (0 included)."""

    ids: list[int]
    ends: list[int]

    def nearest_end(self, depth: float) -> int:
        return min(self.ends, key=lambda end: abs(end - depth * len(self.ids)))


class Haystack:
    """A text as encoded sentences, dealt out in an order of its own to each random generator.

    Paragraphs are shuffled and stay whole, so the text reads on; when they run out, they are
    shuffled again.
    """

    def __init__(self, chat: Chat, text: str):
        self.text = text.lower()
        self._paragraphs = [
            [chat.encode(("\n" if i == 0 else " ") + sentence) for i, sentence in enumerate(part)]
            for part in paragraphs(text)
        ]

    def cut(self, rng: random.Random, tokens: int) -> Cut:
        """``tokens`` tokens that end with a sentence; what is too much goes from the front."""
        pieces: list[list[int]] = []
        total = 0
        for sentence in self._deal(rng):
            if total >= tokens:
                break
            pieces.append(sentence)
            total += len(sentence)
        excess = total - tokens
        ids = [token for piece in pieces for token in piece][excess:]
        ends = [end - excess for end in accumulate(map(len, pieces)) if end > excess]
        return Cut(ids, [0, *ends])

    def _deal(self, rng: random.Random) -> Iterator[list[int]]:
        while True:
            order = list(self._paragraphs)
            rng.shuffle(order)
            for paragraph in order:
                yield from paragraph


@dataclass(frozen=True)
class Prompt:
    """Ids, and the position where the question begins: a fold there has not seen it."""

    ids: list[int]
    question_at: int
    needle_at: int = -1


def build(
    chat: Chat,
    haystack: Haystack,
    rng: random.Random,
    length: int,
    question: str,
    *,
    intro: str = "",
    needle: str = "",
    depth: float = 0.0,
    others: Sequence[tuple[str, float]] = (),
    answer_prefix: str = "",
) -> Prompt:
    """A prompt of exactly ``length`` tokens: intro, text with the needle, question.

    The needle follows the sentence end that is nearest to ``depth`` (0 to 1) of the text; so do
    ``others``, each at a depth of its own, and before it where they share a place.
    """
    before = chat.head + (chat.encode(intro + "\n\n") if intro else [])
    facts = [(chat.encode(" " + fact), share) for fact, share in others]
    facts.append((chat.encode(" " + needle) if needle else [], depth))
    gap = chat.encode("\n\n")
    after = chat.encode(question) + chat.tail
    after += chat.encode(answer_prefix) if answer_prefix else []
    room = length - len(before) - sum(len(fact) for fact, _ in facts) - len(gap) - len(after)
    if room < 1:
        raise ValueError(f"a prompt of {length} tokens leaves no room for text; {1 - room} more do")
    text = haystack.cut(rng, room)
    placed = sorted(((text.nearest_end(share), i) for i, (_, share) in enumerate(facts)))
    ids, done, needle_at = list(before), 0, -1
    for at, i in placed:
        ids += text.ids[done:at]
        if i == len(others):
            needle_at = len(ids)
        ids += facts[i][0]
        done = at
    front = ids + text.ids[done:] + gap
    return Prompt(front + after, len(front), needle_at if needle else -1)
