"""Programs in SGLang's frontend language: each call has the policy of the place it stands in."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import sglang as sgl
from serving import NONE, STREAMING, flush, ledger, uses_server

from sglang_kv.benchmarks.server import Server
from sglang_kv.frontend import KVRuntimeEndpoint, kv_policy

pytestmark = uses_server("small")

SMALL = {"method": "streamingllm", "sinks": 4, "recent": 124}
CITIES = ["London", "Paris", "Rome"]


@pytest.fixture
def backend(server: Server) -> KVRuntimeEndpoint:
    return KVRuntimeEndpoint(server.url)


@pytest.fixture(scope="session")
def document(root: Path, demo_model: Path) -> str:
    """1,500 tokens of a story."""
    from transformers import AutoTokenizer

    text = (root / "scripts/demo/red_headed_league.txt").read_text()
    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    return str(tokenizer.decode(tokenizer(text)["input_ids"][:1500]))


def report(state: Any, name: str) -> dict[str, Any]:
    found: dict[str, Any] = state.get_meta_info(name)["kv_compression"]
    return found


def cached(state: Any, name: str) -> int:
    """Prompt tokens of a call that came from the prefix tree."""
    return int(state.get_meta_info(name)["cached_tokens"])


def applied(state: Any, name: str) -> dict[str, Any]:
    value = report(state, name)
    given = value["parameters"].items()
    parameters = {k: v for k, v in given if v is not None and k != "positions"}
    return {"method": value["method"], **parameters}


# fork ------------------------------------------------------------------------------------------


@sgl.function
def three_readings(s: Any, document: str, policies: list[dict[str, Any]]) -> None:
    s += document
    s.sync()  # SGLang computes the text ahead of its branches if it is there when the fork is asked
    forks = s.fork(len(policies))
    for fork, policy in zip(forks, policies, strict=True):
        with kv_policy(fork, **policy):
            fork += "\nIn short: " + sgl.gen("summary", max_tokens=8, temperature=0)
    s["states"] = forks


def test_branches_of_a_fork_read_one_document_under_their_own_policies(
    server: Server, backend: KVRuntimeEndpoint, document: str
) -> None:
    flush(server)
    policies = [NONE, STREAMING, SMALL]
    branches = three_readings.run(document, policies, backend=backend)["states"]
    assert [applied(branch, "summary") for branch in branches] == policies
    full, streaming, small = (report(branch, "summary") for branch in branches)
    assert full["kept_tokens"] == full["logical_tokens"] > 1500
    assert (streaming["kept_tokens"], small["kept_tokens"]) == (256, 128)
    assert streaming["logical_tokens"] == small["logical_tokens"] == full["logical_tokens"]
    assert all(branch["summary"].strip() for branch in branches)
    # The fork computes the document once, before its branches. A windowed branch takes as much of
    # it as full attention gives it, too: sinks and window.
    whole, *windows = (cached(branch, "summary") for branch in branches)
    assert whole > 1450
    assert [hit // 16 for hit in windows] == [256 // 16, 128 // 16]


def test_a_full_branch_answers_as_if_it_were_alone(
    backend: KVRuntimeEndpoint, document: str
) -> None:
    """Its neighbours share the document's KV, and drop it: not from under this one."""
    together = three_readings.run(document, [STREAMING, NONE, SMALL], backend=backend)["states"]
    (alone,) = three_readings.run(document, [NONE], backend=backend)["states"]
    assert together[1]["summary"] == alone["summary"]


# select ----------------------------------------------------------------------------------------


@sgl.function
def capital(s: Any, country: str, policy: dict[str, Any] | None) -> None:
    s += f"The capital of {country} is"
    if policy is None:
        s += sgl.select("city", choices=[" " + city for city in CITIES])
    else:
        with kv_policy(s, **policy):
            s += sgl.select("city", choices=[" " + city for city in CITIES])


