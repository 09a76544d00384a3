"""A long English text out of a seeded grammar: the haystack where no text file is at hand.

Sentences are plain and true to no story, so that nothing in them answers a question, and none of
the words that needles are made of (`needle.KEYS`, `needle.WORDS`) occur.
"""

from __future__ import annotations

import random
from functools import cache


def _choices(text: str) -> list[str]:
    return text.split("|")


_WHO = _choices(
    "the clerk|an old farmer|the young teacher|a retired captain|the postman|her neighbour|"
    "the miller's wife|a travelling painter|the night watchman|our doctor|the carpenter|"
    "a quiet student|the gardener|the village council|my uncle|the ferryman|a tired nurse|"
    "the librarian|an honest merchant|the new tenant"
)
_DID = _choices(
    "walked slowly past|looked twice at|wrote a long letter about|asked nobody about|"
    "had never cared for|remembered the smell of|made a drawing of|paid too much for|"
    "was afraid of|told a story about|kept a careful account of|carried home|"
    "would not speak of|dreamed again of|spent a whole week on|had forgotten|"
    "stood a long while before|laughed at|repaired|measured"
)
_WHAT = _choices(
    "the broken fence|a box of old papers|the road to the coast|the clock above the door|"
    "the winter coat|a field of barley|the empty house on the corner|a loaf of rye bread|"
    "the price of salt|the bell of the chapel|a narrow staircase|the debts of the year before|"
    "the stone bridge|a pair of worn boots|the wine from the south|the map on the wall|"
    "an unpaid bill|the rules of the school|a small boat|the letters of the alphabet"
)
_WHEN = _choices(
    "in the spring|before the rain came|on most evenings|during the long winter|"
    "after the fair|at the end of the month|when the lamps were lit|early in the day|"
    "while the others slept|in those years|on the last day of harvest|without any hurry"
)
_WHY = _choices(
    "because there was nothing else to do|though nobody had asked for it|"
    "as people in that part of the country do|and thought no more about it|"
    "which surprised everyone at the table|since the work had to be done by somebody|"
    "for reasons that were never written down|and so the matter rested|"
    "as if it were the most natural thing|but it made no difference in the end|"
    "until the light was gone|and the dog followed at a distance"
)
_SHAPES = (
    "{who} {did} {what} {when}",
    "{when}, {who} {did} {what}",
    "{who} {did} {what}, {why}",
    "{when}, {who} {did} {what}, {why}",
    "{who} {did} {what}, and {who2} {did2} {what2}",
    "it was {when} that {who} {did} {what}",
    "{who} said that {who2} {did} {what} {when}, {why}",
)


def sentence(rng: random.Random) -> str:
    """One sentence, with its full stop."""
    who, who2 = rng.sample(_WHO, 2)
    did, did2 = rng.sample(_DID, 2)
    what, what2 = rng.sample(_WHAT, 2)
    parts = {"who": who, "who2": who2, "did": did, "did2": did2, "what": what, "what2": what2}
    line = rng.choice(_SHAPES).format(**parts, when=rng.choice(_WHEN), why=rng.choice(_WHY))
    return line[0].upper() + line[1:] + "."


@cache
def grammar_text(words: int = 20_000, seed: int = 0) -> str:
    """At least so many words, a paragraph of three to eight sentences per line."""
    rng = random.Random(f"grammar-{seed}")
    lines: list[str] = []
    count = 0
    while count < words:
        lines.append(" ".join(sentence(rng) for _ in range(rng.randint(3, 8))))
        count += len(lines[-1].split())
    return "\n".join(lines) + "\n"
