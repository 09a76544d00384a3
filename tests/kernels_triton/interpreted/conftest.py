"""Random streams in any dtype."""

from collections.abc import Callable, Iterator, Sequence
from itertools import cycle

import pytest
import torch
from quick_interpreter import swap_language_once

from sglang_kv.kernels.layout import PagedStreams, allocate_pages

DENSE = (0, 0, -1)

swap_language_once()


@pytest.fixture(autouse=True)
def _seeded_and_alone() -> Iterator[None]:
    torch.manual_seed(0)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def make_streams() -> Callable[..., PagedStreams]:
    """Builds a batch of random streams.

    `kv_lens` gives one length per request or one per KV head of each; `policies`, (gap, num_sinks,
    window_left), are dealt to the streams in turn. Page ids and slots are shuffled. Whatever
    belongs to no token, in the pool and in its last pages, is NaN, and no page of the pool.
    """

    def make(
        kv_lens: Sequence[int | Sequence[int]],
        *,
        num_layers: int = 1,
        num_kv_heads: int = 1,
        head_dim: int = 64,
        page_size: int = 16,
        dtype: torch.dtype = torch.bfloat16,
        policies: Sequence[tuple[int, int, int]] = (DENSE,),
    ) -> PagedStreams:
        lens = [[n] * num_kv_heads if isinstance(n, int) else list(n) for n in kv_lens]
        num_slots = len(lens) + 1
        max_pages = max(-(-max(map(max, lens)) // page_size), 1) + 1
        num_streams = num_slots * num_layers * num_kv_heads
        pages = allocate_pages(num_streams * max_pages + 3, page_size, head_dim, dtype)
        pages.copy_(torch.full(pages.shape, torch.nan))
        ids = torch.randperm(len(pages))[: num_streams * max_pages].int()
        table = ids.view(num_slots, num_layers, num_kv_heads, max_pages).contiguous()
        desc = torch.zeros(num_slots, num_layers, num_kv_heads, 4, dtype=torch.int32)
        slots = torch.randperm(num_slots)[: len(lens)].int()
        policy = cycle(policies)
        for slot, head_lens in zip(slots.tolist(), lens, strict=True):
            for layer in range(num_layers):
                for head, kv_len in enumerate(head_lens):
                    desc[slot, layer, head] = torch.tensor([kv_len, *next(policy)])
                    used = -(-kv_len // page_size)
                    for i, page in enumerate(table[slot, layer, head, :used].tolist()):
                        tokens = min(kv_len - i * page_size, page_size)
                        values = torch.randn(2, tokens, head_dim).to(dtype)
                        pages[page, :, :tokens] = values
                    table[slot, layer, head, used:] = 2**30
        return PagedStreams(pages, table, desc, slots)

    return make
