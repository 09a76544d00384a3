"""Claims about what is still known after tokens are dropped: needles, agreement, perplexity."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import fmean, variance
from typing import Any

from sglang_kv.benchmarks.records import (
    Row,
    last,
    lines,
    number_needles,
    of_demo,
    suite_cells,
)
from sglang_kv.benchmarks.verdicts import FAILS, HOLDS, Found, at_most, listed, percent, verdict

#: "Stable": perplexity grows by no more than this.
STABLE = 1.1
#: "Loses less than 0.5 %".
LOSS = 0.005


def needles(arm: str, stated: float) -> Found:
    """Seven-digit needles of an arm with the question seen, beside the share that was stated."""
    cell = number_needles(arm)
    if cell is None or not cell["full_hits"]:
        return None
    return _shown(arm, cell), verdict(cell["kept_interval"], stated, f"n = {cell['full_hits']}")


def every_needle(arm: str) -> Found:
    """That none is lost: one that is decides it, and no count proves it."""
    found, cell = needles(arm, 1.0), number_needles(arm)
    if found is None or cell is None:
        return None
    if lost := cell["full_hits"] - cell["kept"]:
        return found[0], f"{FAILS}: {lost} of {cell['full_hits']} lost"
    return found


def needles_lost(arm: str) -> Found:
    """That some are lost: one that is shows it."""
    found, cell = needles(arm, 1.0), number_needles(arm)
    if found is None or cell is None:
        return None
    if cell["kept"] < cell["full_hits"]:
        return found[0], HOLDS
    return found[0], f"open: none lost with n = {cell['full_hits']}"


def _shown(arm: str, cell: Row) -> str:
    memory = "" if cell["memory"] is None else f", {cell['memory']:.0%} of the memory"
    return (
        f"{arm}: {cell['kept']}/{cell['full_hits']} of the full cache's 7-digit needles "
        f"({percent(cell['kept_interval'])}){memory}; {cell['model']}, {listed(cell['lengths'])} "
        "tokens"
    )


def sinks_keep_it_stable() -> Found:
    stream = last("endless_stream", lambda r: r.get("policy", {}).get("sinks", 0) > 0 and _ppl(r))
    if stream is not None:
        logs = [math.log(value) for value in stream["perplexity"]]
        half = len(logs) // 2
        first, second = logs[:half], logs[half:]
        interval = _growth(first, second)
        shown = "" if interval is None else f" ({interval[0]:.2f} - {interval[1]:.2f} times)"
        text = (
            f"{math.exp(fmean(first)):.1f} over the first half of {stream['tokens']:,} tokens, "
            f"{math.exp(fmean(second)):.1f} over the second{shown}; {stream['model']}"
        )
        said = at_most(interval, STABLE, f"{len(logs)} parts of {stream['bucket']:,} tokens")
        return text, _no_further(said, stream["tokens"])
    cell = _window_perplexity(lambda policy: policy.get("sinks", 4) > 0)
    if cell is None:
        return None
    low, high = cell["ratio_interval"]
    text = (
        f"{cell['arm']}: {cell['ppl']:.1f} beside {cell['full_ppl']:.1f} with the full cache "
        f"({cell['ratio']:.3f}x, {low:.3f} - {high:.3f}) over {cell['length']:,} tokens; "
        f"{cell['model']}"
    )
    said = at_most([low, high], STABLE, f"n = {cell['n']:,} tokens")
    return text, _no_further(said, cell["length"])


def _no_further(said: str, tokens: int) -> str:
    if said != HOLDS:
        return said
    return f"holds to {tokens:,} tokens; 4 million are not measured yet"


def _growth(first: list[float], second: list[float]) -> list[float] | None:
    """95 % of the ratio of two means of logs, whose parts stand for themselves (Welch)."""
    if min(len(first), len(second)) < 2:
        return None
    gap = fmean(second) - fmean(first)
    half = 1.959964 * math.sqrt(variance(first) / len(first) + variance(second) / len(second))
    return [math.exp(gap - half), math.exp(gap + half)]


def _ppl(row: dict[str, Any]) -> bool:
    return "perplexity" in row


def no_sinks_collapse() -> Found:
    arms = {
        bool(row["policy"]["sinks"]): row
        for row in lines("endless_stream")
        if "policy" in row and _ppl(row) and of_demo(row)
    }
    if set(arms) == {True, False}:
        pairs = list(zip(arms[False]["perplexity"], arms[True]["perplexity"], strict=False))
        worst, beside = max(pairs, key=lambda pair: pair[0] / pair[1])
        text = (
            f"{worst:,.0f} beside {beside:.1f} with sinks at worst, per {arms[True]['bucket']:,} "
            f"of {arms[False]['tokens']:,} tokens; {arms[False]['model']}"
        )
        return text, HOLDS if worst > 10 * beside else "no collapse here, but worse"
    cell = _window_perplexity(lambda policy: policy.get("sinks") == 0)
    if cell is None:
        return None
    text = (
        f"{cell['arm']}: {cell['ppl']:.0f} beside {cell['full_ppl']:.1f}, {cell['length']:,} "
        f"tokens; {cell['model']}"
    )
    if cell["ppl"] > 1000:
        return text, HOLDS
    return text, "in part" if cell["ratio"] > 2 else "no collapse here"


def _window_perplexity(fits: Callable[[dict[str, Any]], bool]) -> Row | None:
    """The longest text's perplexity of such a window."""
    found = [
        cell
        for cells in suite_cells("perplexity", "length", field="summary").values()
        for cell in cells.values()
        if cell["policy"].get("method") == "streamingllm" and fits(cell["policy"])
    ]
    return max(found, key=lambda cell: int(cell["length"]), default=None)


