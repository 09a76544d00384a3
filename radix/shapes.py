"""Traffic with the shape of public traces, made from a seed; no line of a trace is in it.

**conversation** follows `conversation_trace.jsonl` of the Mooncake trace release (FAST'25;
kvcache-ai/Mooncake, FAST25-release/traces; Apache 2.0). Counted on its 12,031 requests:

- lengths of first turns, of answers, and by how much a later turn's prompt is longer than the one
  before it: the percentiles below, with straight lines between them;
- how long a user thinks until the next turn, likewise; and that there is a next turn: in 25 % of
  first turns, 39 % of second ones, up to 65 %;
- all requests begin with the same block of 512 tokens;
- 13.6 % of first turns begin with more of an earlier request's text, groups of mostly two and at
  most 14; how much of the prompt that is: percentiles, too.

**tool_agent** follows what is published of `toolagent_trace.jsonl` of the same release (23,608
requests in an hour, 8,596 tokens in and 182 out on average, in its README) and the form of its
lines: about half of them are one tool with 12 shared blocks, few tokens of its own and a short
answer, one in twelve another tool with 5 shared blocks, and the rest are conversations as above.
The shares and the tools' own lengths are read off a stretch of about a hundred lines of the
trace's earlier release. Nothing was tuned on it: it is **held out**, as `workloads.rag` is.

Both are sampled by conversations, so that pauses mean what they meant: fewer users in the same
hour. The traces have no text, so importance is that of `workloads.window_pass`: the first block is
instructions, the newest text is asked about.
"""

from __future__ import annotations

import heapq

import numpy as np
from numpy.random import Generator

from sglang_kv.radix.trace import Request
from sglang_kv.radix.workloads import Names, Segment, window_pass

HOUR = 3537.0  # seconds, first to last request of the conversation trace
BLOCK = 512
PERCENT = (0, 5, 10, 20, 30, 40, 50, 60, 70, 80, 90, 95, 99, 100)
FIRST = (891, 898, 907, 1157, 2120, 4359, 5933, 8511, 12084, 16913, 26280, 38154, 87219, 126195)
GROWTH = (1, 25, 72, 204, 320, 401, 474, 561, 696, 1419, 4700, 7621, 17145, 91918)
ANSWER = (1, 10, 24, 100, 213, 291, 350, 399, 447, 504, 597, 698, 1118, 2000)
THINK = (5, 29, 41, 59, 75, 96, 125, 165, 230, 324, 480, 612, 1470, 3030)  # seconds
#: Whether another turn follows, after so many.
GOES_ON = (0.25, 0.39, 0.49, 0.55, 0.61, 0.65)
#: First turns that begin with an earlier one's text, and with how much of their prompt.
SHARES_TEXT = 0.068  # half of the 13.6 %: the other half is who was there first
SHARED_PERCENT = (1, 10, 25, 50, 75, 90, 99)
SHARED = (0.03, 0.07, 0.125, 0.24, 0.49, 0.82, 1.0)
#: tool_agent: share of requests, shared blocks, percentiles 0, 50, 90, 100 of own tokens.
TOOLS = (
    (0.50, 12, (20, 400, 1500, 3600), (3, 3, 30, 45)),
    (0.08, 5, (520, 620, 1300, 2000), (16, 20, 26, 30)),
)
OWN_PERCENT = (0, 50, 90, 100)


def _draw(rng: Generator, percent: tuple[int, ...], table: tuple[float, ...]) -> float:
    return float(np.interp(rng.random() * 100, percent, table))


class _Conversations:
    """Conversations by the figures above: first turns, and what follows them."""

    def __init__(self, rng: Generator, names: Names):
        self.rng, self.names = rng, names
        self.system = names.new(BLOCK)
        self.openings: list[Segment] = []

    def first(self) -> list[Segment]:
        length = max(BLOCK + 1, int(_draw(self.rng, PERCENT, FIRST))) - BLOCK
        prompt = [self.system]
        if self.openings and self.rng.random() < SHARES_TEXT:
            text, known = self.openings[int(self.rng.integers(len(self.openings)))]
            shared = min(known, int(_draw(self.rng, SHARED_PERCENT, SHARED) * length))
            if shared:
                prompt.append((text, shared))
                length -= shared
                self.openings.append((text, known))  # who was shared once is likelier to be again
        if length > 0:
            prompt.append(self.names.new(length))
            self.openings.append(prompt[-1])
        return prompt

    def ask(self, prompt: list[Segment]) -> Request:
        answer = self.names.new(_draw(self.rng, PERCENT, ANSWER))
        newest = len(prompt) - 1
        seen = window_pass(self.rng, prompt, system=1, evidence=sorted({min(1, newest), newest}))
        return Request(tuple(prompt), (answer,), importance=seen)

    def more(self, request: Request) -> list[Segment]:
        """The next turn's prompt."""
        answer = request.output[0]
        message = max(1, int(_draw(self.rng, PERCENT, GROWTH)) - answer[1])
        return [*request.prompt, answer, self.names.new(message)]

    def next_after(self, turns: int) -> float | None:
        """Seconds until the turn after so many; None: it was the last."""
        if self.rng.random() >= GOES_ON[min(turns, len(GOES_ON)) - 1]:
            return None
        return _draw(self.rng, PERCENT, THINK)


def _hour(rng: Generator, talk: _Conversations, starts: int) -> list[tuple[float, Request]]:
    """So many conversations that begin at some time of the hour, with all turns in it."""
    due = [(float(at), i, 1, talk.first()) for i, at in enumerate(rng.uniform(0, HOUR, starts))]
    heapq.heapify(due)
    done = []
    while due:
        now, who, turns, prompt = heapq.heappop(due)
        request = talk.ask(prompt)
        done.append((now, request))
        wait = talk.next_after(turns)
        if wait is not None and now + wait < HOUR:
            heapq.heappush(due, (now + wait, who, turns + 1, talk.more(request)))
    return done


def conversation(seed: int = 0, *, requests: int = 1200) -> list[Request]:
    """Mooncake's conversation trace; about so many ``requests``, two thirds of them first turns."""
    rng = np.random.default_rng(seed)
    starts = round(requests * 0.67)
    return [request for _, request in _hour(rng, _Conversations(rng, Names()), starts)]


def tool_agent(seed: int = 0, *, requests: int = 1200) -> list[Request]:
    """Mooncake's tool and agent trace; about so many ``requests``."""
    rng, names = np.random.default_rng(seed), Names()
    talk = _Conversations(rng, names)
    chats = requests * (1.0 - sum(share for share, *_ in TOOLS))
    timed = _hour(rng, talk, round(chats * 0.67))
    for share, blocks, own, answers in TOOLS:
        tool = names.new(blocks * BLOCK)
        for at in rng.uniform(0, HOUR, round(requests * share)):
            prompt = [tool, names.new(_draw(rng, OWN_PERCENT, own))]
            answer = names.new(_draw(rng, OWN_PERCENT, answers))
            seen = window_pass(rng, prompt, system=1, evidence=(1,))
            timed.append((float(at), Request(tuple(prompt), (answer,), importance=seen)))
    timed.sort(key=lambda item: item[0])
    return [request for _, request in timed]
