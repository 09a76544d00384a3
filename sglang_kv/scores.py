"""Attention that each token has received, for the requests whose policy chooses by it."""

from __future__ import annotations

import torch
from torch import Tensor


class ScoreTable:
    """``values[slot, layer, kv_head, i]``: fp32, of the token at index ``i`` of a stream.

    A slot is held while a request's queries are scored, so the table is small; it grows by
    doubling. What lies beyond a stream's length is zero.
    """

    def __init__(
        self, num_layers: int, num_kv_heads: int, device: torch.device | str = "cpu"
    ) -> None:
        self.values: Tensor = torch.zeros((0, num_layers, num_kv_heads, 64), device=device)
        self._free: list[int] = []

    def take(self) -> int:
        """A slot of zeros."""
        if not self._free:
            slots = len(self.values)
            more = self.values.new_zeros((max(1, slots), *self.values.shape[1:]))
            self.values = torch.cat([self.values, more])
            self._free = list(range(len(self.values) - 1, slots - 1, -1))
        slot = self._free.pop()
        self.values[slot].zero_()
        return slot

    def give(self, slot: int) -> None:
        self._free.append(slot)
        if len(self._free) == len(self.values):
            self.clear()  # one very long prompt must not leave every later slot as wide

    def clear(self) -> None:
        self.values = self.values.new_zeros((0, *self.values.shape[1:3], 64))
        self._free = []

    def fit(self, tokens: int) -> None:
        """Make room for streams of ``tokens`` tokens."""
        width = self.values.shape[-1]
        if tokens <= width:
            return
        while width < tokens:
            width *= 2
        wide = self.values.new_zeros((*self.values.shape[:-1], width))
        wide[..., : self.values.shape[-1]] = self.values
        self.values = wide
