"""What the texts behind this project claim, what was measured here, and what follows.

Every figure in the second column and every verdict comes from a line of ``results/*.jsonl``, or
from the planner, which is then named. A claim without such a line says "not measured yet".
Verdicts follow one rule (`verdicts`): what a 95 % interval does not decide is open.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from sglang_kv.benchmarks import claims_quality as quality
from sglang_kv.benchmarks import claims_serving as serving
from sglang_kv.benchmarks.verdicts import Found

PENDING = ("-", "not measured yet")


@dataclass(frozen=True)
class Claim:
    """``measure`` gives the figures and the verdict, or None while there are none."""

    stated: str
    measure: Callable[[], Found]


def table() -> str:
    """Markdown: stated, measured here, verdict."""
    rows = ["| stated | measured here | verdict |", "|---|---|---|"]
    for claim in CLAIMS:
        measured, verdict = claim.measure() or PENDING
        rows.append(f"| {claim.stated} | {measured} | {verdict} |")
    return "\n".join(rows)


CLAIMS = (
    Claim(
        "without its sinks, a window's perplexity jumps from 12 beyond 1,000",
        quality.no_sinks_collapse,
    ),
    Claim("4 sinks and a window stay stable, to 4 million tokens", quality.sinks_keep_it_stable),
    Claim("t_0 to t_3 draw attention out of proportion", quality.attention_mass("first_4", 0.1)),
    Claim(
        "under 20 % of the tokens hold over 80 % of the attention",
        quality.attention_mass("top_20", 0.8),
    ),
    Claim("H2O drops 80 % and loses less than 0.5 %", quality.h2o_at_a_fifth),
    Claim(
        "the same on GSM8K and CNN/DailyMail (here: generated stand-ins, not those sets)",
        quality.h2o_standins,
    ),
    Claim(
        "H2O may lose facts that drew no attention before",
        partial(quality.needles_lost, "h2o 0.25"),
    ),
    Claim("SnapKV keeps 16 % and finds over 98 %", partial(quality.needles, "snapkv 0.16", 0.98)),
    Claim(
        "the same, with heads weighed and a wide kernel (preset `copy`)",
        partial(quality.needles, "copy 0.16", 0.98),
    ),
    Claim(
        "PyramidKV is more precise than SnapKV at an equal budget", quality.pyramid_against_snapkv
    ),
    Claim("PyramidKV costs nothing in decode beside SnapKV", serving.decode_costs_the_same),
    Claim("DuoAttention finds every needle", partial(quality.every_needle, "duoattention 0.5")),
    Claim("DuoAttention saves up to 70 % of the memory", serving.seventy_percent),
    Claim("whole blocks go back to the pool without copies", serving.blocks_without_copies),
    Claim("scattered tokens break alignment, whole pages do not", serving.whole_pages),
    Claim("blocks of 16 or 32 tokens", serving.page_sizes),
    Claim(
        "four times the requests per device, with the facts kept (DuoAttention, PyramidKV)",
        serving.four_times_the_requests,
    ),
    Claim("decode is linear in the context, and flat with StreamingLLM", serving.linear_and_flat),
    Claim("1 to 2 FLOP per byte read in decode", serving.flop_per_byte),
    Claim("Qwen3.8-27B at 262,144 tokens: 16 GiB, and 64 GiB by mistake", serving.hybrid_model),
    Claim("the methods side by side, Llama-3-8B at 128K on an H100", serving.method_table),
)
