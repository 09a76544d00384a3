"""SGLang's attention backend over one-head pages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from sglang_kv import runtime
from sglang_kv.fold import ScorePass
from sglang_kv.kernels.attention import decode, extend
from sglang_kv.kernels.layout import PagedStreams
from sglang_kv.kernels.scores import column_sums
from sglang_kv.kernels.transfer import append
from sglang_kv.kvcache import HeadPageKVPool
from sglang_kv.rotary import Rotary
from sglang_kv.streams import ANYWHERE

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

NAME = "sglang_kv"


class HeadPageAttnBackend(AttentionBackend):
    """Appends new K/V to each stream and attends over its page list.

    All that a policy decided is in the page lists and their lengths, so one code path
    serves dense and compressed requests in the same batch.
    """

    def __init__(self, model_runner: ModelRunner):
        super().__init__()
        current = runtime.current()
        pool = model_runner.token_to_kv_pool
        if current is None or not isinstance(pool, HeadPageKVPool):
            raise RuntimeError(
                f"--attention-backend {NAME} needs the KV pool of sglang-kv: start the server "
                "with --kv-compression"
            )
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.token_to_kv_pool = pool
        self.ledger = current.ledger
        self.first_layer = pool.start_layer
        layers = range(pool.start_layer, pool.start_layer + pool.layer_num)
        context = model_runner.model_config.context_len
        positions = min(context, self.ledger.trained_length or context)
        self.rotary = self.ledger.rotary = Rotary.of(model_runner.model, layers, positions)
        current.check_default()

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        rows = forward_batch.req_pool_indices.cpu().numpy()
        tables = self.ledger.streams
        self._streams = PagedStreams(
            pages=self.token_to_kv_pool.pages,
            table=tables.table_tensor,
            desc=tables.desc_tensor,
            slots=torch.from_numpy(self.ledger.row_to_slot[rows]),
        )
        self._indptr: torch.Tensor | None = None
        if not forward_batch.forward_mode.is_decode_or_idle():
            lens = forward_batch.extend_seq_lens
            indptr = torch.zeros(len(lens) + 1, dtype=torch.int32)
            torch.cumsum(lens, 0, out=indptr[1:])
            self._indptr = indptr
        self._scored = self._score_pass(rows, forward_batch)
        self._sink_distance = self._place(forward_batch)

    def _place(self, forward_batch: ForwardBatch) -> torch.Tensor | None:
        """Tell the model where its tokens stand.

        Returns how far each token is from where sinks see it, int64 [tokens]; None: no token is.
        """
        streams, slots = self.ledger.streams, self._streams.slots.numpy()
        offset, last = streams.offset[slots], streams.last_position[slots]
        if (last == ANYWHERE).all():
            return None
        if self._indptr is not None:
            counts = np.diff(self._indptr.numpy())
            offset, last = offset.repeat(counts), last.repeat(counts)
        positions = forward_batch.positions
        if offset.any():
            positions = forward_batch.positions = positions - torch.from_numpy(offset)
        distance = (positions - torch.from_numpy(last)).clamp_(min=0)
        return distance if distance.any() else None

    def _score_pass(self, rows: Any, forward_batch: ForwardBatch) -> ScorePass | None:
        """Whose queries are scored in this forward; None: nobody's, and it costs nothing."""
        ledger = self.ledger
        if not ledger.scored:
            return None
        states = [ledger.rows.get(row) for row in rows.tolist()]
        if self._indptr is None:
            return ledger.folder.score_pass(states, [1] * len(states))
        return ledger.folder.score_pass(states, forward_batch.extend_seq_lens.tolist())

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        return self._attend(q, k, v, layer, save_kv_cache)

    forward_extend = forward_decode

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        save_kv_cache: bool,
    ) -> torch.Tensor:
        index = layer.layer_id - self.first_layer
        heads, dim = layer.tp_k_head_num, layer.head_dim
        if save_kv_cache and k is not None:
            k, v = k.view(-1, heads, dim), v.view(-1, heads, dim)
            append(k, v, self._indptr, self._streams, index)
        query = q.view(-1, layer.tp_q_head_num, dim)
        window = layer.sliding_window_size
        options = {
            "sm_scale": layer.scaling,
            "logits_soft_cap": layer.logit_cap or 0.0,
            "layer_window_left": -1 if window is None else window,
        }
        seen_by_sinks = None
        if self._sink_distance is not None:
            seen_by_sinks = self.rotary.sink_queries(query, self._sink_distance, index)
        if self._scored is None:
            if self._indptr is None:
                out = decode(query, self._streams, index, sink_q=seen_by_sinks, **options)
            else:
                out = extend(
                    query, self._indptr, self._streams, index, sink_q=seen_by_sinks, **options
                )
            return out.view(q.shape[0], -1)
        more = {"sink_q": seen_by_sinks, **options}
        if self._indptr is None:
            out, lse = decode(query, self._streams, index, return_lse=True, **more)
        else:
            out, lse = extend(query, self._indptr, self._streams, index, return_lse=True, **more)
        column_sums(
            query,
            self._indptr,
            self._scored.first_query,
            lse,
            self._streams,
            index,
            self.ledger.folder.scores.values,
            self._scored.slots,
            **options,
        )
        return out.view(q.shape[0], -1)

    def support_triton(self) -> bool:
        return False
