"""``--kv-compression-min-keep``: no stream is left less, by whichever layer, head or fold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from arithmetic import stream_lengths

from sglang_kv.compression import FoldPlan, Geometry, Plan, PolicyError, parse_policy
from sglang_kv.compression.base import Candidates
from sglang_kv.compression.gates import find_gates
from sglang_kv.compression.least import least_kept
from sglang_kv.config import Options

GEOMETRY = Geometry(30, 3, 16, find_gates("SmolLM2-135M-Instruct", 30, 3))

POLICIES: list[dict[str, Any]] = [
    {"method": "snapkv", "budget": 300},
    {"method": "snapkv", "budget": 300, "granularity": "page"},
    {"method": "snapkv", "keep_ratio": 0.3, "head_budgets": "gates", "head_floor": 0.0},
    {"method": "snapkv", "budget": 300, "head_budgets": "gates", "granularity": "page"},
    {"method": "snapkv", "budget": 300, "decode_budget": 200, "interval": 7},
    {"method": "snapkv", "budget": 300, "decode_budget": 200, "granularity": "page"},
    {"method": "pyramidkv", "budget": 300},
    {"method": "pyramidkv", "keep_ratio": 0.25, "delta": 90, "granularity": "page"},
    {"method": "pyramidkv", "budget": 300, "decode_budget": 250, "interval": 5},
    {"method": "h2o", "budget": 300},
    {"method": "h2o", "budget": 300, "granularity": "page", "interval": 6},
    {"method": "h2o", "budget": 300, "granularity": "page", "interval": 32},
]


def brute_force(plan: FoldPlan, answer: int) -> int:
    """The shortest that a stream ever is after a fold that cut it; all folds of a long answer."""
    assert plan.fold_at is not None
    first = stream_lengths(plan, plan.fold_at, plan.fold_at)
    found = [first[first < plan.fold_at]]
    if plan.interval is not None:
        for now in range(plan.fold_at + plan.interval, plan.fold_at + answer, plan.interval):
            left = stream_lengths(plan, now, now)
            before = stream_lengths(plan, now, now - 1)
            found.append(left[left < before])
    return min(int(lengths.min()) for lengths in found if lengths.size)


@pytest.mark.parametrize("spec", POLICIES, ids=str)
def test_the_least_is_what_folds_come_to(spec: dict[str, Any]) -> None:
    for prompt in (299, 301, 512, 1003, 3000):
        plan = parse_policy(spec).plan(prompt, GEOMETRY)
        least = least_kept(plan)
        if not isinstance(plan, FoldPlan):
            assert least is None
            continue
        assert least is not None
        assert least.tokens == brute_force(plan, 600)
        assert plan.kept is not None
        if not least.in_decode:
            assert plan.kept[least.layer, least.head] == least.tokens


@pytest.mark.parametrize("granularity", ["token", "page"])
@pytest.mark.parametrize("head_floor", [0.0, 0.2, 0.7, 1.0])
@pytest.mark.parametrize("method", ["snapkv", "pyramidkv"])
def test_heads_that_nobody_looks_at_come_to_the_floor(
    method: str, head_floor: float, granularity: str
) -> None:
    spec = {"method": method, "budget": 200, "head_budgets": "adaptive", "head_floor": head_floor}
    plan = parse_policy({**spec, "granularity": granularity}).plan(1003, GEOMETRY)
    assert isinstance(plan, FoldPlan)
    assert plan.policy is not None
    scores = torch.zeros(30, 3, 1003)
    scores[:, 1] = 1.0
    chosen = plan.policy.choose(
        Candidates(
            scores=scores,
            lengths=torch.full((30, 3), 1003),
            kept=torch.from_numpy(plan.kept),
            positions=None,
            num_tokens=1003,
            score_from=plan.score_from,
            page_size=16,
            weights=torch.ones(30, 3),
        )
    )
    counts = chosen.sum(-1).numpy()
    least = least_kept(plan)
    assert least is not None
    assert least.tokens == counts.min() == counts[least.layer, least.head]


def test_windows_keep_theirs() -> None:
    for spec in (
        {"method": "streamingllm", "sinks": 3, "recent": 50},
        {"method": "duoattention", "sinks": 3, "recent": 50},
    ):
        least = least_kept(parse_policy(spec).plan(1000, GEOMETRY))
        assert least is not None
        assert least.tokens == 53
    for spec in ({"method": "duoattention", "sparsity": 0.0}, {"method": "none"}):
        assert least_kept(parse_policy(spec).plan(1000, GEOMETRY)) is None


def test_a_head_is_the_models() -> None:
    """Of four ranks' heads, this one holds the last two of eight."""
    geometry = Geometry(4, 2, 16, heads=slice(6, 8), num_ranks=4)
    least = least_kept(parse_policy("pyramidkv").plan(5000, geometry))
    assert least is not None
    assert (least.layer, least.head) == (3, 6)


