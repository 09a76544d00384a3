"""What does a policy cost in quality? Needles, RULER, LongBench, fidelity, perplexity, on a server.

    sglang-kv quality --model MODEL \\
        --arm 'window={"method": "streamingllm", "recent": 508}' --lengths 1024,2048
    sglang-kv quality --model MODEL --suite ruler --arm ... --questions 3
    sglang-kv quality --report           # tables of what was recorded
    sglang-kv quality --report --heat-maps FOLDER

The full cache (`none`) always runs first; the others are compared with it on the same prompts,
all arms of a prompt in turn. Each answer is kept in --work as it comes: a run that was stopped
goes on where it was. One JSON line per arm and suite in --results, with the parameters that the
answers reported; one that reports others than were asked for ends the run.

A policy that can fold before a question has two columns: aware, where the question is in what is
compressed, and agnostic, where the text is compressed first and asked about afterwards.

For an engine of another kind, --dump-cases FILE writes the prompts of the first --suite as JSON
lines, and --score-answers NAME=FILE scores its {id, output_ids} lines with the same code, given
the same flags. The first name is its full cache.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sglang_kv.benchmarks import tables
from sglang_kv.benchmarks.arms import FULL, Asker, Remote
from sglang_kv.benchmarks.common import environment, record
from sglang_kv.benchmarks.prompts import Chat, load_text, text_name
from sglang_kv.benchmarks.quality_options import add_arguments, check
from sglang_kv.benchmarks.server import Server
from sglang_kv.benchmarks.suites import SUITES


def add_parser(commands: Any) -> None:
    """``quality`` among the commands of ``sglang-kv``."""
    parser = commands.add_parser(
        "quality",
        help="what a policy costs in quality, through a server",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser)
    parser.set_defaults(run=partial(run_command, parser))


def run_command(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Everything that ``args`` ask for."""
    check(parser, args)
    try:
        if args.dump_cases:
            dump(args)
            return
        if args.report:
            rows = [json.loads(line) for line in args.results.read_text().splitlines()]
        else:
            rows = score(args) if args.score_answers else run(args)
    except ValueError as error:
        parser.error(str(error))
    print(tables.table(rows))
    if args.heat_maps:
        for path in tables.heat_maps(rows, args.heat_maps):
            print(path)


def start_server(args: argparse.Namespace) -> Server:
    if args.base_url:
        return Remote(args.base_url)
    longest = max(args.lengths) + 4 * args.max_new_tokens + 2 * args.answer_tokens
    pool = args.max_total_tokens or (1 + args.parallel) * longest + args.chunk
    flags = ["--kv-compression", FULL, "--dtype", args.dtype, "--max-total-tokens", str(pool)]
    flags += ["--chunked-prefill-size", str(args.chunk), *shlex.split(args.server_args)]
    return Server(args.model, *flags)


def settings(args: argparse.Namespace, suite: str) -> dict[str, Any]:
    """What makes rows comparable: a row is only ever set beside rows of the same settings."""
    names = (*SUITES[suite].settings, "samples", "limit", "dtype")
    found = {name: getattr(args, name) for name in names} | {"text": text_name(args.text)}
    # Pages in the model's own dtype are what a row without it was measured on.
    if args.kv_cache_dtype not in (None, "auto"):
        found["kv_cache_dtype"] = args.kv_cache_dtype
    return found


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """All suites, all arms, on one server; the rows that were recorded."""
    text = load_text(args.text)
    rows = []
    with start_server(args) as server:
        info = json.loads(server.get("/server_info"))
        args.dtype, args.kv_cache_dtype = info["dtype"], info.get("kv_cache_dtype")
        model = Path(info["model_path"]).name
        chat = Chat.load(args.model or info["tokenizer_path"] or info["model_path"])
        # Answers of other code, weights or arithmetic are not taken for this run's.
        names = ("model_path", "dtype", "kv_cache_dtype", "device", "page_size")
        about = {name: info.get(name) for name in names}
        ask = Asker(server, args.work, about | {"commit": environment()["commit"]})
        for name in args.suite:
            suite = SUITES[name]
            cases = suite.cases(args, chat, text)
            for arm, summary in suite.measure(args, ask, chat, cases).items():
                policy = next(a.policy for a in args.arms if a.name == arm)
                proved = {"proved": ask.proof(policy)} if summary["cells"] else {}
                rows.append(row(args, name, arm, policy, model, {**summary, **proved}))
    return rows


def dump(args: argparse.Namespace) -> None:
    """The prompts of the first suite, a JSON line each."""
    chat = Chat.load(args.model)
    cases = SUITES[args.suite[0]].cases(args, chat, load_text(args.text))
    if not all(hasattr(case, "to_json") for case in cases):
        raise ValueError(f"--dump-cases: {args.suite[0]} takes more than an answer")
    args.dump_cases.write_text("".join(json.dumps(c.to_json()) + "\n" for c in cases))


def score(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of an outside engine's answers to the dumped cases."""
    chat, name = Chat.load(args.model), args.suite[0]
    suite = SUITES[name]
    assert suite.score is not None
    files = {arm: Path(file) for arm, file in args.score_answers}
    lines = {
        arm: [json.loads(line) for line in file.read_text().splitlines() if line]
        for arm, file in files.items()
    }
    found = suite.score(chat, suite.cases(args, chat, load_text(args.text)), lines)
    model = Path(args.model).name
    return [
        row(args, name, arm, {"answers": files[arm].name}, model, summary)
        for arm, summary in found.items()
    ]


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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    run_command(parser, parser.parse_args(argv))


if __name__ == "__main__":
    main()
