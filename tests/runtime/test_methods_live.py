"""Every method in the running engine: what it reports is what its plan says, to the page, and what
its requests held is free again afterwards."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from arithmetic import dropped_tokens, held_pages, kept_tokens
from policies import full_budget, with_effect
from serving import (
    NONE,
    PAGE_BYTES,
    STREAMS,
    chat_body,
    completion_body,
    eventually,
    flush,
    ledger,
    noise,
    report,
    uses_server,
    words,
)

from sglang_kv.benchmarks.server import Server, generate_body
from sglang_kv.compression import Geometry, Plan, parse_policy
from sglang_kv.compression.base import methods
from sglang_kv.compression.gates import find_gates
from sglang_kv.planner.find import find_model
from sglang_kv.planner.memory import Serving, request_need

pytestmark = uses_server("small")

PROMPT = 600
DEMO = find_model("smollm2-135m-instruct")
GEOMETRY = Geometry(30, 3, 16, find_gates("SmolLM2-135M-Instruct", 30, 3))

SNAPKV: dict[str, Any] = {"method": "snapkv", "budget": 128}
POLICIES: list[dict[str, Any]] = [
    {"method": "streamingllm", "sinks": 4, "recent": 252},
    {"method": "streamingllm", "budget": 100, "fold_at": 300},
    {"method": "duoattention"},
    {"method": "duoattention", "sinks": 20, "recent": 101, "threshold": 0.4},
    {"method": "duoattention", "recent": 100, "first_chunk": "dense"},
    {"method": "duoattention", "recent": 100, "fold_at": 500},
    SNAPKV,
    {"method": "snapkv", "keep_ratio": 0.5, "pooling": "max", "fold_at": 450},
    {"method": "snapkv", "budget": 128, "granularity": "page", "share": "layer"},
    {"method": "snapkv", "budget": 128, "head_budgets": "adaptive"},
    {"method": "snapkv", "budget": 128, "head_budgets": "gates", "head_floor": 0.0},
    {"method": "snapkv", "budget": 200, "decode_budget": 64, "interval": 5},
    {"method": "pyramidkv", "budget": 128},
    {"method": "pyramidkv", "keep_ratio": 0.25, "delta": 100, "granularity": "page"},
    {"method": "pyramidkv", "budget": 128, "beta": 1.0, "head_budgets": "adaptive"},
    {"method": "h2o", "budget": 128},
    {"method": "h2o", "keep_ratio": 0.3, "scores": "window", "norm": "mean"},
    {"method": "h2o", "heavy": 64, "recent": 64, "granularity": "page", "interval": 8},
]


def label(spec: dict[str, Any]) -> str:
    return ",".join(str(v) if k == "method" else f"{k}={v}" for k, v in spec.items())


every_policy = pytest.mark.parametrize("spec", POLICIES, ids=label)
every_method = pytest.mark.parametrize("method", methods())


def planned(spec: dict[str, Any], prompt: int = PROMPT) -> Plan:
    return parse_policy(spec).plan(prompt, GEOMETRY)


def figures(
    spec: dict[str, Any], prompt: int, length: int, last: int | None = None
) -> dict[str, Any]:
    """The whole report, from the policy and lengths alone; ``last`` as in `held_pages`."""
    policy, plan = parse_policy(spec), planned(spec, prompt)
    pages = held_pages(plan, prompt, length, last)
    assert pages is not None
    return {
        "method": policy.name,
        "parameters": policy.parameters,
        "logical_tokens": length,
        "kept_tokens": kept_tokens(plan, prompt, length),
        "kept_pages": pages,
        "kept_bytes": pages * PAGE_BYTES,
        "freed_bytes": (-(-length // 16) * STREAMS - pages) * PAGE_BYTES,
    }


def metric(server: Server, name: str, **labels: str) -> float:
    try:
        return server.metric(f"sglang_kv:{name}", **labels)
    except KeyError:  # no request of that policy yet
        return 0.0


def nothing_is_held(server: Server) -> bool:
    return metric(server, "head_pages_used") == metric(server, "head_pages_evictable")


def metrics_are_current(server: Server) -> bool:
    now = ledger(server)
    return (
        metric(server, "tokens_dropped_total") == pytest.approx(now["dropped_tokens"])
        and metric(server, "requests_total") == sum(now["requests_total"].values())
        and metric(server, "running_requests") == 0
        and nothing_is_held(server)
    )


# The report, and what is left ------------------------------------------------------------------


@every_policy
def test_the_report_is_the_arithmetic_of_the_plan(server: Server, spec: dict[str, Any]) -> None:
    """600 tokens of a prompt that nobody has sent before, and 5 of 6 answered ones."""
    prompt = noise(PROMPT, seed=100 + POLICIES.index(spec))
    answer = server.generate(prompt, spec, max_new_tokens=6, ignore_eos=True)
    found, plan = report(answer), planned(spec)
    if spec.get("head_budgets") == "adaptive":  # heads share a layer's pages, unevenly filled
        wanted = figures({**spec, "head_budgets": "equal"}, PROMPT, PROMPT + 5)
        assert found["kept_tokens"] == kept_tokens(plan, PROMPT, PROMPT + 5)
        assert abs(found["kept_pages"] - wanted["kept_pages"]) <= STREAMS
        return
    assert found == figures(spec, PROMPT, PROMPT + 5)
    assert 0 < found["kept_pages"] < 38 * STREAMS
    if "decode_budget" not in spec and spec.get("interval") is None:
        assert found["kept_pages"] == plan.pages(PROMPT + 5)
        need = request_need(
            DEMO, parse_policy(spec), Serving(page_size=16), PROMPT, 5, GEOMETRY.gates
        )
        assert found["kept_bytes"] == need.kv


@every_policy
def test_the_metrics_follow(server: Server, spec: dict[str, Any]) -> None:
    """Nothing is held any more; dropped tokens and requests are counted, to the token."""
    method = spec["method"]
    eventually(lambda: metrics_are_current(server))
    dropped, requests = metric(server, "tokens_dropped_total"), metric(server, "requests_total")
    own = metric(server, "requests_total", policy=method)
    prompt = noise(PROMPT, seed=200 + POLICIES.index(spec))
    server.generate(prompt, spec, max_new_tokens=1)
    eventually(lambda: metric(server, "requests_total") == requests + 1)
    assert metric(server, "requests_total", policy=method) == own + 1
    eventually(lambda: metrics_are_current(server))
    more = metric(server, "tokens_dropped_total") - dropped
    assert more == pytest.approx(dropped_tokens(planned(spec), PROMPT, PROMPT))


@pytest.mark.parametrize(
    "spec",
    [
        {"method": "h2o", "budget": 100},
        {"method": "h2o", "budget": 100, "granularity": "page", "interval": 7},
        {"method": "snapkv", "budget": 128, "decode_budget": 80, "interval": 16},
        # These end where a fold is due that nothing comes after: it is not reported as done.
        {"method": "snapkv", "budget": 128, "decode_budget": 80, "interval": 20},
        {
            **{"method": "snapkv", "budget": 192, "decode_budget": 80, "interval": 60},
            "granularity": "page",
        },
        {"method": "pyramidkv", "budget": 100, "decode_budget": 100, "interval": 9},
        {"method": "duoattention", "sinks": 4, "recent": 60},
    ],
    ids=label,
)
def test_folds_in_decode(server: Server, spec: dict[str, Any]) -> None:
    """60 answered tokens: the report is exact through every further fold, and between them."""
    prompt = noise(200, seed=300)
    answer = server.generate(prompt, spec, max_new_tokens=61, ignore_eos=True)
    assert report(answer) == figures(spec, 200, 260)


def test_methods_side_by_side(server: Server) -> None:
    """One batch of all methods: each request is cut as if it were alone.

    They are more than fit at once. Should one be retracted for the others, it is computed again as
    a prompt, and cut once more at its end.
    """
    specs = [spec for spec in POLICIES if spec.get("head_budgets") != "adaptive"]
    prompts = [noise(150 + 10 * i, seed=400 + i) for i in range(len(specs))]
    bodies = [generate_body([], spec, max_new_tokens=8, ignore_eos=True) for spec in specs]
    params = [body["sampling_params"] for body in bodies]
    retracted = server.log.count("Retract requests")
    answers = server.post("/generate", {"input_ids": prompts, "sampling_params": params})
    again = server.log.count("Retract requests") > retracted
    for spec, prompt, answer in zip(specs, prompts, answers, strict=True):
        wanted = [figures(spec, len(prompt), len(prompt) + 7)]
        if again:
            wanted.append(figures(spec, len(prompt), len(prompt) + 7, len(prompt) + 7))
        assert report(answer) in wanted, spec
    eventually(lambda: nothing_is_held(server))


# The prefix cache ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "cached"),
    [
        (NONE, 592),  # all but the last token, in whole pages
        (SNAPKV, 560),  # all but the window of 32 queries
        ({"method": "pyramidkv", "budget": 128, "window": 100}, 496),
        ({"method": "snapkv", "budget": 128, "fold_at": 300}, 256),
        ({"method": "h2o", "budget": 128}, 0),  # every query is scored
        ({"method": "h2o", "budget": 128, "scores": "window"}, 560),
        ({"method": "duoattention"}, 320),
        ({"method": "duoattention", "fold_at": 500}, 496),
    ],
    ids=lambda value: label(value) if isinstance(value, dict) else "",
)
def test_a_document_is_computed_once(server: Server, spec: dict[str, Any], cached: int) -> None:
    """What the prefix cache holds of it is used as far as a policy can."""
    prompt = noise(PROMPT, seed=500)
    server.generate(prompt, NONE, max_new_tokens=1)
    answer = server.generate(prompt, spec, max_new_tokens=2, ignore_eos=True)
    assert answer["meta_info"]["cached_tokens"] == cached
    assert report(answer) == figures(spec, PROMPT, PROMPT + 1)


# A budget that covers everything ---------------------------------------------------------------


@functools.cache
def full_answer(server: Server) -> Any:
    return answer_to_all(server, NONE)


def answer_to_all(server: Server, spec: dict[str, Any]) -> Any:
    flush(server)
    text = "Once upon a time there was a little town by the sea." + words(300)
    options = {"return_logprob": True, "logprob_start_len": 0, "ignore_eos": True}
    answer = server.generate(text, spec, max_new_tokens=24, **options)
    meta = answer["meta_info"]
    logprobs = [*meta["input_token_logprobs"][1:], *meta["output_token_logprobs"]]
    return answer["text"], [value for value, *_ in logprobs], report(answer)


@every_method
def test_a_full_budget_changes_nothing(server: Server, method: str) -> None:
    parameters = with_effect(method, full_budget(method).parameters)
    spec = {"method": method, **{k: v for k, v in parameters.items() if v is not None}}
    text, logprobs, found = answer_to_all(server, spec)
    wanted_text, wanted, _ = full_answer(server)
    assert text == wanted_text
    assert logprobs == wanted
    assert found["freed_bytes"] == 0
    assert found["kept_tokens"] == found["logical_tokens"]


# The other routes ------------------------------------------------------------------------------

ROUTES = {"/v1/chat/completions": chat_body, "/v1/completions": completion_body}


@pytest.mark.parametrize("route", ROUTES)
def test_openais_routes(server: Server, route: str) -> None:
    answer = server.post(route, ROUTES[route](words(500), SNAPKV, ignore_eos=True))
    prompt = answer["usage"]["prompt_tokens"]
    assert prompt >= 500
    assert answer["sglext"]["kv_compression"] == figures(SNAPKV, prompt, prompt + 3)


@pytest.mark.parametrize("route", ROUTES)
def test_a_stream_reports_at_its_end(server: Server, route: str) -> None:
    options = {"ignore_eos": True, "stream_options": {"include_usage": True}}
    *events, usage = server.stream(route, ROUTES[route](words(500), SNAPKV, **options))
    prompt = usage["usage"]["prompt_tokens"]
    reports = [event["sglext"]["kv_compression"] for event in events if event.get("sglext")]
    assert reports == [figures(SNAPKV, prompt, prompt + 3)]


# Memory pressure -------------------------------------------------------------------------------


@pytest.mark.parametrize("route", ["/generate", *ROUTES])
def test_a_request_may_name_what_the_server_does_anyway(server: Server, route: str) -> None:
    """This server retracts: to ask for that is no mistake, with a policy or without."""
    make = {"/generate": generate_body, **ROUTES}[route]
    for policy in (SNAPKV, None):
        body = make("The capital of France is", policy)
        where = body.get("sampling_params", body).setdefault("custom_params", {})
        where["kv_pressure"] = "retract"
        assert server.post(route, body)
