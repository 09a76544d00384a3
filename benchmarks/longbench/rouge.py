"""ROUGE-L as LongBench counts it: that of the `rouge` package (1.0.1), on summary level.

Lin, "ROUGE: A Package for Automatic Evaluation of Summaries", 2004, section 3.2, with that
package's ways: sentences end at every full stop, words are what single spaces part, each distinct
word counts once, and F weighs precision and recall equally.
"""

from __future__ import annotations


def rouge_l(prediction: str, truth: str) -> float:
    """F, from 0 to 1. An empty text is 0, where LongBench catches the package's error."""
    said, meant = _sentences(prediction), _sentences(truth)
    if not said or not meant:
        return 0.0
    common: set[str] = set()
    for sentence in meant:
        for other in said:
            common.update(_longest_common(sentence, other))
    recall = len(common) / len({word for sentence in meant for word in sentence})
    precision = len(common) / len({word for sentence in said for word in sentence})
    return 2.0 * (precision * recall / (precision + recall + 1e-8))


def _sentences(text: str) -> list[list[str]]:
    parts = [" ".join(part.split()) for part in text.split(".") if part]
    return [part.split(" ") for part in parts]


def _longest_common(a: list[str], b: list[str]) -> list[str]:
    """A longest common subsequence; of several, the one that drops from ``b`` first."""
    lengths = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, x in enumerate(a, 1):
        row, above = lengths[i], lengths[i - 1]
        for j, y in enumerate(b, 1):
            row[j] = above[j - 1] + 1 if x == y else max(above[j], row[j - 1])
    found: list[str] = []
    i, j = len(a), len(b)
    while i and j:
        if a[i - 1] == b[j - 1]:
            found.append(a[i - 1])
            i, j = i - 1, j - 1
        elif lengths[i - 1][j] > lengths[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return found[::-1]
