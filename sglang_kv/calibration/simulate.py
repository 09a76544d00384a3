"""Judge gates without the engine: does the model still find a passkey when heads stream?

Two ways to stream. *Windowed prefill* is the engine's: streaming heads see sinks and recent tokens
in the whole text. *Dense prefill* is that of DuoAttention's reference code (its first chunk) and of
kvpress: all heads see everything up to the question, then streaming heads are cut, for the question
and the answer. It costs one pass over a text for all that is asked about it, under any heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from sglang_kv.calibration.attention import attention, duo, full
from sglang_kv.calibration.passkey import Passkey
from sglang_kv.calibration.prefill import WINDOWED
from sglang_kv.calibration.prefix import Prefix

Heads = np.ndarray[Any, np.dtype[np.bool_]]
#: Retrieval heads [layers, kv_heads], and the sinks and recent tokens of the others.
Try = tuple[Heads, int, int]


class Answers:
    """Asks for passkeys under retrieval heads, by either prefill.

    Args:
        model: a causal LM of transformers, in eval mode.
        prefill: `prefill.DENSE`, which holds the keys and values of the last text, or
            `prefill.WINDOWED`.
    """

    def __init__(self, model: Any, prefill: str) -> None:
        self.model, self.prefill = model, prefill
        self._text: tuple[int, ...] = ()
        self._prefix = Prefix(0)

    def __call__(self, sample: Passkey, tries: Sequence[Try]) -> list[tuple[bool, float]]:
        """As `answers`, for each of the tries."""
        if self.prefill == WINDOWED:
            return [
                answers(self.model, sample, heads, sinks=sinks, recent=recent)
                for heads, sinks, recent in tries
            ]
        text = sample.ids[: sample.question.start]
        if self._text != text:
            self._text, self._prefix = text, Prefix(len(text))
            ids = torch.tensor([text], device=self.model.device)
            with torch.inference_mode(), attention(self.model, self._prefix.keeping(full)):
                self.model.base_model(ids, use_cache=False)
        cut = [self._prefix.before(duo(*one)) for one in tries]
        with attention(self.model, cut):
            return _judge(self.model, sample, self._prefix, len(cut))


def answers(
    model: Any, sample: Passkey, retrieval: Heads, *, sinks: int = 64, recent: int = 256
) -> tuple[bool, float]:
    """Whether greedy decoding writes the number, and the mean log-likelihood of its tokens.

    Windowed prefill. The answer is given up to its number. All tokens are computed in one pass:
    the answer is right iff each of its tokens is the likeliest after those before it.
    """
    with attention(model, duo(retrieval, sinks, recent)):
        return _judge(model, sample, Prefix(0))[0]


@torch.inference_mode()
def _judge(model: Any, sample: Passkey, prefix: Prefix, times: int = 1) -> list[tuple[bool, float]]:
    rest = prefix.rest(sample.ids, model.device, times)
    logits = model(**rest, logits_to_keep=len(sample.answer) + 1).logits[:, :-1].float()
    wanted = rest["input_ids"][:, -len(sample.answer) :]
    right = (logits.argmax(-1) == wanted).all(-1)
    likelihood = logits.log_softmax(-1).gather(-1, wanted[..., None]).mean((1, 2))
    return list(zip(right.tolist(), likelihood.tolist(), strict=True))
