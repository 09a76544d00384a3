"""The quality suites: what each is set by, its cases, and what comes of them for every arm."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sglang_kv.benchmarks import fidelity, generated, graded, needle, perplexity, standins
from sglang_kv.benchmarks.arms import FULL, Asker
from sglang_kv.benchmarks.longbench import cases as longbench
from sglang_kv.benchmarks.longbench import datasets
from sglang_kv.benchmarks.prompts import Chat, Haystack
from sglang_kv.benchmarks.ruler import tasks as ruler

Summaries = dict[str, dict[str, Any]]
Args = argparse.Namespace


@dataclass(frozen=True)
class Suite:
    """One suite.

    Args:
        settings: flags that make its rows comparable, beside those that all suites have.
        cases: its prompts, of ``(args, chat, text)``.
        measure: the summary of each arm, of ``(args, ask, chat, cases)``.
        score: the same of an outside engine's answers, of ``(chat, cases, lines by name)``; None
            where an answer alone is not enough.
    """

    settings: tuple[str, ...]
    cases: Callable[[Args, Chat, str], list[Any]]
    measure: Callable[[Args, Asker, Chat, list[Any]], Summaries]
    score: Callable[[Chat, list[Any], Mapping[str, Iterable[dict[str, Any]]]], Summaries] | None = (
        None
    )


def _needle_cases(args: Args, chat: Chat, text: str) -> list[needle.Case]:
    return needle.make_cases(
        chat,
        Haystack(chat, text),
        args.lengths,
        args.depths,
        args.samples,
        args.seed,
        kinds=args.kinds,
        max_new_tokens=args.max_new_tokens,
        answer_prefix=args.answer_prefix,
        limit=args.limit,
    )


def _needle(args: Args, ask: Asker, chat: Chat, cases: list[needle.Case]) -> Summaries:
    answers = needle.run(ask, chat, cases, args.arms, args.parallel)
    return {name: needle.summarize(cases, found, answers[FULL]) for name, found in answers.items()}


def _score_needle(
    chat: Chat, cases: list[needle.Case], lines: Mapping[str, Iterable[dict[str, Any]]]
) -> Summaries:
    """The first name is its engine's full cache."""
    answers = {name: needle.score_answers(chat, cases, said) for name, said in lines.items()}
    full = next(iter(answers.values()))
    return {name: needle.summarize(cases, found, full) for name, found in answers.items()}


def _fidelity_cases(args: Args, chat: Chat, text: str) -> list[fidelity.Case]:
    return fidelity.make_cases(
        chat, Haystack(chat, text), args.lengths, args.samples, args.seed, args.limit
    )


def _fidelity(args: Args, ask: Asker, chat: Chat, cases: list[fidelity.Case]) -> Summaries:
    options = {"tokens": args.answer_tokens, "top_k": args.top_k, "parallel": args.parallel}
    scores = fidelity.run(ask, cases, args.arms, **options)
    return {name: fidelity.summarize(found) for name, found in scores.items()}


def _perplexity_cases(args: Args, chat: Chat, text: str) -> list[perplexity.Case]:
    stretches = perplexity.make_cases(chat, text, args.lengths, args.samples, args.limit)
    if missing := set(args.lengths) - {len(case.ids) for case in stretches}:
        print(f"perplexity: the text is shorter than {sorted(missing)} tokens", file=sys.stderr)
    return stretches


def _perplexity(args: Args, ask: Asker, chat: Chat, cases: list[perplexity.Case]) -> Summaries:
    got = perplexity.run(ask, cases, args.arms, fold=args.fold, parallel=args.parallel)
    return {
        name: perplexity.summarize(cases, found, got[FULL], args.bucket)
        for name, found in got.items()
    }


def _generated(
    flag: str, tasks: Mapping[str, generated.Task]
) -> Callable[[Args, Chat, str], list[Any]]:
    def cases(args: Args, chat: Chat, text: str) -> list[graded.Case]:
        return generated.make_cases(
            chat,
            text,
            [tasks[name] for name in getattr(args, flag)],
            args.lengths,
            args.samples,
            args.seed,
            questions=args.questions,
            limit=args.limit,
        )

    return cases


def _longbench_cases(args: Args, chat: Chat, text: str) -> list[graded.Case]:
    if args.longbench is None:
        raise ValueError("the suite longbench needs --longbench FOLDER, or --longbench hub")
    source = datasets.load(args.longbench, args.datasets)
    args.prompts_of = source.prompts_of
    return longbench.make_cases(chat, source, args.lengths, args.samples, args.limit)


def _graded(
    label: str, able_from: float
) -> Callable[[Args, Asker, Chat, list[graded.Case]], Summaries]:
    def measure(args: Args, ask: Asker, chat: Chat, cases: list[graded.Case]) -> Summaries:
        answers = graded.run(ask, chat, label, cases, args.arms, args.parallel)
        return graded.by_arm(cases, answers, able_from)

    return measure


def _score_graded(
    able_from: float,
) -> Callable[[Chat, list[Any], Mapping[str, Iterable[dict[str, Any]]]], Summaries]:
    def score(
        chat: Chat, cases: list[graded.Case], lines: Mapping[str, Iterable[dict[str, Any]]]
    ) -> Summaries:
        answers = {name: graded.score_answers(chat, cases, said) for name, said in lines.items()}
        full = next(iter(answers.values()))
        return {
            name: graded.summarize(cases, found, full, able_from) for name, found in answers.items()
        }

    return score


#: Full-cache grades from which a task counts in averages: F1 and ROUGE are low even where a model
#: does well, string matches are not.
ABLE = {"ruler": graded.ABLE_FROM, "longbench": 0.1, "standins": 0.2}

SUITES: dict[str, Suite] = {
    "needle": Suite(
        ("lengths", "depths", "kinds", "answer_prefix", "max_new_tokens"),
        _needle_cases,
        _needle,
        _score_needle,
    ),
    "fidelity": Suite(("lengths", "answer_tokens", "top_k"), _fidelity_cases, _fidelity),
    "perplexity": Suite(("lengths", "fold", "bucket"), _perplexity_cases, _perplexity),
    "ruler": Suite(
        ("lengths", "tasks", "questions"),
        _generated("tasks", ruler.TASKS),
        _graded("ruler", ABLE["ruler"]),
        _score_graded(ABLE["ruler"]),
    ),
    "standins": Suite(
        ("lengths", "standins"),
        _generated("standins", standins.TASKS),
        _graded("standins", ABLE["standins"]),
        _score_graded(ABLE["standins"]),
    ),
    "longbench": Suite(
        ("lengths", "datasets", "prompts_of"),
        _longbench_cases,
        _graded("longbench", ABLE["longbench"]),
        _score_graded(ABLE["longbench"]),
    ),
}
#: What runs unless told otherwise.
USUAL = ("needle", "fidelity", "perplexity")
