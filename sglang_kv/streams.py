"""Page lists and lengths of all running streams, laid out as the kernels read them."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from sglang_kv.kernels.layout import GAP, KV_LEN, NUM_SINKS, WINDOW_LEFT

ANYWHERE = np.iinfo(np.int64).max

__all__ = ["ANYWHERE", "GAP", "KV_LEN", "NUM_SINKS", "WINDOW_LEFT", "StreamTable"]


class StreamTable:
    """``table[slot, layer, kv_head, i]``: the i-th head page; ``desc[..., 4]``: its lengths.

    ``desc`` holds (kv_len, gap, num_sinks, window_left) as `kernels.layout.PagedStreams`
    reads them. Slot 0 stays empty, for padded rows. Updated in place, so a decode step
    writes a few integers per request and copies nothing; it grows by doubling.

    ``offset[slot]`` and ``last_position[slot]`` say where a request's tokens stand: the model is
    told ``t - offset``, and sinks see a query no further than at ``last_position``.

    Who writes into ``table`` calls `touch`: ``version[slot]`` says whether a page list is still the
    one that was read; ``changes`` and ``single_changes`` say what a copy elsewhere has yet to take
    over.
    """

    def __init__(self, num_layers: int, num_kv_heads: int, slots: int = 8, pages: int = 64):
        self.num_layers = num_layers
        self.num_kv_heads = num_kv_heads
        self.table: NDArray[np.int32] = np.zeros(
            (slots, num_layers, num_kv_heads, pages), dtype=np.int32
        )
        self.desc: NDArray[np.int32] = np.zeros(
            (slots, num_layers, num_kv_heads, 4), dtype=np.int32
        )
        self.offset: NDArray[np.int64] = np.zeros(slots, dtype=np.int64)
        self.last_position: NDArray[np.int64] = np.full(slots, ANYWHERE)
        self.version: NDArray[np.int64] = np.zeros(slots, dtype=np.int64)
        self.tracked = False  # whether anyone takes `changes` over
        self.changes: dict[int, tuple[int, int]] = {}
        self.single_changes: list[tuple[NDArray[np.int64], ...]] = []
        self._free = list(range(slots - 1, 0, -1))
        self._rebind()

    def touch(self, slot: int, first: int, last: int) -> None:
        """Columns ``first .. last`` of a slot's page lists were written."""
        self.version[slot] += 1
        if self.tracked:
            begin, end = self.changes.get(slot, (first, last))
            self.changes[slot] = (min(begin, first), max(end, last))

    def touch_each(
        self,
        slot: int,
        layers: NDArray[np.int64],
        heads: NDArray[np.int64],
        columns: NDArray[np.int64],
    ) -> None:
        """One column of each of these streams was written."""
        self.version[slot] += 1
        if self.tracked:
            self.single_changes.append((np.full(len(layers), slot), layers, heads, columns))

    def _rebind(self) -> None:
        self.table_tensor = torch.from_numpy(self.table)
        self.desc_tensor = torch.from_numpy(self.desc)

    def take(self) -> int:
        """A slot of empty streams that see everything."""
        if not self._free:
            slots = len(self.table)
            self.table = np.concatenate([self.table, np.zeros_like(self.table)])
            self.desc = np.concatenate([self.desc, np.zeros_like(self.desc)])
            self.offset = np.concatenate([self.offset, np.zeros_like(self.offset)])
            self.last_position = np.concatenate([self.last_position, np.full(slots, ANYWHERE)])
            self.version = np.concatenate([self.version, np.zeros_like(self.version)])
            self._free = list(range(2 * slots - 1, slots - 1, -1))
            self._rebind()
        slot = self._free.pop()
        self.desc[slot] = (0, 0, 0, -1)
        self.offset[slot], self.last_position[slot] = 0, ANYWHERE
        return slot

    def give(self, slot: int) -> None:
        self.desc[slot] = 0
        self.offset[slot], self.last_position[slot] = 0, ANYWHERE
        self._free.append(slot)

    def reset(self) -> None:
        self.desc[:] = 0
        self.offset[:] = 0
        self.last_position[:] = ANYWHERE
        self._free = list(range(len(self.table) - 1, 0, -1))

    def fit(self, pages: int) -> None:
        """Make room for lists of ``pages`` pages."""
        width = self.table.shape[3]
        if pages <= width:
            return
        while width < pages:
            width *= 2
        wide = np.zeros((*self.table.shape[:3], width), dtype=np.int32)
        wide[..., : self.table.shape[3]] = self.table
        self.table = wide
        self._rebind()
