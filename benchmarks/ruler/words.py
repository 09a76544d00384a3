"""RULER's aggregation tasks: the words that occur most often."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from string import ascii_lowercase

from sglang_kv.benchmarks.generated import Question, Sample
from sglang_kv.benchmarks.ruler.vocabulary import ADJECTIVES, NOUNS, phrases

COMMON = 10
CWE_INTRO = (
    "Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often.\n"
)
CWE_QUESTION = f"Question: What are the {COMMON} most common words in the above list?"
CWE_PREFIX = f"Answer: The top {COMMON} words that appear most often in the list are:"
FWE_INTRO = (
    "Read the following coded text and track the frequency of each coded word. Find the three "
    "most frequently appeared coded words. "
)
FWE_QUESTION = (
    "Question: Do not provide any explanation. Please ignore the dots '....'. What are the three "
    "most frequently appeared words in the above coded text?"
)
FWE_PREFIX = (
    "Answer: According to the coded text above, the three most frequently appeared words are:"
)
NOISE_WORD = "..."
#: Below so many words, RULER repeats common ones 6 times and others once; above, 30 and 3 times.
SHORT = 400
#: fwe's words per vocabulary entry. RULER: a vocabulary of a fiftieth of the tokens.
WORDS_PER_ENTRY = 10
#: Fewer coded words than these would not tell the third from the fourth.
FEWEST = 60


def common_words(rng: random.Random, size: int, sentences: Sequence[str]) -> Sample:
    """cwe: a shuffled, numbered list of ``size`` words and `COMMON` that occur more often."""
    often, seldom = (30, 3) if size > SHORT else (6, 1)
    example_of = (30, 10, 3) if size > SHORT else (10, 3, 1)
    shown, shown_answers = _list(rng, *example_of)
    text, answers = _list(rng, max(1, size // seldom), often, seldom)
    example = "\n".join(
        (CWE_INTRO + shown, CWE_QUESTION, f"{CWE_PREFIX} {_numbered(shown_answers)}")
    )
    question = Question(CWE_QUESTION, CWE_PREFIX, tuple(answers))
    return Sample(f"{example}\n\n{CWE_INTRO}{text}", (question,))


def _list(rng: random.Random, others: int, often: int, seldom: int) -> tuple[str, list[str]]:
    plain = [*ADJECTIVES, *NOUNS]
    words = rng.sample(plain, min(len(plain), COMMON + others))
    words += phrases(rng, COMMON + others - len(words))
    common, rest = words[:COMMON], words[COMMON:]
    listed = common * often + rest * seldom
    rng.shuffle(listed)
    return _numbered(listed), common


def _numbered(words: list[str]) -> str:
    return " ".join(f"{i}. {word}" for i, word in enumerate(words, 1))


def frequent_words(rng: random.Random, size: int, sentences: Sequence[str]) -> Sample:
    """fwe: coded words whose counts follow a zeta distribution with alpha = 2.

    The most frequent "word" is noise; the answer is the next three.
    """
    size = max(size, FEWEST)
    entries = max(5, size // WORDS_PER_ENTRY)
    words: list[str] = []
    while len(words) < entries:
        word = "".join(rng.choices(ascii_lowercase, k=6))
        if word not in words:
            words.append(word)
    words[0] = NOISE_WORD
    zeta_2 = math.pi**2 / 6
    coded = [w for k, w in enumerate(words, 1) for _ in range(round(size / zeta_2 / k**2))]
    rng.shuffle(coded)
    question = Question(FWE_QUESTION, FWE_PREFIX, tuple(words[1:4]))
    return Sample(FWE_INTRO + " ".join(coded), (question,))
