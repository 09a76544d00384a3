"""The device's copy of the stream table: what the kernels of a GPU read.

The ledger writes its table on the host (`streams.StreamTable`) while earlier forwards may still
run. Before a forward, what has changed since the last one is copied, on the forward's stream: the
lengths of the batch, and of the page lists the columns that were touched. A decode step uploads 16
bytes per stream, and 4 more for each page that it took.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from sglang_kv.kernel_paths import upload
from sglang_kv.streams import StreamTable


class DeviceStreams:
    """``table`` and ``desc`` of a `StreamTable`, on a device.

    Args:
        streams: the host's; its `changes` are consumed here.
        device: where to. The copy moves when the host's table grows.
    """

    def __init__(self, streams: StreamTable, device: torch.device):
        self.streams = streams
        self.device = device
        streams.tracked = True
        self._allocate()

    def _allocate(self) -> None:
        table, desc = self.streams.table_tensor, self.streams.desc_tensor
        self.table = torch.empty(table.shape, dtype=torch.int32, device=self.device)
        self.desc = torch.zeros(desc.shape, dtype=torch.int32, device=self.device)
        self.table.copy_(table)
        self.streams.changes.clear()
        self.streams.single_changes.clear()

    def sync(self, slots: NDArray[np.int32]) -> None:
        """Bring the device up to date for a forward of these slots."""
        host = self.streams
        if host.table.shape != self.table.shape:
            self._allocate()
        self._copy_columns()
        desc = upload(torch.from_numpy(host.desc[slots]), self.device)
        self.desc.index_copy_(
            0, upload(torch.from_numpy(slots.astype(np.int64)), self.device), desc
        )

    def _copy_columns(self) -> None:
        """All that changed in one upload, and one copy on the device."""
        host, changes, single = (
            self.streams.table,
            self.streams.changes,
            self.streams.single_changes,
        )
        if not changes and not single:
            return
        self.streams.changes, self.streams.single_changes = {}, []
        _, layers, heads, width = self.table.shape
        stream = np.arange(layers * heads)[:, None] * width
        places, values = [], []
        for slot, (first, last) in changes.items():
            column = np.arange(first, last)
            places.append((slot * layers * heads * width + stream + column).reshape(-1))
            values.append(host[slot, :, :, first:last].reshape(-1))
        for slots, of_layer, head, columns in single:
            places.append(((slots * layers + of_layer) * heads + head) * width + columns)
            values.append(host[slots, of_layer, head, columns])
        # The same place twice carries the same value: both were read from the table as it is now.
        where = upload(torch.from_numpy(np.concatenate(places)), self.device)
        what = upload(torch.from_numpy(np.concatenate(values)), self.device)
        self.table.view(-1).index_copy_(0, where, what)