@pytest.mark.parametrize("policy", [None, STREAMING], ids=["default", "streamingllm"])
@pytest.mark.parametrize(
    ("country", "city"), [("France", "Paris"), ("Italy", "Rome"), ("England", "London")]
)
def test_select_chooses_the_right_city(
    backend: KVRuntimeEndpoint, country: str, city: str, policy: dict[str, Any] | None
) -> None:
    assert capital.run(country, policy, backend=backend)["city"].strip() == city


@sgl.function
def asked_after_a_document(s: Any, document: str) -> None:
    s += document + "\n\nThe capital of France is"
    s += sgl.select("city", choices=[" " + city for city in CITIES])


@pytest.mark.parametrize("policy", [NONE, SMALL], ids=lambda policy: policy["method"])
def test_select_after_a_document_longer_than_the_window(
    server: Server, backend: KVRuntimeEndpoint, document: str, policy: dict[str, Any]
) -> None:
    before = Counter(ledger(server)["requests_total"])
    state = asked_after_a_document.run(document, backend=backend.with_policy(**policy))
    assert state["city"].strip() == "Paris"
    # The choices are scored in requests of their own, whose reports SGLang drops: count them.
    asked = Counter(ledger(server)["requests_total"]) - before
    assert asked == {policy["method"]: 1 + len(CITIES)}


# conversations ---------------------------------------------------------------------------------


@sgl.function
def conversation(s: Any) -> None:
    s += sgl.system("You answer in one short sentence.")
    s += sgl.user("What is the capital of France?")
    s += sgl.assistant(sgl.gen("first", max_tokens=12, temperature=0))
    s += sgl.user("And of Italy?")
    with kv_policy(s, **STREAMING):
        s += sgl.assistant(sgl.gen("second", max_tokens=12, temperature=0))
        s += sgl.user("And of England?")
        with kv_policy(s, **NONE):
            s += sgl.assistant(sgl.gen("third", max_tokens=12, temperature=0))
        s += sgl.user("Thank you.")
        s += sgl.assistant(sgl.gen("fourth", max_tokens=4, temperature=0))
    s += sgl.user("Goodbye.")
    s += sgl.assistant(sgl.gen("fifth", max_tokens=4, temperature=0))


def test_turns_of_a_conversation_have_their_own_policies(
    server: Server, backend: KVRuntimeEndpoint
) -> None:
    flush(server)
    state = conversation.run(backend=backend.with_policy(**SMALL))
    turns = ["first", "second", "third", "fourth", "fifth"]
    assert [applied(state, turn) for turn in turns] == [SMALL, STREAMING, NONE, STREAMING, SMALL]
    assert "Paris" in state["first"]
    # Each turn holds all before it.
    lengths = [report(state, turn)["logical_tokens"] for turn in turns]
    assert lengths == sorted(lengths)
    # The first has nothing to go on from; the others share what lies within all their windows.
    hits = [cached(state, turn) for turn in turns]
    assert hits[0] == 0
    assert all(hit > 0 for hit in hits[1:])


def test_a_streamed_program_has_its_report_in_the_end(backend: KVRuntimeEndpoint) -> None:
    state = conversation.run(backend=backend.with_policy(**SMALL), stream=True)
    assert "Paris" in "".join(state.text_iter("first"))
    state.sync()
    assert applied(state, "third") == NONE


def test_a_batch_of_programs_with_one_policy(backend: KVRuntimeEndpoint) -> None:
    cases = [{"country": country, "policy": STREAMING} for country in ("France", "Italy")]
    states = capital.run_batch(cases, backend=backend, progress_bar=False)
    assert [state["city"].strip() for state in states] == ["Paris", "Rome"]


@pytest.mark.filterwarnings("ignore:Error in stream_executor")
def test_a_bad_policy_fails_the_program_by_name(backend: KVRuntimeEndpoint) -> None:
    bad = backend.with_policy(method="streamingllm", recent=-1)
    state = capital.run("France", None, backend=bad)
    assert "kv_compression.recent: must be at least 1" in str(state.error())
