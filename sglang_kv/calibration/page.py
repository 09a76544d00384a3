"""A report's figures as Markdown."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sglang_kv.calibration.prefill import DENSE, WINDOWED

Data = dict[str, Any]


def page(data: Data, plots: list[str]) -> str:
    """The report; ``plots`` are names of image files beside it."""
    parts = [
        f"# Retrieval heads of {data['model']}",
        summary(data),
        *(f"![{name.removesuffix('.png')}]({name})" for name in plots),
        *(needle_sections(data) if tried(data) else ()),
        "## Retrieval heads by threshold",
        "Share of heads whose gate is at least so high.",
        share_table(data),
    ]
    if data["agreement"]:
        parts += ["## Do the methods agree?", agreement_table(data), AGREEMENT]
    return "\n\n".join(part for part in parts if part) + "\n"


PREFILL = {
    DENSE: (
        "**Dense prefill, heads cut afterwards**: all heads see the whole text up to the question, "
        "and streaming heads are cut for the question and the answer, as in kvpress; the server's "
        "prefill, windowed in the prompt too, is stricter."
    ),
    WINDOWED: "**Windowed prefill**: streaming heads are cut in the prompt too, as on the server.",
}

AGREEMENT = (
    "Rank correlation is Spearman's over all heads. Overlap is the share of retrieval heads that "
    "both name; gates that know nothing of each other would share as many as there are retrieval "
    "heads (in brackets)."
)


def tried(data: Data) -> int:
    """Passkeys that the full cache was asked for."""
    return sum(n for _, n in data["full"]["by_length"].values())


def needle_sections(data: Data) -> list[str]:
    return [
        "## Passkeys found",
        needle_table([data["full"], *data["needles"]], data),
        needle_note(data),
        *prefill_section(data),
        "## Sinks and recent tokens",
        window_table(data),
    ]


def summary(data: Data) -> str:
    main = data["gates"][0]
    lines = [f"Gates `{main['name']}`, method {main['method']}. Weights and config {data['hash']}."]
    if not tried(data):
        return lines[0] + " No passkeys were tried."
    share = data["recommended"]
    if share is None:
        lines.append("No sparsity that was tried keeps 98 % of the full cache's passkeys.")
    else:
        row = next(r for r in data["needles"] if r["sparsity"] == share)
        memory = ", ".join(f"{m:.0%} at {n} tokens" for n, m in row["memory"].items())
        found, of = (sum(part) for part in zip(*row["by_length"].values(), strict=True))
        lines.append(
            f"**Recommended sparsity: {share:g}**, the highest tried that keeps 98 % of the "
            f"passkeys that the full cache finds, at every length ({found} of {of} here). "
            f"Memory, of the full cache's: {memory}."
        )
    return " ".join(lines)


def needle_table(rows: list[Data], data: Data) -> str:
    settings = data["settings"]
    lengths, seeds = settings["lengths"], settings["seeds"]
    head = ["gates", "streaming heads", f"memory at {lengths[-1]}"]
    head += [f"{length} tokens" for length in lengths] + [f"seed {seed}" for seed in seeds]
    cells = [
        [
            row["name"],
            f"{row['sparsity']:.0%}",
            f"{row['memory'][lengths[-1]]:.2f}",
            *(_count(row["by_length"][length]) for length in lengths),
            *(_count(row["by_seed"][seed]) for seed in seeds),
            _number(row["likelihood"]),
        ]
        for row in rows
        if any(n for _, n in row["by_length"].values())
    ]
    return _table([*head, "log-likelihood"], cells) if cells else ""


def needle_note(data: Data) -> str:
    settings = data["settings"]
    window = data["needles"][0]
    return (
        f"7-digit numbers hidden in {settings['text']}, {settings['passkeys']} in each text and "
        f"asked for one at a time: up to {settings['samples']} per length and seed that the full "
        "cache finds (its own row counts all tried). Found: greedy decoding, after the answer's "
        "first words, writes all digits. Random gates are "
        f"drawn anew for each seed. Streaming heads keep {window['sinks']} sinks and "
        f"{window['recent']} recent tokens; no passkey lies in either. "
        f"{PREFILL[settings['prefill']]} Memory is in whole pages of 16 tokens. Log-likelihood is "
        "the number's tokens' mean."
    )


def prefill_section(data: Data) -> list[str]:
    """Where texts were tried by both prefills: what each finds of the same texts."""
    here = data["settings"]["prefill"]
    there = WINDOWED if here == DENSE else DENSE
    cells = [
        [
            row["name"],
            f"{row['sparsity']:.0%}",
            f"{row['sinks']} + {row['recent']}",
            f"{row['here']}/{row['tried']}",
            f"{row['there']}/{row['tried']}",
            str(row["only_here"]),
            str(row["only_there"]),
            *(f"{value:.2f}" for value in row["likelihood"]),
        ]
        for row in data["prefill"]
    ]
    if not cells:
        return []
    head = ["gates", "streaming heads", "sinks + recent", here, there]
    head += [f"only {here}", f"only {there}", f"log-likelihood {here}", there]
    return ["## Dense and windowed prefill", "The same texts, by both.", _table(head, cells)]


def window_table(data: Data) -> str:
    lengths = data["settings"]["lengths"]
    rows = [row for row in data["windows"] if any(n for _, n in row["by_length"].values())]
    if not rows:
        return ""
    cells = [
        [
            f"{row['sinks']} + {row['recent']}",
            f"{row['memory'][lengths[-1]]:.2f}",
            *(_count(row["by_length"][length]) for length in lengths),
            _number(row["likelihood"]),
        ]
        for row in rows
    ]
    head = ["sinks + recent", f"memory at {lengths[-1]}", *(f"{n} tokens" for n in lengths)]
    best = data["window"]
    said = (
        f"The smallest that keeps 98 % at every length: {best[0]} + {best[1]}."
        if best
        else "None keeps 98 % at every length."
    )
    streaming = f"{rows[0]['sparsity']:.0%} of the heads stream."
    return "\n\n".join([f"{streaming} {said}", _table([*head, "log-likelihood"], cells)])


def share_table(data: Data) -> str:
    thresholds = list(data["gates"][0]["shares"])
    cells = [
        [gates["name"], *(f"{share:.0%}" for share in gates["shares"].values())]
        for gates in data["gates"]
    ]
    return _table(["gates", *(f"{threshold:g}" for threshold in thresholds)], cells)


def agreement_table(data: Data) -> str:
    shares = list(data["agreement"][0]["overlap"])
    cells = [
        [
            f"{pair['first']}, {pair['second']}",
            _number(pair["rank_correlation"]),
            *(f"{_percent(both)} ({1 - share:.0%})" for share, both in pair["overlap"].items()),
        ]
        for pair in data["agreement"]
    ]
    return _table(
        ["gates", "rank correlation", *(f"overlap, {share:.0%} streaming" for share in shares)],
        cells,
    )


def _table(head: list[str], rows: Iterable[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _count(found: list[int]) -> str:
    return f"{found[0]}/{found[1]}" if found[1] else "-"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
