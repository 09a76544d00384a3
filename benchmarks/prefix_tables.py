"""The tables of docs/PREFIXES.md: what the prefix tree's order buys and costs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sglang_kv.benchmarks.markdown import NOTHING, head
from sglang_kv.benchmarks.records import lines, newest

#: Orders as they are shown, importance first.
ORDERS = ("importance", "lru", "lfu", "slru", "cost")
GATES = ("calibrated gates", "all-one gates", "shuffled gates", "no attention", "recompute cost")

#: What `radix_tree.py` records of a tree: the column, and digits behind the point.
TREE_COSTS = {
    "match_ms": ("match", 2),
    "insert_ms": ("insert", 2),
    "match_and_insert_ms": ("both", 2),
    "match_and_insert_worst_ms": ("both, worst", 2),
    "match_path_of_pages_ms": ("match, comb", 2),
    "profile_ms": ("profile", 2),
    "credit_ms": ("credit", 2),
    "evict_node_ms": ("evict a node", 3),
}


def _ratio(value: float, base: float) -> str:
    return f"{value / base:.2f}x" if base else "-"


def orders() -> str:
    """Hit tokens of each order beside lru's, by workload and memory."""
    rows = newest("prefix_replay").values()
    if not rows:
        return NOTHING
    table = head("workload", "memory", "hit rate of lru", *ORDERS, "optimum")
    for row in rows:
        hits = row["hit_tokens"]
        name = f"`{row['workload']}`" + (" (held out)" if row["held_out"] else "")
        shown = [_ratio(hits[order], hits["lru"]) for order in (*ORDERS, "optimum")]
        rate = f"{hits['lru'] / row['prompt_tokens']:.1%}"
        table.append(f"| {name} | {row['memory_tokens']:,} | {rate} | {' | '.join(shown)} |")
    return "\n".join([*table, "", _where(rows)])


def thinning() -> str:
    """Prefix tokens in memory and hits with thinning, beside whole prefixes.

    Hits of either kind of request stand in newer lines only.
    """
    rows = newest("prefix_replay").values()
    if not rows:
        return NOTHING
    arms, kinds = ("thinned", "thinned first"), ("dense", "duoattention")
    shown_of_arm = ("in memory", "hits", *(f"hits, {kind}" for kind in kinds))
    table = head("workload", "memory", *(f"{arm}: {what}" for arm in arms for what in shown_of_arm))
    for row in rows:
        whole, shown = row["duoattention"]["whole"], []
        for arm in arms:
            cell = row["duoattention"][arm]
            shown += [_ratio(cell[key], whole[key]) for key in ("resident_tokens", "hit_tokens")]
            of_kind, base = (one.get("hit_tokens_by_kind", {}) for one in (cell, whole))
            shown += [_ratio(of_kind.get(kind, 0), base.get(kind, 0)) for kind in kinds]
        table.append(f"| `{row['workload']}` | {row['memory_tokens']:,} | {' | '.join(shown)} |")
    return "\n".join(table)


def gates() -> str:
    """The same attention under other weights, at equal memory."""
    rows = newest("prefix_gates").values()
    if not rows:
        return NOTHING
    arms = (*GATES, "lru", "lfu", "slru", "optimum")
    table = head("workload", "memory", "half-life", *arms)
    for row in rows:
        lines_of = [("1/16", row["hit_tokens"])]
        if "hit_tokens_at_long" in row:
            lines_of.append((f"{row['long_half_life']:.0f}", row["hit_tokens_at_long"]))
        for half_life, found in lines_of:
            hits = [f"{found[arm]:,}" if arm in found else "" for arm in arms]
            table.append(
                f"| `{row['traffic']}` | {row['memory_tokens']:,} | {half_life} "
                f"| {' | '.join(hits)} |"
            )
    first = next(iter(rows))
    alike = {row["traffic"]: row["gated_and_plain_correlate"] for row in rows}
    said = ", ".join(f"{name} {value:.2f}" for name, value in alike.items())
    return "\n".join(
        [
            *table,
            "",
            f"Hit tokens; {first['model']}, seed {first['seed']}. Page densities with "
            f"calibrated and all-one gates correlate within a prompt by (mean): {said}. "
            + _where(rows),
        ]
    )


def served() -> str:
    """One server per order, the same requests: hits and time to first token."""
    rows = newest("prefix_orders").values()
    if not rows:
        return NOTHING
    columns = ("hit rate", "TTFT, mean", "beside lru", "replayed, all read evenly")
    table = head("traffic", "requests", "prompt tokens", "memory", "order", "hit tokens", *columns)
    for row in rows:
        replayed = row.get("replayed_evenly")
        table.append(
            f"| `{row['traffic']}` | {row['requests']} | {row['prompt_tokens']:,} "
            f"| {row['pool_tokens']:,} | `{row['order']}` "
            f"| {row['hit_tokens']:,} | {row['hit_rate']:.1%} "
            f"| {row['ttft_mean_s']:.2f} s | {_beside(row.get('ttft_to_lru'))} "
            f"| {'-' if replayed is None else format(replayed, ',')} |"
        )
    first = next(iter(rows))
    return "\n".join([*table, "", f"{first['model']}, seed {first['seed']}. {_where(rows)}"])


def _beside(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def costs() -> str:
    """What the tree costs by its size, and the window pass beside a prefill."""
    found = {row["nodes"]: row for row in lines("radix_tree")}
    passes = lines("window_pass")
    if not found and not passes:
        return NOTHING
    parts: list[str] = []
    if found:
        parts = head("nodes", *(shown for shown, _ in TREE_COSTS.values()))
        for nodes in sorted(found):
            row = found[nodes]
            cells = [f"{row[name]:.{digits}f} ms" for name, (_, digits) in TREE_COSTS.items()]
            parts.append(f"| {nodes:,} | {' | '.join(cells)} |")
        any_row = next(iter(found.values()))
        prompt, pages = any_row["prompt_tokens"], any_row["prompt_tokens"] // any_row["page_size"]
        parts += [
            "",
            f"Prompts of {prompt:,} tokens; medians. *Comb*: a match along {pages:,} nodes of one "
            "page each, the worst shape there is. *Profile* and *credit*, once per prompt: its "
            f"importance over pages, and adding that to its path. {_where(found.values())}",
        ]
    if passes:
        row = passes[-1]
        parts += [
            "",
            f"The window pass takes {row['window_ms']:.0f} ms of a prompt of {row['tokens']:,} "
            f"tokens ({row['queries']} queries, all layers), and the log-sum-exp that it needs "
            f"{max(0.0, row['lse_ms']):.0f} ms: {row['share_of_prefill']:.2%} of the "
            f"attention ({row['attention_ms'] / 1e3:.1f} s) and products "
            f"({row['products_ms'] / 1e3:.1f} s) of its prefill. {_where([row])}",
        ]
    return "\n".join(parts)


def _where(rows: Iterable[dict[str, Any]]) -> str:
    env = list(rows)[-1]["environment"]
    return f"{env['cores']} core(s) of an {env['cpu']}, commit {env['commit']}, {env['date'][:10]}."
