"""Moving tokens: new ones into streams, kept ones into fresh pages."""

import torch
from torch import Tensor

from sglang_kv.kernels.jit import load_kernels
from sglang_kv.kernels.layout import PagedStreams


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
    """Write new tokens at the end of their streams, whose `kv_len` counts them already.

    - `k`, `v`: bf16 or fp32 [total, num_kv_heads, head_dim], cast to the dtype of the pages; any
      strides but the last
    - `qo_indptr`: int32 [batch + 1], the rows of each request; None for one token per request
    - `k_scale`, `v_scale`: keys and values are divided by these before they are stored

    8-bit floats are rounded to the nearest, to even in the middle; what is too large for them, and
    infinity, becomes the largest number, and NaN stays NaN.

    Row j of the n of a request becomes token index `kv_len - n + j` of each of its streams. A
    stream of kv_len 0 (a padded row) takes nothing.

    Raises ValueError, naming the argument, for shapes, dtypes or a `desc` that do not fit together.
    """
    load_kernels().append(
        k,
        v,
        qo_indptr,
        streams.pages,
        streams.table,
        streams.desc,
        streams.slots,
        layer,
        k_scale,
        v_scale,
        torch.get_num_threads(),
    )


def gather(
    pages: Tensor,
    src_indptr: Tensor,
    src_indices: Tensor,
    keep_indptr: Tensor,
    keep_indices: Tensor,
    dst_indptr: Tensor,
    dst_indices: Tensor,
) -> None:
    """Copy the kept tokens of N streams into other pages, in order and without holes.

    - `pages`: the pool, of any dtype
    - `src_indptr`, `src_indices`: int32 or int64, [N + 1] and page ids; where each stream is
    - `keep_indptr`, `keep_indices`: the token indices that each stream keeps, in the order wanted
    - `dst_indptr`, `dst_indices`: page ids; kept token j goes to page `j // page_size` of the list,
      slot `j % page_size`. Nothing else in those pages is written

    A stream may be compacted in place: its destination pages are the first of its own source pages,
    and its kept tokens ascend. Other than that no destination page may be a source page of any
    stream; that is not checked.

    Raises ValueError, naming the argument, for lists that do not fit together.
    """
    lists = (src_indptr, src_indices, keep_indptr, keep_indices, dst_indptr, dst_indices)
    load_kernels().gather(
        pages, *(values.to(torch.int64) for values in lists), torch.get_num_threads()
    )
