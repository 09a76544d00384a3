"""The tables and plots of README and docs, from ``results/*.jsonl`` and the registry.

``--write`` puts the tables there, ``--plots`` draws ``docs/figures``.

Each table shows recorded lines: the newest of each arm, or in quality's tables, by cell, the one
with the most cases. ``tests/test_readme.py`` fails when the two differ.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path

from sglang_kv import cli
from sglang_kv.benchmarks import (
    bench_tables,
    beside,
    calibration_tables,
    choosing,
    claims,
    cpu_kernel_tables,
    decode_cost,
    endless_figures,
    headline,
    kv_tables,
    plots,
    prefix_tables,
    quality_tables,
)
from sglang_kv.benchmarks.figures import figures
from sglang_kv.benchmarks.markdown import NOTHING, head
from sglang_kv.benchmarks.records import newest
from sglang_kv.planner import command

ROOT = Path(__file__).resolve().parent.parent
#: Where the plots are, beside the documents that show them.
FIGURES = Path("docs", "figures")


def pressure() -> str:
    """Evict or retract, in a pool of a third of what is wanted."""
    rows = newest("pressure")
    if not rows:
        return NOTHING
    table = head("", "output", "beside retract", "retracted", "answer as with room for all, until")
    for arm, row in rows.items():
        ratio = f"{row['ratio_to_retract']:.2f}x" if row["ratio_to_retract"] else "-"
        same = f"{row['same_answer_until']:.0%} of it"
        table.append(
            f"| {arm} ({row['pool_tokens']:,} tokens) | {row['output_tok_s']:.0f} tok/s "
            f"| {ratio} | {row['retractions_logged']} | {same} |"
        )
    return "\n".join(table)


def pictures(folder: str, *names: str) -> str:
    """The plots, or those of these names, as a document that lies beside ``folder`` shows them."""
    shown = [f for f in figures() if not names or f.name in names]
    return "\n".join(f"![{f.title}]({folder}/{f.name}.svg)" for f in shown)


def methods() -> str:
    return cli.method_table()


def plan(*argv: str) -> str:
    """An invocation of ``sglang-kv plan`` and what it prints."""
    printed = command.output(*argv)
    words = shlex.join(["sglang-kv", "plan", *argv])
    if printed.startswith("|"):
        return f"```\n{words}\n```\n\n{printed}"
    return f"```\n$ {words}\n{printed}\n```"


SECTIONS: dict[str, Callable[[], str]] = {
    "headline": headline.table,
    "plot": partial(pictures, FIGURES.as_posix(), "quality-memory"),
    "plots": partial(pictures, FIGURES.name),
    "traffic": choosing.traffic,
    "claims": claims.table,
    "questions": choosing.questions,
    "methods": methods,
    "parameters": cli.parameter_tables,
    "presets": cli.preset_table,
    "needles": quality_tables.needles,
    "decided": quality_tables.decided,
    "fidelity": quality_tables.fidelity,
    "perplexity": quality_tables.perplexity,
    "ruler": partial(quality_tables.graded, "ruler"),
    "standins": partial(quality_tables.graded, "standins"),
    "longbench": partial(quality_tables.graded, "longbench"),
    "room": headline.room,
    "endless": lambda: f"{endless_figures.table()}\n\n{pictures(FIGURES.name, 'endless-stream')}",
    "pressure": pressure,
    "beside-quality": beside.quality,
    "beside-kept": beside.kept,
    "beside-speed": beside.speed,
    "bench": bench_tables.bench,
    "plan-example": partial(plan, "qwen3.8-27b", "--device", "192GB"),
    "plan-models": partial(
        plan,
        "llama-2-7b,llama-3-8b,llama-3-70b,qwen3-8b,gemma-3-27b,deepseek-v3,qwen3.8-27b",
        *("--context", "8k,32k,128k,1m", "--kv-dtype", "fp16"),
    ),
    "plan-methods": partial(
        plan,
        *("llama-3.1-8b", "--context", "128k", "--method", "all", "--assume-sparsity", "0.5"),
        *("--device", "h100"),
    ),
    "plan-outgrow": partial(plan, "llama-3.1-8b", "--context", "128k", "--show", "outgrow"),
    "plan-attention": partial(plan, "llama-3-8b", "--context", "8k,128k", "--show", "attention"),
    "plan-paging": partial(
        plan,
        *("llama-3.1-8b", "--context", "2k,16k,128k", "--device", "h100", "--show", "paging"),
    ),
    "kernels-cpu": cpu_kernel_tables.bandwidth,
    "kernels-steps": cpu_kernel_tables.steps,
    "kernels-decode": decode_cost.table,
    "kernels-eight": partial(decode_cost.table, batch=8, tokens=32768),
    "kernels-splits": decode_cost.splits_table,
    "kernels-pages": decode_cost.pages_table,
    "calibration-times": calibration_tables.times,
    "calibration-needles": partial(calibration_tables.needles, 1),
    "calibration-five": partial(calibration_tables.needles, 5),
    "calibration-windows": calibration_tables.windows,
    "calibration-prefill": calibration_tables.prefill,
    "calibration-shares": calibration_tables.shares,
    "kernels-fp8": kv_tables.quality,
    "kernels-modules": kv_tables.modules,
    "prefix-orders": prefix_tables.orders,
    "prefix-plot": partial(pictures, FIGURES.name, "prefix-hits-memory"),
    "prefix-thinning": prefix_tables.thinning,
    "prefix-gates": prefix_tables.gates,
    "prefix-served": prefix_tables.served,
    "prefix-costs": prefix_tables.costs,
}
#: Where each section stands.
DOCUMENTS = {
    "README.md": ("headline", "plot", "methods"),
    "docs/CHOOSING.md": ("traffic", "claims", "plots", "questions"),
    "docs/METHODS.md": ("methods", "parameters", "presets", "decided", "room", "pressure"),
    "docs/QUALITY.md": (
        *("decided", "needles", "fidelity", "perplexity", "ruler", "standins", "longbench"),
        *("endless", "beside-quality", "beside-kept"),
    ),
    "docs/BENCHMARKS.md": ("bench", "beside-speed"),
    "docs/PLANNER.md": (
        *("plan-example", "plan-models", "plan-methods"),
        *("plan-outgrow", "plan-attention", "plan-paging"),
    ),
    "docs/CALIBRATION.md": (
        *("calibration-times", "calibration-needles", "calibration-five"),
        *("calibration-windows", "calibration-prefill", "calibration-shares"),
    ),
    "docs/PREFIXES.md": (
        *("prefix-orders", "prefix-plot", "prefix-thinning"),
        *("prefix-gates", "prefix-served", "prefix-costs"),
    ),
    "docs/KERNELS.md": (
        *(
            "kernels-cpu",
            "kernels-steps",
            "kernels-decode",
            "kernels-eight",
            "kernels-splits",
            "kernels-pages",
        ),
        *("kernels-fp8", "kernels-modules"),
    ),
}


def render(text: str) -> str:
    """``text`` with every ``<!-- NAME -->`` section made anew."""
    for name, make in SECTIONS.items():
        pattern = rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)"
        text = re.sub(pattern, lambda m, make=make: f"{m[1]}{make()}\n{m[2]}", text, flags=re.S)  # type: ignore[misc]
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--write", action="store_true", help="the documents' tables")
    parser.add_argument("--plots", action="store_true", help="the plots, too (needs matplotlib)")
    args = parser.parse_args()
    if args.plots:
        for path in plots.draw(ROOT / FIGURES):
            print(path.relative_to(ROOT))
    if not args.write:
        if not args.plots:
            print(headline.table())
        return
    for name in DOCUMENTS:
        path = ROOT / name
        path.write_text(render(path.read_text()))


if __name__ == "__main__":
    main()
