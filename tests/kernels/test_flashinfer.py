"""FlashInfer's arguments, carried out by an executor of its layout, against the reference."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flashinfer_executor
import numpy as np
import pytest
import torch
from torch import Tensor

from sglang_kv.kernels import reference
from sglang_kv.kernels.attention import visible_ranges
from sglang_kv.kernels.flashinfer import entries, wrappers
from sglang_kv.kernels.flashinfer.attention import FlashInferAttention, LayerOptions
from sglang_kv.kernels.layout import FP8_DTYPES, KV_LEN, PagedStreams

MakeStreams = Callable[..., PagedStreams]

# gap, num_sinks, window_left: dense, window, sinks and window, dropped middle, sinks only, half a
# page of sinks, a window that reaches the sinks.
POLICIES = [
    (0, 0, -1),
    (0, 0, 20),
    (0, 4, 31),
    (64, 4, 15),
    (32, 16, 0),
    (96, 24, 50),
    (32, 8, 40),
]
OPTIONS = LayerOptions(sm_scale=0.125)


@pytest.fixture(autouse=True)
def _executor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wrappers, "decode_wrapper", flashinfer_executor.DecodeWrapper)
    monkeypatch.setattr(wrappers, "prefill_wrapper", flashinfer_executor.PrefillWrapper)
    monkeypatch.setattr(wrappers, "merge_state_in_place", flashinfer_executor.merge_state_in_place)


def attention_of(
    streams: PagedStreams, group: int, *layers: LayerOptions, dtype: torch.dtype = torch.float32
) -> FlashInferAttention:
    heads = streams.num_kv_heads
    return FlashInferAttention(
        layers or (OPTIONS,) * streams.table.shape[1],
        num_qo_heads=group * heads,
        num_kv_heads=heads,
        head_dim=streams.head_dim,
        page_size=streams.page_size,
        q_dtype=dtype,
        kv_dtype=streams.pages.dtype,
        device="cpu",
    )


def plan_decode(fi: FlashInferAttention, streams: PagedStreams, version: Any = 0) -> None:
    slots = streams.slots.numpy()
    fi.plan_decode(streams, slots, streams.desc.numpy()[slots], version)


def check_decode(fi: FlashInferAttention, streams: PagedStreams, q: Tensor, **more: Any) -> None:
    for layer, options in enumerate(fi.layers):
        out, lse = fi.run(q, layer, return_lse=True, **more)
        expected, expected_lse = reference.decode(
            q,
            streams,
            layer,
            sm_scale=options.sm_scale,
            logits_soft_cap=options.logits_soft_cap,
            layer_window_left=options.window_left,
            k_scale=options.k_scale,
            v_scale=options.v_scale,
            **more,
        )
        torch.testing.assert_close(out, expected, atol=1e-4, rtol=0)
        torch.testing.assert_close(lse, expected_lse, atol=1e-4, rtol=0)


def check_extend(
    fi: FlashInferAttention, streams: PagedStreams, counts: list[int], q: Tensor, **more: Any
) -> None:
    indptr = [0, *itertools.accumulate(counts)]
    slots = streams.slots.numpy()
    fi.plan_extend(streams, slots, streams.desc.numpy()[slots], indptr)
    for layer, options in enumerate(fi.layers):
        out, lse = fi.run(q, layer, return_lse=True, **more)
        expected, expected_lse = reference.extend(
            q,
            torch.tensor(indptr),
            streams,
            layer,
            sm_scale=options.sm_scale,
            logits_soft_cap=options.logits_soft_cap,
            layer_window_left=options.window_left,
            k_scale=options.k_scale,
            v_scale=options.v_scale,
            **more,
        )
        torch.testing.assert_close(out, expected, atol=1e-4, rtol=0)
        torch.testing.assert_close(lse, expected_lse, atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", FP8_DTYPES, ids=["e4m3", "e5m2"])
def test_fp8_pages(make_streams: MakeStreams, dtype: torch.dtype) -> None:
    """Layers that share a plan differ in their scales; sinks apart are merged in the same units."""
    streams = make_streams([300, 40, 17], num_layers=3, dtype=dtype, policies=[(64, 4, 15)])
    options = [OPTIONS._replace(k_scale=k, v_scale=v) for k, v in ((1, 1), (0.4, 3), (2, 0.1))]
    fi = attention_of(streams, 3, *options)
    plan_decode(fi, streams)
    check_decode(fi, streams, torch.randn(3, 6, 64), sink_q=torch.randn(3, 6, 64))
    check_extend(fi, streams, [20, 1, 17], torch.randn(38, 6, 64))


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("layer_window_left", [-1, 0, 6, 40])
def test_ranges_are_those_of_the_kernels(page_size: int, layer_window_left: int) -> None:
    index = np.arange(70)
    grid = itertools.product([-1, 0, 3, 12, 100], [0, 1, 4, 16, 30], [0, 16, 32])
    for window_left, num_sinks, gap in grid:
        desc = np.array([70, gap, num_sinks, window_left], dtype=np.int32)
        found = entries.visible_ranges(index, desc, page_size, layer_window_left)
        for i, sink_begin, sink_stop, begin in zip(index.tolist(), *found, strict=True):
            sinks, window = visible_ranges(
                i,
                gap=gap,
                num_sinks=num_sinks,
                window_left=window_left,
                page_size=page_size,
                layer_window_left=layer_window_left,
            )
            assert window == range(begin, i + 1)
            assert [*sinks] == [*range(sink_begin, sink_stop)]


@pytest.mark.parametrize(
    ("page_size", "layer_window_left", "turned"),
    [
        (1, -1, True),
        (16, -1, False),
        (16, 25, True),
        (16, 90, False),
        (32, -1, True),
        (32, 25, False),
    ],
)
def test_a_policy_for_each_stream(
    make_streams: MakeStreams, page_size: int, layer_window_left: int, turned: bool
) -> None:
    lens = [[97, 40, 5], [128, 130, 16], [17, 200, 64], [64, 33, 0], [300, 129, 80]]
    streams = make_streams(
        lens, num_layers=2, num_kv_heads=3, page_size=page_size, policies=POLICIES
    )
    layers = (OPTIONS._replace(window_left=layer_window_left), OPTIONS)
    fi = attention_of(streams, 2, *layers)
    q, sink_q = torch.randn(2, 5, 6, 64)
    plan_decode(fi, streams)
    check_decode(fi, streams, q, **({"sink_q": sink_q} if turned else {}))
    counts = [1, 16, 1, 0, 70]
    q, sink_q = torch.randn(2, sum(counts), 6, 64)
    check_extend(fi, streams, counts, q, **({"sink_q": sink_q} if turned else {}))


@pytest.mark.parametrize("group", [1, 3, 5, 7, 8, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_groups_and_dtypes(make_streams: MakeStreams, group: int, dtype: torch.dtype) -> None:
    streams = make_streams([130, 17, 1], num_kv_heads=2, dtype=dtype, head_dim=128)
    fi = attention_of(streams, group)
    plan_decode(fi, streams)
    check_decode(fi, streams, torch.randn(3, 2 * group, 128))
    check_extend(fi, streams, [75, 3, 1], torch.randn(79, 2 * group, 128))


def test_soft_cap_and_whole_prompts(make_streams: MakeStreams) -> None:
    """From the first token on, through every stage of a window that fills."""
    streams = make_streams([170, 20, 90], policies=[(0, 4, 31), (0, 16, 40), (0, 0, -1)])
    fi = attention_of(streams, 2, LayerOptions(0.125, 5.0))
    plan_decode(fi, streams)
    check_decode(fi, streams, 20 * torch.randn(3, 4, 64))
    check_extend(fi, streams, [170, 20, 90], 20 * torch.randn(280, 4, 64))


def grow(streams: PagedStreams, by: int = 1) -> bool:
    """New tokens in every stream of the batch; whether one took a page. Lists are wide enough."""
    lens = streams.desc[streams.slots.long(), :, :, KV_LEN]
    added = -(-(lens + by) // streams.page_size) != -(-lens // streams.page_size)
    streams.desc[streams.slots.long(), :, :, KV_LEN] += by
    return bool(added.any())


@pytest.fixture
def growing(make_streams: MakeStreams) -> PagedStreams:
    """Streams of 40 tokens and of 1,012, in lists for 1,100, every slot of which is written."""
    lens = [[1100, 1100], [1100, 1100]]
    streams = make_streams(lens, num_layers=3, policies=[(0, 0, -1), (0, 0, -1), (0, 4, 31)])
    streams.pages.nan_to_num_(0.5)
    streams.desc[streams.slots[0].long(), :, :, KV_LEN] = 40
    streams.desc[streams.slots[1].long(), :, :, KV_LEN] = 1012
    return streams


def test_a_plan_lasts_until_the_tiles_change(growing: PagedStreams) -> None:
    """Twenty decode steps: no plan after the first ones but where a stream passes 1,024 tokens or
    a window's page count changes; right at each."""
    fi = attention_of(growing, 2)
    planned = []
    for _ in range(20):
        before = fi.stats.plans
        plan_decode(fi, growing)  # lists are as they were, they only grow
        planned.append(fi.stats.plans - before)
        check_decode(fi, growing, torch.randn(2, 4, 64))
        grow(growing)
    # The first window leaves a page behind at 48 tokens, and all take one at 49; the others do at
    # 1,024 and 1,025, where a stream without a window has a tile more.
    assert [i for i, count in enumerate(planned) if count] == [0, 8, 9, 12, 13]
    assert planned[8] == planned[9] == planned[12] == 1


