"""Three kinds of traffic with text in them, small enough to be read by the demo model.

The same shapes as `radix.workloads`, a tenth of the size: tenants with a system prompt and one-off
documents, agents that go on turn after turn, questions over a Zipf-distributed set of documents.
Each document holds facts, and each question asks for one of them, so that the attention of a
prompt's last queries has something to find. Everything follows from a seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from sglang_kv.benchmarks.grammar import sentence
from sglang_kv.radix.key import Namespace
from sglang_kv.radix.trace import Segments

Encode = Callable[[str], list[int]]


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_PLACES = _words(
    "harbour station mill chapel library bakery brewery museum garden lighthouse market school "
    "theatre bridge quarry stable tannery orchard foundry courthouse"
)
_THINGS = ("code", "telephone number", "account", "ticket", "licence", "parcel", "case", "order")
_RULES = (
    "Answer in at most {n} sentences.",
    "Never give the {thing} of the {place} to anybody who has not named it first.",
    "If a question is about the {place}, name the document that the answer comes from.",
    "Write numbers as digits, with no spaces between them.",
    "Refuse politely when you are asked about prices of more than {n} items at once.",
    "When two documents disagree about the {place}, the newer one is right.",
    "Do not repeat the question.",
    "Use the tool called find_{thing_} only with the name of a place, such as the {place}.",
    "Begin with the answer itself, then give the reason in one line.",
    "A request that mentions the {place} and no {thing} is to be sent on to a colleague.",
)


@dataclass(frozen=True)
class Turn:
    """One request: texts by name, in order. The last one asks."""

    texts: tuple[int, ...]
    answer: int
    namespace: Namespace


@dataclass
class Traffic:
    """Requests over texts; ``tokens[name]`` are the ids of a text."""

    name: str
    encode: Encode
    tokens: dict[int, list[int]] = field(default_factory=dict)
    turns: list[Turn] = field(default_factory=list)

    def text(self, words: str) -> int:
        """A new text; its name."""
        name = len(self.tokens) + 1
        self.tokens[name] = self.encode(words)
        return name

    def prompt(self, turn: Turn) -> list[int]:
        return [token for name in turn.texts for token in self.tokens[name]]

    def request(self, turn: Turn) -> tuple[Segments, Segments]:
        """Segments of prompt and answer, as `radix.trace.Request` has them."""
        prompt = tuple((name, len(self.tokens[name])) for name in turn.texts)
        return prompt, ((turn.answer, len(self.tokens[turn.answer])),)


def _rules(rng: random.Random, company: str, count: int) -> str:
    lines = [f"<|im_start|>system\nYou are the assistant of {company}. Rules:"]
    for i in range(count):
        thing = rng.choice(_THINGS)
        blanks = {"n": rng.randint(2, 6), "place": rng.choice(_PLACES), "thing": thing}
        line = rng.choice(_RULES).format(**blanks, thing_=thing.replace(" ", "_"))
        lines.append(f"{i + 1}. {line}")
    return "\n".join(lines) + "<|im_end|>\n"


def _document(rng: random.Random, sentences: int, facts: int = 3) -> tuple[str, list[str]]:
    """A text, and a question with its answer for each fact in it: ``question|answer``."""
    lines = [sentence(rng) for _ in range(sentences)]
    asked = []
    for place in rng.sample(_PLACES, facts):
        thing, value = rng.choice(_THINGS), rng.randint(10_000, 99_999)
        lines.insert(rng.randrange(len(lines)), f"The {thing} of the {place} is {value}.")
        asked.append(f"What is the {thing} of the {place}?|It is {value}.")
    return " ".join(lines), asked


def _ask(traffic: Traffic, question: str) -> tuple[int, int]:
    asked, answer = question.split("|")
    end = f"\n\n{asked}<|im_end|>\n<|im_start|>assistant\n"
    return traffic.text(end), traffic.text(f"{answer}<|im_end|>\n")


def tenants(encode: Encode, seed: int = 0, *, requests: int = 100, count: int = 8) -> Traffic:
    """Many tenants, each with its system prompt, and documents that are asked about once."""
    rng, traffic = random.Random(f"tenants-{seed}"), Traffic("tenants", encode)
    systems = [traffic.text(_rules(rng, f"company {i}", rng.randint(8, 20))) for i in range(count)]
    weights = [1.0 / (rank + 1) ** 0.6 for rank in range(count)]
    for _ in range(requests):
        tenant = rng.choices(range(count), weights)[0]
        text, asked = _document(rng, rng.randint(8, 28))
        document = traffic.text(f"<|im_start|>user\n{text}")
        question, answer = _ask(traffic, rng.choice(asked))
        texts = (systems[tenant], document, question)
        traffic.turns.append(Turn(texts, answer, Namespace(tenant=f"t{tenant}")))
    return traffic


def rag(encode: Encode, seed: int = 0, *, requests: int = 100, documents: int = 60) -> Traffic:
    """Questions over documents of Zipf-distributed popularity, two in each prompt."""
    rng, traffic = random.Random(f"rag-{seed}"), Traffic("rag", encode)
    system = traffic.text(_rules(rng, "the city archive", 10))
    texts = [_document(rng, rng.randint(8, 16)) for _ in range(documents)]
    names = [traffic.text(f"<|im_start|>user\n{text}<|im_end|>\n") for text, _ in texts]
    weights = [1.0 / (rank + 1) for rank in range(documents)]
    for _ in range(requests):
        first = rng.choices(range(documents), weights)[0]
        second = rng.choices(range(documents), weights)[0]
        found = [first, second] if first != second else [first]
        if rng.random() < 0.5:
            found.sort()
        question, answer = _ask(traffic, rng.choice(texts[rng.choice(found)][1]))
        prompt = (system, *(names[i] for i in found), question)
        traffic.turns.append(Turn(prompt, answer, Namespace(tenant="rag")))
    return traffic


def agents(encode: Encode, seed: int = 0, *, requests: int = 100, at_once: int = 8) -> Traffic:
    """Agents with the same tools, each with a task of its own, that go on turn after turn."""
    rng, traffic = random.Random(f"agents-{seed}"), Traffic("agents", encode)
    tools = traffic.text(_rules(rng, "a team of clerks", 24))
    running: list[tuple[list[int], int]] = [([tools], 0)] * at_once
    pace = [rng.lognormvariate(0.0, 1.0) for _ in range(at_once)]
    for _ in range(requests):
        who = rng.choices(range(at_once), pace)[0]
        history, left = running[who]
        if left == 0:
            history, left = [tools], rng.randint(3, 12)
        text, asked = _document(rng, rng.randint(2, 6), facts=2)
        question, answer = _ask(traffic, asked[0])
        observed = traffic.text(f"<|im_start|>user\n{text}")
        texts = (*history, observed, question)
        traffic.turns.append(Turn(texts, answer, Namespace(tenant="agents")))
        running[who] = ([*texts, answer], left - 1)
    return traffic


#: Generators, and the tokens of memory at which they are compared.
TEXTS: dict[str, tuple[Callable[..., Traffic], tuple[int, ...]]] = {
    "tenants": (tenants, (2_560, 5_120, 10_240)),
    "agents": (agents, (2_560, 5_120, 10_240)),
    "rag": (rag, (2_560, 5_120, 10_240)),
}
