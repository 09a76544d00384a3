"""Planner and server cannot disagree: the same plans, pages and requests."""

from __future__ import annotations

from dataclasses import replace

import pytest
from arithmetic import held_pages
from policies import all_variants, label

from sglang_kv.benchmarks.concurrency import predicted
from sglang_kv.benchmarks.methods import PAGE, arms, plan_of
from sglang_kv.compression import Compressor, Geometry, PolicyError, parse_policy
from sglang_kv.compression.base import methods
from sglang_kv.compression.gates import find_gates
from sglang_kv.kernels.layout import ALIGNMENT_BYTES
from sglang_kv.planner.capacity import Device, make_plan
from sglang_kv.planner.find import find_model
from sglang_kv.planner.memory import (
    ALIGNMENT,
    Serving,
    assumed_gates,
    geometry,
    model_gates,
    page_bytes,
    request_need,
)
from sglang_kv.planner.model import Attention
from sglang_kv.planner.units import KV_DTYPES, parse_dtype

DEMO = find_model("smollm2-135m-instruct")
GEOMETRY = Geometry(30, 3, PAGE, find_gates("SmolLM2-135M-Instruct", 30, 3))


def test_the_demo_model_s_geometry() -> None:
    found = geometry(DEMO, Serving(page_size=PAGE), model_gates(DEMO))
    assert found._replace(heads=slice(None)) == GEOMETRY


@pytest.mark.parametrize("policy", all_variants(), ids=label)
@pytest.mark.parametrize("tokens", [1, 60, 100, 1000, 4000])
def test_pages_of_a_request(policy: Compressor, tokens: int) -> None:
    """At the fold, exactly what the ledger holds then."""
    found = request_need(DEMO, policy, Serving(page_size=PAGE), tokens, 0, GEOMETRY.gates)
    plan = policy.plan(tokens, GEOMETRY)
    assert found.pages == plan.pages(tokens) == held_pages(plan, tokens, tokens)
    published = (plan.dense_prefix or 0) // PAGE
    assert found.peak_pages == plan.peak_pages(tokens, 8192, published=published)
    assert found.kept_tokens == plan.kept_tokens(tokens)


@pytest.mark.parametrize("method", methods())
def test_pages_while_it_decodes(method: str) -> None:
    """What the ledger holds at any of the answer's tokens, or more; a window that moves is dropped
    from a step later, which is one page per stream."""
    policy = parse_policy(method)
    plan = policy.plan(4000, GEOMETRY)
    for new in range(0, 200, 7):
        found = request_need(DEMO, policy, Serving(page_size=PAGE), 4000, new, GEOMETRY.gates)
        held = held_pages(plan, 4000, 4000 + new)
        assert held is not None
        assert found.pages == plan.pages(4000 + new) >= held - GEOMETRY.num_streams


@pytest.mark.parametrize("arm", arms(4000))
@pytest.mark.parametrize("pool", [1000, 8_000, 34_000])
def test_requests_at_once_are_the_benchmark_s(arm: str, pool: int) -> None:
    """In bytes as in pages: a device with room for the benchmark's pool fits as many."""
    policy, new, chunk = arms(4000)[arm], 64, 4096
    page = page_bytes(DEMO.full[0], Serving(page_size=PAGE))
    room = pool // PAGE * GEOMETRY.num_streams * page
    plan = make_plan(
        DEMO,
        policy,
        Serving(page_size=PAGE, chunk=chunk),
        Device(memory=room, weights=0),
        prompt=4000,
        new=new,
    )
    assert plan.fits is not None
    assert plan.fits.requests == predicted(policy, GEOMETRY, pool, 4000, new, chunk)
    assert plan.need.pages == plan_of(policy, GEOMETRY, 4000).pages(4064)


def test_requests_at_once_that_were_measured() -> None:
    """benchmarks/results/concurrency.jsonl: 8 ran, and 8 were predicted."""
    assert predicted(arms(4000)["none"], GEOMETRY, 34_000, 4000, 64, 4096) == 8


@pytest.mark.parametrize("page_size", [1, 16, 32])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"])
def test_bytes_of_a_page_are_the_pool_s(page_size: int, head_dim: int, dtype: str) -> None:
    torch = pytest.importorskip("torch")
    from sglang_kv.kernels.layout import allocate_pages

    pages = allocate_pages(2, page_size, head_dim, getattr(torch, dtype), "cpu")
    layer = Attention(1, head_dim, head_dim, 1)
    short = parse_dtype(f"torch.{dtype}", "dtype", KV_DTYPES)
    serving = Serving(kv_dtype=short, page_size=page_size)
    assert page_bytes(layer, serving) == pages.stride(0) * pages.element_size()
    assert ALIGNMENT == ALIGNMENT_BYTES


def test_a_server_refuses_what_the_planner_refuses() -> None:
    """Unequal heads under tensor parallelism: the policy's own words."""
    layer = replace(DEMO.full[0], kv_heads=4, query_heads=4)
    model = replace(DEMO, caches=(layer,) * 30)
    gates = assumed_gates(model)
    with pytest.raises(PolicyError, match="not supported with tensor parallelism"):
        request_need(model, parse_policy("duoattention"), Serving(tp_size=2), 100, 0, gates)
