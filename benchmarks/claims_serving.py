"""Claims about memory and speed: what fits, what a decode step costs, what pages change."""

from __future__ import annotations

import itertools
from typing import Any

from sglang_kv.benchmarks.records import (
    Row,
    at_once,
    decode_speeds,
    last,
    needle_cells,
    newest,
    number_needles,
    planned,
)
from sglang_kv.benchmarks.verdicts import FAILS, HOLDS, Found, verdict, within
from sglang_kv.compression import parse_policy
from sglang_kv.planner.find import find_model

#: One run each is the same speed as another within this share.
ALIKE = 0.05
#: Milliseconds per token of a straight line, from one pair of contexts to the next.
STRAIGHT = 1.25
#: "Flat": a step at the longest context beside the shortest.
FLAT = 1.1
#: The methods that are said to serve four times the requests, and what "facts kept" is.
FOUR_TIMES = ("duoattention", "pyramidkv")
FACTS = 0.98


def seventy_percent() -> Found:
    argv = ("llama-3.1-8b", "--context", "128k", "--method", "none,duoattention")
    dense, half = (r["per_request"]["steady"] for r in planned(*argv, "--assume-sparsity", "0.5"))
    most = planned(*argv, "--assume-sparsity", "0.75")[1]["per_request"]["steady"]
    cell = number_needles("duoattention 0.5")
    seen = "" if cell is None else f"; with half, {cell['model']}: {1 - cell['memory']:.0%}"
    text = (
        f"planner, Llama-3.1-8B at 128K: {1 - half / dense:.0%} with half the heads streaming, "
        f"{1 - most / dense:.0%} with three quarters{seen}"
    )
    return text, "as modelled, if 70 % of the heads or more may stream"


def blocks_without_copies() -> Found:
    row = newest("pressure").get("evict")
    if row is None or not row["tokens_evicted"]:
        return None
    text = (
        f"{row['tokens_evicted']:,} tokens dropped from running requests, in whole pages; output "
        f"{row['ratio_to_retract']:.2f}x of the same memory where requests wait for it"
    )
    return text, "holds"


def four_times_the_requests() -> Found:
    """Of the methods that it is said of: how many fit, and whether their facts stay."""
    rows = at_once()
    dense = next((row for row in rows if row["arm"] == "none"), None)
    best: dict[str, Row] = {}
    for row in rows:
        method = (row["policy"] or {}).get("method")
        if method in FOUR_TIMES:
            best[method] = max(row, best.get(method, row), key=lambda r: int(r["running_at_once"]))
    if dense is None or not best:
        return None
    parts: list[str] = []
    kept: list[str] = []
    four = 0
    for row in best.values():
        ratio = row["running_at_once"] / dense["running_at_once"]
        cell, exact = _needles_of(row["policy"])
        said = "needles not measured"
        if cell is not None:
            who = "it" if exact else cell["arm"]
            said = f"{who} keeps {cell['kept']}/{cell['full_hits']} needles"
        weights = " with random weights" if row.get("shape_only") else ""
        parts.append(
            f"{row['arm']}: {row['running_at_once']} at once beside "
            f"{dense['running_at_once']} ({ratio:.2f}x{weights}), {said}"
        )
        if ratio >= 4:
            four += 1
            kept.append(_facts(cell, exact))
    text = f"{'; '.join(parts)}; prompts of {dense['context']:,} tokens, the same memory"
    if HOLDS in kept:
        return text, HOLDS
    if not four:
        return text, f"{FAILS} here: less than four times"
    if set(kept) == {FAILS}:
        return text, "in part: so many fit, and then facts are lost"
    return text, next(one for one in kept if one != FAILS)


def _needles_of(policy: dict[str, Any]) -> tuple[Row | None, bool]:
    """The needles of the arm of this method that keeps as much, else the least more than that.

    Whether it keeps as much stands beside it.
    """
    share = _kept_share(policy)
    cells = [cells.get(("number", "aware")) for cells in needle_cells().values()]
    found = [
        (kept, cell)
        for cell in cells
        if cell and cell["full_hits"] and cell["policy"]["method"] == policy["method"]
        for kept in (_kept_share(cell["policy"]),)
        if kept is not None and share is not None and kept >= share
    ]
    if not found:
        return None, False
    kept, cell = min(found, key=lambda pair: pair[0])
    return cell, kept == share


def _kept_share(policy: dict[str, Any]) -> float | None:
    """Of the prompt, or of the heads that keep it all; None: a number of tokens."""
    parameters = parse_policy(policy).parameters
    if parameters.get("sparsity") is not None:
        return 1 - float(parameters["sparsity"])
    return parameters.get("keep_ratio")


def _facts(cell: Row | None, exact: bool) -> str:
    """Needles of an arm that keeps more can only show that facts are lost."""
    if cell is None:
        return "open: so many fit, and needles are not measured"
    said = verdict(cell["kept_interval"], FACTS, f"n = {cell['full_hits']} needles")
    if said == HOLDS and not exact:
        return "open: so many fit, and needles are measured with more memory only"
    return said


