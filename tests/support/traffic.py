"""Random traffic for a live server: what is sent, the same for the same seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from policies import random_policy

from sglang_kv.benchmarks.server import generate_body
from sglang_kv.compression import Geometry, Plan, WindowPlan, parse_policy
from sglang_kv.compression.gates import find_gates

POOL, CONTEXT, CHUNK = 1376, 2048, 256
NONE: dict[str, Any] = {"method": "none"}
#: Of requests whose answers are known from a quiet server.
PROBED: list[dict[str, Any]] = [
    {"method": "streamingllm", "sinks": 4, "recent": 60},
    {"method": "snapkv", "budget": 100, "granularity": "page", "decode_budget": 64, "interval": 8},
    {"method": "duoattention", "sinks": 4, "recent": 60},
    {"method": "pyramidkv", "budget": 60, "window": 16},
    {"method": "h2o", "budget": 90},
    {"method": "snapkv", "keep_ratio": 0.2, "min_budget": 40, "head_budgets": "gates"},
]
#: Policies, or other mistakes, and a piece of the answer.
REFUSED: list[tuple[Any, str]] = [
    ({"method": "bogus"}, "kv_compression.method: unknown method 'bogus'"),
    ({}, "kv_compression.method: missing"),
    (7, "kv_compression: expected an object"),
    ({"method": "none", "recent": 5}, "kv_compression.recent: unknown parameter"),
    ({"method": "streamingllm", "recnt": 5}, "kv_compression.recnt: unknown parameter"),
    ({"method": "streamingllm", "recent": 0}, "kv_compression.recent: must be at least 1"),
    ({"method": "streamingllm", "recent": True}, "kv_compression.recent: expected an integer"),
    ({"method": "streamingllm", "sinks": -1}, "kv_compression.sinks: must be at least 0"),
    ({"method": "streamingllm", "budget": 4}, "kv_compression.budget: 4 leaves no recent"),
    ({"method": "streamingllm", "budget": 9, "recent": 4}, "kv_compression.budget: give either"),
    ({"method": "snapkv", "kernel_size": 4}, "kv_compression.kernel_size: must be odd"),
    ({"method": "snapkv", "budget": 32}, "kv_compression.budget: 32 leaves no token"),
    ({"method": "pyramidkv", "beta": 0.5}, "kv_compression.beta: must be at least 1"),
    ({"method": "h2o", "budget": 9, "heavy": 4}, "kv_compression.budget: give either"),
    ({"method": "duoattention", "sparsity": 2}, "kv_compression.sparsity: must be at most 1"),
    ("no such pressure", "kv_pressure: must be evict or retract, got 'drop'"),
    (None, "temperature"),
    ("never fits", "input_ids: the prompt of"),
    ("too long", "context length"),
]
GEOMETRY = Geometry(30, 3, 16, find_gates("SmolLM2-135M-Instruct", 30, 3))


def plan_of(policy: dict[str, Any], prompt_tokens: int) -> Plan:
    """What the server does with such a request."""
    return parse_policy(policy).plan(prompt_tokens, GEOMETRY)


def fits(policy: dict[str, Any]) -> bool:
    """Whether no prompt of the traffic is too much for the pool with this policy."""
    for length in (40, 200, 400, 600, 700, 800, 900):
        plan = plan_of(policy, length)
        published = (plan.dense_prefix or 0) // GEOMETRY.page_size
        peak = plan.peak_pages(length + 1, CHUNK, published=published)
        if peak > POOL // GEOMETRY.page_size * GEOMETRY.num_streams:
            return False
    return True


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
        body = generate_body(
            self.passage(length),
            PROBED[index // 2] if index % 2 else NONE,
            max_new_tokens=self.rng.randint(16, 32),
            ignore_eos=True,
            return_logprob=True,
            top_logprobs_num=2,
        )
        # What it keeps must not depend on its neighbours.
        body["sampling_params"]["custom_params"]["kv_pressure"] = "retract"
        return body

    def prompt(self, longest: int = 900) -> list[int]:
        rng = self.rng
        length = min(longest, rng.choice([rng.randint(1, 40)] * 3 + [rng.randint(40, 250)] * 2))
        if rng.random() < 0.15:
            length = rng.randint(min(250, longest), longest)
        shared = rng.choice([0, 0, length // 2, length - 1, length])
        return rng.choice(self.stems)[:shared] + self.passage(length - shared)

    def policy(self) -> dict[str, Any]:
        if self.rng.random() < 0.3:
            return NONE
        while not fits(policy := random_policy(self.rng)):
            pass
        return policy

    def pressed(self, body: dict[str, Any]) -> dict[str, Any]:
        """Some requests say what may happen to them when memory runs out."""
        if self.rng.random() < 0.4:
            custom = body.get("sampling_params", body)["custom_params"]
            custom["kv_pressure"] = self.rng.choice(["retract", "retract", "evict"])
            if isinstance(plan_of(custom["kv_compression"], 100), WindowPlan):
                custom["kv_pressure"] = "retract"  # evict takes nothing from it, and is refused
        return body

    def new_tokens(self) -> int:
        rng = self.rng
        return rng.randint(20, 60) if rng.random() < 0.35 else rng.randint(1, 8)

    def cases(self, count: int) -> list[Case]:
        kinds: dict[Callable[[], Case], int] = {
            self.answer: 34,
            self.grows: 6,
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
        body = self.pressed(generate_body(prompt, policy, **options))
        return Case(kind, body, "/generate", [policy], [len(prompt)])

    def answer(self) -> Case:
        return self.generate("answer")

    def grows(self) -> Case:
        """A long answer to a long prompt that keeps everything: there pressure finds something."""
        prompt = self.passage(self.rng.randint(250, 500))
        body = generate_body(
            prompt, NONE, max_new_tokens=self.rng.randint(60, 120), ignore_eos=True
        )
        return Case("answer", self.pressed(body), prompts=[len(prompt)])

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
            self.pressed(generate_body(prompt, policy, max_new_tokens=self.new_tokens()))
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
        if kind == "chat_stream":
            body["stream_options"] = {"include_usage": True}
        return Case(kind, self.pressed(body), "/v1/chat/completions", [policy])

    def refused(self) -> Case:
        """Bad parameters, and prompts that can never fit."""
        small = [1, 2, 3]
        policy, error = self.rng.choice(REFUSED)
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
        if policy == "no such pressure":
            body = generate_body(small, NONE, **options)
            body["sampling_params"]["custom_params"]["kv_pressure"] = "drop"
            return Case("refused", body, error=error)
        return Case("refused", generate_body(small, policy, **options), error=error)
