"""The miniature scheduler with a GPU's copy of the page lists beside it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from ledger_harness import Harness, Req

from sglang_kv.device_streams import DeviceStreams


class Mirrored(Harness):
    """Each forward reads the copy, as a GPU would: it has to hold what the ledger says."""

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.mirror = DeviceStreams(self.ledger.streams, torch.device("cpu"))

    def _forward(self, req: Req, start: int, target: int) -> None:
        states = [r.sglang_kv for r in self.running]
        slots = np.array([s.slot for s in states], dtype=np.int32)
        self.mirror.sync(slots)
        for state in states:
            assert (
                self.mirror.desc[state.slot].numpy() == self.ledger.streams.desc[state.slot]
            ).all()
            table = self.ledger.streams.table[state.slot]
            live = np.arange(table.shape[2]) < state.counts[..., None]
            copied = self.mirror.table[state.slot].numpy()[..., : table.shape[2]]
            assert (copied[live] == table[live]).all(), state.policy
        super()._forward(req, start, target)
