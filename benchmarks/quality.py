"""What does a policy cost in quality? Needle, fidelity and perplexity, through a server.

    python -m sglang_kv.benchmarks.quality --model MODEL \\
        --arm 'window={"method": "streamingllm", "recent": 508}' --lengths 1024,2048
    python -m sglang_kv.benchmarks.quality --report           # tables of what was recorded
    python -m sglang_kv.benchmarks.quality --report --heat-maps FOLDER

The full cache (`none`) always runs first; the others are compared with it on the same prompts,
all arms of a prompt in turn. Each answer is kept in --work as it comes: a run that was stopped
goes on where it was. One JSON line per arm and suite in results/quality.jsonl.

For an engine of another kind, --dump-cases FILE writes the needle prompts as JSON lines, and
--score-answers NAME=FILE scores its {id, output_ids} lines with the same code, given the same
flags. The first name is its full cache.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sglang_kv.benchmarks import fidelity, needle, perplexity, tables
from sglang_kv.benchmarks.arms import FULL, Arm, Asker, Remote, work_folder
from sglang_kv.benchmarks.common import RESULTS, environment, record
from sglang_kv.benchmarks.prompts import STORY, Chat, Haystack, load_text
from sglang_kv.benchmarks.server import Server

SUITES = ("needle", "fidelity", "perplexity")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    where = parser.add_argument_group("where")
    where.add_argument("--model", help="path or name; starts a server on this machine's CPU")
    where.add_argument("--base-url", help="a server that already runs, started with the plugin")
    where.add_argument("--dtype", default="auto")
    where.add_argument("--max-total-tokens", type=int, help="the pool (default: room for two)")
    where.add_argument("--chunk", type=int, default=2048, help="--chunked-prefill-size")
    where.add_argument(
        "--server-args",
        default="",
        help="further flags of the server: --server-args='--sleep-on-idle'",
    )
    where.add_argument("--parallel", type=int, default=1, help="prompts at a time")
    what = parser.add_argument_group("what")
    what.add_argument(
        "--arm",
        action="append",
        default=[],
        help='name={"method": ...}; name@aware= or name@agnostic= for one column; repeat',
    )
    what.add_argument("--suite", default=",".join(SUITES))
    what.add_argument("--lengths", default="1024,2048,4096", help="prompt tokens")
    what.add_argument("--depths", default="0.1,0.3,0.5,0.7,0.9", help="of the needle, 0 to 1")
    what.add_argument("--kinds", default=",".join(needle.KINDS), help="of needles")
    what.add_argument("--samples", type=int, default=4, help="per cell of the grid")
    what.add_argument("--seed", type=int, default=0)
    what.add_argument("--limit", type=int, help="most prompts per suite")
    what.add_argument("--text", type=Path, help="the text (default: the demo's story)")
    what.add_argument("--answer-prefix", action="store_true", help="begin the needle's answer")
    what.add_argument("--max-new-tokens", type=int, default=32, help="of a needle's answer")
    what.add_argument("--answer-tokens", type=int, default=64, help="of fidelity's answer")
    what.add_argument("--top-k", type=int, default=20, help="tokens in fidelity's KL")
    what.add_argument("--fold", type=float, default=0.5, help="perplexity: fold at this share")
    what.add_argument("--bucket", type=int, default=512, help="perplexity: positions per bucket")
    out = parser.add_argument_group("out")
    out.add_argument(
        "--work", type=Path, default=work_folder(), help="answers so far (%(default)s)"
    )
    out.add_argument("--results", type=Path, default=RESULTS / "quality.jsonl")
    out.add_argument("--report", action="store_true", help="tables of --results, and no run")
    out.add_argument("--heat-maps", type=Path, metavar="FOLDER", help="needle PNGs")
    out.add_argument("--dump-cases", type=Path, metavar="FILE")
    out.add_argument("--score-answers", action="append", default=[], metavar="NAME=FILE")
    args = parser.parse_args(argv)
    try:
        args.suite = choices(args.suite, SUITES)
        args.kinds = choices(args.kinds, needle.KINDS)
        args.lengths = [int(part) for part in args.lengths.split(",")]
        args.depths = [float(part) for part in args.depths.split(",")]
        args.arms = [Arm(FULL, {"method": FULL}), *map(Arm.parse, args.arm)]
        args.score_answers = [pair.split("=", 1) for pair in args.score_answers]
        if any(len(pair) != 2 for pair in args.score_answers):
            raise ValueError("--score-answers: expected NAME=FILE")
    except ValueError as error:
        parser.error(str(error))
    names = [arm.name for arm in args.arms] + [name for name, _ in args.score_answers]
    if len(set(names)) < len(names):
        parser.error(f"arms need different names ({FULL} is the server's full cache)")
    if not (args.report or args.model or args.base_url):
        parser.error("give --model or --base-url")
    if (args.dump_cases or args.score_answers) and not args.model:
        parser.error("the cases are made with the tokenizer of --model")
    if args.heat_maps and importlib.util.find_spec("matplotlib") is None:
        parser.error("--heat-maps needs matplotlib: pip install 'sglang-kv[bench]'")
    source = args.results if args.report else args.text or STORY
    if not source.exists():
        parser.error(f"{source}: no such file" + ("" if args.report else "; name a --text"))
    return args


def choices(text: str, allowed: Iterable[str]) -> list[str]:
    chosen = text.split(",")
    if unknown := set(chosen) - set(allowed):
        raise ValueError(f"{', '.join(unknown)}: expected some of {', '.join(allowed)}")
    return chosen


def start_server(args: argparse.Namespace) -> Server:
    if args.base_url:
        return Remote(args.base_url)
    longest = max(args.lengths) + args.max_new_tokens + 2 * args.answer_tokens
    pool = args.max_total_tokens or (1 + args.parallel) * longest + args.chunk
    flags = ["--kv-compression", FULL, "--dtype", args.dtype, "--max-total-tokens", str(pool)]
    flags += ["--chunked-prefill-size", str(args.chunk), *shlex.split(args.server_args)]
    return Server(args.model, *flags)


def settings(args: argparse.Namespace, suite: str) -> dict[str, Any]:
    """What makes rows comparable: a row is only ever set beside rows of the same settings."""
    names = {
        "needle": ("lengths", "depths", "kinds", "answer_prefix", "max_new_tokens"),
        "fidelity": ("lengths", "answer_tokens", "top_k"),
        "perplexity": ("lengths", "fold", "bucket"),
    }[suite]
    shared = {name: getattr(args, name) for name in ("samples", "limit", "dtype")}
    shared["text"] = args.text.name if args.text else STORY.name
    return {name: getattr(args, name) for name in names} | shared


def needle_cases(args: argparse.Namespace, chat: Chat, text: str) -> list[needle.Case]:
    return needle.make_cases(
        chat,
        Haystack(chat, text),
        args.lengths,
        args.depths,
        args.samples,
        args.seed,
        kinds=args.kinds,
        max_new_tokens=args.max_new_tokens,
        answer_prefix=args.answer_prefix,
        limit=args.limit,
    )


def measure(
    args: argparse.Namespace, suite: str, ask: Asker, chat: Chat, text: str
) -> dict[str, dict[str, Any]]:
    """A suite's summary for each arm."""
    if suite == "needle":
        cases = needle_cases(args, chat, text)
        answers = needle.run(ask, chat, cases, args.arms, args.parallel)
        return {
            name: needle.summarize(cases, found, answers[FULL]) for name, found in answers.items()
        }
    if suite == "fidelity":
        prompts = fidelity.make_cases(
            chat, Haystack(chat, text), args.lengths, args.samples, args.seed, args.limit
        )
        options = {"tokens": args.answer_tokens, "top_k": args.top_k, "parallel": args.parallel}
        scores = fidelity.run(ask, prompts, args.arms, **options)
        return {name: fidelity.summarize(found) for name, found in scores.items()}
    stretches = perplexity.make_cases(chat, text, args.lengths, args.samples, args.limit)
    if missing := set(args.lengths) - {len(case.ids) for case in stretches}:
        print(f"perplexity: the text is shorter than {sorted(missing)} tokens", file=sys.stderr)
    got = perplexity.run(ask, stretches, args.arms, fold=args.fold, parallel=args.parallel)
    return {
        name: perplexity.summarize(stretches, found, got[FULL], args.bucket)
        for name, found in got.items()
    }


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """All suites, all arms, on one server; the rows that were recorded."""
    text = load_text(args.text)
    rows = []
    with start_server(args) as server:
        info = json.loads(server.get("/server_info"))
        args.dtype = info["dtype"]
        model = Path(info["model_path"]).name
        chat = Chat.load(args.model or info["tokenizer_path"] or info["model_path"])
        # Answers of other code, weights or arithmetic are not taken for this run's.
        about = {name: info.get(name) for name in ("model_path", "dtype", "device", "page_size")}
        ask = Asker(server, args.work, about | {"commit": environment()["commit"]})
        for suite in args.suite:
            for name, summary in measure(args, suite, ask, chat, text).items():
                policy = next(arm.policy for arm in args.arms if arm.name == name)
                rows.append(row(args, suite, name, policy, model, summary))
    return rows


