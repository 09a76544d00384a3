"""Every op again, slow and obvious: fp32 torch, one stream at a time, one mask per query.

The compiled ops are tested against these; these are tested against torch's own attention.
"""

import math

import torch
from torch import Tensor

from sglang_kv.kernels.layout import FP8_DTYPES, KV_LEN, PagedStreams


def visible_mask(
    num_queries: int, desc: Tensor, page_size: int, layer_window_left: int = -1
) -> Tensor:
    """Which keys each of the last `num_queries` tokens of a stream sees: [num_queries, kv_len].

    `desc` is the stream's (kv_len, gap, num_sinks, window_left).
    """
    kv_len, gap, num_sinks, window_left = desc.tolist()
    index = torch.arange(kv_len)
    sink_end = -(-num_sinks // page_size) * page_size
    position = torch.where(index < sink_end, index, index + gap)
    query = torch.arange(kv_len - num_queries, kv_len)
    distance = position[query, None] - position
    mask = index <= query[:, None]
    if window_left >= 0:
        mask &= (position < num_sinks) | (distance <= window_left)
    if layer_window_left >= 0:
        mask &= distance <= layer_window_left
    return mask


def sinks_apart(
    num_queries: int, desc: Tensor, page_size: int, layer_window_left: int = -1
) -> Tensor:
    """Which keys are sinks that a query sees beyond a gap: [num_queries, kv_len].

    There is a gap if it does not see the position after the last sink.
    """
    kv_len, gap, num_sinks, _ = desc.tolist()
    mask = visible_mask(num_queries, desc, page_size, layer_window_left)
    sinks = torch.arange(kv_len) < num_sinks
    later = torch.arange(kv_len - num_queries, kv_len) >= num_sinks
    dropped = gap > 0 and num_sinks % page_size == 0
    beyond = later & (~mask[:, min(num_sinks, kv_len - 1)] | dropped)
    apart: Tensor = mask & sinks & beyond[:, None]
    return apart


def stream_tokens(
    streams: PagedStreams, slot: int, layer: int, kv_head: int
) -> tuple[Tensor, Tensor]:
    """K and V of one stream, each fp32 [kv_len, head_dim]."""
    kv_len = int(streams.desc[slot, layer, kv_head, KV_LEN])
    index = torch.arange(kv_len)
    page = streams.table[slot, layer, kv_head, index // streams.page_size].long()
    k, v = streams.pages[page, :, index % streams.page_size].float().unbind(1)
    return k, v


def masked_logits(
    q: Tensor,
    k: Tensor,
    desc: Tensor,
    page_size: int,
    sm_scale: float,
    logits_soft_cap: float,
    layer_window_left: int,
) -> Tensor:
    """Logits of a stream's last tokens, -inf for what they do not see: [heads, queries, kv_len].

    `q` is [queries, heads, head_dim], the query heads of this KV head; `k` is [kv_len, head_dim].
    """
    logits = torch.einsum("qhd,kd->hqk", q.float(), k) * sm_scale
    if logits_soft_cap > 0:
        logits = logits_soft_cap * torch.tanh(logits / logits_soft_cap)
    mask = visible_mask(len(q), desc, page_size, layer_window_left)
    return logits.masked_fill(~mask, -math.inf)


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
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """`attention.extend` in fp32: [total_q, num_qo_heads, head_dim] and its base-2 lse."""
    out = torch.zeros(q.shape)
    lse = torch.full(q.shape[:2], -math.inf)
    group = q.shape[1] // streams.num_kv_heads
    for b, slot in enumerate(streams.slots.tolist()):
        begin, end = qo_indptr[b : b + 2].tolist()
        for h in range(streams.num_kv_heads):
            desc = streams.desc[slot, layer, h]
            if begin == end or desc[KV_LEN] == 0:
                continue
            heads = slice(h * group, (h + 1) * group)
            k, v = stream_tokens(streams, slot, layer, h)
            k, v = k * k_scale, v * v_scale
            scoring = (sm_scale, logits_soft_cap, layer_window_left)
            logits = masked_logits(q[begin:end, heads], k, desc, streams.page_size, *scoring)
            if sink_q is not None:
                rotated = masked_logits(
                    sink_q[begin:end, heads], k, desc, streams.page_size, *scoring
                )
                apart = sinks_apart(end - begin, desc, streams.page_size, layer_window_left)
                logits = torch.where(apart, rotated, logits)
            out[begin:end, heads] = torch.einsum("hqk,kd->qhd", logits.softmax(-1), v)
            lse[begin:end, heads] = logits.logsumexp(-1).T / math.log(2)
    return out, lse


def decode(
    q: Tensor,
    streams: PagedStreams,
    layer: int,
    *,
    sm_scale: float,
    sink_q: Tensor | None = None,
    logits_soft_cap: float = 0.0,
    layer_window_left: int = -1,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """`attention.decode` in fp32: [batch, num_qo_heads, head_dim] and its base-2 lse."""
    return extend(
        q,
        torch.arange(len(streams.slots) + 1),
        streams,
        layer,
        sm_scale=sm_scale,
        sink_q=sink_q,
        logits_soft_cap=logits_soft_cap,
        layer_window_left=layer_window_left,
        k_scale=k_scale,
        v_scale=v_scale,
    )


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
    """`scores.column_sums` in fp32, with a matrix of weights for each stream."""
    if qo_indptr is None:
        qo_indptr = torch.arange(len(streams.slots) + 1)
    group = q.shape[1] // streams.num_kv_heads
    for b, (slot, score_slot) in enumerate(
        zip(streams.slots.tolist(), score_slots.tolist(), strict=True)
    ):
        rows = slice(int(qo_indptr[b] + first_query[b]), int(qo_indptr[b + 1]))
        for h in range(streams.num_kv_heads):
            desc = streams.desc[slot, layer, h]
            if score_slot == -1 or rows.start == rows.stop or desc[KV_LEN] == 0:
                continue
            heads = slice(h * group, (h + 1) * group)
            k, _ = stream_tokens(streams, slot, layer, h)
            logits = masked_logits(
                q[rows, heads],
                k * k_scale,
                desc,
                streams.page_size,
                sm_scale,
                logits_soft_cap,
                layer_window_left,
            )
            row_lse = lse[rows, heads].T[:, :, None]
            weights = torch.exp2(logits / math.log(2) - row_lse)
            weights = weights.masked_fill(row_lse == -math.inf, 0.0)
            scores[score_slot, layer, h, : desc[KV_LEN]] += weights.sum((0, 1))


def as_stored(values: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Keys or values as pages of `dtype` hold them; torch alone would make NaN of large ones."""
    values = values.float() / scale
    if dtype in FP8_DTYPES:
        largest = torch.finfo(dtype).max
        values = values.clamp(-largest, largest)
    return values.to(dtype)


def append(
    k: Tensor,
    v: Tensor,
    qo_indptr: Tensor | None,
    streams: PagedStreams,
    layer: int,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """`transfer.append`, token by token."""
    k = as_stored(k, k_scale, streams.pages.dtype)
    v = as_stored(v, v_scale, streams.pages.dtype)
    if qo_indptr is None:
        qo_indptr = torch.arange(len(streams.slots) + 1)
    for b, slot in enumerate(streams.slots.tolist()):
        begin, end = qo_indptr[b : b + 2].tolist()
        for h in range(streams.num_kv_heads):
            kv_len = int(streams.desc[slot, layer, h, KV_LEN])
            for row in range(begin, end) if kv_len else ():
                page, token = divmod(kv_len - end + row, streams.page_size)
                streams.pages[streams.table[slot, layer, h, page], 0, token] = k[row, h]
                streams.pages[streams.table[slot, layer, h, page], 1, token] = v[row, h]


def gather(
    pages: Tensor,
    src_indptr: Tensor,
    src_indices: Tensor,
    keep_indptr: Tensor,
    keep_indices: Tensor,
    dst_indptr: Tensor,
    dst_indices: Tensor,
) -> None:
    """`transfer.gather`, token by token."""
    page_size = pages.shape[2]
    for i in range(len(src_indptr) - 1):
        src = src_indices[src_indptr[i] : src_indptr[i + 1]]
        dst = dst_indices[dst_indptr[i] : dst_indptr[i + 1]]
        for j, index in enumerate(keep_indices[keep_indptr[i] : keep_indptr[i + 1]].tolist()):
            source = pages[src[index // page_size], :, index % page_size]
            pages[dst[j // page_size], :, j % page_size] = source


def turned(heads: Tensor, cos_sin: Tensor, is_neox_style: bool = True) -> Tensor:
    """Rotary embedding in fp32, by complex numbers: a pair is one, turned by multiplying.

    `heads` is [..., head_dim]; `cos_sin`, one row of `rotate.turned_queries`' table for each or
    for all, [..., rotary_dim].
    """
    width = cos_sin.shape[-1]
    by = torch.complex(*cos_sin.chunk(2, -1))
    x = heads[..., :width].float()
    if is_neox_style:
        pairs = torch.complex(*x.chunk(2, -1)) * by
        x = torch.cat((pairs.real, pairs.imag), -1)
    else:
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2)) * by
        x = torch.view_as_real(pairs).flatten(-2)
    return torch.cat((x, heads[..., width:].float()), -1)


def beyond_rounding(stored: Tensor, exact: Tensor) -> Tensor:
    """By how much `stored` is further from fp32 `exact` than rounding may put it: at most 0 if it
    is within half a unit of the last place of its dtype. What is too large is to be the largest.
    """
    info = torch.finfo(stored.dtype)
    exact = exact.clamp(-info.max, info.max)
    power = exact.abs().clamp(min=info.smallest_normal).log2().floor()
    return (stored.float() - exact).abs() - info.eps * torch.exp2(power) / 2
