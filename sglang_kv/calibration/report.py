"""The report on a model's gates: what is measured, and its figures as plain data."""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from sglang_kv.calibration.agreement import overlap, rank_correlation, retrieval_shares
from sglang_kv.calibration.needles import (
    FULL,
    INVERTED,
    RANDOM,
    Arm,
    Trial,
    Trials,
    digest_of,
    run,
    texts_of,
)
from sglang_kv.calibration.page import page
from sglang_kv.calibration.prefill import DENSE, WINDOWED, compare
from sglang_kv.calibration.progress import Progress
from sglang_kv.compression.base import PolicyError
from sglang_kv.compression.duoattention import DuoAttention
from sglang_kv.compression.gates import HeadGates, load_gates, model_hash, require_match
from sglang_kv.compression.plan import Geometry, Plan

THRESHOLDS = (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9)
#: A sparsity is recommended if it keeps this share of the full cache's passkeys at every length.
GOOD = 0.98
#: The server's default, in tokens.
PAGE_SIZE = 16


def report(args: argparse.Namespace) -> Path:
    """Measure, and write report.md, report.json and the plots; returns the page's path.

    Arguments as `command.add_report` defines them.
    """
    if args.plots:
        from sglang_kv.calibration import plots

        plots.require_matplotlib()
    digest = model_hash(args.model)
    gates = load_all(args.gates, args.model, digest)
    trials = measure(args, gates, digest)
    other = trials_of(args, digest, DENSE if args.prefill == WINDOWED else WINDOWED)
    data = figures(args, gates, trials) | {
        "model": args.model.resolve().name,
        "hash": digest,
        "prefill": compare(trials, other),
    }
    args.out.mkdir(parents=True, exist_ok=True)
    names = plots.draw(data, args.out) if args.plots else []
    text = json.dumps(data, indent=1)
    (args.out / "report.json").write_text(text + "\n", encoding="utf-8")
    path: Path = args.out / "report.md"
    path.write_text(page(data, names), encoding="utf-8")
    return path


