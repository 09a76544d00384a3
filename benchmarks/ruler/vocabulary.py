"""Words for RULER's keys, lists and documents, all of them without a download."""

from __future__ import annotations

import random

from sglang_kv.benchmarks.needle import KEYS, WORDS


def _words(text: str) -> list[str]:
    return text.split()


ADJECTIVES = _words("""
    able ancient angry austere brave brief bright busy calm careful cheerful clever cloudy clumsy
    cold curious dusty eager early easy faithful famous fierce flat foamy fresh friendly frozen
    gentle grand happy hasty heavy hollow humble icy idle jolly keen kind large late lazy loud
    lucky merry mighty misty modern narrow nimble noisy odd patient plain polite proud quick rapid
    rough round rusty salty sandy sharp shy silent simple sleepy slow smooth soft solid spotless
    steady steep sturdy sudden sweet swift tall tame tender thin tidy tiny tough vague vast warm
    weary wide wild wise witty wooden young
""")
NOUNS = sorted({*KEYS, *WORDS})
GIVEN = _words("""
    Adela Bruno Celia Dario Edith Felix Greta Hugo Irene Jonas Klara Leon Mabel Nils Olga Pavel
    Rita Simon Thea Ulric Vera Walter Xenia Yorick Zelda Amos Beata Cyrus Dora Emil
""")
FAMILY = _words("""
    Abernat Bellweth Corrigad Dunmarsh Eldergat Farnholt Grimsbek Hartwend Iverlund Jaspering
    Kestrand Lombrock Marwick Norvale Ostergan Penhallo Quillham Rothmere Sandvort Tarnowel
    Umberly Vandersk Wexcombe Yardleth Zimmerol
""")
_SYLLABLES = _words("bar cal dor fen gal hol kin lor mer nor pel ros sel tor ven wal")
_ENDINGS = _words("burg dale ford ham mouth stead ton ville wick worth")
TOWNS = [a.capitalize() + b + c for a in _SYLLABLES for b in _SYLLABLES if a != b for c in _ENDINGS]
RIVERS = [a.capitalize() + b + "ne" for a in _SYLLABLES for b in _SYLLABLES if a != b]
TRADES = _words("""
    baker binder brewer carpenter cooper dyer engraver gardener glazier goldsmith hatter joiner
    mason miller painter potter printer sailor shepherd tailor tanner teacher weaver
""")


def phrases(rng: random.Random, count: int) -> list[str]:
    """So many different ``adjective-noun`` pairs."""
    most = len(ADJECTIVES) * len(NOUNS)
    if count > most:
        raise ValueError(f"{count} different keys were asked for, there are {most}")
    picked = rng.sample(range(most), count)
    return [f"{ADJECTIVES[i % len(ADJECTIVES)]}-{NOUNS[i // len(ADJECTIVES)]}" for i in picked]


def number(rng: random.Random) -> str:
    """Seven digits."""
    return str(rng.randrange(10**6, 10**7))


def uuid(rng: random.Random) -> str:
    """32 hexadecimal digits in the usual groups."""
    digits = f"{rng.getrandbits(128):032x}"
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))
