"""LongBench's metrics, one answer against one reference, each from 0 to 1.

Bai et al., "LongBench: A Bilingual, Multitask Benchmark for Long Context Understanding", ACL 2024
(https://arxiv.org/abs/2308.14508); what exactly is counted follows its `metrics.py` and `eval.py`
(https://github.com/THUDM/LongBench, MIT), its peculiarities included, so that figures compare.
"""

from __future__ import annotations

import difflib
import importlib
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from sglang_kv.benchmarks.longbench.rouge import rouge_l

#: ``(prediction, truth, all_classes) -> score``
Metric = Callable[[str, str, Sequence[str]], float]

_PUNCTUATION = set(string.punctuation)
# What LongBench takes for punctuation in Chinese texts, in code points: full-width ASCII signs,
# CJK brackets and marks, dashes and typographic quotes.
_CHINESE_PUNCTUATION = {
    *"！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃",  # noqa: RUF001
    *"》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏.",  # noqa: RUF001
}


def _f1(said: Sequence[str], meant: Sequence[str]) -> float:
    same = sum((Counter(said) & Counter(meant)).values())
    if same == 0:
        return 0.0
    precision, recall = same / len(said), same / len(meant)
    return 2 * precision * recall / (precision + recall)


def _plain_words(text: str) -> list[str]:
    """Lower case; no punctuation, no articles."""
    text = "".join(c for c in text.lower() if c not in _PUNCTUATION)
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def qa_f1(prediction: str, truth: str, all_classes: Sequence[str] = ()) -> float:
    """F1 of the words, with their counts."""
    return _f1(_plain_words(prediction), _plain_words(truth))


def qa_f1_zh(prediction: str, truth: str, all_classes: Sequence[str] = ()) -> float:
    """F1 of jieba's tokens without punctuation and white space."""

    def tokens(text: str) -> list[str]:
        skipped = _PUNCTUATION | _CHINESE_PUNCTUATION
        plain = ("".join(c for c in token.lower() if c not in skipped) for token in cut(text))
        return [joined for token in plain if (joined := "".join(token.split()))]

    return _f1(tokens(prediction), tokens(truth))


def rouge(prediction: str, truth: str, all_classes: Sequence[str] = ()) -> float:
    return rouge_l(prediction, truth)


def rouge_zh(prediction: str, truth: str, all_classes: Sequence[str] = ()) -> float:
    """ROUGE-L of jieba's tokens."""
    return rouge_l(" ".join(cut(prediction)), " ".join(cut(truth)))


def classification(prediction: str, truth: str, all_classes: Sequence[str]) -> float:
    """One over the number of class names in the answer, if the true one is among them.

    Names within the true name do not count. As LongBench has it, the one that follows a name just
    taken out is not looked at.
    """
    named = [name for name in all_classes if name in prediction]
    i = 0
    while i < len(named):
        if named[i] in truth and named[i] != truth:
            named.remove(named[i])
        i += 1
    return 1.0 / len(named) if truth in named else 0.0


def _share_of_numbers(prediction: str, truth: str) -> float:
    numbers = re.findall(r"\d+", prediction)
    return numbers.count(truth) / len(numbers) if numbers else 0.0


def retrieval(prediction: str, truth: str, all_classes: Sequence[str] = ()) -> float:
    """The share of the numbers in the answer that are the true paragraph's."""
    return _share_of_numbers(prediction, re.findall(r"Paragraph (\d+)", truth)[0])


def retrieval_zh(prediction: str, truth: str, all_classes: Sequence[str] = ()) -> float:
    return _share_of_numbers(prediction, re.findall(r"段落(\d+)", truth)[0])


def count(prediction: str, truth: str, all_classes: Sequence[str] = ()) -> float:
    """The share of the numbers in the answer that are the true one."""
    return _share_of_numbers(prediction, str(truth))


def code_sim(prediction: str, truth: str, all_classes: Sequence[str] = ()) -> float:
    """Likeness of the first line that is neither a fence nor a comment, in whole hundredths.

    LongBench asks fuzzywuzzy, which asks `difflib` where no faster library is installed; its
    requirements name none.
    """
    lines = prediction.lstrip("\n").split("\n")
    line = next((x for x in lines if "`" not in x and "#" not in x and "//" not in x), "")
    if line == truth:
        return 1.0
    if not line or not truth:
        return 0.0
    return round(100 * difflib.SequenceMatcher(None, line, truth).ratio()) / 100


def cut(text: str) -> list[str]:
    """Chinese words, by jieba. Raises ImportError where it is not installed."""
    try:
        jieba: Any = importlib.import_module("jieba")
    except ImportError:
        raise ImportError(
            "the Chinese data sets of LongBench need jieba: pip install jieba"
        ) from None
    return list(jieba.cut(text, cut_all=False))
