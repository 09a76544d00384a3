"""What the endless stream's lines show: a table, and StreamingLLM's figure of perplexity."""

from __future__ import annotations

from typing import Any

from sglang_kv.benchmarks.figure import Figure, Series
from sglang_kv.benchmarks.records import newest

SPEED = "memory and speed"


def perplexities() -> dict[str, dict[str, Any]]:
    """The newest line of each arm that has perplexities, by position in the stream."""
    return {arm: row for arm, row in newest("endless_stream").items() if "perplexity" in row}


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
    for arm, found in arms.items():
        values = found["perplexity"]
        if "samples" in found:  # too few in a bucket for one of its own
            count = found["samples"] * len(values)
            lines.append(
                f"| perplexity, {arm} | {found['perplexity_of_all']:.1f} over {count} tokens of "
                f"{found['tokens']:,} |"
            )
            continue
        lines.append(
            f"| perplexity, {arm}, {found['tokens']:,} tokens | {values[0]:.1f} in the first "
            f"{found['bucket']:,}, {values[-1]:.1f} in the last, {min(values):.1f} to "
            f"{max(values):.1f} between |"
        )
    return "\n".join(lines)


def figure() -> Figure | None:
    """Perplexity against position in the stream, past the trained length."""
    arms = {arm: row for arm, row in perplexities().items() if "samples" not in row}
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
