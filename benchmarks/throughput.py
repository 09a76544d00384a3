"""Which method serves most? Requests per second, latencies and memory, beside stock SGLang.

    sglang-kv bench --model MODEL --quick                      # everything once, small
    sglang-kv bench --model MODEL --workload document --budgets 4
    sglang-kv bench --model MODEL --workload stream:output=20000 --arms none,'streamingllm 1/4'
    sglang-kv bench --base-url http://127.0.0.1:30000          # a server that runs already

Each arm is a server of its own with the same KV memory in bytes and the same flags: stock SGLang,
then sglang-kv with `none` and every method at several shares of the prompt. SGLang's own load
generator sends the workloads, the same requests to each arm, with the cache flushed before each.
An arm that did not run what it says, by its log, metrics and answers, ends the run. One JSON line
per arm and workload is added to --results; what stands there already is not run again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sglang_kv.benchmarks import methods
from sglang_kv.benchmarks.arms import Arm, Progress, Remote
from sglang_kv.benchmarks.common import environment, record, results_file
from sglang_kv.benchmarks.load import AllFailed, import_load_generator
from sglang_kv.benchmarks.proof import NotProved
from sglang_kv.benchmarks.server import HTTPError
from sglang_kv.benchmarks.under_load import (
    ROOM,
    Target,
    kv_cache_dtype_in,
    kv_dtype_of,
    measure,
    server_flags,
    serving,
)
from sglang_kv.benchmarks.watch import Metrics, information
from sglang_kv.benchmarks.workloads import QUICK, WORKLOADS, Workload, parse_workload

STOCK = "stock"


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="sglang-kv bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    where = parser.add_argument_group("where")
    where.add_argument("--model", help="path or name")
    where.add_argument("--base-url", help="a server that runs already, with --enable-metrics")
    where.add_argument("--device", help="cpu or cuda (default: cuda if there is one)")
    where.add_argument("--dtype", default="auto")
    where.add_argument(
        "--pool-mib",
        type=float,
        help="KV memory of every arm (default: room for "
        f"{ROOM} of the longest requests and a chunk)",
    )
    where.add_argument("--chunk", type=int, default=4096, help="--chunked-prefill-size")
    where.add_argument("--max-running-requests", type=int, default=64)
    where.add_argument("--server-args", default="", help="further flags of every server")
    where.add_argument(
        "--one-server", action="store_true", help="one for all arms but stock: quicker to start"
    )
    what = parser.add_argument_group("what")
    what.add_argument(
        "--workload",
        action="append",
        default=[],
        metavar="NAME[:SIZE=N,...]",
        help=f"{', '.join(WORKLOADS)}; repeat (default: all)",
    )
    what.add_argument("--budgets", default="2,4,8", help="1/N of the prompt is kept")
    what.add_argument("--arms", help="comma-separated names (default: all)")
    what.add_argument("--arm", action="append", default=[], help='also: name={"method": ...}')
    what.add_argument("--rate", type=float, default=float("inf"), help="requests per second")
    what.add_argument("--seed", type=int, default=0)
    what.add_argument("--quick", action="store_true", help="small workloads")
    what.add_argument("--list", action="store_true", help="arms and workloads, and no run")
    out = parser.add_argument_group("out")
    out.add_argument("--results", type=Path, default=results_file("throughput"))
    out.add_argument("--again", action="store_true", help="also what --results has already")
    out.add_argument("--log", type=Path, help="what the load generator prints")
    args = parser.parse_args(argv)
    try:
        check(args)
    except ValueError as error:
        parser.error(str(error))
    return args


def check(args: argparse.Namespace) -> None:
    """Turn text into workloads and arms.

    Raises:
        ValueError: naming the flag that is wrong.
    """
    if not (args.model or args.base_url or args.list):
        raise ValueError("give --model or --base-url")
    for flag, value, least in (
        ("--chunk", args.chunk, 16),
        ("--max-running-requests", args.max_running_requests, 1),
    ):
        if value < least:
            raise ValueError(f"{flag} must be at least {least}, got {value}")
    if not args.rate > 0:
        raise ValueError(f"--rate must be above 0, got {args.rate}")
    if args.pool_mib is not None and not args.pool_mib > 0:
        raise ValueError(f"--pool-mib must be above 0, got {args.pool_mib}")
    if args.device not in (None, "cpu", "cuda"):
        raise ValueError(f"--device must be cpu or cuda, got {args.device!r}")
    args.device = args.device or ("cuda" if shutil.which("nvidia-smi") else "cpu")
    args.kv_cache_dtype = kv_cache_dtype_in(args.server_args)
    kv_dtype_of(args.dtype, args.kv_cache_dtype)
    parts = args.budgets.split(",")
    if not all(part.isdecimal() and int(part) > 1 for part in parts):
        raise ValueError(f"--budgets must be whole numbers above 1, got {args.budgets!r}")
    args.parts = tuple(int(part) for part in parts)
    known = QUICK if args.quick else WORKLOADS
    args.workloads = [parse_workload(text, args.quick) for text in args.workload or known]
    args.own = {arm.name: arm.policy for arm in map(Arm.parse, args.arm)}
    every = [STOCK, *policies(args, next(iter(args.workloads)))]
    args.chosen = list(dict.fromkeys([*args.arms.split(","), *args.own])) if args.arms else every
    if unknown := [name for name in args.chosen if name not in every]:
        raise ValueError(f"--arms: {unknown[0]!r} is none of {', '.join(every)}")


def policies(args: argparse.Namespace, workload: Workload) -> dict[str, methods.Policy]:
    """Each arm's policy; a method that is told a number of tokens gets its share of them."""
    return methods.arms(workload.budgeted, args.parts) | args.own