def score(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of an outside engine's answers to the dumped cases."""
    chat, rows = Chat.load(args.model), []
    cases = needle_cases(args, chat, load_text(args.text))
    full: list[needle.Answer] | None = None
    for name, file in args.score_answers:
        lines = [json.loads(line) for line in Path(file).read_text().splitlines() if line]
        answers = needle.score_answers(chat, cases, lines)
        full = answers if full is None else full
        summary = needle.summarize(cases, answers, full)
        policy = {"answers": Path(file).name}
        rows.append(row(args, "needle", name, policy, Path(args.model).name, summary))
    return rows


def row(
    args: argparse.Namespace,
    suite: str,
    arm: str,
    policy: dict[str, Any],
    model: str,
    summary: dict[str, Any],
) -> dict[str, Any]:
    line = {"suite": suite, "arm": arm, "policy": policy, "model": model, "seed": args.seed}
    line |= {"settings": settings(args, suite), **summary}
    return record("quality", line, args.results, show=False)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    if args.dump_cases:
        chat = Chat.load(args.model)
        cases = needle_cases(args, chat, load_text(args.text))
        args.dump_cases.write_text("".join(json.dumps(c.to_json()) + "\n" for c in cases))
        return
    if args.report:
        rows = [json.loads(line) for line in args.results.read_text().splitlines()]
    else:
        rows = score(args) if args.score_answers else run(args)
    print(tables.table(rows))
    if args.heat_maps:
        for path in tables.heat_maps(rows, args.heat_maps):
            print(path)


if __name__ == "__main__":
    main()
