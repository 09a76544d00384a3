"""The tables and plots of README and docs, from ``results/*.jsonl`` and the registry.

``--write`` puts the tables there, ``--plots`` draws ``docs/figures``.

Each table shows the newest line of each arm, so a figure in them is always one that a benchmark
has recorded. ``tests/test_readme.py`` fails when the two differ.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from sglang_kv import cli
from sglang_kv.benchmarks import (
    beside,
    calibration_tables,
    choosing,
    claims,
    cpu_kernel_tables,
    decode_cost,
    endless_figures,
    kv_tables,
    plots,
    prefix_tables,
)
from sglang_kv.benchmarks.figures import figures
from sglang_kv.benchmarks.markdown import head
from sglang_kv.benchmarks.methods import NONE, PAGE, plan_of
from sglang_kv.benchmarks.records import at_once, needle_cells, newest
from sglang_kv.compression import Geometry
from sglang_kv.compression.gates import find_gates
from sglang_kv.planner import command

ROOT = Path(__file__).resolve().parent.parent
#: Where the plots are, beside the documents that show them.
FIGURES = Path("docs", "figures")

#: Hits of the full cache from which a needle figure decides anything.
ENOUGH = 150


#: Layers and KV heads of the demo model.
DEMO = (30, 3)
#: Arms of the headline as the speed benchmark calls them: what the reader sees, and the needle arm.
ARMS = {
    "stock": ("stock SGLang (`torch_native`)", ""),
    "none": ("sglang-kv, `none`", "none"),
    "snapkv 1/4": ("`snapkv`, 1/4 kept", "snapkv 0.25"),
    "pyramidkv 1/4": ("`pyramidkv`, 1/4 kept", "pyramidkv 0.25"),
    "h2o 1/4": ("`h2o`, 1/4 kept", "h2o 0.25"),
    "streamingllm 1/4": ("`streamingllm`, 4 + 996", "streamingllm 0.25"),
    "duoattention 0.5": ("`duoattention`, half the heads", "duoattention 0.5"),
    "copy 1/4": ("preset `copy`, 1/4 kept", "copy 0.25"),
}


def headline() -> str:
    speed, needles = newest("decode_speed"), needle_cells()
    if not speed:
        return "(no results recorded yet)"
    first = speed["stock"]
    counts = at_once()
    fit = {row["arm"]: row["running_at_once"] for row in counts}
    shown = [needles.get(needle, {}).get(("number", "aware")) for _, needle in ARMS.values()]
    lengths = sorted({length for cell in shown if cell for length in cell["lengths"]})
    table = head(
        *("", "KV memory", "requests at once", f"decode, {first['batch']} x {first['context']:,}"),
        *("beside stock", "prefill", "7-digit needles, of the full cache's"),
    )
    for arm, (name, needle) in ARMS.items():
        row, cells = speed[arm], needles.get(needle, {})
        table.append(
            f"| {name} | {_share(row['policy'], row['context']):.0%} | {fit.get(arm, '-')} "
            f"| {row['decode_tok_s']:.0f} tok/s | {row['ratio_to_first_arm']:.1f}x "
            f"| {row['prefill_tok_s']:,.0f} tok/s | {_found(cells)} |"
        )
    env = first["environment"]
    table += [
        "",
        f"SmolLM2-135M-Instruct in bf16 on {env['cores']} cores of an {env['cpu']} without AMX, "
        f"sglang {env['versions']['sglang']}, commit {env['commit']}, {env['date'][:10]}; the same "
        f"flags in every row. KV memory, by arithmetic, after {first['context']:,} tokens; "
        f"needles at {' to '.join(f'{n:,}' for n in lengths[:: max(1, len(lengths) - 1)])} tokens, "
        "the question in the prompt. ",
    ]
    if counts:
        table[-1] += (
            f"Requests at once: prompts of {counts[0]['context']:,} tokens in memory for "
            f"{counts[0]['pool_tokens']:,}. "
        )
    table[-1] += (
        "`benchmarks/decode_speed.py`, `concurrency.py`, `quality.py`; more in "
        "[docs/METHODS.md](docs/METHODS.md#what-it-costs-in-quality)."
    )
    return "\n".join(table)


def _share(policy: dict[str, Any] | None, context: int) -> float:
    """Head pages that the demo model's plan leaves of a prompt; what the server's tests count."""
    geometry = Geometry(*DEMO, PAGE, find_gates("SmolLM2-135M-Instruct", *DEMO))
    plan = plan_of(policy or NONE, geometry, context)
    return plan.pages(context) / plan_of(NONE, geometry, context).pages(context)


def _found(
    cells: dict[tuple[str, str], dict[str, Any]], kind: str = "number", column: str = "aware"
) -> str:
    """Hits that an arm has kept of the full cache's."""
    cell = cells.get((kind, column))
    return "-" if cell is None else f"{cell['kept']}/{cell['full_hits']}"