H2O_FIFTH = {"method": "h2o", "keep_ratio": 0.2}


def h2o_at_a_fifth() -> Found:
    """Agreement with the question seen, beside the full cache asked a second time."""
    arms = suite_cells("fidelity", "column", "length")
    found = [
        cell
        for cells in arms.values()
        for (column, _), cell in cells.items()
        if cell["policy"] == H2O_FIFTH and column == "aware"
    ]
    if not found:
        return None
    cell = max(found, key=lambda cell: int(cell["length"]))
    share = cell["agreed"] / cell["tokens"]
    again = arms.get("none", {}).get(("aware", cell["length"]))
    most = again["agreed"] / again["tokens"] if again else 1.0
    beside = f", {most:.1%} with the full cache asked again" if again else ""
    text = (
        f"{share:.1%} ({percent(cell['interval'])}) of next tokens as the full cache's{beside}; "
        f"{cell['length']:,} tokens, n = {cell['tokens']} of {cell['n']} prompts; {cell['model']}"
    )
    return text, verdict(cell["interval"], most - LOSS, f"n = {cell['tokens']} tokens")


def h2o_standins() -> Found:
    """Grades of tasks that the full cache can do, with the question seen."""
    cells = [
        cell
        for arm in suite_cells("standins", "column", "task", "length").values()
        for cell in arm.values()
        if cell["policy"] == H2O_FIFTH and cell["column"] == "aware"
    ]
    if not cells:
        return None
    parts = [
        f"{c['task']} {100 * c['score']:.1f} beside {100 * c['full_score']:.1f} at "
        f"{c['length']:,} (n = {c['n']})"
        for c in cells
    ]
    text = "; ".join(parts) + f"; {cells[0]['model']}"
    able = [cell for cell in cells if cell["able"]]
    if not able:
        return text, "not shown: the full cache cannot do it"
    said = [verdict(c["difference_interval"], -LOSS, f"n = {c['n']}") for c in able]
    if FAILS in said:
        return text, FAILS
    return text, next((one for one in said if one != HOLDS), HOLDS)


def pyramid_against_snapkv() -> Found:
    """KL from the full cache at lengths that both have; their intervals decide."""
    arms = suite_cells("fidelity", "column", "length")
    ours, theirs = (arms.get(arm, {}) for arm in ("pyramidkv 0.25", "snapkv 0.25"))
    both = sorted(n for column, n in set(ours) & set(theirs) if column == "aware")
    if not both:
        return None
    pairs = [(ours["aware", n], theirs["aware", n]) for n in both]
    shown = ", ".join(
        f"{a['kl']:.3f} against {b['kl']:.3f} at {n:,}"
        for (a, b), n in zip(pairs, both, strict=True)
    )
    prompts = sorted({a["n"] for a, _ in pairs})
    text = (
        f"KL from the full cache, a quarter kept: {shown}, n = {listed(prompts)} prompts each; "
        f"{pairs[0][0]['model']}"
    )
    closer = sum(a["kl"] < b["kl"] for a, b in pairs)
    spans = [(a.get("kl_interval"), b.get("kl_interval")) for a, b in pairs]
    better = [a and b and a[1] < b[0] for a, b in spans]
    if all(better):
        return text, HOLDS
    if any(a and b and a[0] > b[1] for a, b in spans) and not any(better):
        return text, FAILS
    return text, (
        f"open: closer at {closer} of {len(pairs)} lengths, n = {listed(prompts)} prompts each"
    )


def attention_mass(field: str, least: float) -> Callable[[], Found]:
    def measure() -> Found:
        row = last("attention_mass", lambda r: field in r)
        if row is None:
            return None
        text = (
            f"{row[field]:.1%}, one text of {row['context']:,} tokens, mean over layers and heads"
        )
        return f"{text}; {row['model']}", HOLDS if row[field] >= least else FAILS

    return measure
