"""RULER's tasks, needles of several kinds, stand-ins: what is asked can be answered from the text.

No server: answers are found again by reading the prompt, not by asking the generator.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_kv.benchmarks import (
    attention_mass,
    graded,
    grammar,
    intervals,
    needle,
    prompts,
    quality,
    standins,
)
from sglang_kv.benchmarks.arms import FULL, Arm
from sglang_kv.benchmarks.common import wilson
from sglang_kv.benchmarks.generated import make_cases
from sglang_kv.benchmarks.prompts import Chat, Haystack, paragraphs
from sglang_kv.benchmarks.ruler import vocabulary
from sglang_kv.benchmarks.ruler.tasks import TASKS, string_match_all, string_match_part

LENGTH = 1024
TEXT = grammar.grammar_text(2000)


@pytest.fixture(scope="module")
def chat(demo_model: Path) -> Chat:
    return Chat.load(str(demo_model))


@pytest.fixture(scope="module")
def cases(chat: Chat) -> dict[str, list[graded.Case]]:
    every = [*TASKS.values(), *standins.TASKS.values()]
    made = make_cases(chat, TEXT, every, [LENGTH], 2, 3, questions=3)
    return {task.name: [case for case in made if case.task == task.name] for task in every}


def parts(chat: Chat, case: graded.Case) -> tuple[str, str]:
    """The text, and what follows the fold."""
    ids, at = case.prompt_ids, case.fold_at
    return chat.decode(ids[:at]), chat.decode(ids[at:])


def test_the_13_tasks_fit_their_length(cases: dict[str, list[graded.Case]]) -> None:
    assert len(TASKS) == 13
    for task, found in cases.items():
        assert found, task
        used = [len(case.prompt_ids) + case.max_new_tokens for case in found]
        assert max(used) <= LENGTH, task
        assert max(used) > 0.88 * LENGTH, task  # and fill it
        assert len({case.id for case in found}) == len(found)
        # Several questions are asked of one text, and share it to the token.
        for case in found:
            first = next(other for other in found if other.context == case.context)
            assert case.prompt_ids[: case.fold_at] == first.prompt_ids[: first.fold_at]
    several = {t for t, found in cases.items() if len(found) == 6}
    assert several == {f"niah_multikey_{i}" for i in (1, 2, 3)} | {"qa_1", "qa_2"}


def test_needles_answer_their_question(chat: Chat, cases: dict[str, list[graded.Case]]) -> None:
    wanted = {"niah_multivalue": 4, "niah_multiquery": 4}
    stand = {"niah_multikey_1": 4, "niah_multivalue": 4, "niah_multiquery": 4}
    for task in (name for name in TASKS if name.startswith("niah")):
        for case in cases[task]:
            text, after = parts(chat, case)
            needles = re.findall(r"One of the special magic \w+ for (\S+) is: (\S+)\.", text)
            asked = re.search(r"for (.+) mentioned", after)
            assert asked is not None
            keys = re.findall(r"[\w-]+-[\w-]+", asked[1].replace(", and", ","))
            assert sorted(v for k, v in needles if k in keys) == sorted(case.answers)
            assert len(case.answers) == wanted.get(task, 1)
            many = task in ("niah_multikey_2", "niah_multikey_3")
            assert len(needles) > 7 if many else len(needles) == stand.get(task, 1)
            assert case.grade(", ".join(case.answers)) == 1.0
            assert case.grade("nothing") == 0.0


def test_chains_lead_to_their_variables(chat: Chat, cases: dict[str, list[graded.Case]]) -> None:
    for case in cases["vt"]:
        text, after = parts(chat, case)
        asked = re.search(r"value (\d+)", after)
        assert asked is not None
        value: dict[str, str] = {}
        for name, source in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", text):
            value[name] = value.get(source, source)  # in order: a name stands before its use
        assert [n for n, v in value.items() if v == asked[1]] == list(case.answers)
        assert len(case.answers) == 5
        assert case.grade(" ".join(case.answers[:2])) == 0.4


def test_frequent_words_are_the_most_frequent(
    chat: Chat, cases: dict[str, list[graded.Case]]
) -> None:
    for case in cases["cwe"]:
        text = parts(chat, case)[0].rsplit("Memorize the ones", 1)[1]
        words = Counter(re.findall(r"\d+\. (\S+)", text))
        assert {word for word, _ in words.most_common(10)} == set(case.answers)
        assert {words[word] for word in case.answers} == {6}
        assert all(n == 1 for word, n in words.items() if word not in case.answers)
    for case in cases["fwe"]:
        words = Counter(parts(chat, case)[0].split("coded words. ")[-1].split())
        (dots, most), *others = words.most_common(5)
        assert dots == "..."
        assert tuple(word for word, _ in others[:3]) == case.answers
        # Zeta with alpha = 2: rank k has 1 / k^2 of the first one's.
        assert all(abs(n - most / k**2) < 1 for k, (_, n) in enumerate(others, 2))


def test_facts_answer_their_questions(chat: Chat, cases: dict[str, list[graded.Case]]) -> None:
    for task in ("qa_1", "qa_2"):
        for case in cases[task]:
            text, after = parts(chat, case)
            asked = re.search(r"(?:was|which) (\w+ \w+) (?:was )?born", after)
            assert asked is not None
            town = re.search(rf"{asked[1]} was born in (\w+)", text)
            assert town is not None
            answer = town[1]
            if task == "qa_2":
                river = re.search(rf"{answer} is a small town on the river (\w+)", text)
                assert river is not None
                answer = river[1]
            assert case.answers == (answer,)


def test_problems_come_out(chat: Chat, cases: dict[str, list[graded.Case]]) -> None:
    for case in cases["arithmetic_standin"]:
        text, after = parts(chat, case)
        for a, sign, b, c in re.findall(r"(\d+) ([-+*]) (\d+) = (\d+)", text):
            assert {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[sign] == int(
                c
            )
        x, y, z = map(int, re.findall(r"\d+", after))
        assert case.answers == (str(x + y - z if "loses" in after else x * y + z),)
        assert case.grade(f"{x} + 1 = 2. The answer is {case.answers[0]}. Question: 7") == 1.0
        assert case.grade("The answer is 12345.") == 0.0
    for case in cases["summary_standin"]:
        facts = [fact + "." for fact in case.answers[0].rstrip(".").split(". ")]
        assert all(fact in parts(chat, case)[0] for fact in facts)
        assert 0.3 < case.grade(facts[0]) < case.grade(case.answers[0]) == pytest.approx(1.0)


def test_rulers_metrics() -> None:
    assert string_match_all(["Red", "blue"], "it is RED") == 0.5
    assert string_match_part(["Red", "blue"], "it is RED") == 1.0
    assert string_match_part(["Red"], "green") == 0.0


def test_needles_of_several_numbers(chat: Chat) -> None:
    made = needle.make_cases(
        chat, Haystack(chat, TEXT), [700], [0.0, 1.0], 1, 5, kinds=needle.MULTIPLE
    )
    for case in made:
        text, after = parts(chat, case)  # type: ignore[arg-type]
        stand = re.findall(r"magic number for (\w+) is: (\d+)", text)
        assert len(stand) == 4
        asked = [value for key, value in stand if re.search(rf"\b{key}\b", after)]
        assert sorted(asked) == sorted(case.values)
        assert len(case.prompt_ids) == 700
        first = text.index(case.values[0]) / len(text)
        assert first < 0.3 if case.depth == 0.0 else first > 0.7
        assert needle.hit(case.values, " ".join(case.values))
        assert not needle.hit(case.values, " ".join(case.values[1:]))


def test_the_vocabulary_and_the_grammar() -> None:
    words = [*vocabulary.ADJECTIVES, *vocabulary.NOUNS]
    assert len(words) == len(set(words))
    text = TEXT.lower()
    assert not [word for word in (*needle.KEYS, *needle.WORDS) if word in text]
    assert grammar.grammar_text(2000) == TEXT
    sentences = [s for part in paragraphs(TEXT) for s in part]
    assert len(set(sentences)) > 0.95 * len(sentences)
    with pytest.raises(ValueError, match="different keys"):
        vocabulary.phrases(random.Random(0), 10**6)


def test_without_the_demo_the_text_is_the_grammars(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert prompts.text_name() == prompts.STORY.name
    monkeypatch.setattr(prompts, "STORY", tmp_path / "none")
    assert prompts.text_name() == "grammar"
    assert prompts.load_text() == grammar.grammar_text()


# Grades and intervals


def test_intervals_draw_whole_contexts() -> None:
    right = {str(i): [1.0] for i in range(10)}
    assert intervals.interval(right) == wilson(10, 10)
    assert intervals.interval({"one": [0.5, 1.0]}) is None
    mixed = {str(i): [i / 20] for i in range(20)}
    low, high = intervals.interval(mixed) or (0, 0)
    # The normal approximation of the same mean.
    spread = 1.96 * (sum((i / 20 - 0.475) ** 2 for i in range(20)) / 19 / 20) ** 0.5
    assert (low, high) == pytest.approx((0.475 - spread, 0.475 + spread), abs=0.02)
    # Four questions to a context that say the same are no more evidence than one.
    copied = {name: group * 4 for name, group in mixed.items()}
    assert intervals.interval(copied) == [low, high]
    shifted = {name: [x - 0.1 for x in group] for name, group in mixed.items()}
    assert intervals.interval_of_difference(shifted, mixed) == pytest.approx([-0.1, -0.1])
    average = intervals.interval_of_average([mixed, right])
    assert average is not None
    assert (average[0] + average[1]) / 2 == pytest.approx((0.475 + 1) / 2, abs=0.02)


def test_a_task_that_the_full_cache_cannot_do_is_not_in_the_average() -> None:
    def case(task: str, i: int) -> graded.Case:
        name = f"{task}-{i}"
        return graded.Case(name, [1], 1, 1, task, 64, name, ("x",), float)

    made = [case(task, i) for task in ("easy", "hard") for i in range(4)]
    full = [graded.Answer(c.id, "aware", float(c.task == "easy" or c.id == "hard-0")) for c in made]
    arm = [graded.Answer(c.id, "aware", float(c.id in ("easy-1", "hard-2")), 0.5) for c in made]
    row = graded.summarize(made, arm, full)
    assert [(c["task"], c["able"]) for c in row["cells"]] == [("easy", True), ("hard", False)]
    (average,) = row["summary"]
    assert average["score"] == 0.25
    assert (average["tasks"], average["left_out"], average["n"]) == (["easy"], ["hard"], 4)
    assert row["cells"][1]["score"] == 0.25
    assert row["cells"][0]["difference"] == -0.75


class Answering:
    """An `Asker` that answers from a function of the case's name, the policy and the column."""

    def __init__(self, chat: Chat, said: Callable[[str, dict[str, Any]], str]):
        self.chat, self.said, self.asked = chat, said, []  # type: ignore[var-annotated]

    def start(self, label: str, total: int) -> None:
        self.total = total

    def __call__(self, what: str, body: dict[str, Any], reduce: Any) -> dict[str, Any]:
        policy = body["sampling_params"]["custom_params"]["kv_compression"]
        self.asked.append((what, body["input_ids"], policy))
        return {"output_ids": self.chat.encode(self.said(what, policy)), "memory": 0.5}


