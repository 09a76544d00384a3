"""The tables of docs/KERNELS.md that are measured: 8-bit pages, and FlashInfer's modules."""

from __future__ import annotations

from sglang_kv.benchmarks.markdown import NOTHING, head
from sglang_kv.benchmarks.records import Row, lines, newest


def quality() -> str:
    """Perplexity and needles by dtype of the pages, each arm in 8 bits below itself in 16."""
    rows: dict[tuple[str, str], dict[str, Row]] = {}
    for row in lines("kv_dtypes"):
        dtype = row["settings"].get("kv_cache_dtype", row["settings"]["dtype"])
        dtype = "bfloat16" if dtype == "auto" else dtype  # the demo model's own
        rows.setdefault((row["arm"], dtype), {})[row["suite"]] = row
    if not rows:
        return NOTHING
    table = head("arm", "pages", "perplexity of the last bucket", "beside bf16", "needles found")
    arms = dict.fromkeys(arm for arm, _ in rows)
    dtypes = sorted({dtype for _, dtype in rows}, key=lambda d: (d.startswith("fp8"), d))
    for arm, dtype in [(a, d) for a in arms for d in dtypes if (a, d) in rows]:
        found = rows[arm, dtype]
        text, ratio, needles = "-", "-", "-"
        if "perplexity" in found:
            cell = last_cell(found["perplexity"])
            text = f"{cell['ppl']:.2f} ({cell['n']:,} tokens)"
            wide = rows.get((arm, "bfloat16"), {}).get("perplexity")
            if wide is not None:
                ratio = f"{cell['ppl'] / last_cell(wide)['ppl']:.4f}x"
        if "needle" in found:
            (cell,) = found["needle"]["summary"]
            needles = f"{cell['hits']}/{cell['n']}"
        table.append(f"| {arm} | {dtype} | {text} | {ratio} | {needles} |")
    return "\n".join(table)


def last_cell(row: Row) -> Row:
    """Of a line of the perplexity suite: the positions that every arm is judged by."""
    cell: Row = row["cells"][-1]
    return cell


def modules() -> str:
    """What nvcc made of each of FlashInfer's modules."""
    rows = newest("flashinfer_modules").values()
    if not rows:
        return NOTHING
    table = head(
        *("module", "compiles", "objects", "kernels"),
        *("most registers", "that spill", "size", "CPU"),
    )
    for row in rows:
        start = f"| {short(row['arm'])} |"
        if not row["ok"]:
            table.append(f"{start} no: {row['failed']} | - | - | - | - | - | - |")
            continue
        table.append(
            f"{start} yes | {row['objects']} | {row['kernels']} | {row['most_registers']} "
            f"| {row['spilling_kernels']} | {row['so_bytes'] / 2**20:.1f} MiB "
            f"| {row['cpu_s'] / 60:.1f} min |"
        )
    return "\n".join(table)


def short(name: str) -> str:
    """What tells one module of FlashInfer's from another, in a few words."""
    if "head_dim_qk_" not in name:
        return name
    dim = name.split("head_dim_qk_")[1].split("_")[0]
    pages = name.split("dtype_kv_")[1].split("_")[0]
    kernels = "FA3" if name.endswith("_sm90") else "FA2"
    window = ", window" if "use_swa_True" in name else ""
    return f"{kernels}, head size {dim}, {pages} pages{window}"
