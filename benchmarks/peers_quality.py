"""The quality part of peers.py: needles found, and tokens kept, beside kvpress.

Each engine gets the same token ids, the question in the prompt. Compared are the prompts that
every engine answers with its full cache. kvpress's kept sets are held against ours on its own
queries and keys (`kept_sets.py`). Answers come in pieces that stay on disk: a run that is stopped
goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from sglang_kv.benchmarks import kept_sets, needle
from sglang_kv.benchmarks.arms import Asker, fan_out
from sglang_kv.benchmarks.common import environment
from sglang_kv.benchmarks.methods import NONE, PAGE, Policy, copy, geometry_of, plan_of
from sglang_kv.benchmarks.peers_outside import job_name, outside
from sglang_kv.benchmarks.prompts import Chat, Haystack, load_text, text_name
from sglang_kv.benchmarks.server import Server, generate_body
from sglang_kv.compression import parse_policy
from sglang_kv.compression.gates import find_gates, retrieval_heads
from sglang_kv.compression.plan import FoldPlan

#: Prompts per kvpress process, and of whose tensors the disk has room: up to 100 MB each.
PIECE = 8
#: Arms of a prompt that the server answers at once.
TOGETHER = 4
WIDE = {"window": 16, "kernel_size": 31}
EAGER = "ObservedAttentionPress"

Add = Callable[..., None]
#: The lines ``{id, output_ids}`` of each engine and arm.
Answers = dict[tuple[str, str], list[dict[str, Any]]]


class Pair(NamedTuple):
    """A policy and kvpress's press for the same; ``theirs`` is false where it has none."""

    policy: Policy
    press: dict[str, Any] | None = None
    theirs: bool = True

    def at(self, tokens: int) -> Policy:
        """The policy for a prompt of ``tokens``. What acts while a prompt streams does so after it,
        as kvpress has it; and StreamingLLM's own budget is no share of the prompt."""
        policy = dict(self.policy)
        if policy["method"] in ("streamingllm", "duoattention"):
            policy["fold_at"] = tokens
        if policy["method"] == "streamingllm":
            policy["budget"] = int(policy.pop("keep_ratio") * tokens)
        return policy


def arms(keep_ratio: float) -> dict[str, Pair]:
    """Each arm's policy and press; what a press is told is taken from the policy."""
    kept = {"keep_ratio": keep_ratio}
    found = {"none": Pair(NONE)}
    for name, extra in (("", {}), (" wide", WIDE)):
        policy: Policy = {"method": "snapkv", **kept, **extra}
        found["snapkv" + name] = Pair(policy, {"class": "SnapKVPress", **kept, **window_of(policy)})
    for name, extra in (("", {}), (" wide", WIDE)):
        policy = {"method": "pyramidkv", **kept, **extra}
        beta = parse_policy(policy).parameters["beta"]
        press = {"class": "PyramidKVPress", **kept, **window_of(policy), "beta": beta}
        found["pyramidkv" + name] = Pair(policy, press)
    found["copy"] = Pair(copy(keep_ratio), theirs=False)
    found["h2o"] = Pair({"method": "h2o", **kept}, {"class": EAGER, **kept})
    sinks = parse_policy("streamingllm").parameters["sinks"]
    press = {"class": "StreamingLLMPress", **kept, "n_sink": sinks}
    policy = {"method": "streamingllm", "positions": "original", **kept}
    found["streamingllm"] = Pair(policy, press)
    found["duoattention"] = Pair({"method": "duoattention"}, {"class": "DuoAttentionPress"})
    return found


def window_of(policy: Policy) -> dict[str, Any]:
    parameters = parse_policy(policy).parameters
    return {"window_size": parameters["window"], "kernel_size": parameters["kernel_size"]}


