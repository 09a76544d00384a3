"""What ``calibrate`` and ``calibrate-report`` refuse before anything long begins.

Every message names the argument. Standard library only: torch alone takes seconds to import.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from pathlib import Path

from sglang_kv.calibration.passkey import WORDS

#: With fewer words a text is repeated again and again, which is not what models read.
FEW_WORDS = 500
#: What torch and numpy take as a seed.
SEEDS = 1 << 63


class Refused(ValueError):
    """The message names the argument and what is wrong with it."""


def check_model(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        raise Refused(f"MODEL: {folder} is no folder of a model; download it first")
    if not any(path for kind in ("safetensors", "bin") for path in folder.glob(f"*.{kind}")):
        raise Refused(f"MODEL: {folder} holds no weights (*.safetensors or *.bin)")


def check_text(path: Path, default: Path) -> None:
    """Warns where a text is so short that it will be repeated."""
    if path.is_dir():
        raise Refused(f"--text: {path} is a folder")
    if not path.is_file():
        more = "; name any text of a few thousand words" if path == default else ""
        raise Refused(f"--text: {path}: no such file{more}")
    try:
        words = len(path.read_text(encoding="utf-8").split())
    except (UnicodeDecodeError, OSError) as error:
        raise Refused(f"--text: {path}: {error}") from None
    if not words:
        raise Refused(f"--text: {path} is empty")
    if words < FEW_WORDS:
        print(
            f"--text: {path} has {words} words and will be repeated; a few thousand are better",
            file=sys.stderr,
        )


def check_lengths(args: argparse.Namespace, sinks: int, recent: int) -> None:
    """Passkeys lie beyond a streaming head's window, and texts within the model's positions."""
    if min(args.lengths) <= sinks + recent:
        raise Refused(
            f"--lengths: {min(args.lengths)} tokens leave no place for a passkey beyond {sinks} "
            f"sinks and {recent} recent tokens"
        )
    config = json.loads((args.model / "config.json").read_text(encoding="utf-8"))
    most = config.get("max_position_embeddings")
    if most and max(args.lengths) > most:
        raise Refused(
            f"--lengths: {max(args.lengths)} tokens are more than this model's {most} positions"
        )
    if args.passkeys > len(WORDS):
        raise Refused(f"--passkeys: from 1 to {len(WORDS)}, got {args.passkeys}")


def check_folder(option: str, folder: Path) -> None:
    """That files can be written into it; it is made if need be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise Refused(f"{option}: cannot write into {folder}: {error.strerror}") from None


def check_file(option: str, path: Path) -> None:
    if path.is_dir():
        raise Refused(f"{option}: {path} is a folder")
    check_folder(option, path.parent)


# Types of arguments; argparse shows their names.


def count(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return number


def seed(text: str) -> int:
    if not 0 <= (number := int(text)) < SEEDS:
        raise argparse.ArgumentTypeError(f"must be in [0, 2^63), got {text}")
    return number


def share(text: str) -> float:
    if not 0 <= (number := float(text)) <= 1:
        raise argparse.ArgumentTypeError(f"must be in [0, 1], got {text}")
    return number


def amount(text: str) -> float:
    """A finite number that is not negative."""
    if not 0 <= (number := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of at least 0, got {text}")
    return number


def rate(text: str) -> float:
    if not (number := amount(text)):
        raise argparse.ArgumentTypeError("must be above 0")
    return number


def name(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError("must not be empty")
    return text


def window(text: str) -> tuple[int, int]:
    """``SINKS+RECENT``, as two counts."""
    sinks, plus, recent = text.partition("+")
    if not plus or int(sinks) < 0:
        raise argparse.ArgumentTypeError(f"expected SINKS+RECENT, as in 64+256, got {text}")
    return int(sinks), count(recent)
