"""SGLang's attention backend as GPUs use it: FlashInfer's plans, or Triton; CUDA graphs by Triton.

The ledger lives on the host, and a forward reads the device's copy of it (`device_streams`). A
decode step that does not fold never waits for the device: rows, lengths and positions are the
host's.

A captured graph repeats its launches, while FlashInfer's follow from the batch (one per distinct
mask). So graphs are captured of Triton's kernels, which read page lists and lengths on the device.
A batch in which a query is scored, or stands at another position than SGLang thinks, is run
without a graph (`graph_serves`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from sglang_kv import runtime
from sglang_kv.backend import HeadPageAttnBackend, layer_options
from sglang_kv.device_streams import DeviceStreams
from sglang_kv.kernel_paths import FLASHINFER, upload
from sglang_kv.kernels.layout import PagedStreams
from sglang_kv.kv_dtypes import attention_layers
from sglang_kv.streams import ANYWHERE, KV_LEN

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

#: Most bytes for the page table that graphs read, which is allocated for the longest context.
LARGEST_GRAPH_TABLE = 4 << 30


class DeviceAttnBackend(HeadPageAttnBackend):
    """`HeadPageAttnBackend` on the device's copy of the ledger.

    Args:
        model_runner: SGLang's.
        path: `kernel_paths.FLASHINFER` or `TRITON`.
    """

    def __init__(self, model_runner: ModelRunner, path: str):
        super().__init__(model_runner)
        self._device_streams = DeviceStreams(self.ledger.streams, self.device)
        self._graph_streams: PagedStreams | None = None
        self._context_pages = -(-model_runner.model_config.context_len // self.ledger.page_size)
        self.flashinfer: Any = self._flashinfer(model_runner) if path == FLASHINFER else None
        self._planned = False

    def _flashinfer(self, model_runner: ModelRunner) -> Any:
        # Here, so that only a server that runs it imports it.
        from sglang_kv.kernels.flashinfer.attention import FlashInferAttention, LayerOptions

        pool = self.token_to_kv_pool
        layers = attention_layers(model_runner.model, pool)
        return FlashInferAttention(
            [
                LayerOptions(*layer_options(layer).values())._replace(**scales)
                for layer, scales in zip(layers, self.scales, strict=True)
            ],
            num_qo_heads=layers[0].tp_q_head_num,
            num_kv_heads=pool.head_num,
            head_dim=pool.head_dim,
            page_size=pool.page_size,
            q_dtype=model_runner.dtype,
            kv_dtype=pool.dtype,
            device=pool.pages.device,
        )

    # -- once per forward --

    def _rows(self, forward_batch: ForwardBatch) -> NDArray[np.int64]:
        rows: NDArray[np.int64] | None = getattr(forward_batch, "sglang_kv_rows", None)
        # A batch that no scheduler made (SGLang warms kernels up): there the host may wait.
        return super()._rows(forward_batch) if rows is None else rows

    def _new_tokens(self, forward_batch: ForwardBatch) -> list[int]:
        counts = forward_batch.extend_seq_lens_cpu
        return list(counts if isinstance(counts, list) else counts.tolist())

    def _read_streams(self) -> PagedStreams:
        mirror = self._device_streams
        mirror.sync(self._slots)
        slots = upload(torch.from_numpy(self._slots), self.device)
        return PagedStreams(self.token_to_kv_pool.pages, mirror.table, mirror.desc, slots)

    def _plan(self) -> None:
        self._planned = self.flashinfer is not None and len(self._slots) > 0
        if not self._planned:
            return
        tables = self.ledger.streams
        desc = tables.desc[self._slots]
        if self._counts is None:
            version = (tables.version[self._slots].tobytes(), self._streams.table.data_ptr())
            self.flashinfer.plan_decode(self._streams, self._slots, desc, version)
        else:
            indptr = np.concatenate([[0], np.cumsum(self._counts)]).tolist()
            self.flashinfer.plan_extend(self._streams, self._slots, desc, indptr)

    def _attend(
        self,
        query: torch.Tensor,
        index: int,
        sink_q: torch.Tensor | None,
        options: dict[str, Any],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if not self._planned:
            return super()._attend(query, index, sink_q, options)
        # FlashInfer gives no weights, only the lse: the column sums of a decode step stay a pass
        # of Triton's, which reads the keys once more. Triton's own decode needs none.
        out, lse = self.flashinfer.run(
            query, index, sink_q=sink_q, return_lse=self._scored is not None
        )
        return out, lse

    # -- CUDA graphs --

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Page lists and lengths of a batch, at addresses that stay."""
        _, layers, heads, _ = self.ledger.streams.table.shape
        pages = self._context_pages + 1
        if 4 * max_bs * layers * heads * pages > LARGEST_GRAPH_TABLE:
            raise ValueError(
                f"CUDA graphs of {max_bs} requests need a page table of {pages} pages per stream, "
                "which is too large: lower --cuda-graph-max-bs or --context-length, or give "
                "--disable-cuda-graph"
            )
        shape = (max_bs, layers, heads)
        self._graph_streams = PagedStreams(
            self.token_to_kv_pool.pages,
            torch.zeros((*shape, pages), dtype=torch.int32, device=self.device),
            torch.zeros((*shape, 4), dtype=torch.int32, device=self.device),
            torch.arange(max_bs, dtype=torch.int32, device=self.device),
        )

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def init_forward_metadata_out_graph(
        self, forward_batch: ForwardBatch, in_capture: bool = False
    ) -> None:
        """Before a capture or a replay: the batch's page lists and lengths into their fixed places.

        Rows that pad the batch read slot 0, whose streams are empty.
        """
        batch = forward_batch.batch_size
        fixed = self._graph_streams
        assert fixed is not None, "init_cuda_graph_state comes first"
        self._slots = np.zeros(batch, dtype=np.int32)
        if not in_capture:
            rows = runtime.current_rows()
            self._slots[: len(rows)] = self.ledger.row_to_slot[rows]
            self._device_streams.sync(self._slots)
            slots = upload(torch.from_numpy(self._slots.astype(np.int64)), self.device)
            lengths = self.ledger.streams.desc[self._slots, :, :, KV_LEN]
            width = -(-int(lengths.max()) // self.ledger.page_size)
            lists = self._device_streams.table[..., :width].index_select(0, slots)
            fixed.table[:batch, :, :, :width] = lists
            fixed.desc[:batch] = self._device_streams.desc.index_select(0, slots)
        self._streams = PagedStreams(fixed.pages, fixed.table, fixed.desc, fixed.slots[:batch])
        self._counts = self._indptr = None
        self._scored = self._sink_distance = None
        self._planned = False

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        """Nothing: kernels read lengths and page lists where `out_graph` put them."""

    def graph_serves(self) -> bool:
        """Whether a captured graph does all that the announced batch needs."""
        rows = runtime.current_rows()
        placed = self.ledger.streams.last_position[self.ledger.row_to_slot[rows]] != ANYWHERE
        states = (self.ledger.rows.get(row) for row in rows.tolist())
        scored = any(
            s is not None and s.scored_queries(s.length - 1, s.length) is not None for s in states
        )
        return not placed.any() and not scored
