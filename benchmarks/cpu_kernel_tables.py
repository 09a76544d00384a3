"""docs/KERNELS.md on decode on a CPU: how near to memory's limit, and where a step's time goes."""

from __future__ import annotations

from sglang_kv.benchmarks.markdown import NOTHING, head
from sglang_kv.benchmarks.records import Row, lines, newest
from sglang_kv.benchmarks.step_time import PARTS


def bandwidth() -> str:
    """The first and the newest line of each shape and each set of instructions, by CPU."""
    found: dict[tuple[str, ...], list[Row]] = {}
    for row in lines("decode_kernel"):
        env = row["environment"]
        # Older lines have no width, and are all of CPUs without AVX-512.
        machine = f"{env['cpu']}, {env['cores']} cores, {row.get('vector_bits', 256)}-bit vectors"
        found.setdefault((machine, row["arm"]), []).append(row)
    if not found:
        return NOTHING
    table = head("machine", "kernel and shape", "commit", "K and V read", "plain read", "of it")
    for (machine, arm), rows in found.items():
        for line in (rows[0], rows[-1]) if len(rows) > 1 else rows:
            table.append(
                f"| {machine} | {arm} | {line['environment']['commit']} "
                f"| {line['kv_gb_s']:.1f} GB/s | {line['read_gb_s']:.1f} GB/s "
                f"| {line['share_of_limit']:.0%} |"
            )
    return "\n".join(table)


def steps() -> str:
    """Where the time of a decode step goes, by arm: stock SGLang's is the "before"."""
    arms = newest("step_time")
    if not arms:
        return NOTHING
    table = head("milliseconds of a step", *arms)
    for part in (*PARTS, "other"):
        if any(part in row["parts_ms"] for row in arms.values()):
            shown = (f"{row['parts_ms'].get(part, 0.0):.1f}" for row in arms.values())
            table.append(f"| {part} | {' | '.join(shown)} |")
    whole = (f"**{row['step_ms']:.1f}**" for row in arms.values())
    table.append(f"| **all** | {' | '.join(whole)} |")
    first = next(iter(arms.values()))
    env = first["environment"]
    commits = dict.fromkeys(row["environment"]["commit"] for row in arms.values())
    table += [
        "",
        f"{first['batch']} requests of {first['context']:,} tokens, SmolLM2-135M-Instruct in bf16 "
        f"on {env['cores']} cores of an {env['cpu']} that read {first['read_gb_s']:.1f} GB/s, "
        f"commit {', '.join(commits)}, {env['date'][:10]}; samples of the scheduler's thread, "
        "times the step's length without sampling. `benchmarks/step_time.py`.",
    ]
    return "\n".join(table)
