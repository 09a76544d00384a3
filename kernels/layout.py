"""Where keys and values lie: pages of one KV head, and the streams that are lists of such pages."""

import ctypes
import mmap
from dataclasses import dataclass

import torch
from torch import Tensor

HEAD_DIMS = (64, 80, 96, 128, 256)
PAGE_SIZES = (1, 16, 32)
ALIGNMENT_BYTES = 128
#: 8-bit pages hold keys and values divided by a scale of their layer.
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)

# Columns of PagedStreams.desc.
KV_LEN, GAP, NUM_SINKS, WINDOW_LEFT = range(4)


def allocate_pages(
    num_pages: int,
    page_size: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Memory for `num_pages` pages: [num_pages, 2, page_size, head_dim], K at index 0 and V at 1.

    A page holds `page_size` tokens of one KV head of one layer. Its K and its V each start on a
    128-byte boundary, whatever the dtype (1, 2 or 4 bytes), and its tokens are contiguous; between
    K, V and the next page there may be padding, so the tensor need not be contiguous. The memory
    is not written: on CPU the system commits it page by page, at first use, and no kernel reads a
    slot before it is appended to.

    Raises ValueError for a `page_size` outside `PAGE_SIZES`, a `head_dim` outside `HEAD_DIMS`, or
    `num_pages` < 1.
    """
    if num_pages < 1:
        raise ValueError(f"num_pages must be positive, not {num_pages}")
    if page_size not in PAGE_SIZES:
        raise ValueError(f"page_size must be one of {PAGE_SIZES}, not {page_size}")
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"head_dim must be one of {HEAD_DIMS}, not {head_dim}")
    alignment = ALIGNMENT_BYTES // dtype.itemsize  # in elements
    kv_stride = -(-page_size * head_dim // alignment) * alignment
    memory = torch.empty(num_pages * 2 * kv_stride + alignment, dtype=dtype, device=device)
    if memory.device.type == "cpu":
        _ask_for_huge_pages(memory)
    offset = -memory.data_ptr() % ALIGNMENT_BYTES // dtype.itemsize
    pages = memory.as_strided(
        (num_pages, 2, page_size, head_dim), (2 * kv_stride, kv_stride, head_dim, 1), offset
    )
    assert pages.data_ptr() % ALIGNMENT_BYTES == 0
    assert all(s * dtype.itemsize % ALIGNMENT_BYTES == 0 for s in pages.stride()[:2])
    return pages


def _ask_for_huge_pages(memory: Tensor) -> None:
    """Asks Linux to back memory with 2 MiB pages, for what of it nobody has written yet.

    Head pages lie scattered over the pool, so with pages of 4 KiB nearly each one is a miss in the
    TLB, which a virtual machine pays for twice. Only a hint: systems without transparent huge pages
    do as before.
    """
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    begin = -(-memory.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    length = memory.data_ptr() + memory.numel() * memory.itemsize - begin
    if advice is not None and length > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), advice)


@dataclass(frozen=True)
class PagedStreams:
    """The streams of a batch. A stream is one (layer, KV head) of one request.

    - `pages`: the pool, from `allocate_pages`; bf16, fp32, or one of `FP8_DTYPES`
    - `table`: int32 [slots, layers, kv_heads, max_pages], page ids; contiguous
    - `desc`: int32 [slots, layers, kv_heads, 4], (kv_len, gap, num_sinks, window_left); contiguous
    - `slots`: int32 [batch], the row of `table` and `desc` of each request of the batch

    A stream holds `kv_len` tokens without holes: token index i lies in page `table[..., i //
    page_size]`, slot `i % page_size`. Between its sink pages (as many as `num_sinks` tokens need)
    and its other pages `gap` logical positions, a multiple of the page size, were dropped:

        index      0 ...... s ......... i .....     s = sink pages x page_size
        position   0 ...... s | gap | . t .....     t = i + gap from s on

    A query is a token of the stream: it sees no later index. If `window_left` >= 0, a query at
    position t sees position p only if p < num_sinks or t - p <= window_left. A stream of kv_len 0
    gives zeros, and an lse of -inf.
    """

    pages: Tensor
    table: Tensor
    desc: Tensor
    slots: Tensor

    @property
    def page_size(self) -> int:
        return self.pages.shape[2]

    @property
    def head_dim(self) -> int:
        return self.pages.shape[3]

    @property
    def num_kv_heads(self) -> int:
        return self.table.shape[2]