def press_for(pair: Pair, model: str) -> dict[str, Any] | None:
    """The press; DuoAttention's with our heads, since kvpress would guess others.

    Raises:
        ValueError: the model has no gates.
    """
    if pair.press is None or pair.press["class"] != "DuoAttentionPress":
        return pair.press
    policy, geometry = parse_policy(pair.policy).parameters, geometry_of(model)
    gates = find_gates(model, geometry.num_layers, geometry.num_kv_heads)
    if gates is None:
        raise ValueError(f"--arms: duoattention needs gates, and {model} has none")
    share = policy["sparsity"]
    heads = (~retrieval_heads(gates, sparsity=share)).tolist()
    about = {"head_compression_ratio": share, "streaming": heads}
    return {**pair.press, **about, "sink": policy["sinks"], "recent": policy["recent"]}


def make_cases(args: argparse.Namespace, chat: Chat) -> list[needle.Case]:
    """Numbers and words, sample by sample, so that a limit leaves some of both."""
    story = Haystack(chat, load_text(args.text))
    wanted = {"number": args.samples, "word": args.words}
    found = [
        case
        for kind, counts in wanted.items()
        for length, samples in zip(args.lengths, counts, strict=True)
        for case in needle.make_cases(
            chat, story, [length], args.depths, samples, args.seed, kinds=[kind]
        )
    ]
    sample = {case.id: int(case.id.split("-")[3]) for case in found}
    return sorted(found, key=lambda case: sample[case.id])[: args.limit]


def our_answers(args: argparse.Namespace, server: Server, cases: list[needle.Case]) -> Answers:
    """The first arm of a prompt, then the others: those that fold once share its dense prefix."""
    found: Answers = {("sglang-kv", arm): [] for arm in args.arms}
    about = {"commit": environment()["commit"], "dtype": args.dtype}
    ask = Asker(server, args.work, about)
    ask.start("sglang-kv", len(cases) * len(args.arms))
    first, *others = args.arms
    for case in cases:

        def one(arm: str, case: needle.Case = case) -> None:
            policy = args.pairs[arm].at(len(case.prompt_ids))
            body = generate_body(case.prompt_ids, policy, max_new_tokens=case.max_new_tokens)
            answer = ask(f"peers {arm} {case.id}", body, lambda raw: {})
            found["sglang-kv", arm].append({"id": case.id, **answer})

        one(first)
        list(fan_out(one, others, TOGETHER))
    return found


def kvpress_answers(
    args: argparse.Namespace, cases: Sequence[needle.Case]
) -> tuple[Answers, dict[str, list[dict[str, Any]]], dict[str, str]]:
    """Its answers, the comparisons of kept sets by arm, and versions."""
    presses = {
        arm: press_for(args.pairs[arm], str(args.model))
        for arm in args.arms
        if args.pairs[arm].theirs
    }
    eager = {arm for arm, press in presses.items() if press and press["class"] == EAGER}
    answers: Answers = {("kvpress", arm): [] for arm in presses}
    sets: dict[str, list[dict[str, Any]]] = {}
    versions: dict[str, str] = {}
    for names in (presses.keys() - eager, eager):
        part = {arm: presses[arm] for arm in presses if arm in names}
        for start in range(0, len(cases), PIECE) if part else ():
            found, kept = kvpress_piece(args, part, cases[start : start + PIECE])
            versions = found["versions"]
            for line in found["answers"]:
                answers["kvpress", line["arm"]].append(line)
            for arm, counts in kept.items():
                sets.setdefault(arm, []).extend(counts)
    return answers, sets, versions


def kvpress_piece(
    args: argparse.Namespace, presses: dict[str, Any], cases: Sequence[needle.Case]
) -> tuple[dict[str, Any], dict[str, list[dict[str, Any]]]]:
    """Some prompts in one process; its tensors are compared, then deleted: they are large."""
    scored = [arm for arm, press in presses.items() if press and "window_size" in press]
    keys = ("id", "prompt_ids", "max_new_tokens")
    job = kvpress_job(args, presses)
    job["answers"] = [{key: getattr(case, key) for key in keys} for case in cases]
    name = job_name("kvpress", job)  # of what is asked, wherever the tensors go
    folder, compared = args.work / f"{name}.tensors", args.work / f"{name}.sets.json"
    job["tensors"] = {"folder": str(folder), "arms": scored} if scored else None
    folder.mkdir(parents=True, exist_ok=True)
    found = outside(args, "kvpress", job)
    if scored and (args.again or not compared.exists()):
        counts = {
            arm: [compare(args, arm, folder / f"{case.id}.npz") for case in cases] for arm in scored
        }
        compared.write_text(json.dumps(counts))
    shutil.rmtree(folder)
    return found, json.loads(compared.read_text()) if scored else {}


