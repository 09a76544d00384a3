"""README's table, and the counts of requests at once beside the arithmetic."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sglang_kv.benchmarks.markdown import NOTHING, head
from sglang_kv.benchmarks.methods import NONE, PAGE, not_the_preset, plan_of
from sglang_kv.benchmarks.records import (
    DEMO,
    Row,
    at_once,
    commits,
    decode_speeds,
    needle_cells,
    suite_lines,
)
from sglang_kv.compression import Geometry
from sglang_kv.compression.gates import find_gates

#: Layers and KV heads of the demo model.
SHAPE = (30, 3)
#: Arms as the speed benchmark calls them: what the reader sees, and the needle arm.
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


def table() -> str:
    """Memory, requests, speed and needles of prompts of one length (to the needles' grid)."""
    speed = decode_speeds()
    if "stock" not in speed:
        return NOTHING
    first = speed["stock"]
    fit = {row["arm"]: row for row in at_once()}
    length = needle_length(first["context"])
    needles = needle_cells(length) if length else {}
    columns = ["", "KV memory", "requests at once"]
    columns += [f"decode, {first['batch']} x {first['context']:,}", "beside stock", "prefill"]
    columns += [f"7-digit needles at {length:,}" if length else "7-digit needles"]
    lines = head(*columns)
    cells: list[Row] = []
    for arm, (name, needle) in ARMS.items():
        if arm not in speed:
            continue
        row, cell = speed[arm], needles.get(needle, {}).get(("number", "aware"))
        cells += [cell] if cell else []
        lines.append(
            f"| {name} | {_share(row['policy'], row['context']):.0%} "
            f"| {fit[arm]['running_at_once'] if arm in fit else '-'} "
            f"| {row['decode_tok_s']:.0f} tok/s "
            f"| {row['decode_tok_s'] / first['decode_tok_s']:.1f}x "
            f"| {row['prefill_tok_s']:,.0f} tok/s | {found(cell)} |"
        )
    return "\n".join([*lines, "", _said(list(speed.values()), list(fit.values()), cells, length)])


def _said(speed: list[Row], fit: list[Row], cells: list[Row], length: int | None) -> str:
    """What the rows have in common, and what each column was measured at."""
    first = next(row for row in speed if row["arm"] == "stock")
    env = first["environment"]
    shown = [row for row in speed if row["arm"] in ARMS]
    dates = sorted({row["environment"]["date"][:10] for row in shown})
    parts = [
        f"{DEMO} in bf16 on {env['cores']} cores of an {env['cpu']} without AMX, sglang "
        f"{env['versions']['sglang']}; the same flags in every row. "
        f"Speed: {_at(shown)}, {' to '.join(dict.fromkeys((dates[0], dates[-1])))}. "
        f"KV memory: by arithmetic, after {first['context']:,} tokens."
    ]
    counted = [row for row in fit if row["arm"] in ARMS]
    if counted:
        parts.append(
            f"Requests at once: prompts of {counted[0]['context']:,} tokens in memory for "
            f"{counted[0]['pool_tokens']:,}, {_at(counted)}{_random(counted)}."
        )
    if cells:
        parts.append(
            f"Needles: of those that the full cache finds in prompts of {length:,} tokens, the "
            f"question in the prompt; of each arm the run with the most cases, {_at(cells)}."
        )
    parts += list(_earlier([*shown, *counted, *cells]))
    parts.append(
        "`benchmarks/decode_speed.py`, `concurrency.py`, `quality.py`; more in "
        "[docs/METHODS.md](docs/METHODS.md#what-it-costs-in-quality)."
    )
    return " ".join(parts)


def _at(rows: list[Row]) -> str:
    """The commits that rows are of."""
    named = commits(rows)
    return f"commit{'s' * (',' in named)} {named}"


def _random(counted: list[Row]) -> str:
    """Which counts are of random weights, that give the same pages."""
    names = [row["arm"] for row in counted if row.get("shape_only")]
    return f" ({', '.join(names)}: random weights of that shape)" if names else ""


def _earlier(rows: Iterable[Row]) -> Iterable[str]:
    """Presets whose figures are of other parameters than the presets' today."""
    names = {"decode_speed": "speed", "concurrency": "count", None: "needles"}
    found: dict[tuple[str, str], dict[str, None]] = {}
    for row in rows:
        if other := not_the_preset(row["arm"], row["policy"]):
            what = found.setdefault((row["arm"].split()[0], other), {})
            what[names[row.get("benchmark")]] = None
    for (preset, other), what in found.items():
        yield f"The {' and '.join(what)} of `{preset}`: with an earlier {other}."


def needle_length(context: int) -> int | None:
    """The length of needle prompts that is nearest to a speed row's context."""
    rows = [row for row in suite_lines("needle") if row["arm"] in {n for _, n in ARMS.values()}]
    lengths = {cell["length"] for row in rows for cell in row["cells"]}
    return min(lengths, key=lambda n: abs(int(n) - context), default=None)


def _share(policy: dict[str, Any] | None, context: int) -> float:
    """Head pages that the demo model's plan leaves of a prompt; what the server's tests count."""
    geometry = Geometry(*SHAPE, PAGE, find_gates(DEMO, *SHAPE))
    plan = plan_of(policy or NONE, geometry, context)
    return plan.pages(context) / plan_of(NONE, geometry, context).pages(context)


def found(cell: Row | None) -> str:
    """Hits that an arm has kept of the full cache's."""
    return "-" if cell is None else f"{cell['kept']}/{cell['full_hits']}"


def room() -> str:
    """Requests at once in one pool, measured beside the arithmetic."""
    rows = at_once()
    if not rows:
        return NOTHING
    first = rows[0]
    lines = head("arm", "at once", "by the arithmetic", "weights")
    for row in rows:
        weights = "random" if row.get("shape_only") else "the model's"
        other = not_the_preset(row["arm"], row["policy"])
        lines.append(
            f"| {row['arm']}{f' ({other})' if other else ''} | {row['running_at_once']} "
            f"| {row['predicted']} | {weights} |"
        )
    said = (
        f"Prompts of {first['context']:,} tokens, {first['new_tokens']} new ones, memory for "
        f"{first['pool_tokens']:,}; the shape of {DEMO}'s KV; {_at(rows)}."
    )
    if any(row.get("shape_only") for row in rows):
        said += " Where weights are random (`--shape-only`), only how many are kept is the model's."
    return "\n".join([*lines, "", said])
