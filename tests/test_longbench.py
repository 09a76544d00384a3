"""LongBench's scorers on cases worked by hand, and its rows as prompts.

On 1,500 random pairs, these scorers and LongBench's own (with rouge 1.0.1, fuzzywuzzy 0.18.0 and
jieba 0.42.1) gave the same figures.
"""

from __future__ import annotations

import importlib.util
import json
import zipfile
from pathlib import Path

import pytest

from sglang_kv.benchmarks.longbench import metrics
from sglang_kv.benchmarks.longbench.cases import grade, make_cases
from sglang_kv.benchmarks.longbench.datasets import DATASETS, load
from sglang_kv.benchmarks.longbench.rouge import rouge_l
from sglang_kv.benchmarks.prompts import Chat


def test_all_21_data_sets_have_their_metric() -> None:
    by_metric: dict[str, set[str]] = {}
    for name, dataset in DATASETS.items():
        by_metric.setdefault(dataset.metric.__name__, set()).add(name)
    assert {name: len(found) for name, found in by_metric.items()} == {
        "qa_f1": 7,  # narrativeqa, qasper, multifieldqa_en, hotpotqa, 2wikimqa, musique, triviaqa
        "qa_f1_zh": 1,
        "rouge": 4,
        "rouge_zh": 2,
        "classification": 2,
        "count": 1,
        "retrieval": 1,
        "retrieval_zh": 1,
        "code_sim": 2,
    }
    assert len(DATASETS) == 21
    assert {n for n, d in DATASETS.items() if d.first_line} == {
        *("trec", "triviaqa", "samsum", "lsht")
    }


def test_f1_is_of_words_without_articles_and_punctuation() -> None:
    # {answer, is, red, cat} and {red, cats, and, cat}: 2 of 4 and 2 of 4.
    assert metrics.qa_f1("The answer is a red cat.", "red cats and a cat") == 0.5
    assert metrics.qa_f1("Paris!", "paris") == 1.0
    assert metrics.qa_f1("red red", "red blue") == 0.5  # counts matter
    assert metrics.qa_f1("", "red") == 0.0


def test_rouge_l_is_the_union_of_common_subsequences() -> None:
    # Lin's example: c1 = w1 w2 w6 w7 w8, c2 = w1 w3 w8 w9 w5 cover w1 w2 w3 w5 of 5 words; of the
    # 8 different words said, that are 4. F = 2 * (4/5) * (4/8) / (4/5 + 4/8).
    said = "w1 w2 w6 w7 w8. w1 w3 w8 w9 w5"
    assert rouge_l(said, "w1 w2 w3 w4 w5") == pytest.approx(8 / 13, abs=1e-7)
    assert rouge_l("same words here", "same words here") == pytest.approx(1, abs=1e-7)
    assert rouge_l("b a", "a b") == pytest.approx(0.5, abs=1e-7)  # order matters
    assert rouge_l("", "a") == rouge_l("...", "a") == 0.0


def test_a_class_is_shared_with_others_named_beside_it() -> None:
    classes = ["city", "number", "number of people", "other"]
    score = metrics.classification
    assert score("It is a city", "city", classes) == 1.0
    assert score("city or other", "city", classes) == 0.5
    assert score("number of people", "number of people", classes) == 1.0  # "number" is within it
    assert score("number", "number of people", classes) == 0.0
    # LongBench's loop skips the name after one that it takes out.
    assert score("ab", "ab", ["a", "b", "ab"]) == 0.5


def test_numbers_found_and_right() -> None:
    assert metrics.retrieval("Paragraph 3, or 12, or 3", "Paragraph 3") == pytest.approx(2 / 3)
    assert metrics.retrieval("none", "Paragraph 3") == 0.0
    assert metrics.retrieval_zh("段落12", "段落12") == 1.0
    assert metrics.count("There are 4 of 8", "4") == 0.5