def run(args: argparse.Namespace) -> int:
    """All arms under all workloads; how many lines were added."""
    from transformers import AutoTokenizer

    import_load_generator()
    args.commit = environment()["commit"]
    if args.base_url:
        about = information(Remote(args.base_url))
        args.model = args.model or about["model_path"]
        # There is one server, and what it is decides which arms there are.
        ours = Metrics.of(Remote(args.base_url)).ours
        args.chosen = [arm for arm in args.chosen if (arm == STOCK) is not ours]
        if not args.chosen:
            raise SystemExit(f"{args.base_url} is {'not ' * ours}stock SGLang: no arm is left")
        # Flags of ours do not reach it: its own say how large a token of its KV is.
        args.dtype = str(about.get("dtype") or "auto")
        args.kv_cache_dtype = str(about.get("kv_cache_dtype") or "auto")
    try:
        target = Target.of(args.model, args.dtype, args.kv_cache_dtype)
    except ValueError as error:
        raise SystemExit(f"{args.base_url or args.model}: {error}") from None
    tokenizer = AutoTokenizer.from_pretrained(args.model)

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    known = {row.get("key") for row in rows(args.results)} if not args.again else set()
    work = [
        (arm, workload, asked, key)
        for arm in args.chosen
        for workload in args.workloads
        for asked in (None if arm == STOCK else policies(args, workload)[arm],)
        for key in (digest(args, target, arm, workload, asked),)
        if key not in known
    ]
    total = len(args.chosen) * len(args.workloads)
    progress = Progress("bench", total)
    for _ in range(total - len(work)):
        progress.step(asked=False, what="recorded already")
    for group in servers(args, work):
        with serving(args, target, stock=group[0][0] == STOCK) as server:
            for arm, workload, asked, key in group:
                found: dict[str, Any]
                try:
                    found = measure(args, server, target, workload, asked, encode)
                except NotProved as error:
                    raise SystemExit(f"arm {arm!r}, {workload.name}: {error}") from None
                except (AllFailed, HTTPError) as error:
                    if isinstance(error, HTTPError) and error.status != 400:
                        raise
                    found = {"refused": str(error)[:500]}
                line = {"key": key, "arm": arm, "policy": asked, **common(args, target, workload)}
                record("throughput", {**line, **found}, args.results, show=False)
                progress.step(asked=True, what=f"{arm}, {workload.name}")
    return len(work)


def servers(args: argparse.Namespace, work: list[Any]) -> list[list[Any]]:
    """The work in groups that share a server."""
    groups: dict[str, list[Any]] = {}
    for item in work:
        alone = not (args.base_url or args.one_server) or item[0] == STOCK
        groups.setdefault(item[0] if alone else "", []).append(item)
    return list(groups.values())


def common(args: argparse.Namespace, target: Target, workload: Workload) -> dict[str, Any]:
    """What a line says of its conditions."""
    return {
        "workload": asdict(workload),
        "model": Path(target.model).name,
        "device": None if args.base_url else args.device,
        "rate": args.rate if args.rate != float("inf") else None,
        "flags": None if args.base_url else server_flags(args, target)[0],
        "own_server": not (args.base_url or args.one_server),
        "seed": args.seed,
    }


def digest(
    args: argparse.Namespace,
    target: Target,
    arm: str,
    workload: Workload,
    policy: methods.Policy | None,
) -> str:
    """Everything that makes a line another one: of other code, too."""
    about = [arm, policy, common(args, target, workload), args.base_url, args.commit]
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def table(lines: list[dict[str, Any]]) -> str:
    """A Markdown table per workload and machine, the newest line of each arm."""
    heads = "arm | req/s | output tok/s | TTFT p50/p99, s | TPOT p50/p99, ms | at once | KV MiB"
    heads += " | hits"
    sections: dict[str, dict[str, dict[str, Any]]] = {}
    for line in lines:
        size = Workload(**line["workload"]).label()
        sections.setdefault(f"{line['model']}, {size}", {})[line["arm"]] = line
    parts = []
    for title, arms in sections.items():
        parts += [f"### {title}", "", f"| {heads} |", "|---" * 8 + "|"]
        for arm, line in arms.items():
            if "refused" in line:
                parts.append(f"| {arm} | refused: {line['refused'][:80]} |" + " |" * 6)
                continue
            ttft, tpot = line["ttft_ms"], line["tpot_ms"]
            parts.append(
                f"| {arm} | {line['requests_per_s']:.3f} | {line['output_tok_s']:.1f} "
                f"| {ttft['p50'] / 1e3:.2f} / {ttft['p99'] / 1e3:.2f} "
                f"| {tpot['p50']:.1f} / {tpot['p99']:.1f} | {line['running_at_once']} "
                f"| {line['kv_bytes']['peak'] / 2**20:.0f} | {line['hit_rate']:.0%} |"
            )
        parts.append("")
    return "\n".join(parts)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    if args.list:
        print(*args.chosen, "", *(w.label() for w in args.workloads), sep="\n")
        return
    run(args)
    model = Path(args.model).name
    print(table([line for line in rows(args.results) if line.get("model") == model]))


if __name__ == "__main__":
    main()
