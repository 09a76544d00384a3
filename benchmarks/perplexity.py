"""Perplexity of a long text, by position.

A method that acts while a prompt streams is asked for the logprobs of the whole text. One that
acts once gets ``fold_at`` at a given position and is judged by what follows it. Each arm is
paired with the full cache on the same tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from sglang_kv.benchmarks.arms import Arm, Asker, fan_out
from sglang_kv.benchmarks.prompts import Chat
from sglang_kv.benchmarks.server import generate_body


@dataclass(frozen=True)
class Case:
    """A stretch of the text. Logprob i of an answer belongs to token ``start + i``."""

    id: str
    ids: list[int]


def make_cases(
    chat: Chat, text: str, lengths: Iterable[int], samples: int, limit: int | None = None
) -> list[Case]:
    """Stretches of the text that do not overlap: fewer than ``samples`` where it is short."""
    ids = list(chat.tokenizer(text)["input_ids"])
    cases = [
        Case(f"{length}-{sample}", ids[sample * length : (sample + 1) * length])
        for length in lengths
        for sample in range(min(samples, len(ids) // length))
    ]
    return cases[:limit]


def fold_position(length: int, share: float) -> int:
    return max(1, int(length * share))


def run(
    ask: Asker, cases: list[Case], arms: list[Arm], *, fold: float = 0.5, parallel: int = 1
) -> dict[str, list[dict[str, Any]]]:
    """For each arm, one ``{case, start, logprobs, memory}`` per case, in their order."""

    def one(case: Case) -> list[tuple[str, dict[str, Any]]]:
        found = []
        for arm in arms:
            # Logprobs from the fold on leave the dense part to the server's prefix cache.
            given = arm.policy.get("fold_at", fold_position(len(case.ids), fold))
            start = 0 if arm.streaming else min(given, len(case.ids) - 2)
            body = generate_body(
                case.ids,
                arm.with_known_tokens(start),
                max_new_tokens=1,
                return_logprob=True,
                logprob_start_len=start,
            )
            got = ask(f"perplexity {arm.name} {case.id}", body, take_logprobs)
            found.append((arm.name, {**got, "case": case.id, "start": start}))
        return found

    ask.start("perplexity", len(cases) * len(arms))
    answers: dict[str, list[dict[str, Any]]] = {arm.name: [] for arm in arms}
    for found in fan_out(one, cases, parallel):
        for name, got in found:
            answers[name].append(got)
    return answers


def take_logprobs(raw: Any) -> dict[str, Any]:
    """Logprobs of the tokens after the first one asked for, which has none."""
    entries = raw["meta_info"]["input_token_logprobs"][1:]
    return {"logprobs": [round(entry[0], 5) for entry in entries]}


def summarize(
    cases: list[Case], answers: list[dict[str, Any]], full: list[dict[str, Any]], bucket: int
) -> dict[str, Any]:
    """Perplexity by text length and position bucket (``to`` is exclusive), and of all."""
    size = {case.id: len(case.ids) for case in cases}
    dense = {got["case"]: got["logprobs"] for got in full}
    pairs: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for got in answers:
        length = size[got["case"]]
        for i, ours in enumerate(got["logprobs"]):
            position = got["start"] + 1 + i
            pair = (ours, dense[got["case"]][position - 1])
            pairs.setdefault((length, position // bucket), []).append(pair)
    cells = [
        {
            "length": length,
            "from": at * bucket,
            "to": min((at + 1) * bucket, length),
            **paired(part),
        }
        for (length, at), part in sorted(pairs.items())
    ]
    summary = [
        {"length": n, **paired([pair for (m, _), part in pairs.items() if m == n for pair in part])}
        for n in sorted({length for length, _ in pairs})
    ]
    memory = round(fmean(got["memory"] for got in answers), 4) if answers else None
    return {"memory": memory, "summary": summary, "cells": cells}


def paired(pairs: list[tuple[float, float]]) -> dict[str, Any]:
    """Perplexities and their ratio; its interval takes tokens as independent."""
    gaps = [full - ours for ours, full in pairs]
    mean = fmean(gaps)
    half = 1.959964 * stdev(gaps) / math.sqrt(len(gaps)) if len(gaps) > 1 else 0.0
    return {
        "n": len(pairs),
        "ppl": round(math.exp(-fmean(ours for ours, _ in pairs)), 3),
        "full_ppl": round(math.exp(-fmean(full for _, full in pairs)), 3),
        "ratio": round(math.exp(mean), 4),
        "ratio_interval": [round(math.exp(mean - half), 4), round(math.exp(mean + half), 4)],
    }