def test_code_is_its_first_real_line() -> None:
    said = "\n```python\n# comment\nreturn a + b\nmore"
    assert metrics.code_sim(said, "return a + b") == 1.0
    # 11 of 12 characters in both: 2 * 11 / 24 = 0.9167, in whole hundredths.
    assert metrics.code_sim("return a + b", "return a - b") == 0.92
    assert metrics.code_sim("# only a comment", "x") == 0.0


def test_chinese_is_cut_into_words() -> None:
    if importlib.util.find_spec("jieba") is None:
        with pytest.raises(ImportError, match="pip install jieba"):
            metrics.qa_f1_zh("今天", "今天")
        return
    assert metrics.qa_f1_zh("今天天气很好。", "今天天气不错") == pytest.approx(0.4)
    assert metrics.rouge_zh("今天天气很好", "今天天气不错") == pytest.approx(0.4, abs=1e-6)


def test_the_best_reference_counts_and_some_only_by_their_first_line() -> None:
    row = {"answers": ["red", "blue"], "all_classes": None}
    assert grade(DATASETS["hotpotqa"], row, "blue") == 1.0
    assert grade(DATASETS["triviaqa"], row, "\nblue\nred car in the sky") == 1.0
    assert grade(DATASETS["hotpotqa"], row, "blue\nred car in sky") == pytest.approx(1 / 3)


@pytest.fixture(scope="module")
def chat(demo_model: Path) -> Chat:
    return Chat.load(str(demo_model))


def test_rows_become_prompts_cut_in_the_middle(chat: Chat, tmp_path: Path) -> None:
    def row(context: str, **more: object) -> str:
        found = {"context": context, "input": "Who {was} it?", "answers": ["Ann"], **more}
        return json.dumps(found | {"all_classes": None}) + "\n"

    long = " ".join(f"word{i}" for i in range(900))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "hotpotqa.jsonl").write_text(row(long) + row("short"))
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
        archive.writestr("data/trec.jsonl", row("Question: a\nType: b", answers=["b"]))
    own = load(str(tmp_path), ["hotpotqa", "trec"])
    assert own.prompts_of == "sglang-kv"
    config = tmp_path / "LongBench" / "config"
    config.mkdir(parents=True)
    template = "Passages: {context}\nEnd. Question: {input}\nAnswer:"
    given = {"hotpotqa": template, "trec": "{context}\n{input}"}
    (config / "dataset2prompt.json").write_text(json.dumps(given))
    (config / "dataset2maxlen.json").write_text(json.dumps({"hotpotqa": 20}))
    source = load(str(tmp_path), ["hotpotqa", "trec"])
    assert source.prompts_of == "LongBench"
    assert source.max_new_tokens == {"hotpotqa": 20, "trec": 64}

    first, few, second = make_cases(chat, source, [512], 2)
    assert [case.task for case in (first, few, second)] == ["hotpotqa", "trec", "hotpotqa"]
    # All but a token that a half may lose.
    assert 511 <= len(first.prompt_ids) + 20 <= 512
    before = chat.decode(first.prompt_ids[: first.fold_at])
    after = chat.decode(first.prompt_ids[first.fold_at :])
    assert "Passages: word0 word1" in before
    assert before.endswith("word899")
    assert "word450" not in before
    assert after.startswith("\nEnd. Question: Who {was} it?\nAnswer:")
    assert "assistant" in after  # the chat template's
    whole = chat.decode(second.prompt_ids)
    assert "Passages: short\nEnd." in whole
    # Examples to go on from: no chat template.
    assert chat.decode(few.prompt_ids) == "Question: a\nType: b\nWho {was} it?"
    with pytest.raises(ValueError, match=r"no narrativeqa\.jsonl"):
        load(str(tmp_path), ["narrativeqa"])
    with pytest.raises(ValueError, match="no such folder"):
        load(str(tmp_path / "none"), ["trec"])
    with pytest.raises(ValueError, match="leaves no room"):
        make_cases(chat, source, [40], 1)
