"""The advice of ``docs/CHOOSING.md``, with the figures for and against it as they were recorded."""

from __future__ import annotations

from sglang_kv.benchmarks.methods import not_the_preset
from sglang_kv.benchmarks.records import (
    Row,
    at_once,
    commits,
    decode_speeds,
    newest,
    number_needles,
    planned,
    suite_cells,
)
from sglang_kv.benchmarks.verdicts import percent
from sglang_kv.planner.find import find_model

#: Prompt tokens of the needles: of several lengths in one figure, a window keeps several shares.
NEEDLES_AT = 4096
PENDING = "not measured yet"

#: What each traffic is served with, and which arms speak for and against it.
TRAFFIC = (
    (
        "endless dialogue, agents, logs: only the recent matters",
        "`streamingllm`, sinks + a window",
        "streamingllm 0.25",
        "streamingllm 4+1020",
        "streamingllm 1/4",
    ),
    (
        "long documents, RAG at 64K to 256K: facts anywhere",
        "`duoattention`, gates calibrated",
        "duoattention 0.5",
        "duoattention 0.5",
        "duoattention 0.5",
    ),
    (
        "one long document, one short answer, little memory",
        "preset `copy` (`snapkv`, heads by gates)",
        "copy 0.16",
        "copy 0.16",
        "copy 1/4",
    ),
    (
        "summaries, gist",
        "`snapkv`",
        "snapkv 0.25",
        "snapkv 0.25",
        "snapkv 1/4",
    ),
    (
        "the same, layers unequal",
        "`pyramidkv`",
        "pyramidkv 0.25",
        "pyramidkv 0.25",
        "pyramidkv 1/4",
    ),
    (
        "long answers that must stay bounded, no single facts",
        "`h2o`",
        "h2o 0.25",
        "h2o 0.25",
        "h2o 1/4",
    ),
)


def traffic() -> str:
    """Which method for which traffic, with needles, agreement, decode speed and requests."""
    head = ["traffic", "method", f"7-digit needles at {NEEDLES_AT:,}", "same next token"]
    head += ["decode beside `none`", "at once beside `none`"]
    rows = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    used: list[Row] = []
    for kind, method, needles, fidelity, speed in TRAFFIC:
        cells = [kind, method, _needles(needles, used), _agreement(fidelity, used)]
        cells += [_speed(speed, used), _requests(speed, used)]
        rows.append("| " + " | ".join(cells) + " |")
    said = (
        "In brackets: 95 %, and the arm that was measured. Needles: of those that the full cache "
        "finds, the question in the prompt. Same next token: as the full cache's, n tokens at the "
        "longest prompts; the 95 % takes tokens as independent. Decode and requests at once: one "
        "run each."
    )
    if used:
        said += f" Commits {commits(used)}."
    return "\n".join([*rows, "", said])


def _label(row: Row) -> str:
    """The arm, and what a preset's was measured with that is the preset's no more."""
    other = not_the_preset(row["arm"], row["policy"])
    return f"{row['arm']}, {other}" if other else str(row["arm"])


def _needles(arm: str, used: list[Row]) -> str:
    cell = number_needles(arm, length=NEEDLES_AT)
    if cell is None:
        return PENDING
    used.append(cell)
    found = f"{cell['kept']}/{cell['full_hits']}"
    return f"{found} ({percent(cell['kept_interval'])}; {_label(cell)})"


def _agreement(arm: str, used: list[Row]) -> str:
    cells = suite_cells("fidelity", "column", "length").get(arm, {})
    aware = {length: cell for (column, length), cell in cells.items() if column == "aware"}
    if not aware:
        return PENDING
    cell = aware[max(aware)]
    used.append(cell)
    share = f"{cell['agreed'] / cell['tokens']:.1%} of {cell['tokens']} at {cell['length']:,}"
    return f"{share} ({percent(cell['interval'])}; {_label(cell)})"


