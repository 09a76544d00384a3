import itertools

import pytest
import torch

from sglang_kv.kernels.attention import visible_ranges
from sglang_kv.kernels.reference import visible_mask


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("layer_window_left", [-1, 0, 6, 40])
def test_ranges_are_the_mask(page_size: int, layer_window_left: int) -> None:
    kv_len = 21
    grid = itertools.product([-1, 0, 3, 12, 100], [0, 1, 4, 5, 30], [0, 4, 16])
    for window_left, num_sinks, gap in grid:
        desc = torch.tensor([kv_len, gap, num_sinks, window_left])
        mask = visible_mask(kv_len, desc, page_size, layer_window_left)
        for index in range(kv_len):
            sinks, window = visible_ranges(
                index,
                gap=gap,
                num_sinks=num_sinks,
                window_left=window_left,
                page_size=page_size,
                layer_window_left=layer_window_left,
            )
            assert [*sinks, *window] == mask[index].nonzero().flatten().tolist()
            if sinks and sinks.stop == window.start:  # else they would be one
                assert gap
                assert sinks.stop % page_size == 0


def test_before_the_first_token_nothing_is_visible() -> None:
    sinks, window = visible_ranges(-1, gap=0, num_sinks=4, window_left=8, page_size=16)
    assert len(sinks) == len(window) == 0
