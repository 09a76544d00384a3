"""Random traffic for a live server, what must come back, and what must be left behind."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from sglang_kv.benchmarks.server import HTTPError, Server, generate_body
from sglang_kv.compression import parse_policy

REQUESTS = 500
CLIENTS = 24
POOL, CONTEXT = 1376, 2048
FLAGS = [
    *("--kv-compression", "none", "--dtype", "float32", "--enable-metrics"),
    *("--max-total-tokens", str(POOL), "--context-length", str(CONTEXT)),
    *("--chunked-prefill-size", "256", "--max-running-requests", "16"),
]
ENV = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
    # Room to decode is left for so many tokens of each answer; with so few, it must retract.
    "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "2",
    # Seconds until a client that has gone is noticed while it waits.
    "SGLANG_REQUEST_STATE_WAIT_TIMEOUT": "1",
}
NONE: dict[str, Any] = {"method": "none"}
POLICIES: list[dict[str, Any]] = [
    NONE,
    {"method": "streamingllm", "sinks": 4, "recent": 60},
    {"method": "streamingllm", "sinks": 0, "recent": 17},
    {"method": "streamingllm", "sinks": 20, "recent": 200},
    {"method": "streamingllm", "budget": 33},
    {"method": "streamingllm", "sinks": 4, "recent": 40, "fold_at": 150},
    {"method": "streamingllm"},
]
#: Logprobs of fp32 differ by this much between batch shapes, at most.
NOISE = 1e-3

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

    ledger = runtime.current().ledger
    ledger.check()
    if not ledger.tree.disable:
        ledger.tree.check()
    for state in ledger.rows.values():
        assert state.row >= 0
        assert state.held_pages == state.num_pages * ledger.num_streams


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


# What is sent ------------------------------------------------------------------------------------


@dataclass
class Case:
    """One HTTP request, and what must come of it."""

    kind: str
    body: dict[str, Any]
    path: str = "/generate"
    policies: list[dict[str, Any]] = field(default_factory=lambda: [NONE])
    prompts: list[int] = field(default_factory=list)  # lengths, where known
    error: str = ""  # a piece of the message of a 400
    patience: float = 0.0  # seconds, or events, until the client gives up
    probe: int = -1


class Traffic:
    """Random requests over a few shared beginnings; the same for the same seed."""

    def __init__(self, seed: int, text: list[int]):
        self.rng = random.Random(seed)
        self.text = text
        self.stems = [self.passage(900) for _ in range(5)]
        self.probes = [self.probe(i) for i in range(12)]

    def passage(self, length: int) -> list[int]:
        start = self.rng.randrange(len(self.text) - length)
        return self.text[start : start + length]

    def probe(self, index: int) -> dict[str, Any]:
        """Half of them compressed; lengths around pages, chunks and windows."""
        length = [33, 700, 128, 300, 16, 257, 90, 512, 610, 45, 256, 400][index]
        return generate_body(
            self.passage(length),
            POLICIES[1 + index // 2] if index % 2 else NONE,
            max_new_tokens=self.rng.randint(16, 32),
            ignore_eos=True,
            return_logprob=True,
            top_logprobs_num=2,
        )

    def prompt(self, longest: int = 900) -> list[int]:
        rng = self.rng
        length = min(longest, rng.choice([rng.randint(1, 40)] * 3 + [rng.randint(40, 250)] * 2))
        if rng.random() < 0.15:
            length = rng.randint(min(250, longest), longest)
        shared = rng.choice([0, 0, length // 2, length - 1, length])
        return rng.choice(self.stems)[:shared] + self.passage(length - shared)

    def policy(self) -> dict[str, Any]:
        return NONE if self.rng.random() < 0.4 else self.rng.choice(POLICIES[1:])

    def new_tokens(self) -> int:
        rng = self.rng
        return rng.randint(20, 60) if rng.random() < 0.35 else rng.randint(1, 8)

    def cases(self, count: int) -> list[Case]:
        kinds: dict[Callable[[], Case], int] = {
            self.answer: 40,
            self.stream: 16,
            self.batch: 4,
            self.samples: 2,
            self.chat: 8,
            self.hang_up: 12,
            self.abort: 8,
            self.refused: 10,
        }
        made = [make() for make in self.rng.choices(list(kinds), kinds.values(), k=count - 2 * 12)]
        # Not at the very start, where nothing is going on yet.
        for probe in [*range(12)] * 2:
            body = self.probes[probe]
            case = Case("probe", body, probe=probe)
            made.insert(self.rng.randrange(count // 20, len(made)), case)
        return made

    def generate(self, kind: str, **options: Any) -> Case:
        rng = self.rng
        prompt, policy = self.prompt(), self.policy()
        options = {"max_new_tokens": self.new_tokens(), **options}
        if rng.random() < 0.3:
            options["ignore_eos"] = True
        if rng.random() < 0.1:
            options["temperature"] = 1.0
        if rng.random() < 0.1:
            options["stop"] = rng.choice([[" the"], ["\n", "."], ["e"]])
        if rng.random() < 0.12:
            options.update(return_logprob=True)
            if rng.random() < 0.7:
                options["logprob_start_len"] = rng.randrange(len(prompt))
        return Case(
            kind, generate_body(prompt, policy, **options), "/generate", [policy], [len(prompt)]
        )

    def answer(self) -> Case:
        return self.generate("answer")

    def stream(self) -> Case:
        return self.generate("stream")

    def hang_up(self) -> Case:
        """The client closes: before the first token (any phase), or in mid-stream."""
        rng = self.rng
        case = self.generate("hang_up", max_new_tokens=rng.randint(5, 60), ignore_eos=True)
        case.body["stream"] = rng.random() < 0.7
        case.patience = rng.choice([rng.random() * 0.1, rng.random(), float(rng.randint(1, 5))])
        if rng.random() < 0.5:  # long, so that a chunk of it may be under way
            case.body["input_ids"] = self.passage(rng.randint(500, 900))
        return case

    def abort(self) -> Case:
        case = self.generate("abort", max_new_tokens=self.rng.randint(5, 60))
        case.body["rid"] = f"abort-{self.rng.getrandbits(64):x}"
        case.patience = self.rng.choice([0.0, self.rng.random() * 0.3, self.rng.random() * 2])
        if self.rng.random() < 0.5:
            case.body["input_ids"] = self.passage(self.rng.randint(500, 900))
        return case

    def batch(self) -> Case:
        count = self.rng.randint(2, 4)
        policies = [self.policy() for _ in range(count)]
        prompts = [self.prompt(150) for _ in range(count)]
        bodies = [
            generate_body(prompt, policy, max_new_tokens=self.new_tokens())
            for prompt, policy in zip(prompts, policies, strict=True)
        ]
        body = {
            "input_ids": prompts,
            "sampling_params": [b["sampling_params"] for b in bodies],
        }
        return Case("batch", body, "/generate", policies, [len(p) for p in prompts])

    def samples(self) -> Case:
        """Several answers to one prompt."""
        prompt, policy, count = self.prompt(200), self.policy(), self.rng.randint(2, 3)
        body = generate_body(prompt, policy, max_new_tokens=self.new_tokens(), temperature=0.8)
        body["sampling_params"]["n"] = count
        return Case("batch", body, "/generate", [policy] * count, [len(prompt)] * count)

    def chat(self) -> Case:
        words = " ".join(self.rng.choices(["cat", "moon", "seven", "why", "tell"], k=9))
        policy = self.policy()
        body = {
            "model": "m",
            "messages": [{"role": "user", "content": words * self.rng.randint(1, 10)}],
            "max_tokens": self.new_tokens(),
            "temperature": 0,
            "custom_params": {"kv_compression": policy},
        }
        kind = self.rng.choice(["chat", "chat_stream"])
        return Case(kind, body, "/v1/chat/completions", [policy])

    def refused(self) -> Case:
        """Bad parameters, and prompts that can never fit."""
        small = [1, 2, 3]
        stream = "streamingllm"
        policy, error = self.rng.choice(
            [
                ({"method": "bogus"}, "kv_compression.method: unknown method 'bogus'"),
                ({}, "kv_compression.method: missing"),
                (7, "kv_compression: expected an object"),
                ({"method": stream, "recnt": 5}, "kv_compression.recnt: unknown parameter"),
                ({"method": "none", "recent": 5}, "kv_compression.recent: unknown parameter"),
                ({"method": stream, "recent": 0}, "kv_compression.recent: must be at least 1"),
                ({"method": stream, "recent": True}, "kv_compression.recent: expected an integer"),
                ({"method": stream, "sinks": -1}, "kv_compression.sinks: must be at least 0"),
                ({"method": stream, "budget": 4}, "kv_compression.budget: 4 leaves no recent"),
                (
                    {"method": stream, "budget": 9, "recent": 4},
                    "kv_compression.budget: give either",
                ),
                (None, "temperature"),
                ("never fits", "input_ids: the prompt of"),
                ("too long", "context length"),
            ]
        )
        options: dict[str, Any] = {"max_new_tokens": 4}
        if policy is None:
            options["temperature"] = -1.0
        elif policy == "never fits":
            small, policy = self.passage(self.rng.randint(POOL + 1, CONTEXT - 80)), NONE
        elif policy == "too long":
            small, policy = self.passage(CONTEXT + 5), NONE
        if self.rng.random() < 0.3 and isinstance(policy, dict) and len(small) == 3:
            body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
            body["custom_params"] = {"kv_compression": policy}
            return Case("refused", body, "/v1/chat/completions", error=error)
        return Case("refused", generate_body(small, policy, **options), error=error)


# What must come back -----------------------------------------------------------------------------


def check_report(report: dict[str, Any], policy: dict[str, Any]) -> None:
    wanted = parse_policy(policy)
    assert report["method"] == wanted.name, report
    assert report["parameters"] == wanted.parameters, report
    assert report["kept_tokens"] == wanted.kept_tokens(report["logical_tokens"]), report


def check_answer(case: Case, answer: dict[str, Any], which: int = 0) -> None:
    meta, body = answer["meta_info"], case.body
    sampling = body["sampling_params"]
    sampling = sampling[which] if isinstance(sampling, list) else sampling
    assert meta["finish_reason"]["type"] in ("stop", "length"), meta["finish_reason"]
    assert meta["prompt_tokens"] == case.prompts[which], meta
    assert 1 <= meta["completion_tokens"] <= sampling["max_new_tokens"], meta
    check_report(meta["kv_compression"], case.policies[which])
    if body.get("return_logprob"):
        assert len(meta["output_token_logprobs"]) == meta["completion_tokens"]
    if "logprob_start_len" in body:
        given = len(meta["input_token_logprobs"])
        assert given == case.prompts[which] - body["logprob_start_len"], given


def probe_difference(quiet: dict[str, Any], busy: dict[str, Any]) -> str | None:
    """How an answer differs from what the same request got on a quiet server.

    Greedy tokens may only part where the two best were as good as equal, and up to there all
    logprobs agree within the noise of fp32.
    """
    before, after = quiet["meta_info"], busy["meta_info"]
    pairs = zip(before["output_token_logprobs"], after["output_token_logprobs"], strict=True)
    for position, ((logprob, token, _), (now, token_now, _)) in enumerate(pairs):
        if token != token_now:
            best, second = (entry[0] for entry in before["output_top_logprobs"][position][:2])
            if best - second < NOISE:
                return None
            return f"token {position} is {token_now}, was {token} by {best - second:.4f}"
        if abs(now - logprob) > NOISE:
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

    def answer(self, case: Case) -> None:
        check_answer(case, self.server.post(case.path, case.body))

    def stream(self, case: Case) -> None:
        events = list(self.server.stream(case.path, case.body))
        counts = [event["meta_info"]["completion_tokens"] for event in events]
        assert counts == sorted(counts)
        assert [e["meta_info"]["finish_reason"] is None for e in events[:-1]] == [True] * (
            len(events) - 1
        )
        check_answer(case, events[-1])

    def batch(self, case: Case) -> None:
        answers = self.server.post(case.path, case.body)
        assert len(answers) == len(case.prompts)
        for which, answer in enumerate(answers):
            check_answer(case, answer, which)

    def chat(self, case: Case) -> None:
        answer = self.server.post(case.path, case.body)
        assert answer["choices"][0]["finish_reason"] in ("stop", "length")
        check_report(answer["sglext"]["kv_compression"], case.policies[0])

    def chat_stream(self, case: Case) -> None:
        events = list(self.server.stream(case.path, case.body))
        reports = [e["sglext"]["kv_compression"] for e in events if e.get("sglext")]
        assert len(reports) == 1
        check_report(reports[0], case.policies[0])

    def refused(self, case: Case) -> None:
        with pytest.raises(HTTPError) as refusal:
            self.server.post(case.path, case.body)
        assert refusal.value.status == 400, refusal.value
        assert case.error in refusal.value.body, refusal.value

    def probe(self, case: Case) -> None:
        difference = probe_difference(
            self.quiet[case.probe], self.server.post("/generate", case.body)
        )
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
        timeout_s=10,
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