def test_all_arms_answer_with_the_question_seen_and_not(
    chat: Chat, cases: dict[str, list[graded.Case]]
) -> None:
    """Three questions to one text: the fold is at the same place, before each of them."""
    made = cases["niah_multikey_1"]
    by_id = {case.id: case for case in made}

    def said(what: str, policy: dict[str, Any]) -> str:
        return "" if policy.get("fold_at") else by_id[what.split()[-1]].answers[0]

    ask = Answering(chat, said)
    arms = [Arm(FULL, {"method": FULL}), Arm("once", {"method": "snapkv", "keep_ratio": 0.25})]
    found = graded.by_arm(made, graded.run(ask, chat, "ruler", made, arms))  # type: ignore[arg-type]
    assert ask.total == len(ask.asked) == 3 * len(made)
    folded = [
        (ids[: policy["fold_at"]], ids) for _, ids, policy in ask.asked if "fold_at" in policy
    ]
    assert len({tuple(text) for text, _ in folded}) == 2  # two texts
    assert len({tuple(ids) for _, ids in folded}) == len(made)
    assert [(c["column"], c["score"], c["n"], c["contexts"]) for c in found["once"]["cells"]] == [
        ("agnostic", 0.0, 6, 2),
        ("aware", 1.0, 6, 2),
    ]
    assert [(c["column"], c["score"]) for c in found["once"]["summary"]] == [
        ("agnostic", 0.0),
        ("aware", 1.0),
    ]
    assert found[FULL]["memory"] == 0.5


