"""Gates by training, DuoAttention's way: the model learns which heads may forget.

Xiao et al., "DuoAttention", ICLR 2025 (https://arxiv.org/abs/2410.10819), section 2.3. Each
(layer, KV head) has one gate in [0, 1] that mixes its full and its streaming attention; gates
are all that is trained. The loss is how far the final hidden states are from the full model's,
where passkeys are answered, plus an L1 term that drives gates to 0.

Differs from the reference code: the distance is divided by the full model's own square, so that
``l1`` means the same for every model; only states that predict an answer's number count (the
code counts the whole answer, the paper the passkeys); gates are clamped after each step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sglang_kv.calibration.attention import attention, full, intact, mixed, shape
from sglang_kv.calibration.multi_passkey import MultiPasskey
from sglang_kv.calibration.prefix import Prefix

Array = np.ndarray[Any, np.dtype[np.float32]]

#: Share of the steps over which the learning rate rises, and over which it falls at the end.
RAMP = 0.2
#: Learning rate at either end, as a share of the highest.
LEAST_RATE = 0.1


@dataclass(frozen=True)
class Training:
    """What a run of `Trainer` is made of.

    Args:
        steps: gradient steps, one sample each.
        learning_rate: the highest.
        l1: lambda, the price of a mean gate of 1.
        sinks: first tokens that streaming heads see.
        recent: newest tokens that streaming heads see.
        checkpoint: keep only the layers' inputs for the backward pass and compute the rest
            again: memory for one layer's activations instead of all, and more time.
    """

    steps: int = 40
    learning_rate: float = 0.05
    l1: float = 0.05
    sinks: int = 64
    recent: int = 256
    checkpoint: bool = True

    def rate(self, step: int) -> float:
        """The learning rate of a step: up over the first fifth, down over the last."""
        ramp = max(1, round(RAMP * self.steps))
        share = min(1.0, step / ramp, (self.steps - 1 - step) / ramp)
        return self.learning_rate * (LEAST_RATE + (1 - LEAST_RATE) * share)


class Trainer:
    """Gates under training, one `step` at a time.

    Args:
        model: a causal LM of transformers; its weights are frozen for good.
        samples: taken in turn, again and again; the full model runs once over each, and leaves
            what no gate can change: the keys and values of the tokens that a streaming head
            treats as a full one does.
        training: how.
    """

    def __init__(self, model: Any, samples: Sequence[MultiPasskey], training: Training) -> None:
        self.model, self.samples, self.training = model.requires_grad_(False), samples, training
        layers, _, kv_heads = shape(model.config)
        self.gates = torch.ones(layers, kv_heads, device=model.device, requires_grad=True)
        self.optimizer = torch.optim.AdamW([self.gates], lr=0.0, weight_decay=0.0)
        self.done = 0
        self._targets: dict[int, tuple[torch.Tensor, Prefix]] = {}

    @property
    def values(self) -> Array:
        """The gates, fp32 [layers, kv_heads]."""
        return np.asarray(self.gates.detach().cpu().numpy(), np.float32).copy()

    def step(self) -> tuple[float, float]:
        """One gradient step; returns the distance and the mean gate that it was taken at."""
        index = self.done % len(self.samples)
        for group in self.optimizer.param_groups:
            group["lr"] = self.training.rate(self.done)
        self.optimizer.zero_grad()
        distance = self.backward(self.samples[index], *self._target(index))
        mean = self.gates.mean()
        (self.training.l1 * mean).backward()
        self.optimizer.step()
        with torch.no_grad():
            self.gates.clamp_(0, 1)
        self.done += 1
        return distance, float(mean.detach())

    def backward(self, sample: MultiPasskey, target: torch.Tensor, prefix: Prefix) -> float:
        """Add the distance's gradient to the gates; returns the distance."""
        mix = prefix.before(mixed(self.gates, self.training.sinks, self.training.recent))
        # The backward pass runs attention again, so the patch has to last until its end.
        with attention(self.model, mix), checkpointing(self.model, self.training.checkpoint):
            states = self._states(sample, prefix)
            distance = (states - target).square().sum() / target.square().sum()
            if distance.requires_grad:  # else the sample is shorter than the window
                distance.backward()
        return float(distance.detach())

    def state(self) -> dict[str, Any]:
        """Everything that `restore` needs to go on to the same result."""
        return {
            "done": self.done,
            "gates": self.gates.detach().cpu(),
            "optimizer": self.optimizer.state_dict(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.done = state["done"]
        with torch.no_grad():
            self.gates.copy_(state["gates"])
        self.optimizer.load_state_dict(state["optimizer"])

    def _target(self, index: int) -> tuple[torch.Tensor, Prefix]:
        """The full model's states of a sample and its prefix, computed at its first turn."""
        if index not in self._targets:
            sample = self.samples[index]
            same = intact(self.training.sinks, self.training.recent)
            # One token at least is left to run.
            prefix = Prefix(min(same, sample.predicting[0]))
            with torch.no_grad(), attention(self.model, prefix.keeping(full)):
                self._targets[index] = self._states(sample, Prefix(0)), prefix
        return self._targets[index]

    def _states(self, sample: MultiPasskey, prefix: Prefix) -> torch.Tensor:
        """Final hidden states that predict the numbers, fp32 [predicting, hidden]."""
        rest = prefix.rest(sample.ids, self.model.device)
        hidden = self.model.base_model(**rest).last_hidden_state
        return hidden[0, [at - prefix.tokens for at in sample.predicting]].float()


def train(
    trainer: Trainer, after_step: Callable[[Trainer, float, float], None] = lambda *_: None
) -> Array:
    """Take the steps that are left; ``after_step`` gets the distance and the mean gate."""
    while trainer.done < trainer.training.steps:
        after_step(trainer, *trainer.step())
    return trainer.values


@contextmanager
def checkpointing(model: Any, active: bool) -> Iterator[None]:
    """Recompute each layer in the backward pass. transformers does so in train mode only, which
    is why dropout is switched off by hand."""
    if not active:
        yield
        return
    training = model.training
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.eval()
    try:
        yield
    finally:
        model.train(training)
        model.gradient_checkpointing_disable()
