"""Generated tasks as prompts that just fit a length: a text, and questions on it.

What a task is made of, and the search for the size at which prompt and answer fill the length.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from sglang_kv.benchmarks.graded import Case
from sglang_kv.benchmarks.prompts import Chat, paragraphs


@dataclass(frozen=True)
class Question:
    """What is asked after the text; the answer begins with ``prefix``."""

    text: str
    prefix: str
    answers: tuple[str, ...]


@dataclass(frozen=True)
class Sample:
    """A text and the questions on it."""

    context: str
    questions: tuple[Question, ...]


#: ``(rng, size, sentences) -> Sample``: more ``size``, longer text; ``sentences`` are the essay's.
Maker = Callable[[random.Random, int, Sequence[str]], Sample]


@dataclass(frozen=True)
class Task:
    """A kind of sample, and how an answer is graded: ``metric(answers, said)``, 0 to 1."""

    name: str
    make: Maker
    max_new_tokens: int
    metric: Callable[[Sequence[str], str], float]


def make_cases(
    chat: Chat,
    text: str,
    tasks: Iterable[Task],
    lengths: Iterable[int],
    samples: int,
    seed: int,
    *,
    questions: int = 1,
    limit: int | None = None,
) -> list[Case]:
    """Sample by sample, so that a limit leaves a smaller whole set.

    A prompt and its answer have at most ``length`` tokens together. Up to ``questions`` are asked
    of one text, where the task has more than one.
    """
    sentences = [sentence for part in paragraphs(text) for sentence in part]
    if not sentences:
        raise ValueError("the text has no paragraph that ends with a sentence")
    wanted = [(number, n, task) for number in range(samples) for n in lengths for task in tasks]
    sizes: dict[tuple[str, int], int] = {}
    cases: list[Case] = []
    for number, length, task in wanted[:limit]:
        name = f"{task.name}-{length}-{number}-seed{seed}"
        start = sizes.get((task.name, length))
        sample, sizes[task.name, length] = _fitted(chat, task, length, name, sentences, start)
        front = chat.head + chat.encode(sample.context + "\n\n")
        for i, question in enumerate(sample.questions[:questions]):
            cases.append(
                Case(
                    id=f"{name}-q{i}",
                    prompt_ids=front + _after(chat, question),
                    fold_at=len(front),
                    max_new_tokens=task.max_new_tokens,
                    task=task.name,
                    length=length,
                    context=name,
                    answers=question.answers,
                    grade=partial(task.metric, question.answers),
                )
            )
    return cases


def _after(chat: Chat, question: Question) -> list[int]:
    return chat.encode(question.text) + chat.tail + chat.encode(question.prefix)


def _fitted(
    chat: Chat, task: Task, length: int, name: str, sentences: Sequence[str], start: int | None
) -> tuple[Sample, int]:
    """The largest sample that fits, or nearly; or from what fitted one before it, down."""
    best: Sample | None = None

    def over(size: int) -> int:
        """Tokens beyond the length; what is not is the best so far."""
        nonlocal best
        sample = task.make(random.Random(name), size, sentences)
        longest = max(len(_after(chat, question)) for question in sample.questions)
        used = len(chat.head) + len(chat.encode(sample.context + "\n\n")) + longest
        if used + task.max_new_tokens <= length:
            best = sample
        return used + task.max_new_tokens - length

    size = start
    while size is not None and size >= 1:
        if over(size) <= 0:
            assert best is not None
            return best, size
        size -= max(1, size // 100)
    low, at_low = 1, over(1)
    if best is None:
        raise ValueError(f"{task.name}: its shortest prompt does not fit {length} tokens")
    high, at_high = 2, over(2)
    while at_high <= 0:
        low, at_low = high, at_high
        high *= 2
        at_high = over(high)
    # Tokens grow with the size on a line, nearly.
    for _ in range(12):
        if high - low <= max(1, low // 200):
            break
        guess = low + int((high - low) * -at_low / (at_high - at_low))
        size = min(max(guess, low + 1), high - 1)
        if (beyond := over(size)) <= 0:
            low, at_low = size, beyond
        else:
            high, at_high = size, beyond
    return best, low
