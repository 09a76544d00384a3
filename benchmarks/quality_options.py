"""The flags of ``sglang-kv quality``, and what is wrong with them."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Iterable
from pathlib import Path

from sglang_kv.benchmarks import needle, standins
from sglang_kv.benchmarks.arms import FULL, Arm, work_folder
from sglang_kv.benchmarks.common import results_file
from sglang_kv.benchmarks.longbench.datasets import DATASETS
from sglang_kv.benchmarks.ruler.tasks import TASKS
from sglang_kv.benchmarks.suites import SUITES, USUAL


def default_results() -> Path:
    """The checkout's results; for an installed package, a file where one stands."""
    path, here = results_file("quality"), Path.cwd()
    return path.relative_to(here) if path.parent == here else path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """All flags; `check` makes values of them."""
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
    what.add_argument(
        "--suite", default=",".join(USUAL), help=f"some of {', '.join(SUITES)} (%(default)s)"
    )
    what.add_argument("--lengths", default="1024,2048,4096", help="prompt tokens")
    what.add_argument("--samples", type=int, default=4, help="per length, cell or task")
    what.add_argument("--seed", type=int, default=0)
    what.add_argument(
        "--limit", type=int, help="most prompts (of generated tasks: texts) per suite"
    )
    what.add_argument("--text", type=Path, help="the text (default: the demo's, or a grammar's)")
    each = parser.add_argument_group("of one suite")
    each.add_argument("--depths", default="0.1,0.3,0.5,0.7,0.9", help="of the needle, 0 to 1")
    each.add_argument(
        "--kinds",
        default=",".join(needle.KINDS),
        help=f"of needles, some of {', '.join(needle.ALL_KINDS)} (%(default)s)",
    )
    each.add_argument("--answer-prefix", action="store_true", help="begin the needle's answer")
    each.add_argument("--max-new-tokens", type=int, default=32, help="of one needle's answer")
    each.add_argument("--answer-tokens", type=int, default=64, help="of fidelity's answer")
    each.add_argument("--top-k", type=int, default=20, help="tokens in fidelity's KL")
    each.add_argument("--fold", type=float, default=0.5, help="perplexity: fold at this share")
    each.add_argument("--bucket", type=int, default=512, help="perplexity: positions per bucket")
    each.add_argument("--tasks", default=",".join(TASKS), help="ruler: some of its 13")
    each.add_argument(
        "--questions", type=int, default=1, help="ruler: most questions to one compressed text"
    )
    each.add_argument("--standins", default=",".join(standins.TASKS), help="some of (%(default)s)")
    each.add_argument(
        "--longbench", metavar="FOLDER|hub", help="LongBench's files: data and config"
    )
    each.add_argument("--datasets", default=",".join(DATASETS), help="longbench: some of its 21")
    out = parser.add_argument_group("out")
    out.add_argument(
        "--work", type=Path, default=work_folder(), help="answers so far (%(default)s)"
    )
    out.add_argument("--results", type=Path, default=default_results(), help="(%(default)s)")
    out.add_argument("--report", action="store_true", help="tables of --results, and no run")
    out.add_argument("--heat-maps", type=Path, metavar="FOLDER", help="needle PNGs")
    out.add_argument("--dump-cases", type=Path, metavar="FILE", help="of the first suite")
    out.add_argument("--score-answers", action="append", default=[], metavar="NAME=FILE")


def check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Turn the lists into lists; end with one line that names the flag where one is wrong."""
    try:
        args.suite = choices("--suite", args.suite, SUITES)
        args.kinds = choices("--kinds", args.kinds, needle.ALL_KINDS)
        args.tasks = choices("--tasks", args.tasks, TASKS)
        args.standins = choices("--standins", args.standins, standins.TASKS)
        args.datasets = choices("--datasets", args.datasets, DATASETS)
        args.lengths = numbers("--lengths", args.lengths, int)
        args.depths = numbers("--depths", args.depths, float)
        args.arms = [Arm(FULL, {"method": FULL}), *map(Arm.parse, args.arm)]
        args.score_answers = [pair.split("=", 1) for pair in args.score_answers]
        if any(len(pair) != 2 for pair in args.score_answers):
            raise ValueError("--score-answers: expected NAME=FILE")
        for flag in ("samples", "questions", "parallel"):
            if getattr(args, flag) < 1:
                raise ValueError(f"--{flag}: must be at least 1, got {getattr(args, flag)}")
        if "longbench" in args.suite and not (args.longbench or args.report):
            raise ValueError("--longbench: missing, and the suite longbench needs it")
        if args.score_answers and SUITES[args.suite[0]].score is None:
            raise ValueError(f"--score-answers: {args.suite[0]} takes more than an answer")
    except ValueError as error:
        parser.error(str(error))
    args.prompts_of = None
    args.kv_cache_dtype = None  # the server's, once there is one
    names = [arm.name for arm in args.arms] + [name for name, _ in args.score_answers]
    if len(set(names)) < len(names):
        parser.error(f"arms need different names ({FULL} is the server's full cache)")
    if not (args.report or args.model or args.base_url):
        parser.error("give --model or --base-url")
    if (args.dump_cases or args.score_answers) and not args.model:
        parser.error("the cases are made with the tokenizer of --model")
    if args.heat_maps and importlib.util.find_spec("matplotlib") is None:
        parser.error("--heat-maps needs matplotlib: pip install 'sglang-kv[bench]'")
    source = args.results if args.report else args.text
    if source is not None and not source.exists():
        parser.error(f"{source}: no such file" + ("" if args.report else "; name a --text"))


def choices(flag: str, text: str, allowed: Iterable[str]) -> list[str]:
    """The parts of a comma-separated list. Raises ValueError for one that is not allowed."""
    chosen, known = text.split(","), list(allowed)
    if unknown := [part for part in chosen if part not in known]:
        raise ValueError(f"{flag}: {', '.join(unknown)}: expected some of {', '.join(known)}")
    return chosen


def numbers(flag: str, text: str, kind: type) -> list[float]:
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{flag}: expected numbers with commas, got {text!r}") from None
