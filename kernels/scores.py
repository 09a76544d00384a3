"""Attention that each key received, which some policies keep tokens by."""

import torch
from torch import Tensor

from sglang_kv.kernels.jit import load_kernels
from sglang_kv.kernels.layout import PagedStreams


def column_sums(
    q: Tensor,
    qo_indptr: Tensor | None,
    first_query: Tensor,
    lse: Tensor,
    streams: PagedStreams,
    layer: int,
    scores: Tensor,
    score_slots: Tensor,
    *,
    sm_scale: float,
    logits_soft_cap: float = 0.0,
    layer_window_left: int = -1,
    k_scale: float = 1.0,
) -> None:
    """Add to `scores` the attention weights that each key received from the newest queries.

    A second pass over queries and keys, after `extend` or `decode` with the same arguments; it
    needs no [queries, keys] matrix.

    - `q`: bf16 or fp32 [total_q, num_qo_heads, head_dim]; any strides but the last
    - `qo_indptr`: int32 [batch + 1], the rows of each request, as in `extend`; None for one query
      per request, as in `decode`
    - `first_query`: int32 [batch]; of the queries of request b, those from `first_query[b]` on
      count, from its first row being 0. All of them left out is allowed, and adds nothing
    - `lse`: fp32 [total_q, num_qo_heads], contiguous, as returned with `return_lse`. A row of -inf
      adds nothing
    - `scores`: fp32 [score_slots, layers, kv_heads, width], contiguous
    - `score_slots`: int32 [batch], the row of `scores` of each request, no two the same; -1 for a
      request that is not scored: it costs nothing, and its `first_query` is not read
    - `k_scale`: what the pages hold times this are the keys

    `scores[score_slots[b], layer, h, i]` grows by the sum of 2^(logit - lse) over the counted
    queries that see token index i of the stream, and over the query heads of KV head h. Rows are
    added one by one, in their order, to what is there: a result does not depend on how a prompt is
    cut into chunks, on the rest of the batch or on the number of threads, to the bit. Nothing else
    in `scores` is written.

    Raises ValueError, naming the argument, for shapes, dtypes, slots or a `desc` that do not fit
    together. `scores` is then as it was, unless `table` names a page that the pool has not.
    """
    load_kernels().column_sums(
        q,
        qo_indptr,
        first_query,
        lse,
        streams.pages,
        streams.table,
        streams.desc,
        streams.slots,
        layer,
        scores,
        score_slots,
        sm_scale,
        k_scale,
        logits_soft_cap,
        layer_window_left,
        torch.get_num_threads(),
    )