def test_layers_whose_lengths_agree_share_a_plan(make_streams: MakeStreams) -> None:
    streams = make_streams([70, 200], num_layers=8)
    fi = attention_of(streams, 2)
    plan_decode(fi, streams)
    assert (fi.stats.plans, fi.stats.page_lists) == (1, 1)
    # As with PyramidKV: upper layers keep less.
    streams.desc[streams.slots.long(), 4:, :, KV_LEN] -= 33
    plan_decode(fi, streams, version=1)
    check_decode(fi, streams, torch.randn(2, 4, 64))
    assert fi.stats.plans == 1  # other lengths, the same tiles


def test_neighbours_change_nothing(make_streams: MakeStreams) -> None:
    streams = make_streams([1500, 40, 700], policies=POLICIES)
    fi = attention_of(streams, 2)
    q = torch.randn(3, 4, 64)
    plan_decode(fi, streams)
    together, _ = fi.run(q, 0)
    for b in range(3):
        alone = dataclasses.replace(streams, slots=streams.slots[b : b + 1])
        plan_decode(fi, alone)
        assert torch.equal(fi.run(q[b : b + 1], 0)[0][0], together[b])


# -- planted faults --


def wrong_indptr(fi: FlashInferAttention, streams: PagedStreams) -> None:
    launch = fi._by_layer[0][0]  # noqa: SLF001
    launch.indptr = launch.indptr.clone()
    launch.indptr[1] -= 1


