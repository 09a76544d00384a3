"""The tables of docs/CALIBRATION.md: what calibration finds on the demo model, in which time.

From the lines that ``benchmarks/calibration.py`` records of reports and of timed runs.
"""

from __future__ import annotations

from typing import Any

from sglang_kv.benchmarks.markdown import NOTHING, head
from sglang_kv.benchmarks.records import Row, lines

LENGTHS = ("2048", "4096")


def newest(kind: str, **settings: Any) -> list[Row]:
    """The newest line of each arm, of reports with these settings, in the arms' order."""
    found = {
        row["arm"]: row
        for row in lines("calibration")
        if row["kind"] == kind and settings.items() <= row.get("settings", {}).items()
    }
    return list(found.values())


def needles(passkeys: int) -> str:
    """Passkeys found at each share of streaming heads, of those that the full cache finds.

    Args:
        passkeys: hidden in each text.
    """
    rows = newest("needles", passkeys=passkeys, prefill="dense")
    if not rows:
        return NOTHING
    seeds = list(rows[0]["by_seed"])
    names = [f"{int(n):,} tokens" for n in LENGTHS] + [f"seed {seed}" for seed in seeds]
    table = head("gates", "streaming heads", "memory at 4,096", *names, "of the full cache's")
    for row in sorted(rows, key=lambda row: row["name"] != "full"):
        cells = [row["by_length"][n] for n in LENGTHS] + [row["by_seed"][s] for s in seeds]
        found = sum(cell[0] for cell in cells[: len(LENGTHS)])
        of = sum(cell[1] for cell in cells[: len(LENGTHS)])
        shown = " | ".join(f"{hits}/{n}" for hits, n in cells)
        share = f"({found} of {of} tried)" if row["name"] == "full" else f"{found / of:.1%}"
        table.append(
            f"| {row['name']} | {row['sparsity']:.0%} | {row['memory']['4096']:.2f} | {shown} "
            f"| {share} |"
        )
    return "\n".join([*table, *(f"\n{line}" for line in recommended(passkeys))])


def recommended(passkeys: int) -> list[str]:
    """What the reports of such texts recommend: one sentence for each first gates file."""
    said = []
    for row in newest("chosen", passkeys=passkeys, prefill="dense"):
        share = row["recommended"]
        said.append(
            f"Recommended for `{row['arm']}`: {share:.0%} of the heads streaming, the highest "
            "share tried at which 98 % is kept at both lengths."
            if share
            else f"No share that was tried keeps 98 % at both lengths with `{row['arm']}`."
        )
    return said


def windows() -> str:
    """Sinks and recent tokens of streaming heads, for both kinds of texts."""
    kinds = {n: newest("windows", passkeys=n, prefill="dense") for n in (1, 5)}
    if not any(kinds.values()):
        return NOTHING
    table = head(
        *("passkeys in a text", "streaming heads", "sinks + recent", "memory at 4,096"),
        *(f"{int(n):,} tokens" for n in LENGTHS),
    )
    for passkeys, rows in kinds.items():
        for row in rows:
            hits = " | ".join("/".join(map(str, row["by_length"][n])) for n in LENGTHS)
            table.append(
                f"| {passkeys} | {row['sparsity']:.0%} (`{row['name']}`) | {row['sinks']} + "
                f"{row['recent']} | {row['memory']['4096']:.2f} | {hits} |"
            )
    return "\n".join(table)


def prefill() -> str:
    """The same passkeys where streaming heads are cut in the prompt too, as the server does."""
    rows = newest("prefill")
    if not rows:
        return NOTHING
    table = head(
        *("gates", "streaming heads", "sinks + recent", "passkeys"),
        *("heads cut afterwards", "in the prompt too", "only by the one", "only by the other"),
    )
    for row in rows:
        counts = [row[key] for key in ("here", "there", "only_here", "only_there")]
        if row["settings"]["prefill"] == "windowed":
            counts = [counts[i] for i in (1, 0, 3, 2)]
        table.append(
            f"| {row['name']} | {row['sparsity']:.0%} | {row['sinks']} + {row['recent']} "
            f"| {row['tried']} | {' | '.join(map(str, counts))} |"
        )
    return "\n".join(table)


def shares() -> str:
    """How many heads reach each threshold."""
    rows = newest("shares")
    if not rows:
        return NOTHING
    at = list(rows[0]["shares"])
    table = head("gates", *(f"at least {float(threshold):g}" for threshold in at))
    for row in rows:
        cells = " | ".join(f"{row['shares'][threshold]:.0%}" for threshold in at)
        table.append(f"| {row['name']} | {cells} |")
    pairs = {frozenset((pair["first"], pair["second"])): pair for pair in newest("agreement")}
    for pair in pairs.values():
        both = ", ".join(f"{held:.0%} at {float(s):.0%}" for s, held in pair["overlap"].items())
        table += [
            "",
            f"`{pair['first']}` and `{pair['second']}` rank heads alike with a Spearman "
            f"correlation of {pair['rank_correlation']:.3f}. Of their retrieval heads they share, "
            f"by the share of streaming heads, {both}.",
        ]
    return "\n".join(table)


def times() -> str:
    """Processor and wall seconds of each method's calibration."""
    rows = newest("time")
    if not rows:
        return NOTHING
    table = head("method", "processor time", "wall time", "cores")
    for row in rows:
        table.append(
            f"| {row['arm']} | {row['cpu_seconds']:.0f} s | {row['seconds']:.0f} s "
            f"| {row['threads']} |"
        )
    return "\n".join(table)
