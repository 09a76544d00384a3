"""Five kinds of traffic, made from a seed, with what a window pass would see of each prompt.

**The model of attention.** A prompt's window gives its mass (1 in all, sinks and window left out)
to three places, and every number below is an assumption, the same in all workloads:

- half of it lies evenly on all tokens;
- a fifth goes to the instructions, to the same few pages of a system prompt in every request
  that begins with it; where there are none, it lies evenly, too;
- three tenths are evidence, on a few pages of the texts that *this* request asks about, drawn anew
  for each request. A one-off document is looked at by its own question as hard as any other.

Nothing in it knows what will come again. Defaults (`replay.HALF_LIFE`, what `profile` does) were
chosen on `shared_system_prompts`, `agents` and `chats`; `rag` was kept out of that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from sglang_kv.radix.importance import page_density
from sglang_kv.radix.key import Namespace
from sglang_kv.radix.trace import Request

PAGE_SIZE = 16
SINKS, WINDOW = 16, 32
EVEN, INSTRUCTIONS, EVIDENCE = 0.5, 0.2, 0.3

Segment = tuple[int, int]


def window_pass(
    rng: Generator, prompt: Sequence[Segment], *, system: int = 0, evidence: Sequence[int] = ()
) -> NDArray[np.float64]:
    """Importance of each page of ``prompt`` by the model above. ``[tokens // 16]``

    Args:
        system: leading segments that are instructions.
        evidence: indices of the segments that the request asks about.
    """
    starts = np.cumsum([0] + [count for _, count in prompt])
    total = int(starts[-1])
    mass = np.full(total, EVEN / total)
    if system:
        for index in range(system):
            pages = _pages(starts, index)
            own = np.random.default_rng(prompt[index][0])  # the same in every request
            _spread(mass, own, pages, INSTRUCTIONS / system)
    else:
        mass += INSTRUCTIONS / total
    if evidence:
        for index in evidence:
            _spread(mass, rng, _pages(starts, index), EVIDENCE / len(evidence))
    else:
        mass += EVIDENCE / total
    return page_density(mass, PAGE_SIZE, sinks=SINKS, window=WINDOW)


def _pages(starts: NDArray[np.int64], index: int) -> NDArray[np.int64]:
    return np.arange(starts[index], max(starts[index] + 1, starts[index + 1] - PAGE_SIZE + 1), 16)


def _spread(
    mass: NDArray[np.float64], rng: Generator, pages: NDArray[np.int64], share: float
) -> None:
    """Put ``share`` on a tenth of the pages that begin at ``pages``, at least on one."""
    count = max(1, len(pages) // 10)
    for start in rng.choice(pages, count, replace=False):
        page = mass[start : start + PAGE_SIZE]
        page += share / count / len(page)


class Names:
    """Fresh names of segments."""

    def __init__(self) -> None:
        self.last = 0

    def new(self, tokens: float | np.integer[Any]) -> Segment:
        self.last += 1
        return self.last, max(1, int(tokens))


def _zipf(count: int, exponent: float) -> NDArray[np.float64]:
    weights = 1.0 / np.arange(1, count + 1) ** exponent
    shares: NDArray[np.float64] = weights / weights.sum()
    return shares


def shared_system_prompts(
    seed: int = 0, *, requests: int = 1000, tenants: int = 32
) -> list[Request]:
    """Many tenants, each with one system prompt, and long documents that are asked about once."""
    rng, names = np.random.default_rng(seed), Names()
    systems = [names.new(rng.integers(512, 2049)) for _ in range(tenants)]
    popularity = _zipf(tenants, 0.6)
    trace = []
    for _ in range(requests):
        tenant = int(rng.choice(tenants, p=popularity))
        document = names.new(np.clip(rng.lognormal(8.5, 0.6), 1000, 24_000))
        question, answer = names.new(rng.integers(24, 96)), names.new(rng.integers(32, 256))
        prompt = (systems[tenant], document, question)
        seen = window_pass(rng, prompt, system=1, evidence=(1,))
        trace.append(Request(prompt, (answer,), Namespace(tenant=f"t{tenant}"), seen))
    return trace


def agents(seed: int = 0, *, requests: int = 1000, at_once: int = 24) -> list[Request]:
    """Agents that go on turn after turn: tools and rules that all share, a task, then tool
    outputs and answers. Many run at once, at different speeds; who has ended is replaced."""
    rng, names = np.random.default_rng(seed), Names()
    tools = names.new(3000)

    def start() -> tuple[list[Segment], int, float]:
        turns = int(rng.integers(4, 25))
        return [tools, names.new(rng.integers(64, 512))], turns, float(rng.lognormal(0.0, 1.0))

    running = [start() for _ in range(at_once)]
    trace = []
    for _ in range(requests):
        speed = np.array([pace for _, _, pace in running])
        who = int(rng.choice(at_once, p=speed / speed.sum()))
        history, turns, pace = running[who]
        asked = sorted({1, max(1, len(history) - 1)})
        seen = window_pass(rng, history, system=1, evidence=asked)
        answer = names.new(rng.integers(48, 400))
        trace.append(Request(tuple(history), (answer,), Namespace(tenant="agents"), seen))
        observation = names.new(np.clip(rng.lognormal(5.5, 0.9), 32, 4000))
        running[who] = ([*history, answer, observation], turns - 1, pace)
        if turns == 1:
            running[who] = start()
    return trace


def rag(
    seed: int = 0, *, requests: int = 1000, documents: int = 600, per_request: int = 3
) -> list[Request]:
    """Questions over a set of documents with Zipf-distributed popularity: system prompt, the
    documents by rank of retrieval (most popular first, as often as not), the question."""
    rng, names = np.random.default_rng(seed), Names()
    system = names.new(600)
    texts = [names.new(np.clip(rng.lognormal(7.0, 0.5), 300, 4000)) for _ in range(documents)]
    popularity = _zipf(documents, 1.0)
    trace = []
    for _ in range(requests):
        found = rng.choice(documents, per_request, replace=False, p=popularity)
        if rng.random() < 0.5:
            found = np.sort(found)
        question, answer = names.new(rng.integers(16, 64)), names.new(rng.integers(32, 256))
        prompt = (system, *(texts[i] for i in found), question)
        asked = tuple(range(1, 1 + per_request))
        seen = window_pass(rng, prompt, system=1, evidence=asked)
        trace.append(Request(prompt, (answer,), Namespace(tenant="rag"), seen))
    return trace


def chats(
    seed: int = 0, *, requests: int = 1500, users: int = 60, rewrite: bool = False
) -> list[Request]:
    """Conversations without a shared beginning: most are short, pauses have a heavy tail, and
    some begin with a long pasted text. With ``rewrite``, what comes back is not the answer."""
    rng, names = np.random.default_rng(seed), Names()
    trace: list[Request] = []

    def start() -> list[Segment]:
        pasted = rng.random() < 0.25
        return [names.new(rng.lognormal(8.3, 0.6) if pasted else rng.lognormal(5.0, 1.0))]

    histories = [start() for _ in range(users)]
    due = rng.pareto(1.2, users)
    for _ in range(requests):
        who = int(due.argmin())
        history = histories[who]
        seen = window_pass(rng, history, evidence=sorted({0, len(history) - 1}))
        answer = names.new(np.clip(rng.lognormal(5.5, 0.7), 16, 1500))
        trace.append(Request(tuple(history), (answer,), Namespace(tenant=f"u{who}"), seen))
        back = names.new(0.4 * answer[1]) if rewrite else answer
        histories[who] = [*history, back, names.new(rng.lognormal(4.0, 1.0))]
        if rng.random() < 0.25:
            histories[who] = start()
        due[who] += rng.pareto(1.2)
    return trace


def rewritten(seed: int = 0, *, requests: int = 1500, users: int = 60) -> list[Request]:
    """`chats` whose clients send answers back in other tokens than were generated: thinking left
    out, or the text tokenised anew. Each turn leaves the stored path where the prompt had ended."""
    return chats(seed, requests=requests, users=users, rewrite=True)


#: Generator and the tokens of memory at which orders are compared.
WORKLOADS: dict[str, tuple[Callable[[int], list[Request]], int]] = {
    "shared_system_prompts": (shared_system_prompts, 65_536),
    "agents": (agents, 65_536),
    "rag": (rag, 65_536),
    "chats": (chats, 65_536),
    "rewritten": (rewritten, 65_536),
}
