"""FlashInfer itself: the only file that imports it.

What is asked of it is in `attention.FlashInferAttention`; tests put an executor of the documented
layout in place of these three functions.
"""

from typing import Any

import torch
from torch import Tensor

#: Head sizes that its paged kernels and its merge are built for.
HEAD_DIMS = (64, 128, 256)
#: The tensor-core kernels take queries of 16 bits.
Q_DTYPES = (torch.bfloat16, torch.float16)


def decode_wrapper(workspace: Tensor) -> Any:
    """A `BatchDecodeWithPagedKVCacheWrapper` on the tensor-core path.

    That path serves every group size (the plain one knows 1, 2, 3, 4, 6, 8 and 16), and it alone
    takes `fixed_split_size`, with which an entry's result does not depend on its neighbours.
    """
    _require_cuda(workspace)
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    return BatchDecodeWithPagedKVCacheWrapper(
        workspace, "NHD", use_tensor_cores=True, backend="fa2"
    )


def prefill_wrapper(workspace: Tensor) -> Any:
    """A `BatchPrefillWithPagedKVCacheWrapper`; it picks FA3 on Hopper, FA2 elsewhere."""
    _require_cuda(workspace)
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    return BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")


def merge_state_in_place(v: Tensor, s: Tensor, v_other: Tensor, s_other: Tensor) -> None:
    """Attention of two disjoint sets of keys, into the first: [rows, heads, dim], [rows, heads]."""
    from flashinfer import merge_state_in_place

    merge_state_in_place(v, s, v_other, s_other)


def _require_cuda(workspace: Tensor) -> None:
    if workspace.device.type != "cuda":
        raise ValueError(f"device: FlashInfer needs an NVIDIA GPU, not {workspace.device.type!r}")