def _speed(arm: str, used: list[Row]) -> str:
    rows = decode_speeds()
    if arm not in rows or "none" not in rows:
        return PENDING
    used += [rows["none"], rows[arm]]
    ratio = f"{rows[arm]['decode_tok_s'] / rows['none']['decode_tok_s']:.2f}x"
    return f"{ratio} ({_label(rows[arm])})"


def _requests(arm: str, used: list[Row]) -> str:
    rows = {row["arm"]: row for row in at_once()}
    if arm not in rows or "none" not in rows:
        return PENDING
    used += [rows["none"], rows[arm]]
    other = not_the_preset(arm, rows[arm]["policy"])
    counts = f"{rows[arm]['running_at_once']} / {rows['none']['running_at_once']}"
    return f"{counts} ({other})" if other else counts


def questions() -> str:
    """The sources' five frequent questions."""
    (hybrid,) = planned("qwen3.8-27b", "--device", "192GB")
    (dense,) = planned("llama-3.1-8b", "--context", "128k", "--device", "h100")
    kv, weights = dense["per_request"]["kv"] / 2**30, dense["weights"] / 2**30
    group = find_model("llama-3-8b").full[0]
    texts = suite_cells("perplexity", "length", field="summary").get("streamingllm 4+1020")
    stable = PENDING
    if texts:
        cell = texts[max(texts)]
        low, high = cell["ratio_interval"]
        stable = (
            f"with them, perplexity over {cell['length']:,} tokens is {cell['ratio']:.3f} times "
            f"the full cache's ({low:.3f} - {high:.3f}; {cell['model']})"
        )
    speed = decode_speeds()
    cost = PENDING
    if {"snapkv 1/4", "pyramidkv 1/4"} <= set(speed):
        cost = " and ".join(
            f"{speed[a]['decode_tok_s']:.0f} tok/s ({a})" for a in ("snapkv 1/4", "pyramidkv 1/4")
        )
    duo = number_needles("duoattention 0.5")
    found = PENDING
    if duo:
        found = (
            f"with half of them streaming, {duo['kept']} of {duo['full_hits']} needles are found "
            f"with {duo['memory']:.0%} of the memory"
        )
    pressure = newest("pressure").get("evict")
    freed = PENDING
    if pressure:
        freed = (
            f"{pressure['tokens_evicted']:,} tokens taken from running requests gave "
            f"{pressure['ratio_to_retract']:.2f} times the output of the same memory where others "
            "wait"
        )
    answers = {
        "Why does the KV cache fill the memory?": (
            "It grows with every token of every request, and the weights do not. Llama-3.1-8B "
            f"keeps {dense['bytes_per_token'] // 1024} KiB per token: {kv:g} GiB for one request "
            f"of 128K, beside {weights:.1f} GiB of weights. Count the layers that keep it: "
            f"Qwen3.8-27B takes {hybrid['per_request']['kv'] / 2**30:g} GiB at its full length, "
            f"not {hybrid['naive']['per_request'] / 2**30:g}."
        ),
        "What are attention sinks, and why do they matter?": (
            "The first tokens, which take the attention that a query has no use for. A window "
            f"without them changes every softmax; {stable}."
        ),
        "SnapKV or PyramidKV?": (
            "The same choice of tokens; PyramidKV gives early layers more and late ones less, at "
            f"the same total. In decode: {cost}; which is closer to the full cache "
            "depends on the model: see the claims above."
        ),
        "What are retrieval heads?": (
            "The KV heads that look far back. DuoAttention keeps everything in those and a window "
            f"in the others; {found}. A share of 20 to 30 % is what models with many KV heads "
            f"have; with GQA (Llama-3-8B: {group.kv_heads} KV heads for {group.query_heads} query "
            "heads), its authors keep half. Calibrate."
        ),
        "How do pages keep evicting cheap?": (
            "Memory is handed out in pages of 16 or 32 tokens of one head, so freeing one moves "
            f"nothing and leaves no gap that another cannot fill; under pressure, {freed}."
        ),
    }
    return "\n\n".join(f"**{asked}** {answer}" for asked, answer in answers.items())