def room() -> str:
    """Requests at once in one pool, measured beside the arithmetic."""
    rows = at_once()
    if not rows:
        return "(no results recorded yet)"
    first = rows[0]
    table = head("arm", "at once", "by the arithmetic", "weights")
    for row in rows:
        weights = "random" if row.get("shape_only") else "the model's"
        table.append(
            f"| {row['arm']} | {row['running_at_once']} | {row['predicted']} | {weights} |"
        )
    said = (
        f"Prompts of {first['context']:,} tokens, {first['new_tokens']} new ones, memory for "
        f"{first['pool_tokens']:,}; the shape of SmolLM2-135M-Instruct's KV."
    )
    if any(row.get("shape_only") for row in rows):
        said += " Where weights are random (`--shape-only`), only how many are kept is the model's."
    return "\n".join([*table, "", said])


def needles() -> str:
    """Needles found, of those that the full cache finds."""
    arms = needle_cells()
    if not arms:
        return "(no results recorded yet)"
    kinds = ("number", "word", "long")
    heads = [f"{kind}, question {q}" for kind in kinds for q in ("seen", "not seen")]
    table = [f"| arm | memory | {' | '.join(heads)} |", "|---|---|" + "---|" * len(heads)]
    for arm, cells in arms.items():
        found = [_found(cells, kind, column) for kind in kinds for column in ("aware", "agnostic")]
        memory = next((c["memory"] for c in cells.values() if c["memory"] is not None), None)
        share = "-" if memory is None else f"{memory:.2f}"
        table.append(f"| {arm} | {share} | {' | '.join(found)} |")
    return "\n".join(table)


def decided() -> str:
    """The needle figures with enough cases to decide, with their intervals."""
    table = [
        "| arm | memory | question | kept, of the full cache's hits | | 95 % |",
        "|---|---|---|---|---|---|",
    ]
    for arm, cells in needle_cells().items():
        for (kind, column), cell in cells.items():
            if kind != "number" or cell["full_hits"] < ENOUGH:
                continue
            low, high = cell["kept_interval"]
            asked = {"aware": "seen", "agnostic": "not seen"}[column] if arm != "none" else "-"
            table.append(
                f"| {arm} | {cell['memory']:.2f} | {asked} | {cell['kept']}/{cell['full_hits']} "
                f"| {cell['kept'] / cell['full_hits']:.1%} | {low:.1%} - {high:.1%} |"
            )
    return "\n".join(table)


def fidelity() -> str:
    """Next-token agreement with the full cache, and the KL from it, by prompt length."""
    rows = newest("quality", suite="fidelity")
    sizes = sorted({cell["length"] for row in rows.values() for cell in row["cells"]})
    table = [
        f"| arm | question | {' | '.join(f'{n:,} tokens' for n in sizes)} |",
        "|---|---|" + "---|" * len(sizes),
    ]
    for arm, row in rows.items():
        for column, asked in (("aware", "seen"), ("agnostic", "not seen")):
            cells = {c["length"]: c for c in row["cells"] if c["column"] == column}
            if cells:
                shown = [
                    f"{cells[n]['agreed'] / cells[n]['tokens']:.1%}, {cells[n]['kl']:.3f}"
                    if n in cells
                    else "-"
                    for n in sizes
                ]
                question = asked if arm != "none" else "-"
                table.append(f"| {arm} | {question} | {' | '.join(shown)} |")
    return "\n".join(table)


def perplexity() -> str:
    """Perplexity of what follows the fold, beside the full cache's on the same tokens."""
    rows = newest("quality", suite="perplexity")
    sizes = sorted({cell["length"] for row in rows.values() for cell in row["summary"]})
    table = [
        f"| arm | {' | '.join(f'{n:,} tokens' for n in sizes)} |",
        "|---|" + "---|" * len(sizes),
    ]
    for arm, row in rows.items():
        cells = {c["length"]: c for c in row["summary"]}
        shown = [f"{cells[n]['ppl']:.2f} ({cells[n]['ratio']:.3f}x)" for n in sizes if n in cells]
        table.append(f"| {arm} | {' | '.join(shown)} |")
    return "\n".join(table)


def pressure() -> str:
    """Evict or retract, in a pool of a third of what is wanted."""
    rows = newest("pressure")
    if not rows:
        return "(no results recorded yet)"
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
    "headline": headline,
    "plot": partial(pictures, FIGURES.as_posix(), "quality-memory"),
    "plots": partial(pictures, FIGURES.name),
    "traffic": choosing.traffic,
    "claims": claims.table,
    "questions": choosing.questions,
    "methods": methods,
    "parameters": cli.parameter_tables,
    "presets": cli.preset_table,
    "needles": needles,
    "decided": decided,
    "fidelity": fidelity,
    "perplexity": perplexity,
    "room": room,
    "endless": lambda: f"{endless_figures.table()}\n\n{pictures(FIGURES.name, 'endless-stream')}",
    "pressure": pressure,
    "beside-quality": beside.quality,
    "beside-kept": beside.kept,
    "beside-speed": beside.speed,
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
        *("decided", "needles", "fidelity", "perplexity", "endless"),
        *("beside-quality", "beside-kept"),
    ),
    "docs/BENCHMARKS.md": ("beside-speed",),
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
            print(headline())
        return
    for name in DOCUMENTS:
        path = ROOT / name
        path.write_text(render(path.read_text()))


if __name__ == "__main__":
    main()
