"""Random streams, and the C++ ops under each instruction set."""

from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from pathlib import Path

import pytest
import torch

from sglang_kv.kernels import jit
from sglang_kv.kernels.layout import PagedStreams, allocate_pages

DENSE = (0, 0, -1)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """The tensors are small: a second thread would wait, and so would who else needs the CPU.

    What two threads do is tested where it is the point, in test_invariance.py.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# Where there is no AVX-512 to leave out, both are one library, byte for byte: see test_jit.py.
ISAS = ["native", "plain"] if "avx512f" in Path("/proc/cpuinfo").read_text() else ["native"]


@pytest.fixture(params=ISAS, scope="module")
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs the tests of a module once per instruction set."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_KV_CPU_ISA", request.param)
        jit.load_kernels.cache_clear()
        yield request.param
    jit.load_kernels.cache_clear()


@pytest.fixture
def make_streams() -> Callable[..., PagedStreams]:
    """Builds a batch of random streams.

    `kv_lens` gives one length per request or one per KV head of each; `policies`, (gap, num_sinks,
    window_left), are dealt to the streams in turn. Page ids and slots are shuffled. Whatever
    belongs to no token, in the pool and in its last pages, is NaN.
    """

    def make(
        kv_lens: Sequence[int | Sequence[int]],
        *,
        num_layers: int = 1,
        num_kv_heads: int = 2,
        head_dim: int = 64,
        page_size: int = 16,
        dtype: torch.dtype = torch.bfloat16,
        policies: Sequence[tuple[int, int, int]] = (DENSE,),
    ) -> PagedStreams:
        num_slots = len(kv_lens) + 2
        lens = [[n] * num_kv_heads if isinstance(n, int) else list(n) for n in kv_lens]
        max_pages = max(-(-max(map(max, lens)) // page_size), 1)
        num_streams = num_slots * num_layers * num_kv_heads
        pages = allocate_pages(num_streams * max_pages + 3, page_size, head_dim, dtype)
        pages.fill_(torch.nan)
        ids = torch.randperm(len(pages))[: num_streams * max_pages].int()
        table = ids.view(num_slots, num_layers, num_kv_heads, max_pages).contiguous()
        desc = torch.zeros(num_slots, num_layers, num_kv_heads, 4, dtype=torch.int32)
        slots = torch.randperm(num_slots)[: len(kv_lens)].int()
        policy = cycle(policies)
        for slot, head_lens in zip(slots.tolist(), lens, strict=True):
            for layer in range(num_layers):
                for head, kv_len in enumerate(head_lens):
                    desc[slot, layer, head] = torch.tensor([kv_len, *next(policy)])
                    index = torch.arange(kv_len)
                    page = table[slot, layer, head, index // page_size].long()
                    values = torch.randn(kv_len, 2, head_dim).to(dtype)
                    pages[page, :, index % page_size] = values
        return PagedStreams(pages, table, desc, slots)

    return make