def load_all(paths: Iterable[Path], model: Path, digest: str) -> dict[str, HeadGates]:
    """Gates of one model by their files' names, each checked against it."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    gates: dict[str, HeadGates] = {}
    for path in paths:
        name = path.stem if path.is_file() else path.name
        if name in gates or name in (FULL, RANDOM, INVERTED):
            raise PolicyError(f"GATES: {path}: another name than {name!r}, please: it is taken")
        gates[name] = load_gates(path)
        require_match(gates[name], config["num_hidden_layers"], heads, digest)
    return gates


def arms_of(args: argparse.Namespace, gates: dict[str, HeadGates]) -> dict[str, list[Arm]]:
    """What is tried: the first gates, random and inverted ones at each sparsity, the windows, and
    the other gates. Each list belongs to one table."""
    digests = {name: digest_of(held.values) for name, held in gates.items()}
    main, *others = gates
    digests |= {RANDOM: "", INVERTED: digests[main]}

    def arm(name: str, share: float, window: tuple[int, int] = args.windows[-1]) -> Arm:
        return Arm(name, share, *window, digests[name])

    controls = args.sparsity if args.control_sparsity is None else args.control_sparsity
    return {
        "main": [
            *(arm(main, share) for share in args.sparsity),
            *(arm(name, share) for name in (RANDOM, INVERTED) for share in controls),
        ],
        "windows": [arm(main, args.window_sparsity, window) for window in args.windows],
        "others": [arm(name, share) for name in others for share in args.sparsity],
    }


def trials_of(args: argparse.Namespace, digest: str, prefill: str) -> Trials:
    """What was tried before, by either prefill."""
    about = {
        "model_hash": digest,
        "text": args.text.name,
        "text_hash": "sha256:" + hashlib.sha256(args.text.read_bytes()).hexdigest(),
        "beyond": [max(window[i] for window in args.windows) for i in (0, 1)],
        "dtype": args.dtype,
        "passkeys": args.passkeys,
        "prefill": prefill,
    }
    return Trials(args.out / "needles.jsonl", about)


def measure(args: argparse.Namespace, gates: dict[str, HeadGates], digest: str) -> Trials:
    trials = trials_of(args, digest, args.prefill)
    if args.minutes == 0:
        return trials
    import torch

    from sglang_kv.calibration.attention import require_supported
    from sglang_kv.calibration.prefix import require_positions
    from sglang_kv.calibration.run import load_model
    from sglang_kv.calibration.simulate import Answers

    torch.set_num_threads(args.threads)
    model, tokenizer = load_model(args.model, args.device, args.dtype)
    require_supported(model)
    if args.prefill == DENSE:
        require_positions(model)
    arms = list(dict.fromkeys(itertools.chain(*arms_of(args, gates).values())))
    before = sum(trial.arm in arms for trial in trials.rows.values())
    values = {name: held.values for name, held in gates.items()}
    grid = len(arms) * len(args.lengths) * len(args.seeds) * args.samples
    run(
        trials,
        arms,
        Answers(model, args.prefill),
        texts_of(tokenizer, args.text.read_text(encoding="utf-8"), args.windows, args.passkeys),
        lambda arm, seed: arm.heads(values, next(iter(values)), seed),
        lengths=args.lengths,
        seeds=args.seeds,
        count=args.samples,
        deadline=time.monotonic() + 60 * (math.inf if args.minutes is None else args.minutes),
        progress=Progress(grid, before, "passkeys"),
    )
    return trials


def figures(
    args: argparse.Namespace, gates: dict[str, HeadGates], trials: Trials
) -> dict[str, Any]:
    """All that the page and the plots show."""
    names = list(gates)
    main = gates[names[0]]
    arms = arms_of(args, gates)
    order = [*names, RANDOM, INVERTED]
    compared = sorted([*arms["main"], *arms["others"]], key=lambda arm: order.index(arm.name))
    needles = [row_of(arm, trials, args, main) for arm in compared]
    full = row_of(Arm(FULL, 0.0, 0, 1), trials, args, main)
    windows = [row_of(arm, trials, args, main) for arm in arms["windows"]]
    return {
        "gates": [
            {
                "name": name,
                "method": held.method,
                "sinks": held.sinks,
                "recent": held.recent,
                "values": held.values.round(5).tolist(),
                "shares": retrieval_shares(held.values, THRESHOLDS),
            }
            for name, held in gates.items()
        ],
        "agreement": [
            {
                "first": a,
                "second": b,
                "rank_correlation": finite(rank_correlation(gates[a].values, gates[b].values)),
                "overlap": {
                    share: finite(overlap(gates[a].values, gates[b].values, share))
                    for share in args.sparsity
                },
            }
            for a, b in itertools.combinations(names, 2)
        ],
        "full": full,
        "needles": needles,
        "windows": windows,
        "recommended": recommended(row for row in needles if row["name"] == names[0]),
        "window": smallest_window(windows),
        "settings": {
            "lengths": list(args.lengths),
            "seeds": list(args.seeds),
            "samples": args.samples,
            "passkeys": args.passkeys,
            "text": args.text.name,
            "dtype": args.dtype,
            "prefill": args.prefill,
        },
    }


def row_of(arm: Arm, trials: Trials, args: argparse.Namespace, gates: HeadGates) -> dict[str, Any]:
    """One line of a needle table: passkeys found, and the memory that the arm takes."""
    of_arm = [
        trial
        for trial in trials.of(arm)
        if trial.length in args.lengths and trial.seed in args.seeds
    ]
    return {
        "name": arm.name,
        "sparsity": arm.sparsity,
        "sinks": arm.sinks,
        "recent": arm.recent,
        "memory": {length: memory(arm, gates, length) for length in args.lengths},
        "by_length": {
            length: counts(trial for trial in of_arm if trial.length == length)
            for length in args.lengths
        },
        "by_seed": {
            seed: counts(trial for trial in of_arm if trial.seed == seed) for seed in args.seeds
        },
        "likelihood": (
            round(float(np.mean([trial.likelihood for trial in of_arm])), 3) if of_arm else None
        ),
    }


def counts(trials: Iterable[Trial]) -> list[int]:
    """Found, tried."""
    held = list(trials)
    return [sum(trial.found for trial in held), len(held)]


def finite(value: float) -> float | None:
    """JSON has no NaN."""
    return None if math.isnan(value) else round(value, 4)


def memory(arm: Arm, gates: HeadGates, length: int) -> float:
    """Share of the full cache's pages that a server holds for a prompt of ``length`` tokens."""
    layers, heads = gates.values.shape
    geometry = Geometry(layers, heads, PAGE_SIZE, gates)
    policy = DuoAttention(sinks=arm.sinks, recent=arm.recent, sparsity=arm.sparsity)
    held = policy.plan(length, geometry).pages(length)
    return round(held / Plan(geometry).pages(length), 4)


def is_good(row: dict[str, Any]) -> bool:
    """Whether a row keeps what the full cache finds, at every length that was tried."""
    tried = list(row["by_length"].values())
    return all(n and found >= GOOD * n for found, n in tried)


def recommended(rows: Iterable[dict[str, Any]]) -> float | None:
    """The highest sparsity that is good, as all lower ones are."""
    ordered = sorted(rows, key=lambda row: float(row["sparsity"]))
    good = list(itertools.takewhile(is_good, ordered))
    return float(good[-1]["sparsity"]) if good else None


def smallest_window(rows: list[dict[str, Any]]) -> list[int] | None:
    """The first of the windows, smallest first, that is good; None: none is."""
    ordered = sorted(rows, key=lambda row: int(row["sinks"] + row["recent"]))
    return next(([row["sinks"], row["recent"]] for row in ordered if is_good(row)), None)
