"""A text's beginning, computed once: its keys and values, behind which the rest is run again.

The keys and values of a prefix depend on nothing after it, so what is tried on the rest of a text
(other heads, other gates) does not need the prefix anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sglang_kv.calibration.attention import Attend, UnsupportedModelError, attention, full

#: How far the same states may be apart, as a share of their size: bf16 in deep models.
CLOSE = 0.1


class Prefix:
    """Keys and values of a text's first ``tokens`` tokens, after the rotary embedding."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self._held: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def keeping(self, attend: Attend) -> Attend:
        """``attend``, for a pass over the whole text that fills the prefix."""

        def attend_and_keep(
            layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float
        ) -> torch.Tensor:
            first, second = (part[:, : self.tokens].clone() for part in (k, v))
            self._held[layer] = first, second
            return attend(layer, q, k, v, scaling)

        return attend_and_keep

    def before(self, attend: Attend) -> Attend:
        """``attend``, for a pass over the rest alone: it gets fewer queries than keys."""

        def attend_behind(
            layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float
        ) -> torch.Tensor:
            first, second = self._held[layer]
            return attend(layer, q, torch.cat([first, k], 1), torch.cat([second, v], 1), scaling)

        return attend_behind

    def rest(self, ids: Sequence[int], device: Any, times: int = 1) -> dict[str, Any]:
        """What a model is called with for the tokens after the prefix, ``times`` rows of them."""
        rows = torch.tensor([ids[self.tokens :]] * times, device=device)
        call: dict[str, Any] = {"input_ids": rows, "use_cache": False}
        if self.tokens:
            call["position_ids"] = torch.arange(self.tokens, len(ids), device=device)[None]
        return call


def require_positions(model: Any) -> None:
    """Refuse a model that does not place tokens where ``position_ids`` says.

    Raises:
        UnsupportedModelError: the message names the model.
    """
    ids = [i % model.config.get_text_config().vocab_size for i in range(1, 66)]
    prefix = Prefix(len(ids) - 1)
    try:
        with torch.inference_mode():
            with attention(model, prefix.keeping(full)):
                whole = model.base_model(**Prefix(0).rest(ids, model.device)).last_hidden_state
            with attention(model, prefix.before(full)):
                rest = model.base_model(**prefix.rest(ids, model.device)).last_hidden_state
    except TypeError as error:
        raise UnsupportedModelError(f"{model.config.model_type}: {error}") from None
    wanted, found = whole[0, -1].float(), rest[0, -1].float()
    if not (found - wanted).norm() <= CLOSE * wanted.norm():
        raise UnsupportedModelError(
            f"{model.config.model_type}: calibration needs a model that takes position_ids"
        )