def hybrid_model() -> Found:
    (plan,) = planned("qwen3.8-27b", "--device", "192GB")
    kv, wrong = plan["per_request"]["kv"] / 2**30, plan["naive"]["per_request"] / 2**30
    text = f"planner, from its config.json: {kv:g} GiB of KV; all 64 layers counted, {wrong:g} GiB"
    return text, "holds" if (kv, wrong) == (16, 64) else "does not hold"


def flop_per_byte() -> Found:
    groups = {
        name: find_model(name).full[0].query_heads // find_model(name).full[0].kv_heads
        for name in ("llama-2-7b", "llama-3-8b", "qwen3.8-27b")
    }
    shown = ", ".join(f"{name} {group}" for name, group in groups.items())
    text = f"arithmetic: 2 FLOP per query of the group for 2 bytes read, so per byte {shown}"
    return text, "only for groups up to 2; in 16 bits it is the GQA group size"


def decode_costs_the_same() -> Found:
    rows = decode_speeds()
    if not {"snapkv 1/4", "pyramidkv 1/4"} <= set(rows):
        return None
    ours, theirs = rows["pyramidkv 1/4"], rows["snapkv 1/4"]
    ratio = ours["decode_tok_s"] / theirs["decode_tok_s"]
    text = (
        f"{ours['decode_tok_s']:.0f} against {theirs['decode_tok_s']:.0f} tok/s ({ratio:.2f}x), "
        f"{ours['batch']} x {ours['context']:,} tokens, one run of {ours['steps']} steps each"
    )
    return text, f"holds within {ALIKE:.0%}" if within(ratio, ALIKE) else FAILS


def linear_and_flat() -> Found:
    """`none` on a straight line, streamingllm level; two contexts show no line."""
    rows = {name: shapes(name) for name in ("none", "streamingllm")}
    steps = {
        name: {row["context"]: row["step_ms"] for row in found} for name, found in rows.items()
    }
    contexts = sorted(set(steps["none"]) & set(steps["streamingllm"]))
    if len(contexts) < 2:
        return None
    row = rows["none"][-1]
    text = "; ".join(
        f"{name} {', '.join(f'{by[n]:.0f}' for n in contexts)} ms" for name, by in steps.items()
    )
    text += f": a step of {row['batch']} requests of {', '.join(f'{n:,}' for n in contexts)} tokens"
    text += f"; {row['model']}"
    if len(contexts) < 3:
        return text, "open: two contexts show no line"
    flat = steps["streamingllm"][contexts[-1]] < FLAT * steps["streamingllm"][contexts[0]]
    straight = _straight([(n, steps["none"][n]) for n in contexts])
    if straight and flat:
        return text, HOLDS
    if straight or flat:
        return text, "in part: linear, not flat" if straight else "in part: flat, not linear"
    return text, FAILS


def _straight(points: list[tuple[int, float]]) -> bool:
    """Whether times grow, and as fast between every two neighbours."""
    slopes = [(b - a) / (to - start) for (start, a), (to, b) in itertools.pairwise(points)]
    return min(slopes) > 0 and max(slopes) <= STRAIGHT * min(slopes)


def whole_pages() -> Found:
    found = _cut(16)
    if not {"snapkv by page", "snapkv by token"} <= set(found):
        return None
    page, token = found["snapkv by page"], found["snapkv by token"]
    by_page, by_token = page["step_ms"], token["step_ms"]
    text = (
        f"snapkv, a quarter of {page['context']:,} tokens kept: a step takes {by_page:.1f} ms "
        f"by whole pages, {by_token:.1f} ms by token, whose rows are copied together once"
    )
    if within(by_page / by_token, ALIKE):
        return text, f"no difference once copied, within {ALIKE:.0%}"
    return text, "differs"


def page_sizes() -> Found:
    arms = ("none", "snapkv by token", "snapkv by page")
    sizes = {size: _cut(size) for size in (16, 32)}
    if any(set(found) != set(arms) for found in sizes.values()):
        return None
    shown = "; ".join(
        f"{arm} {sizes[16][arm]['step_ms']:.1f} and {sizes[32][arm]['step_ms']:.1f} ms"
        for arm in arms
    )
    context = sizes[16]["none"]["context"]
    text = f"a step with pages of 16 and of 32 at {context:,} tokens: {shown}"
    return text, "both are served"


def _cut(size: int) -> dict[str, Row]:
    """How pages are cut: the arms at the context of the newest such line, by name."""
    row = last("decode_shapes", lambda row: row["name"] == "snapkv by page")
    if row is None:
        return {}
    same = {key: row[key] for key in ("context", "batch")}
    found = shapes("none", "snapkv by token", "snapkv by page", page_size=size, **same)
    return {line["name"]: line for line in found}


def shapes(*names: str, page_size: int = 16, **fields: Any) -> list[Row]:
    """Of the sweep over decode shapes: the newest line of each point of these arms."""
    rows = newest("decode_shapes", page_size=page_size, **fields).values()
    return [row for row in rows if row["name"] in names]


def method_table() -> Found:
    argv = ("llama-3.1-8b", "--context", "128k", "--method", "all", "--device", "h100")
    fits = {r["row"]: r["fits"]["requests"] for r in planned(*argv, "--assume-sparsity", "0.5")}
    shown = ", ".join(f"{method} {count}" for method, count in fits.items())
    return f"planner, one H100, requests that fit: {shown}", "modelled, not measured"
