"""What suites of graded answers share: cases, asking all arms, averages over what is possible.

A grade is between 0 and 1. A task that the model cannot do with its full cache tests no policy:
it is run and shown, marked, and kept out of the averages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sglang_kv.benchmarks.arms import FULL, Arm, Asker, fan_out
from sglang_kv.benchmarks.intervals import (
    Groups,
    interval,
    interval_of_average,
    interval_of_difference,
    mean,
)
from sglang_kv.benchmarks.needle import COLUMNS
from sglang_kv.benchmarks.prompts import Chat
from sglang_kv.benchmarks.server import generate_body

#: From this mean grade of the full cache on, a task counts in averages.
ABLE_FROM = 0.5


@dataclass(frozen=True)
class Case:
    """One prompt, and how its answer is graded.

    Cases of one ``context`` share the prompt up to ``fold_at``: in the agnostic column they are
    several questions to one compressed text.
    """

    id: str
    prompt_ids: list[int]
    fold_at: int
    max_new_tokens: int
    task: str
    length: int
    context: str
    answers: tuple[str, ...]
    grade: Callable[[str], float] = field(compare=False)

    def to_json(self) -> dict[str, Any]:
        """All but the grading, for an engine of another kind."""
        return {k: v for k, v in self.__dict__.items() if k != "grade"}


@dataclass(frozen=True)
class Answer:
    """The grade of one arm's answer; ``memory`` is the share of the KV bytes that it kept."""

    case: str
    column: str
    score: float
    memory: float | None = None


def run(
    ask: Asker, chat: Chat, label: str, cases: Sequence[Case], arms: list[Arm], parallel: int = 1
) -> dict[str, list[Answer]]:
    """Every case with every arm, all arms of a case in turn: they share its dense prefix."""
    plan = [(arm, column) for arm in arms for column in COLUMNS if arm.has(column)]

    def one(case: Case) -> list[tuple[str, Answer]]:
        found = []
        for arm, column in plan:
            policy = arm.policy if column == "aware" else arm.at(case.fold_at)
            body = generate_body(case.prompt_ids, policy, max_new_tokens=case.max_new_tokens)
            got = ask(f"{label} {arm.name} {column} {case.id}", body, lambda raw: {})
            grade = case.grade(chat.decode(got["output_ids"]))
            found.append((arm.name, Answer(case.id, column, grade, got["memory"])))
        return found

    ask.start(label, len(cases) * len(plan))
    answers: dict[str, list[Answer]] = {arm.name: [] for arm in arms}
    for found in fan_out(one, cases, parallel):
        for name, answer in found:
            answers[name].append(answer)
    return answers


def score_answers(
    chat: Chat, cases: Iterable[Case], lines: Iterable[dict[str, Any]], column: str = "aware"
) -> list[Answer]:
    """Answers of an outside engine, ``{id, output_ids}`` each (``column`` if not aware)."""
    by_id = {case.id: case for case in cases}
    answers = []
    for line in lines:
        if line["id"] not in by_id:
            raise ValueError(f"{line['id']}: not a case of these tasks, lengths, samples and seed")
        grade = by_id[line["id"]].grade(chat.decode(list(line["output_ids"])))
        answers.append(Answer(line["id"], line.get("column", column), grade))
    return answers


def summarize(
    cases: Sequence[Case],
    answers: Sequence[Answer],
    full: Sequence[Answer],
    able_from: float = ABLE_FROM,
) -> dict[str, Any]:
    """Mean grades by task and length, beside the full cache's; averages over able tasks."""
    by_id = {case.id: case for case in cases}
    dense = {answer.case: answer.score for answer in full}
    parts: dict[tuple[str, str, int], list[Answer]] = {}
    for answer in answers:
        case = by_id[answer.case]
        parts.setdefault((answer.column, case.task, case.length), []).append(answer)
    cells: list[dict[str, Any]] = []
    able: dict[tuple[str, str, int], tuple[Groups, Groups]] = {}
    for (column, task, length), part in sorted(parts.items(), key=lambda item: item[0][0]):
        ours: dict[str, list[float]] = {}
        theirs: dict[str, list[float]] = {}
        for answer in part:
            context = by_id[answer.case].context
            ours.setdefault(context, []).append(answer.score)
            theirs.setdefault(context, []).append(dense[answer.case])
        is_able = mean(theirs) >= able_from
        if is_able:
            able[column, task, length] = (ours, theirs)
        cells.append(
            {
                "column": column,
                "task": task,
                "length": length,
                "n": len(part),
                "contexts": len(ours),
                "score": round(mean(ours), 4),
                "interval": interval(ours),
                "full_score": round(mean(theirs), 4),
                "difference": round(mean(ours) - mean(theirs), 4),
                "difference_interval": interval_of_difference(ours, theirs),
                "able": is_able,
            }
        )
    memory = [answer.memory for answer in answers if answer.memory is not None]
    return {
        "memory": round(sum(memory) / len(memory), 4) if memory else None,
        "able_from": able_from,
        "summary": _averages(cells, able),
        "cells": cells,
    }


def _averages(
    cells: list[dict[str, Any]], able: Mapping[tuple[str, str, int], tuple[Groups, Groups]]
) -> list[dict[str, Any]]:
    """Of each column and length: the mean of the able tasks' means."""
    found = []
    for column, length in dict.fromkeys((cell["column"], cell["length"]) for cell in cells):
        here = [c for c in cells if (c["column"], c["length"]) == (column, length)]
        tasks = [(column, cell["task"], length) for cell in here if cell["able"]]
        ours, theirs = ([able[task][side] for task in tasks] for side in (0, 1))
        average: dict[str, Any] = {"score": None, "interval": None, "full_score": None}
        if tasks:
            average = {
                "score": round(sum(map(mean, ours)) / len(ours), 4),
                "interval": interval_of_average(ours),
                "full_score": round(sum(map(mean, theirs)) / len(theirs), 4),
            }
        found.append(
            {
                "column": column,
                "length": length,
                "tasks": [task for _, task, _ in tasks],
                "left_out": [cell["task"] for cell in here if not cell["able"]],
                "n": sum(cell["n"] for cell in here if cell["able"]),
                **average,
            }
        )
    return found


def by_arm(
    cases: Sequence[Case], answers: dict[str, list[Answer]], able_from: float = ABLE_FROM
) -> dict[str, dict[str, Any]]:
    """The summary of every arm, with the full cache's answers as the measure."""
    full = answers[FULL]
    return {name: summarize(cases, found, full, able_from) for name, found in answers.items()}
