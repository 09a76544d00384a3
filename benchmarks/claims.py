"""What the texts behind this project claim, what was measured here, and what follows.

Every figure in the second column and every verdict comes from a line of ``results/*.jsonl``, or
from the planner, which is then named. A claim without such a line says "not measured yet".
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from sglang_kv.benchmarks.records import (
    at_once,
    last,
    lines,
    newest,
    number_needles,
    of_method,
    planned,
)
from sglang_kv.planner.find import find_model

PENDING = ("-", "not measured yet")

#: Needles kept of the full cache's, from which "98 %" or "100 %" is not contradicted.
HIGH = 0.97


@dataclass(frozen=True)
class Claim:
    """``measure`` gives the figures and the verdict, or None while there are none."""

    stated: str
    measure: Callable[[], tuple[str, str] | None]


def table() -> str:
    """Markdown: stated, measured here, verdict."""
    rows = ["| stated | measured here | verdict |", "|---|---|---|"]
    for claim in CLAIMS:
        measured, verdict = claim.measure() or PENDING
        rows.append(f"| {claim.stated} | {measured} | {verdict} |")
    return "\n".join(rows)


def _needles(arm: str, *, least: float) -> tuple[str, str] | None:
    """Seven-digit needles of an arm with the question seen, beside the share that was stated."""
    cell = number_needles(arm)
    if cell is None or not cell["full_hits"]:
        return None
    low, high = cell["kept_interval"]
    *others, longest = (f"{n:,}" for n in cell["lengths"])
    lengths = " and ".join([", ".join(others), longest] if others else [longest])
    text = (
        f"{arm}: {cell['kept']}/{cell['full_hits']} of the full cache's 7-digit needles "
        f"({low:.0%} - {high:.0%}), {cell['memory']:.0%} of the memory; {cell['model']}, {lengths} "
        "tokens"
    )
    verdict = "holds" if low >= least else "open" if high >= least else "does not hold"
    return text, verdict


def sinks_keep_it_stable() -> tuple[str, str] | None:
    stream = last("endless_stream", lambda r: r.get("policy", {}).get("sinks", 0) > 0 and _ppl(r))
    if stream is not None:
        values = [math.log(value) for value in stream["perplexity"]]
        half = len(values) // 2
        first, second = (math.exp(fmean(part)) for part in (values[:half], values[half:]))
        text = (
            f"{first:.1f} over the first half of {stream['tokens']:,} tokens, {second:.1f} over "
            f"the second; {stream['model']}"
        )
        if second > 1.1 * first:
            return text, "does not hold"
        return text, f"holds to {stream['tokens']:,} tokens; 4 million are not measured yet"
    row = last(
        "quality",
        lambda r: r["policy"].get("sinks", 4) > 0 and r["policy"].get("method") == "streamingllm",
        suite="perplexity",
    )
    if row is None:
        return None
    cell = row["summary"][-1]
    text = (
        f"{row['arm']}: {cell['ppl']:.1f} beside {cell['full_ppl']:.1f} with the full cache "
        f"({cell['ratio']:.3f}x) over {cell['length']:,} tokens; {row['model']}"
    )
    if cell["ratio"] > 1.1:
        return text, "does not hold"
    return text, f"holds to {cell['length']:,} tokens; 4 million are not measured yet"


def _ppl(row: dict[str, Any]) -> bool:
    return "perplexity" in row


def no_sinks_collapse() -> tuple[str, str] | None:
    arms = {
        bool(row["policy"]["sinks"]): row
        for row in lines("endless_stream")
        if "policy" in row and _ppl(row)
    }
    if set(arms) == {True, False}:
        pairs = list(zip(arms[False]["perplexity"], arms[True]["perplexity"], strict=False))
        worst, beside = max(pairs, key=lambda pair: pair[0] / pair[1])
        text = (
            f"{worst:,.0f} beside {beside:.1f} with sinks at worst, per {arms[True]['bucket']:,} "
            f"of {arms[False]['tokens']:,} tokens; {arms[False]['model']}"
        )
        return text, "holds" if worst > 10 * beside else "no collapse here, but worse"
    row = last(
        "quality",
        lambda r: r["policy"].get("sinks") == 0 and r["policy"].get("method") == "streamingllm",
        suite="perplexity",
    )
    if row is None:
        return None
    cell = row["summary"][-1]
    text = (
        f"{row['arm']}: {cell['ppl']:.0f} beside {cell['full_ppl']:.1f}, {cell['length']:,} "
        f"tokens; {row['model']}"
    )
    if cell["ppl"] > 1000:
        return text, "holds"
    return text, "in part" if cell["ratio"] > 2 else "no collapse here"


def h2o_at_a_fifth() -> tuple[str, str] | None:
    row = last("quality", of_method("h2o", keep_ratio=0.2), suite="fidelity")
    if row is None:
        return None
    cell = row["cells"][-1]
    share = cell["agreed"] / cell["tokens"]
    text = f"{share:.1%} of next tokens as the full cache's, {cell['length']:,} tokens"
    return f"{text}; {row['model']}", "holds" if share > 0.995 else "does not hold to 0.5 %"


def h2o_standins() -> tuple[str, str] | None:
    row = last("quality", of_method("h2o", keep_ratio=0.2), suite="standins")
    if row is None:
        return None
    parts = [
        f"{c['task']} {100 * c['score']:.1f} beside {100 * c['full_score']:.1f} (n = {c['n']})"
        for c in row["cells"]
        if c["column"] == "aware"
    ]
    worst = min(c["difference_interval"][0] for c in row["cells"] if c["difference_interval"])
    return "; ".join(parts) + f"; {row['model']}", "holds" if worst > -0.005 else "not shown"


def pyramid_against_snapkv() -> tuple[str, str] | None:
    rows = newest("quality", suite="fidelity")
    if not {"snapkv 0.25", "pyramidkv 0.25"} <= set(rows):
        return None
    kl = {
        arm: {c["length"]: c["kl"] for c in rows[arm]["cells"] if c["column"] == "aware"}
        for arm in ("snapkv 0.25", "pyramidkv 0.25")
    }
    lengths = sorted(kl["snapkv 0.25"])
    pairs = [(kl["pyramidkv 0.25"][n], kl["snapkv 0.25"][n]) for n in lengths]
    shown = ", ".join(
        f"{a:.3f} against {b:.3f} at {n:,}" for (a, b), n in zip(pairs, lengths, strict=True)
    )
    better = sum(a < b for a, b in pairs)
    verdict = "holds" if better == len(pairs) else f"at {better} of {len(pairs)} lengths"
    if better == 0:
        verdict = "does not hold on this model"
    return (
        f"KL from the full cache, a quarter kept: {shown}; {rows['snapkv 0.25']['model']}",
        verdict,
    )


def retrieval_heads() -> tuple[str, str] | None:
    return _needles("duoattention 0.5", least=HIGH - 0.01)


def seventy_percent() -> tuple[str, str] | None:
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


def blocks_without_copies() -> tuple[str, str] | None:
    row = newest("pressure").get("evict")
    if row is None or not row["tokens_evicted"]:
        return None
    text = (
        f"{row['tokens_evicted']:,} tokens dropped from running requests, in whole pages; output "
        f"{row['ratio_to_retract']:.2f}x of the same memory where requests wait for it"
    )
    return text, "holds"


def four_times_the_requests() -> tuple[str, str] | None:
    rows = {row["arm"]: row for row in at_once()}
    dense = rows.get("none")
    if dense is None or len(rows) < 2:
        return None
    best = max(rows.values(), key=lambda row: row["running_at_once"])
    # The least compressed arm that holds four times as many, if any does.
    enough = [r for r in rows.values() if r["running_at_once"] >= 4 * dense["running_at_once"]]
    shown = min(enough, key=lambda row: row["running_at_once"], default=best)
    ratio = shown["running_at_once"] / dense["running_at_once"]
    text = (
        f"{shown['arm']}: {shown['running_at_once']} at once beside {dense['running_at_once']} "
        f"({ratio:.2f}x), prompts of {dense['context']:,} tokens, the same memory"
    )
    return text, "holds" if enough else f"{ratio:.2f}x at most"


def hybrid_model() -> tuple[str, str] | None:
    (plan,) = planned("qwen3.8-27b", "--device", "192GB")
    kv, wrong = plan["per_request"]["kv"] / 2**30, plan["naive"]["per_request"] / 2**30
    text = f"planner, from its config.json: {kv:g} GiB of KV; all 64 layers counted, {wrong:g} GiB"
    return text, "holds" if (kv, wrong) == (16, 64) else "does not hold"


def flop_per_byte() -> tuple[str, str] | None:
    groups = {
        name: find_model(name).full[0].query_heads // find_model(name).full[0].kv_heads
        for name in ("llama-2-7b", "llama-3-8b", "qwen3.8-27b")
    }
    shown = ", ".join(f"{name} {group}" for name, group in groups.items())
    text = f"arithmetic: 2 FLOP per query of the group for 2 bytes read, so per byte {shown}"
    return text, "only for groups up to 2; in 16 bits it is the GQA group size"


def decode_costs_the_same() -> tuple[str, str] | None:
    rows = newest("decode_speed")
    if not {"snapkv 1/4", "pyramidkv 1/4"} <= set(rows):
        return None
    ours, theirs = rows["pyramidkv 1/4"], rows["snapkv 1/4"]
    ratio = ours["decode_tok_s"] / theirs["decode_tok_s"]
    text = (
        f"{ours['decode_tok_s']:.0f} against {theirs['decode_tok_s']:.0f} tok/s ({ratio:.2f}x), "
        f"{ours['batch']} x {ours['context']:,} tokens"
    )
    return text, "holds" if abs(ratio - 1) < 0.05 else "does not hold"


def linear_and_flat() -> tuple[str, str] | None:
    """Needs `none` and streamingllm at two contexts or more."""
    steps = {
        name: {row["context"]: row["step_ms"] for row in _shapes(name)}
        for name in ("none", "streamingllm")
    }
    contexts = sorted(set(steps["none"]) & set(steps["streamingllm"]))
    if len(contexts) < 2:
        return None
    row = _shapes("none")[-1]
    text = "; ".join(
        f"{name} {', '.join(f'{by[n]:.0f}' for n in contexts)} ms" for name, by in steps.items()
    )
    text += f": a step of {row['batch']} requests of {', '.join(f'{n:,}' for n in contexts)} tokens"
    low, high = contexts[0], contexts[-1]
    grown, flat = (by[high] / by[low] for by in steps.values())
    return f"{text}; {row['model']}", "holds" if flat < 1.1 < grown else "does not hold"


def whole_pages() -> tuple[str, str] | None:
    pages, tokens = _shapes("snapkv by page"), _shapes("snapkv by token")
    if not pages or not tokens:
        return None
    by_page, by_token = (rows[-1]["step_ms"] for rows in (pages, tokens))
    text = (
        f"snapkv, a quarter of {pages[-1]['context']:,} tokens kept: a step takes {by_page:.1f} ms "
        f"by whole pages, {by_token:.1f} ms by token, whose rows are copied together once"
    )
    alike = abs(by_page / by_token - 1) < 0.05
    return text, "no difference once copied" if alike else "differs"


def page_sizes() -> tuple[str, str] | None:
    arms = ("none", "snapkv by token", "snapkv by page")
    sizes = {size: {row["name"]: row for row in _shapes(*arms, size=size)} for size in (16, 32)}
    if any(set(found) != set(arms) for found in sizes.values()):
        return None
    shown = "; ".join(
        f"{arm} {sizes[16][arm]['step_ms']:.1f} and {sizes[32][arm]['step_ms']:.1f} ms"
        for arm in arms
    )
    return f"a step with pages of 16 and of 32: {shown}", "both are served"


def _shapes(*names: str, size: int = 16) -> list[dict[str, Any]]:
    """Of the sweep over decode shapes: the newest line of each point of these arms."""
    rows = newest("decode_shapes", page_size=size).values()
    return [row for row in rows if row["name"] in names]


def method_table() -> tuple[str, str] | None:
    argv = ("llama-3.1-8b", "--context", "128k", "--method", "all", "--device", "h100")
    fits = {r["row"]: r["fits"]["requests"] for r in planned(*argv, "--assume-sparsity", "0.5")}
    shown = ", ".join(f"{method} {count}" for method, count in fits.items())
    return f"planner, one H100, requests that fit: {shown}", "modelled, not measured"


def attention_mass(field: str, least: float) -> Callable[[], tuple[str, str] | None]:
    def measure() -> tuple[str, str] | None:
        row = last("attention_mass", lambda r: field in r)
        if row is None:
            return None
        text = f"{row[field]:.1%}, {row['context']:,} tokens, mean over layers and heads"
        return f"{text}; {row['model']}", "holds" if row[field] >= least else "does not hold"

    return measure


CLAIMS = (
    Claim("without its sinks, a window's perplexity jumps from 12 beyond 1,000", no_sinks_collapse),
    Claim("4 sinks and a window stay stable, to 4 million tokens", sinks_keep_it_stable),
    Claim(
        "t_0 to t_3 draw attention out of proportion",
        attention_mass("first_4", 0.1),
    ),
    Claim(
        "under 20 % of the tokens hold over 80 % of the attention", attention_mass("top_20", 0.8)
    ),
    Claim("H2O drops 80 % and loses less than 0.5 %", h2o_at_a_fifth),
    Claim(
        "the same on GSM8K and CNN/DailyMail (here: generated stand-ins, not those sets)",
        h2o_standins,
    ),
    Claim(
        "H2O may lose facts that drew no attention before",
        lambda: _needles_lost("h2o 0.25"),
    ),
    Claim(
        "SnapKV keeps 16 % and finds over 98 %",
        lambda: _needles("snapkv 0.16", least=0.98),
    ),
    Claim(
        "the same, with heads weighed and a wide kernel (preset `copy`)",
        lambda: _needles("copy 0.16", least=HIGH - 0.03),
    ),
    Claim("PyramidKV is more precise than SnapKV at an equal budget", pyramid_against_snapkv),
    Claim("PyramidKV costs nothing in decode beside SnapKV", decode_costs_the_same),
    Claim("DuoAttention finds every needle", retrieval_heads),
    Claim("DuoAttention saves up to 70 % of the memory", seventy_percent),
    Claim("whole blocks go back to the pool without copies", blocks_without_copies),
    Claim("scattered tokens break alignment, whole pages do not", whole_pages),
    Claim("blocks of 16 or 32 tokens", page_sizes),
    Claim("four times the requests per device", four_times_the_requests),
    Claim("decode is linear in the context, and flat with StreamingLLM", linear_and_flat),
    Claim("1 to 2 FLOP per byte read in decode", flop_per_byte),
    Claim("Qwen3.8-27B at 262,144 tokens: 16 GiB, and 64 GiB by mistake", hybrid_model),
    Claim("the methods side by side, Llama-3-8B at 128K on an H100", method_table),
)


def _needles_lost(arm: str) -> tuple[str, str] | None:
    found = _needles(arm, least=HIGH)
    if found is None:
        return None
    return found[0], {"does not hold": "holds", "holds": "not seen here"}.get(found[1], "open")
