"""What ``sglang-kv calibrate`` and ``calibrate-report`` take; torch is imported when they run."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sglang_kv.calibration import checks
from sglang_kv.compression.base import PolicyError

#: The demo's story, where this is a checkout; an installed wheel does not bring it.
TEXT = Path(__file__).parents[2] / "scripts/demo/red_headed_league.txt"
METHODS = ("trained", "training-free", "mean-attention")
#: (samples, lengths) of each method unless told.
DEFAULTS: dict[str, tuple[int, tuple[int, int]]] = {
    "trained": (12, (1024, 1152)),
    "training-free": (16, (512, 2048)),
    "mean-attention": (16, (512, 2048)),
}
SPARSITIES = (0.25, 0.5, 0.75, 0.9)
WINDOWS = ((4, 64), (16, 64), (64, 256))


def add_commands(commands: Any) -> None:
    """Add both to the subparsers of `sglang_kv.cli`."""
    add_calibrate(
        commands.add_parser(
            "calibrate",
            help="find a model's retrieval heads and write its head gates",
            description="Find which heads of a model need the whole history, on passkeys hidden "
            "in a text. 'trained' is DuoAttention's way and the most thorough; 'training-free' "
            "measures how much attention a passkey receives while it is answered; "
            "'mean-attention' is a rough cross-check. A run that was stopped goes on when the "
            "same command is given again.",
        )
    )
    add_report(
        commands.add_parser(
            "calibrate-report",
            help="judge gates: plots, agreement, and passkeys found at several sparsities",
            description="Write report.md, report.json and plots about one or more gates files "
            "of a model. The first is the one that the needle tables are about. Needles that "
            "were tried stay in FOLDER/needles.jsonl and are not tried again.",
        )
    )


def add_calibrate(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    parser.add_argument("--out", type=Path, required=True, help="the gates file (JSON) to write")
    parser.add_argument("--method", choices=METHODS, default="trained")
    parser.add_argument("--pattern", action="store_true", help="also write MIT's TSV and config")
    parser.add_argument(
        "--model-id", type=checks.name, help="name in the gates file (default: the folder's name)"
    )
    parser.add_argument("--seed", type=checks.seed, default=0)
    parser.add_argument("--restart", action="store_true", help="forget an unfinished run")
    parser.add_argument("--samples", type=checks.count, help="texts (default: 12; others: 16)")
    parser.add_argument(
        "--lengths",
        type=checks.count,
        nargs=2,
        metavar=("LEAST", "MOST"),
        help="tokens of a text (default: 1024 1152; others: 512 2048)",
    )
    parser.add_argument("--sinks", type=int, default=64, help="of streaming heads (default: 64)")
    parser.add_argument("--recent", type=int, default=256, help="of streaming heads (default: 256)")
    training = parser.add_argument_group("for --method trained")
    training.add_argument("--steps", type=checks.count, default=40, help="gradient steps (40)")
    training.add_argument(
        "--learning-rate", type=checks.rate, default=0.05, help="the highest (0.05)"
    )
    training.add_argument(
        "--l1", type=checks.amount, default=0.05, help="price of a mean gate of 1 (0.05)"
    )
    training.add_argument("--passkeys", type=checks.count, default=10, help="in each text (10)")
    training.add_argument(
        "--no-checkpoint",
        dest="checkpoint",
        action="store_false",
        help="keep all layers' activations: faster, memory grows with the layers",
    )
    parser.set_defaults(run=_calibrate, error=parser.error)


def add_report(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    parser.add_argument("gates", type=Path, nargs="+", help="gates files of that model")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="where to")
    parser.add_argument(
        "--samples", type=checks.count, default=14, help="passkeys per length and seed (14)"
    )
    parser.add_argument(
        "--passkeys", type=checks.count, default=1, help="in each text, asked for one at a time (1)"
    )
    parser.add_argument(
        "--lengths", type=checks.count, nargs="+", default=(2048, 4096), help="tokens"
    )
    parser.add_argument("--seeds", type=checks.seed, nargs="+", default=(0, 1, 2))
    parser.add_argument(
        "--sparsity",
        type=checks.share,
        nargs="+",
        default=SPARSITIES,
        help="shares of streaming heads (default: 0.25 0.5 0.75 0.9)",
    )
    parser.add_argument(
        "--control-sparsity",
        type=checks.share,
        nargs="+",
        help="of random and inverted gates (default: as --sparsity)",
    )
    parser.add_argument(
        "--windows",
        type=checks.window,
        nargs="+",
        default=WINDOWS,
        metavar="SINKS+RECENT",
        help="of streaming heads (default: 4+64 16+64 64+256); the last is for all other tables",
    )
    parser.add_argument(
        "--window-sparsity",
        type=checks.share,
        default=0.5,
        help="at which windows are compared (0.5)",
    )
    parser.add_argument(
        "--prefill",
        choices=("dense", "windowed"),
        default="dense",
        help="dense: heads are cut when the question begins, one pass over a text for all rows; "
        "windowed: in the prompt too, as the server does, one pass for each row (default: dense)",
    )
    parser.add_argument(
        "--minutes",
        type=checks.amount,
        help="try needles for so long at most, then report what there is (0: none)",
    )
    parser.add_argument("--no-plots", dest="plots", action="store_false")
    parser.set_defaults(run=_report, error=parser.error)


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, help="folder of a transformers causal LM")
    parser.add_argument("--text", type=Path, default=TEXT, help="a text file to hide passkeys in")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--dtype",
        choices=("auto", "bfloat16", "float32"),
        default="auto",
        help="auto: bfloat16, but float32 on a CPU without bf16 instructions (default)",
    )
    parser.add_argument("--threads", type=checks.count, default=2)


def _calibrate(args: argparse.Namespace) -> None:
    samples, lengths = DEFAULTS[args.method]
    args.samples = args.samples or samples
    args.lengths = tuple(args.lengths or lengths)
    if args.lengths[0] > args.lengths[1]:
        args.error("--lengths: LEAST comes before MOST")
    if args.sinks < 0 or args.recent < 1:
        args.error("--sinks: at least 0; --recent: at least 1")
    try:
        _check_model(args)
        checks.check_lengths(args, args.sinks, args.recent)
        checks.check_file("--out", args.out)
    except checks.Refused as error:
        args.error(str(error))
    from sglang_kv.calibration.run import calibrate, dtype_of

    args.dtype = dtype_of(args)
    with _ends("calibrate", "the same command goes on from the last step"):
        calibrate(args)
        print(args.out)
        if args.pattern:
            print(args.out.with_suffix(""), "has MIT's pattern", file=sys.stderr)


def _report(args: argparse.Namespace) -> None:
    try:
        _check_model(args)
        sinks, recent = (max(window[i] for window in args.windows) for i in (0, 1))
        checks.check_lengths(args, sinks, recent)
        checks.check_folder("--out", args.out)
    except checks.Refused as error:
        args.error(str(error))
    from sglang_kv.calibration.report import report
    from sglang_kv.calibration.run import dtype_of

    args.dtype = dtype_of(args)
    with _ends("calibrate-report", "the same command goes on; --minutes 0 shows what there is"):
        print(report(args))


def _check_model(args: argparse.Namespace) -> None:
    checks.check_model(args.model)
    checks.check_text(args.text, TEXT)


@contextlib.contextmanager
def _ends(command: str, on: str) -> Iterator[None]:
    """One line for what is refused on the way, and for a run that is stopped (SIGINT, SIGTERM)."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except (PolicyError, ValueError) as error:
        sys.exit(f"{command}: {str(error).replace('--kv-gates:', 'GATES:')}")
    except KeyboardInterrupt:
        print(f"\n{command}: stopped; {on}", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    finally:
        signal.signal(signal.SIGTERM, before)
