"""The reference itself: against torch's attention where it has the op, else against plain loops."""

import math
from collections.abc import Callable

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from sglang_kv.kernels import reference
from sglang_kv.kernels.layout import PagedStreams

MakeStreams = Callable[..., PagedStreams]


@pytest.mark.parametrize("group", [1, 3])
def test_dense_extend_is_torch_attention(make_streams: MakeStreams, group: int) -> None:
    streams = make_streams([37], dtype=torch.float32)
    q = torch.randn(37, 2 * group, 64)
    out, lse = reference.extend(q, torch.tensor([0, 37]), streams, 0, sm_scale=0.125)
    tokens = [reference.stream_tokens(streams, int(streams.slots[0]), 0, h) for h in range(2)]
    k, v = (torch.stack(rows) for rows in zip(*tokens, strict=True))
    expected = scaled_dot_product_attention(
        q.transpose(0, 1), k, v, is_causal=True, scale=0.125, enable_gqa=True
    )
    torch.testing.assert_close(out, expected.transpose(0, 1), atol=1e-6, rtol=1e-5)
    scores = torch.einsum("qhd,hkd->qhk", q, k.repeat_interleave(group, 0)) * 0.125
    scores = scores.masked_fill(torch.ones(37, 1, 37).triu(1 - 37).transpose(0, 2) == 0, 0.0)
    last = scores[-1].logsumexp(-1) / math.log(2)
    torch.testing.assert_close(lse[-1], last, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window_left", [-1, 0, 5, 100])
@pytest.mark.parametrize("num_sinks", [0, 1, 4, 6])
@pytest.mark.parametrize("layer_window_left", [-1, 7])
@pytest.mark.parametrize("gap", [0, 8])
def test_mask_is_the_definition(
    window_left: int, num_sinks: int, layer_window_left: int, gap: int
) -> None:
    kv_len, page_size = 23, 4
    desc = torch.tensor([kv_len, gap, num_sinks, window_left])
    mask = reference.visible_mask(kv_len, desc, page_size, layer_window_left)
    sink_pages = math.ceil(num_sinks / page_size)
    position = [i if i < sink_pages * page_size else i + gap for i in range(kv_len)]
    for query in range(kv_len):
        for key in range(kv_len):
            distance = position[query] - position[key]
            seen = key <= query
            if window_left >= 0:
                seen = seen and (position[key] < num_sinks or distance <= window_left)
            if layer_window_left >= 0:
                seen = seen and distance <= layer_window_left
            assert mask[query, key] == seen


def test_one_query_by_hand(make_streams: MakeStreams) -> None:
    """A soft cap, a sink and a window of two, on a stream of five tokens."""
    streams = make_streams([5], num_kv_heads=1, dtype=torch.float32, policies=[(0, 1, 1)])
    q = torch.randn(1, 1, 64)
    out, lse = reference.decode(q, streams, 0, sm_scale=0.5, logits_soft_cap=3.0)
    k, v = reference.stream_tokens(streams, int(streams.slots[0]), 0, 0)
    weights = [math.exp(3 * math.tanh(float(q[0, 0] @ k[i]) * 0.5 / 3)) for i in (0, 3, 4)]
    expected = sum(w * v[i] for w, i in zip(weights, (0, 3, 4), strict=True)) / sum(weights)
    torch.testing.assert_close(out[0, 0], expected)
    assert float(lse) == pytest.approx(math.log2(sum(weights)), abs=1e-5)


def test_an_empty_stream_gives_zeros(make_streams: MakeStreams) -> None:
    streams = make_streams([0, 3])
    out, lse = reference.decode(torch.randn(2, 4, 64), streams, 0, sm_scale=0.125)
    assert (out[0] == 0).all()
    assert (lse[0] == -math.inf).all()
    assert out.isfinite().all()
