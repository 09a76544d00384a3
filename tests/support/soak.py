"""Random traffic at a live server: what must come back, and what must be left behind."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from arithmetic import held_pages, kept_tokens
from traffic import CHUNK, CONTEXT, GEOMETRY, NONE, POOL, Case, Traffic, plan_of

from sglang_kv.benchmarks.server import HTTPError, Server
from sglang_kv.compression import FoldPlan, WindowPlan, parse_policy

REQUESTS = 500
CLIENTS = 24
FLAGS = [
    *("--kv-compression", "none", "--dtype", "float32", "--enable-metrics"),
    *("--max-total-tokens", str(POOL), "--context-length", str(CONTEXT)),
    *("--chunked-prefill-size", str(CHUNK), "--max-running-requests", "16"),
    *("--kv-pressure", "evict", "--kv-pressure-floor", "0.4", "--sleep-on-idle"),
]
ENV = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
    # Room to decode is left for so many tokens of each answer; with so few, it must retract.
    "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "2",
    # Seconds until a client that has gone is noticed while it waits.
    "SGLANG_REQUEST_STATE_WAIT_TIMEOUT": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
}
#: K and V of 16 tokens in fp32, at head_dim 64.
PAGE_BYTES = 8192
#: Logprobs of fp32 differ by this much between batch shapes, at most.
NOISE = 1e-3
#: The same noise in scores may swap tokens of a fold that are as good as equal.
FOLD_NOISE = 5e-2

# Checks of our own, inside the server: a plugin of SGLang beside the one under test.
CHECKER = """
from sglang.srt.plugins.hook_registry import HookRegistry, HookType


def register():
    HookRegistry.register(
        "sglang.srt.managers.scheduler_components.invariant_checker"
        ".SchedulerInvariantChecker.self_check_during_busy",
        check_step,
        HookType.AFTER,
    )