def wrong_last_page_len(fi: FlashInferAttention, streams: PagedStreams) -> None:
    launch = fi._by_layer[0][0]  # noqa: SLF001
    launch.last_page_len = launch.last_page_len % 16 + 1


def stale_tiles(fi: FlashInferAttention, streams: PagedStreams) -> None:
    """A page list of more tiles than the wrapper was planned for."""
    old = [launch.wrapper for launch in fi._by_layer[0]]  # noqa: SLF001
    grow(streams, 60)  # from 1,012 tokens past 1,024
    plan_decode(fi, streams, version=1)
    for launch, wrapper in zip(fi._by_layer[0], old, strict=True):  # noqa: SLF001
        launch.wrapper = wrapper


def stale_page_list(fi: FlashInferAttention, streams: PagedStreams) -> None:
    """A page was replaced, and the planner was not told."""
    streams.table[streams.slots.long(), :, :, 0] = streams.table[streams.slots.long(), :, :, 1]
    plan_decode(fi, streams, version=0)


@pytest.mark.parametrize("fault", [wrong_indptr, wrong_last_page_len, stale_tiles, stale_page_list])
def test_a_planted_fault_is_caught(
    growing: PagedStreams, fault: Callable[[FlashInferAttention, PagedStreams], None]
) -> None:
    fi = attention_of(growing, 2)
    q = torch.randn(2, 4, 64)
    plan_decode(fi, growing)
    check_decode(fi, growing, q)
    fault(fi, growing)
    with pytest.raises(AssertionError):
        check_decode(fi, growing, q)


# -- what FlashInfer has no kernel for --


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"head_dim": 80}, "head_dim must be one of"),
        ({"num_qo_heads": 7}, "num_qo_heads 7"),
        ({"num_qo_heads": 34}, "num_qo_heads: at most 16"),
    ],
)
def test_what_it_cannot_serve_is_said(changed: dict[str, Any], message: str) -> None:
    shape: dict[str, Any] = {"num_qo_heads": 8, "num_kv_heads": 2, "head_dim": 64, "page_size": 16}
    dtypes = {"q_dtype": torch.bfloat16, "kv_dtype": torch.bfloat16}
    with pytest.raises(ValueError, match=message):
        FlashInferAttention([OPTIONS], **{**shape, **changed}, **dtypes, device="cpu")


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    with pytest.raises(ValueError, match="FlashInfer needs an NVIDIA GPU"):
        wrappers.decode_wrapper(torch.zeros(1, dtype=torch.uint8))


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("decode.py", "BatchDecodeWithPagedKVCacheWrapper"),
        ("prefill.py", "BatchPrefillWithPagedKVCacheWrapper"),
    ],
)
def test_the_attributes_that_we_set_are_flashinfers(file: str, name: str) -> None:
    """`run` of the pinned release reads them; were they renamed, plans would be silently stale."""
    found = importlib.util.find_spec("flashinfer")  # not imported: that takes ten seconds
    assert found is not None
    assert found.origin is not None
    source = (Path(found.origin).parent / file).read_text()
    source = source.split(f"\nclass {name}:")[1].split("\nclass ")[0]
    for buffer in ("indptr", "indices", "last_page_len"):
        assert f"self._paged_kv_{buffer}_buf," in source.split("def run(")[-1]
