"""docs/KERNELS.md on the CPU's decode kernel: how near to the memory's limit."""

from __future__ import annotations

from sglang_kv.benchmarks.markdown import NOTHING, head
from sglang_kv.benchmarks.records import Row, lines


def bandwidth() -> str:
    """The first and the newest line of each shape and each set of instructions, by CPU."""
    found: dict[tuple[str, ...], list[Row]] = {}
    for row in lines("decode_kernel"):
        env = row["environment"]
        found.setdefault((f"{env['cpu']}, {env['cores']} cores", row["arm"]), []).append(row)
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