def compare(args: argparse.Namespace, arm: str, path: Any) -> dict[str, Any]:
    """One prompt's kept sets. PyramidKV's budgets are defined otherwise, so it gets kvpress's."""
    policy, arrays = args.pairs[arm].policy, dict(np.load(path))
    budget = None
    if policy["method"] == "snapkv":
        plan = plan_of(policy, geometry_of(str(args.model)), arrays["k"].shape[2])
        assert isinstance(plan, FoldPlan)
        budget = plan.kept
    found = kept_sets.compare(parse_policy(policy), arrays, arm, budget)
    print(f"{path.stem} {arm}: {found}", file=sys.stderr)
    return found


def kvpress_job(args: argparse.Namespace, presses: dict[str, Any]) -> dict[str, Any]:
    about = {"model": str(args.model), "dtype": args.dtype, "threads": args.threads}
    return {**about, "presses": presses, "answers": [], "tensors": None, "speed": None}


def rows(args: argparse.Namespace, add: Add, start: Callable[..., Server]) -> None:
    """Runs what is missing, and adds a row per engine and arm."""
    chat = Chat.load(str(args.model))
    cases = make_cases(args, chat)
    names = ("lengths", "depths", "samples", "words", "limit", "chunk", "dtype", "keep_ratio")
    settings = {name: getattr(args, name) for name in names} | {"text": text_name(args.text)}
    # Which prompts count hangs on who was asked.
    settings["engines"] = [name for name in args.engines if name in ("sglang-kv", "kvpress")]
    answers: Answers = {}
    if "kvpress" in args.engines:
        found, sets, versions = kvpress_answers(args, cases)
        answers |= found
        for arm, counts in sets.items():
            row = {**kept_sets.total(counts), "rounding_below": kept_sets.ROUNDING}
            add("kept", "kvpress", arm, settings, lambda r=row, v=versions: {**r, "versions": v})
    if "sglang-kv" in args.engines:
        pool = (2 + TOGETHER) * max(args.lengths) + args.chunk
        with start(args, False, pool // PAGE * PAGE) as server:
            answers |= our_answers(args, server, cases)
    for (engine, arm), row in summaries(chat, cases, answers).items():
        add("quality", engine, arm, settings, lambda row=row: row)


def summaries(
    chat: Chat, cases: list[needle.Case], answers: Answers
) -> dict[tuple[str, str], dict[str, Any]]:
    """Hits of each engine and arm: of all prompts, and of those that every full cache answers."""
    scored = {at: needle.score_answers(chat, cases, lines) for at, lines in answers.items()}
    full = [{a.case for a in found if a.hit} for (_, arm), found in scored.items() if arm == "none"]
    able = set.intersection(*full) if full else {case.id for case in cases}
    kinds = {case.id: case.kind for case in cases}
    rows = {}
    for at, found in scored.items():
        engine, arm = at
        dense = {case.id: case.id in able for case in cases}
        by_kind = {
            kind: needle.count([a for a in found if kinds[a.case] == kind], dense)
            for kind in dict.fromkeys(kinds.values())
        }
        other = answers.get(("kvpress" if engine == "sglang-kv" else "sglang-kv", arm))
        memory = [line["memory"] for line in answers[at] if "memory" in line]
        rows[at] = {
            **needle.count(found, dense),
            "kinds": by_kind,
            "same_answers": None if other is None else same(answers[at], other),
            "memory": round(sum(memory) / len(memory), 4) if memory else None,
        }
    return rows


def same(some: Iterable[dict[str, Any]], others: Iterable[dict[str, Any]]) -> int:
    """How many prompts have the same answer in both, token for token."""
    by_id = {line["id"]: line["output_ids"] for line in others}
    return sum(by_id[line["id"]] == line["output_ids"] for line in some)
