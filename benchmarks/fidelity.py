"""How far an arm departs from the full cache, over the full cache's own answer.

The full cache answers greedily. Its tokens are then given to each arm as further prompt tokens
(teacher forcing), behind the position where the arm's policy takes hold, so that every arm is
asked for the same next tokens. The full cache is asked in the same way: what its row shows is
the difference between prefill and decode in this arithmetic, and no arm can be closer.

- agreement: share of tokens that the arm would have chosen, too;
- KL: of the arm's distribution from the full cache's, over its top k tokens and the rest;
- first divergence: where the arm's free greedy answer leaves the full cache's.

A method that drops tokens while it decodes does so here as it does in a prompt's tail.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from sglang_kv.benchmarks.arms import FULL, Arm, Asker, fan_out
from sglang_kv.benchmarks.common import wilson
from sglang_kv.benchmarks.intervals import draws, middle_95
from sglang_kv.benchmarks.needle import COLUMNS
from sglang_kv.benchmarks.prompts import Chat, Haystack, build
from sglang_kv.benchmarks.server import generate_body

QUESTION = "Retell the text above in your own words, with all its details."
FLOOR = 1e-7  # probability; a rest mass below it is rounding

# One position of a host's answer: [logprob, token, text] for each token asked for.
Entries = Sequence[Sequence[Any]]


@dataclass(frozen=True)
class Case:
    id: str
    prompt_ids: list[int]
    fold_at: int
    length: int


def make_cases(
    chat: Chat,
    haystack: Haystack,
    lengths: Iterable[int],
    samples: int,
    seed: int,
    limit: int | None = None,
) -> list[Case]:
    cases = []
    for sample, length in [(s, n) for s in range(samples) for n in lengths][:limit]:
        name = f"{length}-{sample}-seed{seed}"
        prompt = build(chat, haystack, random.Random(f"fidelity-{name}"), length, QUESTION)
        cases.append(Case(name, prompt.ids, prompt.question_at, length))
    return cases


@dataclass(frozen=True)
class Score:
    """One arm on one case."""

    case: str
    column: str
    length: int
    tokens: int
    agreed: int
    kl: float  # mean over the tokens
    divergence: int  # = tokens where the answers are the same
    memory: float


def run(
    ask: Asker,
    cases: list[Case],
    arms: list[Arm],
    *,
    tokens: int = 64,
    top_k: int = 20,
    parallel: int = 1,
) -> dict[str, list[Score]]:
    """Every case with every arm, all arms of a case in turn: they share its dense prefix."""
    plan = [(arm, column) for arm in arms for column in COLUMNS if arm.has(column)]

    def one(case: Case) -> list[tuple[str, Score]]:
        full = ask(
            f"fidelity answer {FULL} {case.id}",
            generate_body(
                case.prompt_ids,
                {"method": FULL},
                max_new_tokens=tokens,
                return_logprob=True,
                top_logprobs_num=top_k,
            ),
            take_answer,
        )
        return [(arm.name, compare(ask, case, full, arm, column, tokens)) for arm, column in plan]

    ask.start("fidelity", 2 * len(cases) * len(plan))
    scores: dict[str, list[Score]] = {arm.name: [] for arm in arms}
    for found in fan_out(one, cases, parallel):
        for name, score in found:
            scores[name].append(score)
    return scores


def compare(
    ask: Asker, case: Case, full: dict[str, Any], arm: Arm, column: str, tokens: int
) -> Score:
    answer = full["output_ids"]
    start = len(case.prompt_ids)
    agnostic = arm.at(case.fold_at)
    name = f"{arm.name} {column} {case.id}"
    # The first entry belongs to the prompt's last token; it has no prediction.
    forced = ask(
        f"fidelity forced {name}",
        generate_body(
            case.prompt_ids + answer,
            agnostic if column == "agnostic" else arm.with_known_tokens(start),
            max_new_tokens=1,
            return_logprob=True,
            logprob_start_len=start - 1,
            top_logprobs_num=1,
            token_ids_logprob=sorted({token for ids, _ in full["top"] for token in ids}),
        ),
        lambda raw: take_forced(raw, full["top"]),
    )
    free = answer
    if arm.name != FULL:
        policy = agnostic if column == "agnostic" else arm.policy
        body = generate_body(case.prompt_ids, policy, max_new_tokens=tokens)
        free = ask(f"fidelity answer {name}", body, lambda raw: {})["output_ids"]
    kls = [
        divergence(dense, theirs)
        for (_, dense), theirs in zip(full["top"], forced["of_top"], strict=True)
    ]
    same = [a == b for a, b in zip(answer, free, strict=False)]
    return Score(
        case=case.id,
        column=column,
        length=case.length,
        tokens=len(answer),
        agreed=sum(a == b for a, b in zip(answer, forced["best"], strict=True)),
        kl=fmean(kls),
        divergence=same.index(False) if False in same else len(same),
        memory=forced["memory"],
    )


def take_answer(raw: Any) -> dict[str, Any]:
    """The top tokens of each position, and their logprobs."""
    top: list[Entries] = raw["meta_info"]["output_top_logprobs"]
    return {"top": [[[e[1] for e in entries], [e[0] for e in entries]] for entries in top]}


def take_forced(raw: Any, top: Sequence[Any]) -> dict[str, Any]:
    """What the arm would have said at each position, and its logprobs of the given tokens."""
    meta = raw["meta_info"]
    best: list[Entries] = meta["input_top_logprobs"][1:]
    asked: list[Entries] = meta["input_token_ids_logprobs"][1:]
    if not len(best) == len(asked) == len(top):
        raise ValueError(f"{len(top)} tokens were forced, {len(best)} came back")
    of_top = []
    for entries, (ids, _) in zip(asked, top, strict=True):
        known = {entry[1]: entry[0] for entry in entries}
        of_top.append([known[token] for token in ids])
    return {"best": [entries[0][1] for entries in best], "of_top": of_top}


def divergence(dense: Sequence[float], arm: Sequence[float]) -> float:
    """KL(dense || arm) over the given tokens' logprobs and the mass of all others."""
    p, q = [math.exp(x) for x in dense], [math.exp(x) for x in arm]
    p.append(max(1 - sum(p), FLOOR))
    q.append(max(1 - sum(q), FLOOR))
    return sum(a * math.log(a / max(b, 1e-30)) for a, b in zip(p, q, strict=True) if a > 0)


def summarize(scores: list[Score]) -> dict[str, Any]:
    """Means by column and length. The interval takes tokens as independent, which flatters it."""
    parts: dict[tuple[str, int], list[Score]] = {}
    for score in scores:
        parts.setdefault((score.column, score.length), []).append(score)
    cells = []
    for (column, length), part in parts.items():
        agreed, tokens = sum(s.agreed for s in part), sum(s.tokens for s in part)
        cells.append(
            {
                "column": column,
                "length": length,
                "n": len(part),
                "tokens": tokens,
                "agreed": agreed,
                "interval": wilson(agreed, tokens),
                "kl": round(sum(s.kl * s.tokens for s in part) / tokens, 5),
                "kl_interval": _over_prompts(part),
                "kl_worst_case": round(max(s.kl for s in part), 5),
                "divergence": round(fmean(s.divergence for s in part), 1),
                "same_answers": sum(s.divergence == s.tokens for s in part),
            }
        )
    return {"memory": round(fmean(s.memory for s in scores), 4), "cells": cells}


def _over_prompts(scores: list[Score]) -> list[float] | None:
    """95 % of the KL, by drawing whole prompts."""
    if len(scores) < 2:
        return None
    return middle_95(draws({score.case: [score.kl] * score.tokens for score in scores}))
