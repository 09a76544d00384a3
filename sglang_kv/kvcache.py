"""SGLang's KV pool, holding one tensor of one-head pages for all layers."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from sglang_kv.kernels.layout import allocate_pages


class HeadPageKVPool(MHATokenToKVPool):
    """``pages[num_pages, 2, page_size, head_dim]``; page ids come from `HeadPagePool`.

    ``size`` is what the host sized: tokens of full KV that fit. The host's token-major
    accessors have no meaning here, and raise: a caller that reached them would read or
    write KV behind the ledger's back.
    """

    pages: torch.Tensor

    def _create_buffers(self) -> None:
        if self.v_head_dim != self.head_dim:
            raise ValueError(
                f"sglang-kv needs equal K and V head_dim, got {self.head_dim} and {self.v_head_dim}"
            )
        self.num_head_pages = self.size // self.page_size * self.layer_num * self.head_num
        self.pages = allocate_pages(
            self.num_head_pages, self.page_size, self.head_dim, self.dtype, self.device
        )

    @property
    def page_bytes(self) -> int:
        """Bytes of one head page, K and V, alignment included."""
        return self.pages.stride(0) * self.pages.element_size()

    def get_kv_size_bytes(self) -> tuple[int, int]:
        half = self.num_head_pages * self.page_bytes // 2
        return half, half

    def _no_token_major(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(
            "sglang-kv keeps KV in one-head pages: a code path of SGLang asked for its "
            "token-major buffers, which means a feature is on that is not supported with it"
        )

    _get_key_buffer = _get_value_buffer = get_key_buffer = get_value_buffer = _no_token_major
    get_kv_buffer = set_kv_buffer = move_kv_cache = _no_token_major
    get_cpu_copy = load_cpu_copy = get_contiguous_buf_infos = _no_token_major
