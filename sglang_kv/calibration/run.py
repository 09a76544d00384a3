"""One calibration from a model's folder to a gates file, by either method."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sglang_kv.calibration import mean_attention, training_free
from sglang_kv.calibration.attention import require_supported
from sglang_kv.calibration.multi_passkey import multi_samples
from sglang_kv.calibration.passkey import samples
from sglang_kv.calibration.prefix import require_positions
from sglang_kv.calibration.progress import Progress, Unfinished
from sglang_kv.calibration.trained import Trainer, Training, train
from sglang_kv.compression.gates import HeadGates, model_hash, save_gates
from sglang_kv.kernels.linear import library_has_bf16


def calibrate(args: argparse.Namespace) -> HeadGates:
    """Calibrate and write ``args.out``; arguments as `command.add_calibrate` defines them."""
    torch.set_num_threads(args.threads)
    text = args.text.read_text(encoding="utf-8")
    parameters = parameters_of(args, text)
    digest = model_hash(args.model)
    window = {"sinks": args.sinks, "recent": args.recent}
    run = {"method": args.method, "model_hash": digest, **window, **parameters}
    unfinished = Unfinished(args.out, run)
    if args.restart:
        unfinished.remove()
    state = unfinished.load()
    model, tokenizer = load_model(args.model, args.device, args.dtype)
    require_supported(model)
    if args.method == "trained":
        require_positions(model)
    find = by_training if args.method == "trained" else without_training
    values = find(args, model, tokenizer, text, unfinished, state)
    gates = HeadGates(
        values,
        model=args.model_id or args.model.resolve().name,
        method=args.method,
        source=str(args.out),
        model_hash=digest,
        **window,
    )
    save_gates(args.out, gates, parameters=parameters, pattern=args.pattern)
    unfinished.remove()
    return gates


def parameters_of(args: argparse.Namespace, text: str) -> dict[str, Any]:
    """What the gates depend on beside the model and the window, for the file's reader."""
    common = {
        "samples": args.samples,
        "lengths": list(args.lengths),
        "seed": args.seed,
        "text": args.text.name,
        "text_hash": "sha256:" + hashlib.sha256(text.encode()).hexdigest(),
        "dtype": args.dtype,
        "device": args.device,
    }
    if args.method == "trained":
        training = dataclasses.asdict(training_of(args))
        own = ("steps", "learning_rate", "l1", "checkpoint")
        return common | {"passkeys": args.passkeys} | {key: training[key] for key in own}
    if args.method == "training-free":
        return common | {"rows": "predicting", "columns": "value", "group": "max"}
    return common | {"positions": mean_attention.POSITIONS, "group": "mean"}


def training_of(args: argparse.Namespace) -> Training:
    return Training(
        steps=args.steps,
        learning_rate=args.learning_rate,
        l1=args.l1,
        sinks=args.sinks,
        recent=args.recent,
        checkpoint=args.checkpoint,
    )


def by_training(
    args: argparse.Namespace,
    model: Any,
    tokenizer: Any,
    text: str,
    unfinished: Unfinished,
    state: dict[str, Any] | None,
) -> np.ndarray[Any, np.dtype[np.float32]]:
    endless = multi_samples(
        tokenizer,
        text,
        seed=args.seed,
        lengths=args.lengths,
        passkeys=args.passkeys,
        sinks=args.sinks,
        recent=args.recent,
    )
    chosen = list(itertools.islice(endless, args.samples))
    trainer = Trainer(model, chosen, training_of(args))
    if state is not None:
        trainer.restore(state)
    progress = Progress(args.steps, trainer.done, "steps")

    def after_step(trainer: Trainer, distance: float, mean: float) -> None:
        unfinished.save(trainer.state())
        progress(trainer.done, f", distance {distance:.4f}, mean gate {mean:.3f}")

    return train(trainer, after_step)


def without_training(
    args: argparse.Namespace,
    model: Any,
    tokenizer: Any,
    text: str,
    unfinished: Unfinished,
    state: dict[str, Any] | None,
) -> np.ndarray[Any, np.dtype[np.float32]]:
    endless = samples(
        tokenizer,
        text,
        seed=args.seed,
        lengths=args.lengths,
        sinks=args.sinks,
        recent=args.recent,
    )
    sums = None
    if state is not None:
        sums = training_free.Sums(state["total"].numpy(), state["done"])
    done = sums.done if sums is not None else 0
    progress = Progress(args.samples, done)

    def after_sample(sums: training_free.Sums) -> None:
        unfinished.save({"total": torch.from_numpy(sums.total), "done": sums.done})
        progress(sums.done)

    method = training_free if args.method == "training-free" else mean_attention
    left = itertools.islice(endless, done, args.samples)
    return method.calibrate(model, left, sums=sums, after_sample=after_sample)


def dtype_of(args: argparse.Namespace) -> str:
    """The ``--dtype`` that is meant: bf16, but fp32 on CPUs on which bf16 products are slow."""
    if args.dtype != "auto":
        return str(args.dtype)
    return "bfloat16" if args.device == "cuda" or library_has_bf16() else "float32"


def load_model(folder: Path, device: str, dtype: str) -> tuple[Any, Any]:
    """A causal LM in eval mode, and its tokenizer.

    Raises:
        ValueError: there is no such device.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device: cuda: torch finds no GPU here")
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    return model.to(device).eval(), AutoTokenizer.from_pretrained(folder)