def refused(options: Options, spec: dict[str, Any], prompt: int) -> str | None:
    """As the HTTP process and the scheduler do, one after the other."""
    try:
        policy, _ = options.policy_for(spec)
        plan: Plan = policy.plan(prompt, GEOMETRY)
        options.check_kept(policy, plan, spec)
    except PolicyError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("spec", "least", "message"),
    [
        ({"method": "pyramidkv"}, 133, "budget: 'pyramidkv' leaves head 0 of layer 29 with 133"),
        ({"method": "snapkv", "budget": 1000, "granularity": "page"}, 988, "budget: 'snapkv' le"),
        ({"method": "h2o", "budget": 1000, "granularity": "page"}, 988, "budget: 'h2o' leaves h"),
        ({"method": "h2o", "recent": 300, "granularity": "page"}, 1308, "heavy: 'h2o' leaves h"),
        (
            {"method": "snapkv", "budget": 2000, "decode_budget": 1000, "granularity": "page"},
            988,
            "decode_budget: 'snapkv' leaves head 0 of layer 0 with 988 tokens in decode, below",
        ),
        (
            {"method": "pyramidkv", "beta": 1.0, "decode_budget": 1000},
            1000,
            "decode_budget: 'pyramidkv' keeps 1000 tokens, below",
        ),
        (
            {"method": "pyramidkv", "keep_ratio": 0.4, "min_budget": 2000},
            130,
            "min_budget: 'pyramidkv' leaves head 0 of layer 29 with",
        ),
        ({"method": "streamingllm", "budget": 900}, 900, "budget: 'streamingllm' keeps 900 tok"),
        ({"method": "duoattention"}, 320, "recent: 'duoattention' keeps 320 tokens, below"),
    ],
    ids=str,
)
def test_one_token_more_is_refused(spec: dict[str, Any], least: int, message: str) -> None:
    """For a prompt of 5,004 tokens, whose last page holds 12."""
    assert refused(Options(method="none", min_keep=least), spec, 5004) is None
    said = refused(Options(method="none", min_keep=least + 1), spec, 5004)
    assert said is not None
    assert said.startswith(f"kv_compression.{message}")
    assert said.endswith(f"this server's --kv-compression-min-keep {least + 1}")


@pytest.mark.parametrize("head_budgets", ["gates", "adaptive"])
def test_heads_with_little_are_refused(head_budgets: str) -> None:
    spec = {"method": "snapkv", "budget": 1024, "head_budgets": head_budgets}
    said = refused(Options(method="none", min_keep=1000), spec, 5004)
    assert said is not None
    assert said.startswith("kv_compression.budget: 'snapkv' leaves head ")
    spec["head_floor"] = 1.0
    assert refused(Options(method="none", min_keep=1000), spec, 5004) is None


def test_it_depends_on_the_prompt() -> None:
    """What keeps a short prompt whole drops nothing of it, and what comes near has flat layers."""
    options = Options(method="none", min_keep=1000)
    spec = {"method": "pyramidkv"}
    found = [refused(options, spec, prompt) is None for prompt in range(16, 6000, 16)]
    assert found[0]
    assert not found[-1]
    assert found == sorted(found, reverse=True)


def test_a_default_that_no_long_request_can_have_stops_the_server() -> None:
    """With the model's layers, which the flags do not know; by page, wherever a prompt ends."""
    for config in ({"budget": 1024}, {"keep_ratio": 0.001, "min_budget": 1024}):
        options = Options(method="pyramidkv", config=config, min_keep=1000)
        with pytest.raises(PolicyError, match=r"^kv_compression.(min_)?budget: 'pyramidkv' leaves"):
            options.check_default(GEOMETRY)
        Options(method="pyramidkv", config=config, min_keep=70).check_default(GEOMETRY)
    paged = {"budget": 1008, "granularity": "page"}
    with pytest.raises(PolicyError, match="with 993 tokens, below"):
        Options(method="snapkv", config=paged, min_keep=1000).check_default(GEOMETRY)
    Options(method="snapkv", config={**paged, "budget": 1024}, min_keep=1000).check_default(
        GEOMETRY
    )


def test_without_a_least_nothing_is_refused() -> None:
    for spec in POLICIES:
        assert refused(Options(method="none"), spec, 5004) is None
    Options(method="pyramidkv").check_default(GEOMETRY)
    with pytest.raises(PolicyError, match="head gates"):
        Options(method="duoattention").check_default(GEOMETRY._replace(gates=None))
