"""What the endless stream's lines show: a table, and StreamingLLM's figure of perplexity."""

from __future__ import annotations

from typing import Any

from sglang_kv.benchmarks.figure import Figure, Series
from sglang_kv.benchmarks.records import newest

SPEED, ANEW = "memory and speed", "recomputed window"


def perplexities() -> dict[str, dict[str, Any]]:
    """The newest line of each policy's arm that has perplexities, by position in the stream."""
    return {
        arm: row
        for arm, row in newest("endless_stream").items()
        if "perplexity" in row and "policy" in row
    }


def table() -> str:
    """One request without an end: memory, speed, and perplexity at its ends."""
    row, arms = newest("endless_stream").get(SPEED), perplexities()
    if row is None and not arms:
        return "(no results recorded yet)"
    lines = ["| | |", "|---|---|"]
    if row is not None:
        rss = row["rss_in_decode_mib"]
        policy = row["policy"]
        lines += [
            f"| one request, sinks {policy['sinks']}, recent {policy['recent']:,} | "
            f"{row['tokens']:,} tokens of prompt, then "
            f"{row['logical_tokens'] - row['tokens'] + 1:,} decoded |",
            f"| final logical length | {row['logical_tokens']:,}, expected "
            f"{row['expected_logical_tokens']:,}; {row['kept_tokens']:,} kept |",
            f"| most head pages | {row['most_head_pages']:,}; computed beforehand: at most "
            f"{row['bound_head_pages']:,} |",
            f"| resident memory in decode | {rss['first']:,.0f} MiB at first, {rss['last']:,.0f} "
            f"at the end ({rss['last'] / rss['first'] - 1:+.1%}) |",
            f"| decode, first and last {row['tokens_compared']:,} tokens | "
            f"{row['decode_tok_s_first']:.1f} and {row['decode_tok_s_last']:.1f} tok/s "
            f"({row['last_to_first']:.3f}x) |",
        ]
        if "most_head_pages_in_decode" in row:  # not in the first lines
            lines.append(
                f"| most head pages in decode | {row['most_head_pages_in_decode']:,}; computed "
                f"beforehand: at most {row['bound_head_pages_in_decode']:,} |"
            )
    for arm, found in arms.items():
        values = found["perplexity"]
        lines.append(
            f"| perplexity, {arm}, {found['tokens']:,} tokens | {values[0]:.1f} in the first "
            f"{found['bucket']:,}, {values[-1]:.1f} in the last, {min(values):.1f} to "
            f"{max(values):.1f} between |"
        )
    if anew := newest("endless_stream").get(ANEW):
        lines.append(_beside(anew))
    return "\n".join(lines)


def _beside(row: dict[str, Any]) -> str:
    """The stream beside the window that is recomputed, on the same tokens."""
    both = row["beside_stream"]
    tokens, (low, high) = both["n"] * row["tokens_per_place"], both["ratio_interval"]
    first, second = (row[f"beside_stream_{half}_half"]["ratio"] for half in ("first", "second"))
    return (
        f"| perplexity beside a recomputed window, the same {tokens:,} tokens at {both['n']} "
        f"places | {both['ppl']:.1f} beside {both['full_ppl']:.1f} ({both['ratio']:.3f}x, "
        f"{low:.3f} - {high:.3f}); {first:.3f}x in the first half of the stream, {second:.3f}x in "
        "the second |"
    )


def figure() -> Figure | None:
    """Perplexity against position in the stream, past the trained length."""
    arms = perplexities()
    if not arms:
        return None
    series = []
    for arm, row in arms.items():
        first = row["bucket"] / 2
        points = tuple(
            (first + i * row["bucket"], value, None, None)
            for i, value in enumerate(row["perplexity"])
        )
        series.append(Series(arm, points))
    longest = max(row["tokens"] for row in arms.values())
    model = next(iter(arms.values()))["model"]
    return Figure(
        "endless-stream",
        f"Perplexity of one request of {longest:,} tokens ({model}, trained to 8,192)",
        "position",
        "perplexity per 10,000 tokens (log)",
        "lines",
        tuple(series),
        log=True,
    )
