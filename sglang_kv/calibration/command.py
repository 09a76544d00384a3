"""The command line of the calibration: calibrate a model, or check its gates on passkeys."""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sglang_kv.calibration.attention import shape
from sglang_kv.calibration.passkey import Passkey, samples
from sglang_kv.calibration.simulate import answers
from sglang_kv.calibration.training_free import calibrate
from sglang_kv.compression.base import PolicyError
from sglang_kv.compression.gates import (
    HeadGates,
    load_gates,
    model_hash,
    retrieval_heads,
    save_gates,
)

#: Seed of the check's samples is this far from the calibration's.
CHECK_SEED = 1_000_000
TEXT = Path(__file__).parents[2] / "scripts/demo/red_headed_league.txt"


def main(argv: list[str] | None = None) -> None:
    parser = build_parser()
    args = parser.parse_args(argv)
    if not args.text.is_file():
        parser.error(f"--text: {args.text}: no such file")
    if args.samples < 1:
        parser.error("--samples: must be at least 1")
    torch.set_num_threads(args.threads)
    model, tokenizer = load_model(args.model)
    text = args.text.read_text(encoding="utf-8")
    try:
        if args.check is not None:
            print(check(model, tokenizer, text, args))
            return
        gates = run(model, tokenizer, text, args)
    except (PolicyError, ValueError, NotImplementedError) as error:
        sys.exit(f"calibration: {error}")
    save_gates(args.out, gates, parameters=parameters(args), pattern=args.pattern)
    print(args.out)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Find a model's retrieval heads without training: on passkey samples, the "
        "attention that the number in the text receives while the answer is written."
    )
    parser.add_argument("model", type=Path, help="folder of a transformers causal LM")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--out", type=Path, help="the gates file (JSON) to write")
    what.add_argument("--check", type=Path, metavar="GATES", help="judge a gates file instead")
    parser.add_argument("--pattern", action="store_true", help="also write MIT's TSV and config")
    parser.add_argument("--text", type=Path, default=TEXT, help="a text file to hide needles in")
    parser.add_argument("--samples", type=int, default=48)
    parser.add_argument(
        "--lengths",
        type=int,
        nargs=2,
        default=(512, 2048),
        metavar=("LEAST", "MOST"),
        help="tokens of a sample (default: 512 2048)",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sinks", type=int, default=64, help="of streaming heads")
    parser.add_argument("--recent", type=int, default=256, help="of streaming heads")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--sparsity",
        type=float,
        nargs="+",
        default=(0.25, 0.5, 0.75),
        help="shares of streaming heads that --check tries",
    )
    return parser


def load_model(folder: Path) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(folder)


def parameters(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "samples": args.samples,
        "lengths": list(args.lengths),
        "seed": args.seed,
        "text": args.text.name,
        "rows": "predicting",
        "columns": "value",
        "group": "max",
    }


def run(model: Any, tokenizer: Any, text: str, args: argparse.Namespace) -> HeadGates:
    endless = samples(
        tokenizer,
        text,
        seed=args.seed,
        lengths=tuple(args.lengths),
        sinks=args.sinks,
        recent=args.recent,
    )
    values = calibrate(
        model, itertools.islice(endless, args.samples), progress=Progress(args.samples)
    )
    return HeadGates(
        values,
        model=args.model.resolve().name,
        method="training-free",
        source=str(args.out),
        sinks=args.sinks,
        recent=args.recent,
        model_hash=model_hash(args.model),
    )


def check(model: Any, tokenizer: Any, text: str, args: argparse.Namespace) -> str:
    """A table: passkeys found under the gates, random ones and inverted ones.

    Counted are passkeys that the model finds with its whole cache.
    """
    gates = load_gates(args.check).values
    layers, _, kv_heads = shape(model.config)
    if gates.shape != (layers, kv_heads):
        raise PolicyError(
            f"--kv-gates: {args.check}: gates of shape {gates.shape}, this model has {layers} "
            f"layers of {kv_heads} KV heads"
        )
    rng = np.random.default_rng(args.seed)
    full = np.ones_like(gates, np.bool_)

    def hit(sample: Passkey, heads: np.ndarray[Any, np.dtype[np.bool_]]) -> bool:
        return answers(model, sample, heads, sinks=args.sinks, recent=args.recent)[0]

    arms: dict[str, Callable[[], Any]] = {
        "gates": lambda: gates,
        "random": lambda: rng.random(gates.shape, np.float32),
        "inverted": lambda: 1 - gates,
    }
    hits = {(name, share): 0 for name in arms for share in args.sparsity}
    progress = Progress(args.samples)
    done = 0
    for sample in found(tokenizer, text, args, lambda sample: hit(sample, full)):
        for name, share in hits:
            hits[name, share] += hit(sample, retrieval_heads(arms[name](), sparsity=share))
        done += 1
        progress(done)
    lines = ["streaming heads  " + "".join(f"{share:>8.0%}" for share in args.sparsity)]
    for name in arms:
        lines.append(f"{name:17}" + "".join(f"{hits[name, share]:>8}" for share in args.sparsity))
    return "\n".join([*lines, f"of {done} passkeys that the whole cache finds"])


def found(
    tokenizer: Any, text: str, args: argparse.Namespace, hit: Callable[[Passkey], bool]
) -> Iterator[Passkey]:
    """As many samples as asked for that the whole cache answers rightly."""
    endless = samples(
        tokenizer,
        text,
        seed=args.seed + CHECK_SEED,
        lengths=tuple(args.lengths),
        sinks=args.sinks,
        recent=args.recent,
    )
    tried = itertools.islice(endless, 10 * args.samples)
    yield from itertools.islice(filter(hit, tried), args.samples)


class Progress:
    """One line with the time left, on stderr."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.started = time.monotonic()

    def __call__(self, done: int) -> None:
        left = (time.monotonic() - self.started) / done * (self.total - done)
        end = "\n" if done == self.total else "\r"
        print(f"{done}/{self.total} samples, {left:4.0f} s left ", end=end, file=sys.stderr)
        sys.stderr.flush()
