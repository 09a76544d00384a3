"""Tables of what peers.py has recorded: kvpress, stock SGLang and llama.cpp beside ours."""

from __future__ import annotations

import json

from sglang_kv.benchmarks.records import Row, lines

NOTHING = "(no results recorded yet)"
NAMES = {
    "none": "full cache",
    "snapkv": "`snapkv`, the defaults (window 32, kernel 5)",
    "snapkv wide": "`snapkv`, window 16, kernel 31",
    "pyramidkv": "`pyramidkv`, the defaults (window 32, kernel 5)",
    "pyramidkv wide": "`pyramidkv`, window 16, kernel 31",
    "copy": "preset `copy`",
    "h2o": "`h2o`",
    "streamingllm": "`streamingllm`, 4 sinks",
    "duoattention": "`duoattention`, half the heads",
}


def newest(part: str) -> dict[tuple[str, str], Row]:
    """The newest rows by engine and arm, of the settings that the newest line has."""
    found = [row for row in lines("peers") if row["part"] == part]
    if not found:
        return {}
    last = comparable(found[-1])
    return {(row["engine"], row["arm"]): row for row in found if comparable(row) == last}


def comparable(row: Row) -> str:
    return json.dumps([row["settings"], row["model"], row["seed"]], sort_keys=True)


def quality() -> str:
    """Needles that an arm still finds, ours beside kvpress's."""
    rows = newest("quality")
    if not rows:
        return NOTHING
    first = next(iter(rows.values()))
    kinds = list(first["kinds"])
    table = [
        f"| arm | sglang-kv | 95 % | kvpress | 95 % | {', '.join(kinds)}: ours, kvpress "
        "| same answer |",
        "|---|---|---|---|---|---|---|",
    ]
    for arm in dict.fromkeys(arm for _, arm in rows):
        ours, theirs = rows.get(("sglang-kv", arm)), rows.get(("kvpress", arm))
        split = "; ".join(
            " ".join(shown(row["kinds"][kind]) if row else "-" for kind in kinds)
            for row in (ours, theirs)
        )
        either = ours or theirs or {}
        same = either.get("same_answers")
        answers = "-" if same is None else f"{same}/{either['n']}"
        table.append(
            f"| {NAMES.get(arm, arm)} | {shown(ours)} | {interval(ours)} | {shown(theirs)} "
            f"| {interval(theirs)} | {split} | {answers} |"
        )
    return "\n".join([*table, "", origin(rows)])


def shown(row: Row | None) -> str:
    return "-" if row is None else f"{row['kept']}/{row['full_hits']}"


def interval(row: Row | None) -> str:
    if row is None or row["kept_interval"] is None:
        return "-"
    low, high = row["kept_interval"]
    return f"{low:.0%} - {high:.0%}"


def kept() -> str:
    """Kept sets on the same queries and keys, ours beside kvpress's."""
    rows = newest("kept")
    if not rows:
        return NOTHING
    table = [
        "| arm | prompts | sets equal | tokens kept by one only | of the rest, by rounding "
        "| largest gap |",
        "|---|---|---|---|---|---|",
    ]
    for (_, arm), row in rows.items():
        rest = row["sets"] - row["equal"]
        table.append(
            f"| {NAMES[arm]} | {row['prompts']} | {row['equal']:,}/{row['sets']:,} "
            f"| {row['exchanged']:,} of {row['tokens']:,} | {row['rounding']}/{rest} "
            f"| {row['gap']:.1e} |"
        )
    return "\n".join([*table, "", origin(rows)])


def speed() -> str:
    """Decode, prefill and memory of each engine."""
    rows = newest("speed")
    if not rows:
        return NOTHING
    table = [
        "| engine | arm | decode | prefill | KV in decode | peak resident |",
        "|---|---|---|---|---|---|",
    ]
    for (engine, arm), row in rows.items():
        name = NAMES[arm] if engine in ("sglang-kv", "kvpress") else "-"
        if "weights" in row:
            name = f"weights in {row['weights']}, KV in {row['kv_dtype']}"
        if "failed" in row:
            table.append(f"| {engine} | {name} | {row['failed']} | | | |")
            continue
        held = row.get("kv_bytes")
        table.append(
            f"| {engine} | {name} | {row['decode_tok_s']:.1f} tok/s "
            f"| {row['prefill_tok_s']:,.0f} tok/s | {mib(held)} | {mib(row['peak_rss_bytes'])} |"
        )
    return "\n".join([*table, "", origin(rows)])


def mib(count: int | None) -> str:
    return "-" if count is None else f"{count / 2**20:,.0f} MiB"


def origin(rows: dict[tuple[str, str], Row]) -> str:
    """Where and when it was measured."""
    first = next(iter(rows.values()))
    where, dtype = first["environment"], first["settings"]["dtype"]
    versions = {name: v for row in rows.values() for name, v in row.get("versions", {}).items()}
    theirs = "".join(
        f", {name} {versions[name]}" for name in ("kvpress", "llama-cpp-python") if name in versions
    )
    return (
        f"{first['model']} in {dtype}, {where['cores']} core(s) of an {where['cpu']}, sglang "
        f"{where['versions']['sglang']}{theirs}, commit {where['commit']}, {where['date'][:10]}. "
        "`benchmarks/peers.py`."
    )
