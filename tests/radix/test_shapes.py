"""Traffic with the shape of public traces has the figures that it says it has."""

from __future__ import annotations

import numpy as np
import pytest

from sglang_kv.radix.optimum import optimum
from sglang_kv.radix.shapes import BLOCK, GOES_ON, conversation, tool_agent
from sglang_kv.radix.trace import Request


def means(requests: list[Request]) -> tuple[float, float]:
    prompts = [r.prompt_tokens for r in requests]
    answers = [r.total_tokens - r.prompt_tokens for r in requests]
    return float(np.mean(prompts)), float(np.mean(answers))


def test_conversations_are_as_long_as_published() -> None:
    """Mooncake's README: 12,035 tokens in and 343 out; 37 % of its blocks were there before."""
    requests = conversation(0, requests=1200)
    prompt, answer = means(requests)
    assert prompt == pytest.approx(12_035, rel=0.1)
    assert answer == pytest.approx(343, rel=0.1)
    reused = optimum(requests, 2**40, page_size=BLOCK) / sum(r.prompt_tokens for r in requests)
    assert 0.27 < reused < 0.45
    later = sum(len(r.prompt) > 3 for r in requests) / len(requests)
    assert GOES_ON[0] < later < 0.45  # 33 % of the trace's requests go on from another


def test_tools_share_their_blocks() -> None:
    """The README: 8,596 tokens in, 182 out, where a third more or less is conversations' noise."""
    requests = tool_agent(0, requests=1200)
    prompt, answer = means(requests)
    assert prompt == pytest.approx(8_596, rel=0.15)
    assert answer == pytest.approx(182, rel=0.25)
    first = [r.prompt[0] for r in requests]
    assert {first.count(one) for one in set(first) if one[1] == 12 * BLOCK} == {600}


def test_a_seed_is_a_trace() -> None:
    one, two, other = (conversation(seed, requests=40) for seed in (3, 3, 4))
    assert [r.prompt for r in one] == [r.prompt for r in two] != [r.prompt for r in other]
