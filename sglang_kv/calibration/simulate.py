"""Judge gates without the engine: does the model still find a passkey when heads stream?"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from sglang_kv.calibration.attention import attention, duo
from sglang_kv.calibration.passkey import Passkey


def answers(
    model: Any,
    sample: Passkey,
    retrieval: np.ndarray[Any, np.dtype[np.bool_]],
    *,
    sinks: int = 64,
    recent: int = 256,
) -> tuple[bool, float]:
    """Whether greedy decoding writes the number, and the mean log-likelihood of its tokens.

    The answer is given up to its number. All tokens are computed in one pass: the answer is
    right iff each of its tokens is the likeliest after those before it.
    """
    ids = torch.tensor([sample.ids], device=model.device)
    with torch.inference_mode(), attention(model, duo(retrieval, sinks, recent)):
        logits = model(ids, use_cache=False, logits_to_keep=len(sample.answer) + 1).logits
    logits = logits[0, :-1].float()
    wanted = ids[0, sample.answer.start : sample.answer.stop]
    likelihood = logits.log_softmax(-1).gather(-1, wanted[:, None])
    return bool((logits.argmax(-1) == wanted).all()), float(likelihood.mean())
