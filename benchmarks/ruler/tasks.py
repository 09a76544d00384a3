"""RULER's 13 tasks without a download, and RULER's metrics.

Hsieh et al., "RULER: What's the Real Context Size of Your Long-Context Language Models?", 2024
(https://arxiv.org/abs/2404.06654). Differs from it: the essays are the text at hand (the demo's
story, `--text`, or `grammar.py`), the questions of qa_1 and qa_2 are on invented facts, and words
come from a list of ours. Tasks, counts and metrics are RULER's, so figures have its shape and not
its values.
"""

from __future__ import annotations

from collections.abc import Sequence

from sglang_kv.benchmarks.generated import Task
from sglang_kv.benchmarks.ruler.chains import variable_tracking
from sglang_kv.benchmarks.ruler.facts import one_document, two_documents
from sglang_kv.benchmarks.ruler.niah import Needles
from sglang_kv.benchmarks.ruler.words import common_words, frequent_words


def string_match_all(answers: Sequence[str], said: str) -> float:
    """The share of the answers that stand in what was said, in either case."""
    return sum(answer.lower() in said.lower() for answer in answers) / len(answers)


def string_match_part(answers: Sequence[str], said: str) -> float:
    """Whether any of the answers stands in what was said, in either case."""
    return float(any(answer.lower() in said.lower() for answer in answers))


_NEEDLES = {
    "niah_single_1": Needles("noise"),
    "niah_single_2": Needles("essay"),
    "niah_single_3": Needles("essay", uuid_values=True),
    "niah_multikey_1": Needles("essay", keys=4),
    "niah_multikey_2": Needles("needles"),
    "niah_multikey_3": Needles("needles", uuid_keys=True, uuid_values=True),
    "niah_multivalue": Needles("essay", values=4),
    "niah_multiquery": Needles("essay", keys=4, queries=4),
}
_ALL = [
    *(Task(name, needles, 128, string_match_all) for name, needles in _NEEDLES.items()),
    Task("vt", variable_tracking, 30, string_match_all),
    Task("cwe", common_words, 120, string_match_all),
    Task("fwe", frequent_words, 50, string_match_all),
    Task("qa_1", one_document, 32, string_match_part),
    Task("qa_2", two_documents, 32, string_match_part),
]
TASKS: dict[str, Task] = {task.name: task for task in _ALL}
