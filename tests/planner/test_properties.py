"""Laws of the arithmetic, over models, policies, lengths, pages and devices."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from policies import random_policy

from sglang_kv.compression import parse_policy
from sglang_kv.planner.capacity import Device, make_plan
from sglang_kv.planner.find import find_model
from sglang_kv.planner.memory import (
    Need,
    Serving,
    assumed_gates,
    model_gates,
    page_bytes,
    request_need,
    requests_at_once,
)
from sglang_kv.planner.units import parse_size, parse_tokens

NAMES = ("llama-3-8b", "qwen2.5-7b", "smollm2-135m-instruct", "qwen3.8-27b", "nemotron-h-8b")
#: Models that only `none` can be planned for.
OTHERS = ("mistral-7b-v0.1", "gemma-3-27b", "gpt-oss-20b", "deepseek-v3")
MODELS = {name: find_model(name) for name in (*NAMES, *OTHERS)}
GATES = {name: model_gates(MODELS[name]) or assumed_gates(MODELS[name]) for name in NAMES}

models = st.sampled_from(NAMES)
lengths = st.integers(1, 200_000)
pages = st.sampled_from([1, 8, 16, 32])
seeds = st.integers(0, 2**32)


def need(name: str, spec: Any, tokens: int, page: int, new: int = 0, **serving: Any) -> Need:
    policy = parse_policy(spec)
    options = Serving(page_size=page, **serving)
    return request_need(MODELS[name], policy, options, tokens, new, GATES.get(name))


def policy_of(seed: int) -> dict[str, Any]:
    return random_policy(random.Random(seed))


@given(models | st.sampled_from(OTHERS), lengths, lengths, pages)
def test_more_context_never_takes_less(name: str, a: int, b: int, page: int) -> None:
    low, high = (need(name, "none", n, page) for n in sorted((a, b)))
    assert low.kv <= high.kv
    assert low.peak <= high.peak
    assert low.fixed == high.fixed


@given(models, seeds, lengths, lengths, pages)
@settings(max_examples=200)
def test_a_policy_is_monotone_but_for_its_pages(
    name: str, seed: int, a: int, b: int, page: int
) -> None:
    """A window or a budget that ends inside a page may take one page more per stream than a little
    later. With pages of one token there is nothing to round, and no such step."""
    spec = policy_of(seed)
    low, high = (need(name, spec, n, page) for n in sorted((a, b)))
    model = MODELS[name]
    streams = len(model.full) * model.full[0].kv_heads
    slack = 0 if page == 1 else streams
    if spec.get("granularity") == "page" or spec.get("head_budgets", "equal") != "equal":
        slack = streams * 2 * page  # kept in whole pages, whose last one is partly filled
    if spec["method"] == "h2o":  # folds again and again: a saw
        slack += streams * (spec.get("interval", 16) // page + 1)
    assert low.pages <= high.pages + slack


@given(models, seeds, lengths, pages, st.integers(0, 300))
@settings(max_examples=200)
def test_it_is_never_less_than_what_is_kept(
    name: str, seed: int, tokens: int, page: int, new: int
) -> None:
    found = need(name, policy_of(seed), tokens, page, new)
    model = MODELS[name]
    streams = len(model.full) * model.full[0].kv_heads
    # The mean is rounded to a whole token.
    assert found.pages * page >= (found.kept_tokens - 0.5) * streams
    assert found.kept_tokens <= tokens + new
    page_size = page_bytes(model.full[0], Serving(page_size=page))
    assert found.kv == found.pages * page_size
    assert found.peak >= found.steady


@given(models, seeds, lengths, pages)
def test_a_policy_never_takes_more_than_none(name: str, seed: int, tokens: int, page: int) -> None:
    """Between two steps; a partly filled page beside the sinks is all it may add."""
    model = MODELS[name]
    slack = 2 * len(model.full) * model.full[0].kv_heads
    assert need(name, policy_of(seed), tokens, page).pages <= (
        need(name, "none", tokens, page).pages + slack
    )


@given(models | st.sampled_from(OTHERS), lengths, pages, st.integers(1, 500))
def test_requests_add_up(name: str, tokens: int, page: int, count: int) -> None:
    """Linear in requests: uncompressed, but for one prefill's peak."""
    serving = Serving(page_size=page)
    one, many, more = (
        make_plan(MODELS[name], "none", serving, Device(), prompt=tokens, requests=n)
        for n in (1, count, count + 1)
    )
    assert more.total - many.total == one.need.steady
    assert many.total == (count - 1) * one.need.steady + one.need.peak


@given(st.integers(0, 10**12), st.integers(1, 10**9), st.integers(1, 10**9))
def test_what_fits_fits_and_one_more_does_not(room: int, steady: int, peak: int) -> None:
    count = requests_at_once(room, steady, peak)
    newest = max(steady, peak)
    assert count == 0 or (count - 1) * steady + newest <= room
    assert count * steady + newest > room


@given(st.sampled_from(NAMES[:3]), lengths, pages, st.sampled_from([1, 2, 4, 8, 16]))
def test_devices_hold_at_least_their_share(name: str, tokens: int, page: int, ranks: int) -> None:
    model = MODELS[name]
    heads, query = model.full[0].kv_heads, model.full[0].query_heads
    if query % ranks or (heads % ranks and ranks % heads):
        return
    whole = need(name, "none", tokens, page).kv
    each = need(name, "none", tokens, page, tp_size=ranks).kv
    assert each * ranks >= whole
    assert each == whole // min(ranks, heads)


@given(st.integers(0, 10**6), st.sampled_from(["B", "KB", "MB", "GB", "KiB", "MiB", "GiB"]))
def test_sizes_are_read_back(number: int, unit: str) -> None:
    size = parse_size(f"{number}{unit}", "x")
    assert size == number * parse_size(f"1{unit}", "x") == parse_size(f"{number} {unit}", "x")


@given(st.integers(0, 2**20))
def test_tokens_are_read_back(number: int) -> None:
    assert parse_tokens(f"{number}k", "x") == number * 1024
    assert parse_tokens(f"{number:,}", "x") == parse_tokens(str(number), "x") == number
