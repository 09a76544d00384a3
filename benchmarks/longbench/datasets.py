"""LongBench's 21 data sets: which metric, how long an answer, and where its files are.

Data and prompts are not in this package. They are read from a folder (a checkout of
https://github.com/THUDM/LongBench has the prompts in ``LongBench/config``; the hub's data set
``THUDM/LongBench`` has ``data.zip``), both MIT.
"""

from __future__ import annotations

import io
import json
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_kv.benchmarks.longbench import metrics

HUB = "THUDM/LongBench"


@dataclass(frozen=True)
class Dataset:
    """One of the 21.

    Args:
        ask: our own prompt after the text, where LongBench's are not at hand.
        first_line: only the first line of an answer counts.
        chat: whether the prompt goes through the model's chat template.
    """

    metric: metrics.Metric
    max_new_tokens: int
    ask: str
    first_line: bool = False
    chat: bool = True


_QA = "Question: {input}\nGive only the answer, as short as possible.\nAnswer:"
_QA_ZH = "问题：{input}\n只给出答案。\n回答："  # noqa: RUF001
_REPORT = "Write a one-page summary of the text above.\nSummary:"
_QUERY = "Query about the meeting above: {input}\nAnswer in one or more sentences:"
_SUM_ZH = "请总结以上会议。\n总结："  # noqa: RUF001
_SHOTS = "{input}"
_COUNT = "How many different paragraphs are there above? Give only the number.\nAnswer: "
_WHICH = 'Which paragraph is this abstract of: "{input}"? Answer like "Paragraph 1".\nAnswer: '
_WHICH_ZH = "以下摘要出自哪一段：{input}\n请按“段落1”的格式回答。\n答案："  # noqa: RUF001
_CODE = "{input}Next line of code:\n"

DATASETS: dict[str, Dataset] = {
    "narrativeqa": Dataset(metrics.qa_f1, 128, _QA),
    "qasper": Dataset(metrics.qa_f1, 128, _QA),
    "multifieldqa_en": Dataset(metrics.qa_f1, 64, _QA),
    "multifieldqa_zh": Dataset(metrics.qa_f1_zh, 64, _QA_ZH),
    "hotpotqa": Dataset(metrics.qa_f1, 32, _QA),
    "2wikimqa": Dataset(metrics.qa_f1, 32, _QA),
    "musique": Dataset(metrics.qa_f1, 32, _QA),
    "dureader": Dataset(metrics.rouge_zh, 128, _QA_ZH),
    "gov_report": Dataset(metrics.rouge, 512, _REPORT),
    "qmsum": Dataset(metrics.rouge, 512, _QUERY),
    "multi_news": Dataset(metrics.rouge, 512, _REPORT),
    "vcsum": Dataset(metrics.rouge_zh, 512, _SUM_ZH),
    "trec": Dataset(metrics.classification, 64, _SHOTS, first_line=True, chat=False),
    "triviaqa": Dataset(metrics.qa_f1, 32, _SHOTS, first_line=True, chat=False),
    "samsum": Dataset(metrics.rouge, 128, _SHOTS, first_line=True, chat=False),
    "lsht": Dataset(metrics.classification, 64, _SHOTS, first_line=True, chat=False),
    "passage_count": Dataset(metrics.count, 32, _COUNT),
    "passage_retrieval_en": Dataset(metrics.retrieval, 32, _WHICH),
    "passage_retrieval_zh": Dataset(metrics.retrieval_zh, 32, _WHICH_ZH),
    "lcc": Dataset(metrics.code_sim, 64, _CODE, chat=False),
    "repobench-p": Dataset(metrics.code_sim, 64, _CODE, chat=False),
}


@dataclass(frozen=True)
class Source:
    """LongBench's files, and whose prompts are asked."""

    rows: dict[str, list[dict[str, Any]]]
    prompts: dict[str, str]
    max_new_tokens: dict[str, int]
    prompts_of: str


def load(place: str, names: list[str]) -> Source:
    """Rows and prompts of these data sets from a folder, or from the hub (``hub``).

    Raises ValueError, naming what is missing.
    """
    folder = _from_hub() if place == "hub" else Path(place)
    if not folder.is_dir():
        raise ValueError(f"--longbench: {place}: no such folder")
    rows = {name: _rows(folder, name) for name in names}
    prompts = _config(folder, "dataset2prompt.json")
    lengths = _config(folder, "dataset2maxlen.json")
    own = {name: "{context}\n\n" + DATASETS[name].ask for name in names}
    return Source(
        rows=rows,
        prompts={name: prompts.get(name, own[name]) for name in names},
        max_new_tokens={n: int(lengths.get(n, DATASETS[n].max_new_tokens)) for n in names},
        prompts_of="LongBench" if set(names) <= set(prompts) else "sglang-kv",
    )


def _rows(folder: Path, name: str) -> list[dict[str, Any]]:
    for path in (folder / f"{name}.jsonl", folder / "data" / f"{name}.jsonl"):
        if path.exists():
            return [json.loads(line) for line in path.read_text("utf-8").splitlines() if line]
    archive = folder / "data.zip"
    if archive.exists():
        with zipfile.ZipFile(archive) as held:
            inside = [n for n in held.namelist() if n.split("/")[-1] == f"{name}.jsonl"]
            if inside:
                text = io.TextIOWrapper(held.open(inside[0]), "utf-8")
                return [json.loads(line) for line in text if line.strip()]
    raise ValueError(
        f"--longbench: {folder} has no {name}.jsonl, no data/{name}.jsonl, and none in data.zip"
    )


def _config(folder: Path, name: str) -> dict[str, Any]:
    """A file of LongBench's ``config`` folder, if it is there."""
    for path in (folder, folder / "config", folder / "LongBench" / "config"):
        if (path / name).exists():
            found: dict[str, Any] = json.loads((path / name).read_text("utf-8"))
            return found
    return {}


def _from_hub() -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(HUB, repo_type="dataset", allow_patterns=["data.zip"]))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ValueError(f"--longbench: the hub's {HUB} cannot be had: {error}") from None
