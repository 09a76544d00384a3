"""The tables of README and docs, from ``results/*.jsonl`` and the registry; ``--write`` puts them
there.

Each table shows the newest line of each arm, so a figure in them is always one that a benchmark
has recorded. ``tests/test_readme.py`` fails when the two differ.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from sglang_kv import cli

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent


def newest(name: str) -> dict[str, dict[str, Any]]:
    """The newest line of each arm of a benchmark, in the order the arms first appeared."""
    arms: dict[str, dict[str, Any]] = {}
    path = HERE / "results" / f"{name}.jsonl"
    for line in path.read_text().splitlines() if path.exists() else ():
        row = json.loads(line)
        arms[row["arm"]] = row
    return arms


NAMES = {
    "stock": "stock SGLang (`torch_native`)",
    "none": "sglang-kv, `none`",
    "streamingllm": "sglang-kv, `streamingllm` (4 + 1,020)",
}


def headline() -> str:
    speed, room = newest("decode_speed"), newest("concurrency")
    if not speed or not room:
        return "(no results recorded yet)"
    first = next(iter(speed.values()))
    pool = next(iter(room.values()))
    lines = [
        f"| | decode, {first['batch']} x {first['context']:,} tokens | beside stock | prefill | "
        f"{pool['context']:,}-token requests at once in {pool['pool_tokens']:,} tokens of memory |",
        "|---|---|---|---|---|",
    ]
    for arm, row in speed.items():
        # Stock has the same one page per token that `none` has.
        fits = room.get(arm, room["none"])["running_at_once"] if arm != "stock" else "-"
        lines.append(
            f"| {NAMES[arm]} | {row['decode_tok_s']:.0f} tok/s | {row['ratio_to_first_arm']:.1f}x "
            f"| {row['prefill_tok_s']:,.0f} tok/s | {fits} |"
        )
    env = first["environment"]
    lines += [
        "",
        f"SmolLM2-135M-Instruct in bf16 on {env['cores']} cores of an {env['cpu']} without AMX, "
        f"sglang {env['versions']['sglang']}, commit {env['commit']}, {env['date'][:10]}; the same "
        "flags in every row. `benchmarks/decode_speed.py`, `benchmarks/concurrency.py`.",
    ]
    return "\n".join(lines)


def methods() -> str:
    return cli.method_table()


SECTIONS = {
    "headline": headline,
    "methods": methods,
    "parameters": cli.parameter_tables,
    "presets": cli.preset_table,
}
#: Where each section stands.
DOCUMENTS = {
    "README.md": ("headline", "methods"),
    "docs/METHODS.md": ("methods", "parameters", "presets"),
}


def render(text: str) -> str:
    """``text`` with every ``<!-- NAME -->`` section made anew."""
    for name, make in SECTIONS.items():
        pattern = rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)"
        text = re.sub(pattern, lambda m, make=make: f"{m[1]}{make()}\n{m[2]}", text, flags=re.S)  # type: ignore[misc]
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    if not args.write:
        print(headline())
        return
    for name in DOCUMENTS:
        path = ROOT / name
        path.write_text(render(path.read_text()))


if __name__ == "__main__":
    main()
