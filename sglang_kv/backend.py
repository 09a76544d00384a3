"""SGLang's attention backend over one-head pages: what every device has in common, and CPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from sglang_kv import runtime
from sglang_kv.fold import ScorePass
from sglang_kv.kernel_paths import choose, kernels_of, upload
from sglang_kv.kernels.layout import PagedStreams
from sglang_kv.kv_dtypes import layer_scales
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
        self.device = pool.pages.device
        self.kernels = kernels_of(self.device.type)
        self.first_layer = pool.start_layer
        # As arguments of the ops, so that a step makes no dictionaries of them.
        self.scales = [s._asdict() for s in layer_scales(model_runner.model, pool)]
        layers = range(pool.start_layer, pool.start_layer + pool.layer_num)
        context = model_runner.model_config.context_len
        positions = min(context, self.ledger.trained_length or context)
        self.rotary = self.ledger.rotary = Rotary.of(
            model_runner.model, layers, positions, self.device
        )
        current.check_default()

    # -- once per forward --

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        rows = self._rows(forward_batch)
        self._slots: NDArray[np.int32] = self.ledger.row_to_slot[rows]
        self._streams = self._read_streams()
        self._counts: list[int] | None = None  # of new tokens; None: one each
        self._indptr: torch.Tensor | None = None
        if not forward_batch.forward_mode.is_decode_or_idle():
            self._counts = self._new_tokens(forward_batch)
            indptr = torch.zeros(len(rows) + 1, dtype=torch.int32)
            torch.cumsum(torch.tensor(self._counts), 0, out=indptr[1:])
            self._indptr = upload(indptr, self.device)
        self._scored = self._score_pass(rows)
        self._sink_distance = self._place(rows, forward_batch)
        self._plan()

    def _rows(self, forward_batch: ForwardBatch) -> NDArray[np.int64]:
        """The rows of the batch, on the host."""
        rows: NDArray[np.int64] = forward_batch.req_pool_indices.cpu().numpy()
        return rows

    def _new_tokens(self, forward_batch: ForwardBatch) -> list[int]:
        counts: list[int] = forward_batch.extend_seq_lens.tolist()
        return counts

    def _read_streams(self) -> PagedStreams:
        tables = self.ledger.streams
        return PagedStreams(
            pages=self.token_to_kv_pool.pages,
            table=tables.table_tensor,
            desc=tables.desc_tensor,
            slots=torch.from_numpy(self._slots),
        )

    def _plan(self) -> None:
        """Whatever the kernels want to know about the batch before its first layer."""

    def _place(self, rows: NDArray[np.int64], forward_batch: ForwardBatch) -> torch.Tensor | None:
        """Tell the model where its tokens stand.

        Returns how far each token is from where sinks see it, int64 [tokens]; None: no token is.
        """
        streams, slots = self.ledger.streams, self._slots
        offset, last = streams.offset[slots], streams.last_position[slots]
        if (last == ANYWHERE).all():
            return None
        counts = [1] * len(rows) if self._counts is None else self._counts
        positions = np.concatenate(
            [
                np.arange(length - count, length)
                for length, count in zip(self._lengths(rows), counts, strict=True)
            ]
        )
        offset, last = offset.repeat(counts), last.repeat(counts)
        if offset.any():
            moved = upload(torch.from_numpy(offset), self.device)
            forward_batch.positions = forward_batch.positions - moved
        distance = np.maximum(positions - offset - last, 0)
        return upload(torch.from_numpy(distance), self.device) if distance.any() else None

    def _lengths(self, rows: NDArray[np.int64]) -> list[int]:
        """Logical tokens of each request, those of this forward included; 1 for a padded row."""
        states = (self.ledger.rows.get(row) for row in rows.tolist())
        return [1 if state is None else state.length for state in states]

    def _score_pass(self, rows: NDArray[np.int64]) -> ScorePass | None:
        """Whose queries are scored in this forward; None: nobody's, and it costs nothing."""
        ledger = self.ledger
        if not ledger.scored:
            return None
        states = [ledger.rows.get(row) for row in rows.tolist()]
        return ledger.folder.score_pass(states, self._counts or [1] * len(states))

    # -- once per layer --

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
        index = layer.layer_id - self.first_layer
        heads, dim = layer.tp_k_head_num, layer.head_dim
        if save_kv_cache and k is not None:
            k, v = k.view(-1, heads, dim), v.view(-1, heads, dim)
            self.kernels.append(k, v, self._indptr, self._streams, index, **self.scales[index])
        query = q.view(-1, layer.tp_q_head_num, dim)
        options = layer_options(layer)
        seen_by_sinks = None
        if self._sink_distance is not None:
            seen_by_sinks = self.rotary.sink_queries(query, self._sink_distance, index)
        out, lse = self._attend(query, index, seen_by_sinks, options)
        if self._scored is not None and lse is not None:
            self.kernels.column_sums(
                query,
                self._indptr,
                self._scored.first_query,
                lse,
                self._streams,
                index,
                self.ledger.folder.scores.values,
                self._scored.slots,
                k_scale=self.scales[index]["k_scale"],
                **options,
            )
        return out.view(q.shape[0], -1)

    forward_extend = forward_decode

    def _attend(
        self,
        query: torch.Tensor,
        index: int,
        sink_q: torch.Tensor | None,
        options: dict[str, Any],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention of the new tokens in one layer, and the lse that their scores are still to be
        summed by; None: nobody is scored, or the sums have been made."""
        options = {**options, **self.scales[index], "sink_q": sink_q}
        scored = self._scored
        if self._indptr is not None:
            options["return_lse"] = scored is not None
            done = self.kernels.extend(query, self._indptr, self._streams, index, **options)
        elif scored is not None and self.kernels.scores_in_decode:
            # A slot says that the one query of its request counts: `first_query` is 0 there.
            scores = {"scores": self.ledger.folder.scores.values, "score_slots": scored.slots}
            return self.kernels.decode(query, self._streams, index, **options, **scores), None
        else:
            options["return_lse"] = scored is not None
            done = self.kernels.decode(query, self._streams, index, **options)
        return done if scored is not None else (done, None)

    def support_triton(self) -> bool:
        return self.device.type == "cuda"


def layer_options(layer: RadixAttention) -> dict[str, Any]:
    """What a layer asks of attention, as `sglang_kv.kernels` names it."""
    window = layer.sliding_window_size
    return {
        "sm_scale": layer.scaling,
        "logits_soft_cap": layer.logit_cap or 0.0,
        "layer_window_left": -1 if window is None else window,
    }


def make_backend(name: str, model_runner: ModelRunner) -> HeadPageAttnBackend:
    """The backend that was asked for by ``name``, one of `kernel_paths.BACKENDS`."""
    pool = model_runner.token_to_kv_pool
    if not isinstance(pool, HeadPageKVPool):
        return HeadPageAttnBackend(model_runner)  # which says what is wrong
    group = model_runner.model_config.num_attention_heads // (
        model_runner.model_config.get_total_num_kv_heads()
    )
    path = choose(name, pool.pages.device, pool.head_dim, group, model_runner.dtype)
    if path == "cpp":
        return HeadPageAttnBackend(model_runner)
    from sglang_kv.backend_gpu import DeviceAttnBackend

    return DeviceAttnBackend(model_runner, path)