def test_ruler_cases_for_another_engine(
    chat: Chat,
    demo_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file, results = tmp_path / "cases.jsonl", tmp_path / "results.jsonl"
    monkeypatch.setattr(Chat, "load", classmethod(lambda cls, model: chat))
    flags = ["--model", str(demo_model), "--suite", "ruler", "--tasks", "niah_single_1,vt"]
    flags += ["--lengths", "512", "--samples", "2", "--results", str(results)]
    quality.main([*flags, "--dump-cases", str(file)])
    dumped = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(dumped) == 4
    said = tmp_path / "said.jsonl"
    half = [{"id": c["id"], "output_ids": chat.encode(" ".join(c["answers"][:2]))} for c in dumped]
    said.write_text("".join(json.dumps(line) + "\n" for line in half))
    quality.main([*flags, "--score-answers", f"theirs={said}"])
    (row,) = [json.loads(line) for line in results.read_text().splitlines()]
    assert {c["task"]: c["score"] for c in row["cells"]} == {"niah_single_1": 1.0, "vt": 0.4}
    printed = capsys.readouterr().out
    assert "| vt x | 2 (2) | 40.0 |" in printed
    assert "| average of 1 | 2 | **100.0** |" in printed
    for wrong, named in (
        (["--tasks", "niah_single_9"], "--tasks: niah_single_9"),
        (["--lengths", "x"], "--lengths: expected numbers"),
        (["--suite", "longbench"], "--longbench: missing"),
        (["--questions", "0"], "--questions: must be at least 1"),
        (["--lengths", "64", "--dump-cases", str(file)], "does not fit 64 tokens"),
    ):
        with pytest.raises(SystemExit):
            quality.main([*flags, *wrong])
        assert named in capsys.readouterr().err


def test_attention_mass_by_hand() -> None:
    """Ten tokens, two heads: one looks at t_0 only, one evenly at all that it sees."""
    first, even = torch.zeros(10, 10), torch.ones(10, 10).tril()
    first[:, 0] = 1.0
    even /= even.sum(-1, keepdim=True)
    found = attention_mass.masses(torch.stack([first, even]))
    seen = range(6, 11)
    assert found["first_4"] == pytest.approx((1 + sum(4 / n for n in seen) / 5) / 2)
    # Of n tokens, the nearest whole number from 20 % on: 2 each.
    assert found["top_20_of_query"] == pytest.approx((1 + sum(2 / n for n in seen) / 5) / 2)
    received = [sum(1 / n for n in range(j + 1, 11)) for j in range(10)]
    assert found["top_20"] == pytest.approx((1 + sum(received[:2]) / 10) / 2)
