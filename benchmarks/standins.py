"""Generated stand-ins for GSM8K and CNN/DailyMail, for claims on arithmetic and summaries.

They are not those data sets: the problems are of two steps and small numbers, the articles are of
invented facts. What they have in common with them is the shape: worked examples before a problem,
one number as its answer; an article whose three main facts make its summary, graded by ROUGE-L.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from sglang_kv.benchmarks.generated import Question, Sample, Task
from sglang_kv.benchmarks.grammar import sentence
from sglang_kv.benchmarks.longbench.rouge import rouge_l
from sglang_kv.benchmarks.needle import KEYS
from sglang_kv.benchmarks.ruler.vocabulary import FAMILY, GIVEN, RIVERS, TOWNS, TRADES


def arithmetic(rng: random.Random, size: int, sentences: Sequence[str]) -> Sample:
    """``size`` worked problems, then one to solve."""
    shown = [_problem(rng) for _ in range(size)]
    ask, _, result = _problem(rng)
    examples = "\n\n".join(f"Question: {asked}\nAnswer: {steps}" for asked, steps, _ in shown)
    intro = "Solve each problem in two steps, as the examples do.\n\n"
    return Sample(intro + examples, (Question(f"Question: {ask}", "Answer:", (str(result),)),))


def _problem(rng: random.Random) -> tuple[str, str, int]:
    """Problem, worked answer, result."""
    name, other = rng.sample(GIVEN, 2)
    thing = rng.choice(KEYS)
    have, more, less = rng.randint(11, 60), rng.randint(2, 30), rng.randint(2, 9)
    if rng.random() < 0.5:
        ask = (
            f"{name} has {have} {thing}s. {other} gives {name} {more} more, and then {name} loses "
            f"{less}. How many {thing}s does {name} have now?"
        )
        total = have + more
        result = total - less
        steps = f"{have} + {more} = {total}. {total} - {less} = {result}."
    else:
        boxes = rng.randint(2, 9)
        ask = (
            f"{name} packs {boxes} boxes with {less} {thing}s in each, and {more} {thing}s are "
            f"left over. How many {thing}s are there?"
        )
        total = boxes * less
        result = total + more
        steps = f"{boxes} * {less} = {total}. {total} + {more} = {result}."
    return ask, f"{steps} The answer is {result}.", result


def final_number(answers: Sequence[str], said: str) -> float:
    """GSM8K's measure: the number after "answer is", or else the last one."""
    said = said.split("Question:")[0]
    told = re.search(r"answer is:?\s*(-?\d+)", said)
    numbers = re.findall(r"-?\d+", said)
    result = told[1] if told else numbers[-1] if numbers else ""
    return float(result == answers[0])


def summary(rng: random.Random, size: int, sentences: Sequence[str]) -> Sample:
    """An article: three facts, spread over ``size`` sentences of no account."""
    name = f"{rng.choice(GIVEN)} {rng.choice(FAMILY)}"
    town, river, trade = rng.choice(TOWNS), rng.choice(RIVERS), rng.choice(TRADES)
    hurt, days = rng.randint(3, 90), rng.randint(2, 30)
    facts = [
        f"The {trade} {name} was elected mayor of {town} on Sunday.",
        f"A flood of the {river} had left {hurt} families of {town} without a home.",
        f"{name} promised that the bridge would be open again in {days} days.",
    ]
    places = [0, *sorted(rng.randint(1, max(1, size)) for _ in facts[1:])]
    text = [sentence(rng) for _ in range(size)]
    for place, fact in reversed(list(zip(places, facts, strict=True))):
        text.insert(place, fact)
    ask = "Summarize the article in three sentences: what are the news?"
    article = "The following is an article.\n\n" + " ".join(text)
    return Sample(article, (Question(ask, "", (" ".join(facts),)),))


def best_rouge_l(answers: Sequence[str], said: str) -> float:
    return max(rouge_l(said, answer) for answer in answers)


_ALL = [
    Task("arithmetic_standin", arithmetic, 48, final_number),
    Task("summary_standin", summary, 96, best_rouge_l),
]
TASKS: dict[str, Task] = {task.name: task for task in _ALL}
