"""The device's copy of the ledger, and the backend's contract with CUDA graphs, on a CPU."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("sglang")

from ledger_harness import Req
from mirrored_harness import Mirrored
from policies import all_variants, label

from sglang_kv import runtime
from sglang_kv.backend_gpu import DeviceAttnBackend
from sglang_kv.compression import Compressor, parse_policy
from sglang_kv.device_streams import DeviceStreams
from sglang_kv.kernel_paths import kernels_of
from sglang_kv.kernels import reference
from sglang_kv.kernels.layout import KV_LEN, PagedStreams, allocate_pages
from sglang_kv.streams import StreamTable

CPU = torch.device("cpu")


@pytest.mark.parametrize("policy", all_variants()[::3], ids=label)
def test_the_copy_follows_the_ledger(policy: Compressor) -> None:
    h = Mirrored(pool_tokens=4096)
    tokens = list(range(100))
    requests = [Req([i, *tokens], p) for i, p in enumerate([policy, parse_policy("none"), policy])]
    for req in requests:
        h.admit(req)
        while req.extend_end < len(req.full_untruncated_fill_ids):
            h.extend(req, 37)
            h.checkpoint(req)
    for token in range(24):
        for req in requests:
            h.decode(req, token)
    h.release(requests[0], publish=True)
    again = Req([0, *tokens, 5, 6, 7], policy)  # its slot, and perhaps its pages
    h.admit(again)
    h.extend(again, 200)
    h.decode(again, 1)


def test_the_copy_follows_a_request_that_goes_on_from_a_thinned_prefix() -> None:
    """In a slot that another request has left, and with other pages than that one had."""
    policy = parse_policy({"method": "duoattention", "sinks": 3, "recent": 10, "sparsity": 0.5})
    none, ids = parse_policy("none"), list(range(160))
    h = Mirrored(pool_tokens=4096, thinned_for=policy)
    for req in (Req(ids, none), Req(list(range(500, 700)), none), Req([*ids, 1], policy)):
        req.thinned = req.policy is policy
        h.admit(req)
        h.extend(req, 200)
        h.checkpoint(req)
        h.decode(req, 5)
        h.release(req, publish=req.policy is none)
        if not req.thinned:
            h.tree.evict_pages(h.ledger.pool.num_free + 1)
    assert req.sglang_kv.report()["thinned_prefix_tokens"] == 160  # type: ignore[index]


def test_only_what_changed_is_copied() -> None:
    host = StreamTable(2, 3, pages=64)
    mirror = DeviceStreams(host, CPU)
    slot = host.take()
    mirror.table.fill_(-7)
    host.table[slot, :, :, 5:9] = 4
    host.touch(slot, 5, 9)
    layers, heads = np.array([0, 1]), np.array([2, 0])
    host.table[slot, layers, heads, [20, 30]] = 5
    host.touch_each(slot, layers, heads, np.array([20, 30]))
    mirror.sync(np.array([slot], dtype=np.int32))
    expected = torch.full_like(mirror.table, -7)
    expected[slot, :, :, 5:9] = 4
    expected[slot, 0, 2, 20] = expected[slot, 1, 0, 30] = 5
    assert torch.equal(mirror.table, expected)


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> DeviceAttnBackend:
    """Of three requests of 40, 7 and 100 tokens, without a server around it."""
    torch.manual_seed(0)
    made: DeviceAttnBackend = object.__new__(DeviceAttnBackend)
    table = StreamTable(2, 3)
    slots = [table.take() for _ in range(3)]
    pages = allocate_pages(200, 16, 64, torch.float32)
    pages.normal_()
    for slot, length in zip(slots, (40, 7, 100), strict=True):
        table.table[slot, :, :, :8] = torch.randperm(200)[: 2 * 3 * 8].view(2, 3, 8)
        table.touch(slot, 0, 8)
        table.desc[slot, :, :, KV_LEN] = length
    made.ledger = SimpleNamespace(  # type: ignore[assignment]
        streams=table, rows={}, row_to_slot=np.array([0, *slots], dtype=np.int32), page_size=16
    )
    made.token_to_kv_pool = SimpleNamespace(pages=pages)  # type: ignore[assignment]
    made.device, made.kernels, made.flashinfer = CPU, kernels_of("cpu"), None
    made._device_streams = DeviceStreams(table, CPU)  # noqa: SLF001
    made._context_pages = 64  # noqa: SLF001
    monkeypatch.setattr(runtime, "_rows", np.array([1, 2, 3]))
    return made


def test_graphs_find_each_step_at_the_same_address(backend: DeviceAttnBackend) -> None:
    """What a capture recorded, three requests and a padded row; then they grow and one leaves."""
    step = SimpleNamespace(batch_size=4)
    backend.init_cuda_graph_state(4, 4)
    backend.init_forward_metadata_out_graph(step, in_capture=True)  # type: ignore[arg-type]
    captured: PagedStreams = backend._streams  # noqa: SLF001
    options = {"sm_scale": 0.125, "logits_soft_cap": 0.0, "layer_window_left": -1}
    tables = backend.ledger.streams
    for rows in ([1, 2, 3], [1, 2, 3], [3, 1]):
        runtime.announce_rows(np.array(rows))
        tables.fit(2 * tables.table.shape[3])  # the ledger's own table may move
        tables.desc[1:, :, :, KV_LEN] += 1
        backend.init_forward_metadata_out_graph(step)  # type: ignore[arg-type]
        backend.init_forward_metadata_in_graph(step)  # type: ignore[arg-type]
        q = torch.randn(4, 6, 64)
        for layer in range(2):
            # The captured tensors, not those of this step: a replay has nothing else.
            out = kernels_of("cpu").decode(q, captured, layer, **options)
            slots = torch.from_numpy(backend.ledger.row_to_slot[rows])
            now = PagedStreams(captured.pages, tables.table_tensor, tables.desc_tensor, slots)
            expected, _ = reference.decode(q[: len(rows)], now, layer, sm_scale=0.125)
            torch.testing.assert_close(out[: len(rows)], expected, atol=1e-4, rtol=0)
            assert (out[len(rows) :] == 0).all()


def test_a_table_that_graphs_cannot_have_is_refused(backend: DeviceAttnBackend) -> None:
    backend._context_pages = 1 << 20  # noqa: SLF001
    with pytest.raises(ValueError, match="--cuda-graph-max-bs"):
        backend.init_cuda_graph_state(512, 512)


def test_which_batches_a_graph_serves(backend: DeviceAttnBackend) -> None:
    assert backend.graph_serves()
    backend.ledger.streams.last_position[2] = 63  # StreamingLLM's positions in the cache
    assert not backend.graph_serves()
    runtime.announce_rows(np.array([1, 3]))
    assert backend.graph_serves()
    scored = SimpleNamespace(length=41, scored_queries=lambda begin, end: 0)
    backend.ledger.rows[1] = scored  # type: ignore[assignment]
    assert not backend.graph_serves()
