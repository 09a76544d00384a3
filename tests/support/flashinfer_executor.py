"""FlashInfer's paged layout carried out in plain torch, on any device.

What its documentation says of `indptr`, `indices`, `last_page_len`, `qo_indptr`, of causal masks,
sliding windows and the log-sum-exp, tile by tile as its FA2 planner cuts them: `plan` fixes the
tiles on the host, `run` reads the page table as it is by then. A table that the plan does not fit
gives what the GPU would give: tokens left out.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

ROWS_OF_A_TILE = 16
LOG2E = math.log2(math.e)


class Wrapper:
    """Stands for a wrapper of FlashInfer's; `plan` and `run` as those are called by us."""

    def __init__(self, workspace: Tensor):
        assert workspace.dtype == torch.uint8
        self._paged_kv_indptr_buf: Tensor
        self._paged_kv_indices_buf: Tensor
        self._paged_kv_last_page_len_buf: Tensor
        self.num_plans = 0

    def reset_workspace_buffer(self, floats: Tensor, ints: Tensor) -> None:
        assert floats.dtype == ints.dtype == torch.uint8

    def _plan(
        self,
        qo_indptr: Tensor,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        heads: tuple[int, int, int, int],
        *,
        causal: bool,
        window_left: int,
        logits_soft_cap: float,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        fixed_split_size: int | None,
    ) -> None:
        for host in (qo_indptr, indptr, last_page_len):
            assert host.device.type == "cpu", "plan would wait for the device"
            assert host.dtype == torch.int32
        assert indices.dtype == torch.int32
        self.group, num_kv_heads, self.head_dim, self.page_size = heads
        assert num_kv_heads == 1
        counts = indptr.diff()
        assert len(counts) == len(last_page_len) == len(qo_indptr) - 1
        assert (counts > 0).all()
        assert ((last_page_len >= 1) & (last_page_len <= self.page_size)).all()
        self.num_plans += 1
        self.causal, self.window_left, self.split = causal, window_left, fixed_split_size
        self.soft_cap, self.sm_scale = logits_soft_cap, sm_scale
        self.q_dtype, self.kv_dtype = q_data_type, kv_data_type
        self._qo_indptr_buf = qo_indptr
        self._paged_kv_indptr_buf, self._paged_kv_indices_buf = indptr, indices
        self._paged_kv_last_page_len_buf = last_page_len
        reach = counts
        if window_left >= 0:
            reach = counts.clamp(max=-(-(window_left + ROWS_OF_A_TILE) // self.page_size))
        split = fixed_split_size
        self.tiles = [1 if split is None else -(-n // split) for n in reach.tolist()]

    def run(
        self,
        q: Tensor,
        cache: tuple[Tensor, Tensor],
        *,
        k_scale: float | None = None,
        v_scale: float | None = None,
        return_lse: bool = False,
    ) -> Any:
        indptr, last = self._paged_kv_indptr_buf.tolist(), self._paged_kv_last_page_len_buf.tolist()
        rows, indices = self._qo_indptr_buf.tolist(), self._paged_kv_indices_buf
        assert indices.dtype == torch.int32
        assert q.dtype == self.q_dtype
        assert cache[0].dtype == cache[1].dtype == self.kv_dtype
        assert cache[0].shape[1:] == (self.page_size, 1, self.head_dim)
        assert len(last) == len(self.tiles)
        assert q.shape == (rows[-1], self.group, self.head_dim)
        out = torch.empty_like(q)
        lse = q.new_empty(q.shape[:2], dtype=torch.float32)
        split = any(n > 1 for n in self.tiles)
        for i, num_tiles in enumerate(self.tiles):
            these = slice(rows[i], rows[i + 1])
            ids = indices[indptr[i] : indptr[i + 1]].long()
            kv_len = (indptr[i + 1] - indptr[i] - 1) * self.page_size + last[i]
            k, v = (c[ids, :, 0].flatten(0, 1)[:kv_len].float() for c in cache)
            k = k if k_scale is None else k * k_scale
            out[these], lse[these] = self._entry(q[these].float(), k, v, num_tiles, split)
        if v_scale is not None:
            out *= v_scale
        return (out, lse) if return_lse else out

    def _entry(
        self, q: Tensor, k: Tensor, v: Tensor, num_tiles: int, split: bool
    ) -> tuple[Tensor, Tensor]:
        qo_len, kv_len = len(q), len(k)
        key = torch.arange(kv_len)
        row = torch.arange(qo_len)[:, None]
        mask = torch.ones(qo_len, kv_len, dtype=torch.bool)
        if self.causal:
            mask &= key <= kv_len - qo_len + row
        start = 0
        if self.window_left >= 0:
            mask &= key + qo_len + self.window_left >= kv_len + row
            start = max(0, kv_len - qo_len - self.window_left)
        if split:  # keys beyond the planned tiles are nobody's
            assert self.split is not None
            mask &= key < start + num_tiles * self.split * self.page_size
        logits = torch.einsum("qhd,kd->qhk", q, k) * self.sm_scale
        if self.soft_cap > 0:
            logits = self.soft_cap * torch.tanh(logits / self.soft_cap)
        logits = logits.masked_fill(~mask[:, None], -math.inf)
        lse = logits.logsumexp(-1)
        weights = torch.exp(logits - lse[..., None]).nan_to_num(0.0)
        return torch.einsum("qhk,kd->qhd", weights, v), lse * LOG2E


class DecodeWrapper(Wrapper):
    """Stands for `BatchDecodeWithPagedKVCacheWrapper` on the tensor-core path."""

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        fixed_split_size: int,
        **options: Any,
    ) -> None:
        heads = (num_qo_heads, num_kv_heads, head_dim, page_size)
        one_each = torch.arange(len(last_page_len) + 1, dtype=torch.int32)
        self._plan(
            one_each,
            indptr,
            indices,
            last_page_len,
            heads,
            causal=False,
            fixed_split_size=fixed_split_size,
            **options,
        )


class PrefillWrapper(Wrapper):
    """Stands for `BatchPrefillWithPagedKVCacheWrapper`."""

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool,
        **options: Any,
    ) -> None:
        heads = (num_qo_heads, num_kv_heads, head_dim_qk, page_size)
        self._plan(
            qo_indptr,
            paged_kv_indptr,
            paged_kv_indices,
            paged_kv_last_page_len,
            heads,
            causal=causal,
            fixed_split_size=None,
            **options,
        )


def merge_state_in_place(v: Tensor, s: Tensor, v_other: Tensor, s_other: Tensor) -> None:
    """As FlashInfer's, which takes contiguous tensors and base-2 sums."""
    for tensor in (v, s, v_other, s_other):
        assert tensor.is_contiguous()
    merged = torch.logaddexp2(s, s_other)
    a = torch.exp2(s - merged).nan_to_num(0.0)[..., None]
    b = torch.exp2(s_other - merged).nan_to_num(0.0)[..., None]
    v.copy_(a * v.float() + b * v_other.float())
    s.copy_(merged)


def install() -> None:
    """In place of FlashInfer's, in this process."""
    from sglang_kv.kernels.flashinfer import wrappers

    wrappers.decode_wrapper = DecodeWrapper
    wrappers.prefill_wrapper = PrefillWrapper
    wrappers.merge_state_in_place = merge_state_in_place
