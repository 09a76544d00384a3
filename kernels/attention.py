"""Attention of new tokens to their streams: one query per request, or several."""

from typing import Literal, overload

import torch
from torch import Tensor

from sglang_kv.kernels.jit import load_kernels
from sglang_kv.kernels.layout import PagedStreams


@overload
def decode(
    q: Tensor,
    streams: PagedStreams,
    layer: int,
    *,
    sm_scale: float,
    sink_q: Tensor | None = ...,
    logits_soft_cap: float = ...,
    layer_window_left: int = ...,
    out: Tensor | None = ...,
    return_lse: Literal[False] = ...,
    k_scale: float = ...,
    v_scale: float = ...,
) -> Tensor: ...


@overload
def decode(
    q: Tensor,
    streams: PagedStreams,
    layer: int,
    *,
    sm_scale: float,
    sink_q: Tensor | None = ...,
    logits_soft_cap: float = ...,
    layer_window_left: int = ...,
    out: Tensor | None = ...,
    return_lse: Literal[True],
    k_scale: float = ...,
    v_scale: float = ...,
) -> tuple[Tensor, Tensor]: ...


def decode(
    q: Tensor,
    streams: PagedStreams,
    layer: int,
    *,
    sm_scale: float,
    sink_q: Tensor | None = None,
    logits_soft_cap: float = 0.0,
    layer_window_left: int = -1,
    out: Tensor | None = None,
    return_lse: bool = False,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of each request's newest token, which its streams already hold.

    - `q`: bf16 or fp32 [batch, num_qo_heads, head_dim]; any strides but the last
    - `layer`: which layer's streams
    - `sm_scale`: multiplies scores, before `logits_soft_cap * tanh(score / logits_soft_cap)` if
      `logits_soft_cap` > 0
    - `sink_q`: the queries as sinks are scored with them, where a query's sinks and its window lie
      apart; as `q`, which is the default. StreamingLLM's positions in the cache are this: sinks
      see a query rotated to where it would stand if nothing lay between them and the window
    - `layer_window_left`: the layer's own sliding window, -1 for none; it bounds sinks as well
    - `out`: bf16 or fp32, the shape of `q`; by default a new tensor with the dtype of `q`
    - `k_scale`, `v_scale`: what the pages hold times these are the keys and values

    Returns `out`, and with `return_lse` also the log-sum-exp of the scaled scores in base 2, fp32
    [batch, num_qo_heads]. A request's results do not depend on the rest of the batch or on the
    number of threads, to the bit.

    Raises ValueError, naming the argument, for shapes, dtypes or a `desc` that do not fit together.
    """
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = q.new_empty(q.shape[:2], dtype=torch.float32) if return_lse else None
    load_kernels().decode(
        q,
        sink_q,
        out,
        lse,
        streams.pages,
        streams.table,
        streams.desc,
        streams.slots,
        layer,
        sm_scale,
        k_scale,
        v_scale,
        logits_soft_cap,
        layer_window_left,
        torch.get_num_threads(),
    )
    return out if lse is None else (out, lse)


@overload
def extend(
    q: Tensor,
    qo_indptr: Tensor,
    streams: PagedStreams,
    layer: int,
    *,
    sm_scale: float,
    sink_q: Tensor | None = ...,
    logits_soft_cap: float = ...,
    layer_window_left: int = ...,
    out: Tensor | None = ...,
    return_lse: Literal[False] = ...,
    k_scale: float = ...,
    v_scale: float = ...,
) -> Tensor: ...


@overload
def extend(
    q: Tensor,
    qo_indptr: Tensor,
    streams: PagedStreams,
    layer: int,
    *,
    sm_scale: float,
    sink_q: Tensor | None = ...,
    logits_soft_cap: float = ...,
    layer_window_left: int = ...,
    out: Tensor | None = ...,
    return_lse: Literal[True],
    k_scale: float = ...,
    v_scale: float = ...,
) -> tuple[Tensor, Tensor]: ...


def extend(
    q: Tensor,
    qo_indptr: Tensor,
    streams: PagedStreams,
    layer: int,
    *,
    sm_scale: float,
    sink_q: Tensor | None = None,
    logits_soft_cap: float = 0.0,
    layer_window_left: int = -1,
    out: Tensor | None = None,
    return_lse: bool = False,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of each request's newest tokens, which its streams already hold.

    - `q`: bf16 or fp32 [total_q, num_qo_heads, head_dim]; any strides but the last
    - `qo_indptr`: int32 [batch + 1]; the queries of request b are rows [qo_indptr[b],
      qo_indptr[b + 1]) of `q`, and the last tokens of its streams

    The other arguments, the result, its independence of the batch and the errors are those of
    `decode`. Nor does it depend on how a prompt is cut into chunks.
    """
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = q.new_empty(q.shape[:2], dtype=torch.float32) if return_lse else None
    load_kernels().extend(
        q,
        sink_q,
        qo_indptr,
        out,
        lse,
        streams.pages,
        streams.table,
        streams.desc,
        streams.slots,
        layer,
        sm_scale,
        k_scale,
        v_scale,
        logits_soft_cap,
        layer_window_left,
        torch.get_num_threads(),
    )
    return out if lse is None else (out, lse)


def visible_ranges(
    index: int,
    *,
    gap: int,
    num_sinks: int,
    window_left: int,
    page_size: int,
    layer_window_left: int = -1,
) -> tuple[range, range]:
    """The token indices that the query at token index `index` of a stream sees.

    Two disjoint ascending ranges, sinks and window; where no position lies between them, the first
    is empty and the second holds both. This is the function that the kernels use.
    """
    ends = load_kernels().visible_ranges(
        index, gap, num_sinks, window_left, page_size, layer_window_left
    )
    return range(ends[0], ends[1]), range(ends[2], ends[3])
