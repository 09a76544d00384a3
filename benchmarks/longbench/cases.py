"""LongBench's rows as prompts of at most a length, cut in the middle as LongBench cuts them."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from sglang_kv.benchmarks.graded import Case
from sglang_kv.benchmarks.longbench.datasets import DATASETS, Dataset, Source
from sglang_kv.benchmarks.prompts import Chat


def make_cases(
    chat: Chat, source: Source, lengths: Iterable[int], samples: int, limit: int | None = None
) -> list[Case]:
    """The first ``samples`` rows of each data set at each length, answer included.

    A row that is shorter than a length is a case of its own there all the same: ``length`` is what
    the prompt was cut to.
    """
    wanted = [
        (sample, length, name)
        for sample in range(samples)
        for length in lengths
        for name, rows in source.rows.items()
        if sample < len(rows)
    ]
    return [
        _case(chat, source, name, length, source.rows[name][sample], sample)
        for sample, length, name in wanted[:limit]
    ]


def _case(
    chat: Chat, source: Source, name: str, length: int, row: dict[str, Any], sample: int
) -> Case:
    dataset = DATASETS[name]
    head, tail = chat.head, chat.tail
    if not dataset.chat:
        head, tail = list(chat.tokenizer("")["input_ids"]), []
    before, marker, after = source.prompts[name].partition("{context}")
    if not marker:
        raise ValueError(f"{name}: its prompt has no {{context}}")
    # Joined as ids, so that it is exact where the question begins.
    front = chat.encode((before + marker).format(**row))
    back = chat.encode(after.format(**row))
    room = length - source.max_new_tokens[name] - len(head) - len(tail)
    ids = _cut(front + back, room, name, length)
    return Case(
        id=f"longbench-{name}-{length}-{sample}",
        prompt_ids=head + ids + tail,
        fold_at=len(head) + max(1, len(ids) - len(back)),
        max_new_tokens=source.max_new_tokens[name],
        task=name,
        length=length,
        context=f"{name}-{length}-{sample}",
        answers=tuple(map(str, row["answers"])),
        grade=partial(grade, dataset, row),
    )


def _cut(ids: list[int], room: int, name: str, length: int) -> list[int]:
    """The first half and the last, where all of it is too long."""
    if room < 2:
        raise ValueError(f"--lengths: {length} leaves no room for {name}'s prompt")
    if len(ids) <= room:
        return ids
    half = room // 2
    return ids[:half] + ids[-half:]


def grade(dataset: Dataset, row: dict[str, Any], said: str) -> float:
    """The best score over the references."""
    if dataset.first_line:
        said = said.lstrip("\n").split("\n")[0]
    classes = row.get("all_classes") or ()
    return max(float(dataset.metric(said, str(truth), classes)) for truth in row["answers"])