def check_step(_result, _checker):
    from sglang_kv import runtime
    from sglang_kv.kernels.layout import KV_LEN

    ledger = runtime.current().ledger
    ledger.check()
    if not ledger.tree.disable:
        ledger.tree.check()
    assert ledger.pool.num_free >= ledger.outstanding
    for state in ledger.rows.values():
        lengths = ledger.streams.desc[state.slot, :, :, KV_LEN]
        assert (state.counts == -(-lengths // ledger.page_size)).all(), state.policy


print("step checks installed", flush=True)
"""


def install_checker(folder: Path) -> dict[str, str]:
    """Write the checks as an installed package; returns the environment that finds it."""
    info = folder / "step_checks-0.dist-info"
    info.mkdir(parents=True)
    (folder / "step_checks.py").write_text(CHECKER)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: step-checks\nVersion: 0\n")
    (info / "entry_points.txt").write_text(
        "[sglang.srt.plugins]\nstep_checks = step_checks:register\n"
    )
    return {"PYTHONPATH": str(folder)}


# What must come back -----------------------------------------------------------------------------


def check_report(report: dict[str, Any], policy: dict[str, Any], prompt: int, body: Any) -> bool:
    """Against the arithmetic of the request's plan; returns whether pressure took anything."""
    wanted, plan = parse_policy(policy), plan_of(policy, prompt)
    assert report["method"] == wanted.name, report
    assert report["parameters"] == wanted.parameters, report
    length, kept = report["logical_tokens"], report["kept_tokens"]
    assert report["kept_bytes"] == report["kept_pages"] * PAGE_BYTES, report
    dense = -(-length // GEOMETRY.page_size) * GEOMETRY.num_streams
    assert report["freed_bytes"] == (dense - report["kept_pages"]) * PAGE_BYTES, report
    assert 0 < kept <= length, report
    if "evicted_tokens" in report:
        assert body.get("sampling_params", body)["custom_params"].get("kv_pressure") != "retract"
        assert not isinstance(plan, WindowPlan), report
        assert report["evicted_tokens"] > 0, report
        room = report["kept_pages"] * GEOMETRY.page_size / GEOMETRY.num_streams
        assert room - GEOMETRY.page_size <= kept <= room, report
        return True
    # The last token came in decode, or from a prefill of all of them after a retraction.
    wanted_kept = {kept_tokens(plan, prompt, length), kept_tokens(plan, prompt, length, length)}
    if isinstance(plan, FoldPlan) and plan.adaptive:
        # A head that a whole prompt falls to does not fill its last page.
        assert max(wanted_kept) - GEOMETRY.page_size <= kept <= max(wanted_kept), report
    else:
        assert kept in wanted_kept, (report, wanted_kept)
    held = {held_pages(plan, prompt, length), held_pages(plan, prompt, length, length)}
    if None not in held:
        assert report["kept_pages"] in held, (report, held)
    return False


def check_answer(case: Case, answer: dict[str, Any], which: int = 0) -> bool:
    meta, body = answer["meta_info"], case.body
    sampling = body["sampling_params"]
    sampling = sampling[which] if isinstance(sampling, list) else sampling
    assert meta["finish_reason"]["type"] in ("stop", "length"), meta["finish_reason"]
    assert meta["prompt_tokens"] == case.prompts[which], meta
    assert 1 <= meta["completion_tokens"] <= sampling["max_new_tokens"], meta
    if body.get("return_logprob"):
        assert len(meta["output_token_logprobs"]) == meta["completion_tokens"]
    if "logprob_start_len" in body:
        given = len(meta["input_token_logprobs"])
        assert given == case.prompts[which] - body["logprob_start_len"], given
    return check_report(
        meta["kv_compression"],
        case.policies[which],
        case.prompts[which],
        {"sampling_params": sampling},
    )


def probe_difference(quiet: dict[str, Any], busy: dict[str, Any], noise: float) -> str | None:
    """How an answer differs from what the same request got on a quiet server.

    Greedy tokens may only part where the two best were as good as equal, and up to there all
    logprobs agree within ``noise``.
    """
    before, after = quiet["meta_info"], busy["meta_info"]
    pairs = zip(before["output_token_logprobs"], after["output_token_logprobs"], strict=True)
    for position, ((logprob, token, _), (now, token_now, _)) in enumerate(pairs):
        if token != token_now:
            best, second = (entry[0] for entry in before["output_top_logprobs"][position][:2])
            if best - second < noise:
                return None
            return f"token {position} is {token_now}, was {token} by {best - second:.4f}"
        if abs(now - logprob) > noise:
            return f"logprob of token {position} is {now:.5f}, was {logprob:.5f}"
    return None


@dataclass
class Soak:
    """Sends cases from many clients and gathers everything that was not as it must be."""

    server: Server
    quiet: list[dict[str, Any]]
    problems: list[str] = field(default_factory=list)
    seen: Counter[str] = field(default_factory=Counter)

    def send_all(self, cases: list[Case]) -> None:
        with ThreadPoolExecutor(CLIENTS) as clients:
            list(clients.map(self.send, range(len(cases)), cases))

    def send(self, number: int, case: Case) -> None:
        try:
            getattr(self, case.kind)(case)
            self.seen[case.kind] += 1
        except Exception as error:  # gathered: what the others do is worth knowing too
            self.problems.append(f"request {number}, {case.kind}: {error!r} {case.policies}")

    def note(self, evicted: bool) -> None:
        self.seen["evicted"] += evicted

    def answer(self, case: Case) -> None:
        self.note(check_answer(case, self.server.post(case.path, case.body)))

    def stream(self, case: Case) -> None:
        events = list(self.server.stream(case.path, case.body))
        counts = [event["meta_info"]["completion_tokens"] for event in events]
        assert counts == sorted(counts)
        assert [e["meta_info"]["finish_reason"] is None for e in events[:-1]] == [True] * (
            len(events) - 1
        )
        self.note(check_answer(case, events[-1]))

    def batch(self, case: Case) -> None:
        answers = self.server.post(case.path, case.body)
        assert len(answers) == len(case.prompts)
        for which, answer in enumerate(answers):
            self.note(check_answer(case, answer, which))

    def chat(self, case: Case) -> None:
        answer = self.server.post(case.path, case.body)
        assert answer["choices"][0]["finish_reason"] in ("stop", "length")
        prompt = answer["usage"]["prompt_tokens"]
        report = answer["sglext"]["kv_compression"]
        self.note(check_report(report, case.policies[0], prompt, case.body))

    def chat_stream(self, case: Case) -> None:
        events = list(self.server.stream(case.path, case.body))
        reports = [e["sglext"]["kv_compression"] for e in events if e.get("sglext")]
        assert len(reports) == 1
        prompt = events[-1]["usage"]["prompt_tokens"]
        self.note(check_report(reports[0], case.policies[0], prompt, case.body))

    def refused(self, case: Case) -> None:
        with pytest.raises(HTTPError) as refusal:
            self.server.post(case.path, case.body)
        assert refusal.value.status == 400, refusal.value
        assert case.error in refusal.value.body, refusal.value

    def probe(self, case: Case) -> None:
        policy = case.body["sampling_params"]["custom_params"]["kv_compression"]
        folds = isinstance(plan_of(policy, len(case.body["input_ids"])), FoldPlan)
        answer = self.server.post("/generate", case.body)
        noise = FOLD_NOISE if folds else NOISE
        difference = probe_difference(self.quiet[case.probe], answer, noise)
        assert difference is None, f"probe {case.probe}: {difference}"

    def hang_up(self, case: Case) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=300)
        with contextlib.closing(connection):
            connection.request(
                "POST", case.path, json.dumps(case.body), {"Content-Type": "application/json"}
            )
            if not case.body["stream"] or case.patience < 1:
                time.sleep(case.patience)
                return
            answer = connection.getresponse()
            assert answer.status == 200
            for _ in range(int(case.patience)):  # an event is a line and an empty line
                answer.readline()
                answer.readline()

    def abort(self, case: Case) -> None:
        timer = threading.Timer(case.patience, self.abort_now, [case.body["rid"]])
        timer.start()
        answer = self.server.post(case.path, case.body)
        timer.join()
        if answer["meta_info"]["finish_reason"]["type"] == "abort":
            self.seen["aborted"] += 1

    def abort_now(self, rid: str) -> None:
        body = json.dumps({"rid": rid})
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=300)
        with contextlib.closing(connection):
            connection.request("POST", "/abort_request", body, {"Content-Type": "application/json"})
            assert connection.getresponse().status == 200


def ledger_stats(server: Server) -> dict[str, Any]:
    info = json.loads(server.get("/server_info"))
    stats: dict[str, Any] = info["internal_states"][0]["kv_compression"]
    return stats


def wait_for(condition: Callable[[], bool], what: str, timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"still not after {timeout_s} s: {what}"
        time.sleep(0.2)


def flush(server: Server) -> None:
    """Flush both ledgers; SGLang refuses that while anything runs or waits."""

    def flushed() -> bool:
        try:
            server.get("/flush_cache")
        except OSError:
            return False
        return True

    wait_for(flushed, "flush the cache")


def check_ledgers_are_empty(server: Server) -> None:
    wait_for(lambda: not ledger_stats(server)["requests_by_policy"], "no request holds a row")
    # All memory can be had at once: nothing is promised, and the tree gives back every page.
    length = POOL - 2
    answer = server.generate(list(range(1000, 1000 + length)), NONE, max_new_tokens=1)
    assert answer["meta_info"]["completion_tokens"] == 1
    flush(server)
    stats = ledger_stats(server)
    assert stats["used_pages"] == stats["evictable_pages"] == 0, stats
    assert stats["free_pages"] == stats["total_pages"], stats
    names = {
        "sglang_kv:head_pages_used": 0,
        "sglang_kv:head_pages_free": stats["total_pages"],
        "sglang_kv:running_requests": 0,
        "sglang:token_usage": 0,
        "sglang:num_used_tokens": 0,
        "sglang:num_running_reqs": 0,
        "sglang:num_queue_reqs": 0,
    }
    wait_for(
        lambda: all(server.metric(name) == value for name, value in names.items()),
        f"metrics {names}",
    )


def check_log(log: str) -> None:
    lines = log.splitlines()
    for word in ("Traceback", "leak detected", "AssertionError", "use-after-free", "due to OOM"):
        at = next((i for i, line in enumerate(lines) if word in line), None)
        assert at is None, "\n".join(lines[at - 5 : at + 40])


def soak(server: Server, traffic: Traffic, requests: int = REQUESTS) -> Soak:
    """All of it: quiet answers, traffic, and the end; raises at the first law broken."""
    quiet = []
    for probe in traffic.probes:
        flush(server)
        quiet.append(server.post("/generate", probe))
    flush(server)
    run = Soak(server, quiet)
    run.send_all(traffic.cases(requests))
    check_log(server.log)
    assert server.alive
    assert not run.problems, "\n".join(run.problems)
    check_ledgers_are_empty(server)
    check_log(server.log)
    return run
