"""Rotary embeddings taken back: queries and keys of a layer, turned by whole positions.

RoPE is a rotation by an angle per position, so what stands at position t becomes what it would be
at t - d by turning it back by d. That holds for every kind whose angles are fixed numbers per
dimension (llama3, linear and yarn scaling among them), and fails for those that depend on a
prompt's length or on more than one axis.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sglang_kv.compression import PolicyError
from sglang_kv.kernel_paths import Kernels, kernels_of

#: SGLang's classes whose angles are fixed; looked up by name, the exact class.
_FIXED = {
    "RotaryEmbedding",
    "LinearScalingRotaryEmbedding",
    "Llama3RotaryEmbedding",
    "YaRNScalingRotaryEmbedding",
}
#: What models call a layer without rotary embedding.
_SWITCHES = ("use_rope", "attn_use_rope")


@dataclass(frozen=True)
class TurnBack:
    """One rotary embedding, backwards.

    Args:
        cos_sin: fp32 ``[positions, rotary_dim]``, cosines and then negated sines.
        halves: the first half of the rotated dimensions goes with the second (GPT-NeoX); else
            neighbours go together (GPT-J).
    """

    cos_sin: Tensor
    halves: bool = True

    @classmethod
    def of(cls, rope: Any, positions: int, device: torch.device | str = "cpu") -> TurnBack:
        """Of SGLang's ``rope``, for distances below ``positions``, to be used on ``device``.

        Raises `PolicyError` for a kind that cannot be taken back so.
        """
        kind = type(rope).__name__
        if kind not in _FIXED:
            raise PolicyError(f"its rotary embedding ({kind}) depends on more than one position")
        # Made again: the model's own is in the model's dtype on some devices. A loaded model is
        # out of the default dtype and device that it was built under.
        table = rope._compute_cos_sin_cache().float().cpu()[:positions]  # noqa: SLF001
        if len(table) < positions:
            raise PolicyError(f"its rotary embedding ends at position {len(table)}")
        cos, sin = (table / table[0, 0]).chunk(2, dim=-1)  # without yarn's factor on magnitudes
        return cls(torch.cat((cos, -sin), dim=-1).to(device), bool(rope.is_neox_style))

    def queries(self, query: Tensor, distances: Tensor) -> Tensor:
        """Queries turned back, a new tensor: `kernels.rotate.turned_queries` of their device."""
        turned: Tensor = self._kernels.turned_queries(
            query, distances, self.cos_sin, is_neox_style=self.halves
        )
        return turned

    def keys(self, pages: Tensor, ids: Tensor, distance: int) -> None:
        """The keys of pages turned back, in place: `kernels.rotate.turn_keys` of their device."""
        self._kernels.turn_keys(pages, ids, distance, self.cos_sin, is_neox_style=self.halves)

    @property
    def _kernels(self) -> Kernels:
        return kernels_of(self.cos_sin.device.type)


def trained_length(config: Any) -> int:
    """Positions that a model's rotary embedding was trained or scaled for, by its text config.

    SGLang's figure, except for yarn: transformers always names the length that was scaled from,
    and SGLang then takes the model to end there, though its own table goes on to that times the
    factor, as the paper means it (arXiv:2309.00071, section 3.1: s = L' / L).
    """
    from sglang.srt.utils.hf_transformers_utils import get_context_length

    found = int(get_context_length(config))
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if rope.get("rope_type", rope.get("type")) != "yarn" or not rope.get("factor"):
        return found
    return max(found, int(rope["factor"] * rope.get("original_max_position_embeddings", found)))


class Rotary:
    """The rotary embedding of each attention layer; None: the layer has none.

    ``refusal`` says why a model has no such thing; then nothing else may be asked of it.
    """

    def __init__(self, layers: list[TurnBack | None], refusal: str | None = None):
        self.layers = layers
        self.refusal = refusal

    @classmethod
    def of(
        cls,
        model: nn.Module,
        layer_ids: Iterable[int],
        positions: int,
        device: torch.device | str = "cpu",
    ) -> Rotary:
        """Of a loaded model of SGLang's, for distances below ``positions``."""
        from sglang.srt.layers.radix_attention import RadixAttention

        found: dict[int, TurnBack | None] = {}
        made: dict[int, TurnBack] = {}  # layers share their embedding
        try:
            for module in model.modules():
                attention = getattr(module, "attn", None)
                if not isinstance(attention, RadixAttention) or not hasattr(module, "rotary_emb"):
                    continue
                rope = module.rotary_emb
                plain = rope is None or not all(getattr(module, s, True) for s in _SWITCHES)
                if not plain and id(rope) not in made:
                    made[id(rope)] = TurnBack.of(rope, positions, device)
                found[attention.layer_id] = None if plain else made[id(rope)]
            return cls([found[layer] for layer in layer_ids])
        except PolicyError as error:
            return cls([], str(error))
        except KeyError:
            return cls([], "its attention layers do not show their rotary embedding")

    def sink_queries(self, query: Tensor, distances: Tensor, layer: int) -> Tensor | None:
        """Queries as sinks see them, [tokens, num_heads, head_dim]; None: as everything else."""
        turn_back = self.layers[layer]
        return None if turn_back is None else turn_back.queries(query, distances)

    def turn_keys(self, pages: Tensor, ids: Tensor, distance: int) -> None:
        """Turn the keys of whole pages back, in place.

        - `pages`: the pool, [num_pages, 2, page_size, head_dim], of any dtype that it can have
        - `ids`: int64 [layers, n], the pages of each layer
        """
        for turn_back, of_layer in zip(self.layers, ids, strict=True):
            if turn_back is not None:
                turn_back.keys(pages, of_layer, distance)
