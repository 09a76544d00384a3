"""Random requests against a dictionary of prefixes, with everything recounted after each step.

The oracle knows no nodes: it has one entry per prefix in whole pages. Two ledgers are simulated
beside the tree. Ids: one per token, handed out by an allocator. Memory: one unit per token page
and stream of two; an id with memory either has both or, once thinned, the second only where the
tree said so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from sglang_kv.radix.key import Key, Namespace
from sglang_kv.radix.node import Node, State, Thin
from sglang_kv.radix.orders import ORDERS
from sglang_kv.radix.owner import Owner
from sglang_kv.radix.tree import Match, RadixTree

PAGE = 2
TOTAL_IDS = 1000
WIDE = Thin("g", frozenset({(0, 0), (1, 1)}), sinks=2, recent=2)
NARROW = Thin("g", frozenset({(0, 0)}), sinks=2, recent=2)
SPACES = (Namespace(extra_key="a", lora_id="bc"), Namespace(extra_key="abc"))
POLICIES = (Namespace(policy="p"), Namespace(extra_key="abc", policy="p"))

Prefix = tuple[Namespace, tuple[int, ...]]
# Two pages to choose from at each place, so that prompts meet often.
tokens_of_a_prompt = st.builds(
    lambda bits, length: [0 if i % PAGE == 0 else bits >> (i // PAGE) & 1 for i in range(length)],
    st.integers(0, 63),
    st.integers(3, 13),
)


@dataclass
class Entry:
    """One prefix: the ids of its last page, whether these have memory, and what it is good for."""

    ids: tuple[int, ...]
    state: State
    thin: Thin | None = None
    ends_window: bool = True
    snapshot: object | None = None


class Oracle(Owner[list[int]]):
    """The dictionary of prefixes, and both ledgers."""

    def __init__(self, thins: bool):
        self.thins = thins
        self.entries: dict[Prefix, Entry] = {}
        self.free_ids = list(range(TOTAL_IDS))
        self.in_flight = 0
        self.with_memory: set[int] = set()

    # -- what the tree asks --

    def weigh(self, node: Node[list[int]]) -> int:
        snapshot = 3 if node.snapshot is not None else 0
        if node.state is State.HOLLOW:
            return snapshot
        return len(node) + (len(node) if node.thin is None else 1) + snapshot

    def plan_thin(self, node: Node[list[int]]) -> Thin | None:
        if not self.thins:
            return None
        return WIDE if node.start % 8 == 0 else NARROW

    # -- what the tree tells --

    def prefixes(self, node: Node[list[int]]) -> list[Prefix]:
        """Of each page of ``node``, top down."""
        steps = node.path()
        tokens = tuple(int(t) for step in steps for t in step.tokens)
        ends = range(node.start + PAGE, node.end + 1, PAGE)
        return [(node.namespace, tokens[:end]) for end in ends]

    def thinned(self, node: Node[list[int]]) -> None:
        assert not node.readers
        own = self.prefixes(node)
        for prefix in own:
            entry = self.entries[prefix]
            assert entry.state is State.RESIDENT
            entry.state, entry.thin = State.THINNED, node.thin
            entry.ends_window = prefix == own[-1]

    def filled(self, node: Node[list[int]], donor: list[int]) -> None:
        assert set(donor) <= self.with_memory
        own = self.prefixes(node)
        for prefix in own:
            entry = self.entries[prefix]
            assert entry.state is node.state is not State.RESIDENT
            self.entries[prefix] = Entry(entry.ids, State.RESIDENT)
        self.with_memory -= set(donor)  # moved, or freed where the node still had its own
        self.with_memory |= set(node.value)

    def emptied(self, node: Node[list[int]]) -> None:
        assert not node.readers
        for prefix in self.prefixes(node):
            entry = self.entries[prefix]
            self.entries[prefix] = Entry(entry.ids, State.HOLLOW)
        self.with_memory -= set(node.value)

    def removed(self, node: Node[list[int]]) -> None:
        assert (node.readers, node.lock_ref, len(node.children)) == (0, 0, 0)
        for prefix in self.prefixes(node):
            entry = self.entries.pop(prefix)
            self.free_ids += entry.ids
            self.with_memory -= set(entry.ids)
        assert not any(prefix in self.entries for prefix in self.prefixes(node))

    # -- what it predicts --

    def take_ids(self, count: int) -> list[int]:
        taken, self.free_ids = self.free_ids[:count], self.free_ids[count:]
        return taken

    def longest(self, space: Namespace, tokens: tuple[int, ...], need: Thin | None) -> int:
        best, served = 0, True
        for end in range(PAGE, len(tokens) + 1, PAGE):
            entry = self.entries.get((space, tokens[:end]))
            if entry is None:
                break
            if entry.snapshot is not None:
                best = end
            covers = entry.thin is not None and need is not None and entry.thin.covers(need)
            served = served and (entry.state is State.RESIDENT or covers)
            if served and entry.ends_window:
                best = end
        return best

    def store(self, space: Namespace, tokens: tuple[int, ...], ids: list[int], state: State) -> int:
        """An insert was made; return how many of its tokens had been known."""
        known = 0
        for end in range(PAGE, len(tokens) + 1, PAGE):
            prefix = (space, tokens[:end])
            if prefix in self.entries:
                known = end
            else:
                self.entries[prefix] = Entry(tuple(ids[end - PAGE : end]), state)
        return known


class TreeMachine(RuleBasedStateMachine):
    """Two dense namespaces whose joined parts are equal, and two policies'."""

    @initialize(order=st.sampled_from(ORDERS), thins=st.booleans(), thin_first=st.booleans())
    def start(self, order: str, thins: bool, thin_first: bool) -> None:
        self.oracle = Oracle(thins)
        self.tree: RadixTree[list[int]] = RadixTree(
            PAGE, owner=self.oracle, order_name=order, half_life=20.0, thin_first=thin_first
        )
        self.held: list[tuple[Node[list[int]], bool]] = []
        self.running: list[tuple[Namespace, list[int], list[int]]] = []

    def values(self, node: Node[list[int]]) -> list[int]:
        return [item for step in node.path() for item in step.value]

    def room(self, count: int) -> None:
        short = count - len(self.oracle.free_ids)
        assert self.tree.evict_tokens(short) >= short, "ids ran out"

    @precondition(lambda self: len(self.running) < 6)
    @rule(space=st.sampled_from(SPACES), tokens=tokens_of_a_prompt)
    def compute(self, space: Namespace, tokens: list[int]) -> None:
        """A request gets ids and memory for its prompt; the tree hears of it when it ends."""
        self.room(len(tokens))
        ids = self.oracle.take_ids(len(tokens))
        self.oracle.in_flight += len(ids)
        self.oracle.with_memory |= set(ids)
        self.running.append((space, tokens, ids))

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 99), density=st.floats(0, 10), hold=st.booleans())
    def insert(self, which: int, density: float, hold: bool) -> None:
        space, tokens, ids = self.running.pop(which % len(self.running))
        whole = tuple(tokens[: len(tokens) // PAGE * PAGE])
        found = self.tree.insert(Key.of(tokens, space), ids, prior=density)
        known = self.oracle.store(space, whole, ids, State.RESIDENT)
        assert (found.known, found.node.end) == (known, len(whole))
        spare = ids[:known] + ids[len(whole) :]  # duplicates, and the tokens of no whole page
        self.oracle.free_ids += spare
        self.oracle.with_memory -= set(spare)
        self.oracle.in_flight -= len(ids)
        self.tree.credit(found.node, [density] * (len(whole) // PAGE), goes_on=found.goes_on)
        assert self.oracle.longest(space, whole, None) == len(whole)
        if hold:
            self.tree.lock(found.node)
            self.held.append((found.node, False))

    @rule(space=st.sampled_from(SPACES), tokens=tokens_of_a_prompt, hold=st.booleans())
    def serve(self, space: Namespace, tokens: list[int], hold: bool) -> None:
        """A request from its beginning to its end."""
        self.compute(space, tokens)
        self.insert(len(self.running) - 1, 1.0, hold)

    @rule(space=st.sampled_from(POLICIES), tokens=tokens_of_a_prompt)
    def insert_snapshot(self, space: Namespace, tokens: list[int]) -> None:
        whole = tuple(tokens[: len(tokens) // PAGE * PAGE])
        if not whole:
            return
        self.room(len(whole))
        ids, snapshot = self.oracle.take_ids(len(whole)), object()
        known = self.oracle.store(space, whole, ids, State.HOLLOW)
        found = self.tree.insert_snapshot(Key.of(tokens, space), ids, snapshot)
        assert (found.known, found.node.end) == (known, len(whole))
        self.oracle.free_ids += ids[:known]
        entry = self.oracle.entries[space, whole]
        if entry.snapshot is None:
            entry.snapshot = snapshot
        assert found.node.snapshot is entry.snapshot

    @rule(
        space=st.sampled_from(SPACES + POLICIES),
        tokens=tokens_of_a_prompt,
        need=st.sampled_from([None, NARROW, WIDE]),
        limit=st.none() | st.integers(0, 12),
        hold=st.sampled_from(["no", "ids", "both"]),
    )
    def match(
        self, space: Namespace, tokens: list[int], need: Thin | None, limit: int | None, hold: str
    ) -> None:
        key = Key.of(tokens, space)
        expected = self.oracle.longest(space, tuple(tokens[:limit]), need)
        assert self.tree.peek(key, limit=limit, need=need) == expected
        match: Match = self.tree.match(key, limit=limit, need=need)
        assert match.length == match.node.end == expected
        own = [self.oracle.entries[space, tuple(tokens[:e])].ids for e in range(2, expected + 1, 2)]
        assert self.values(match.node) == [i for ids in own for i in ids]
        if hold != "no" and expected:
            self.tree.lock(match.node)
            if hold == "both":
                self.tree.read(match.node)
            self.held.append((match.node, hold == "both"))

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 99), memory_only=st.booleans())
    def release(self, which: int, memory_only: bool) -> None:
        node, reads = self.held.pop(which % len(self.held))
        if reads:
            self.tree.unread(node)
        if memory_only:
            self.held.append((node, False))
        else:
            self.tree.unlock(node)

    @rule(which=st.integers(0, 99), at=st.integers(1, 5))
    def split(self, which: int, at: int) -> None:
        nodes = [node for node in self.tree.nodes() if len(node) > at * PAGE]
        if nodes:
            self.tree.split(nodes[which % len(nodes)], at * PAGE)

    @rule(
        how=st.sampled_from(["evict_one"] * 4 + ["evict"] * 2 + ["evict_tokens"] * 2 + ["flush"]),
        count=st.integers(1, 30),
        space=st.sampled_from(SPACES + POLICIES),
    )
    def make_room(self, how: str, count: int, space: Namespace) -> None:
        if how == "evict":
            self.evict(count)
        elif how == "evict_tokens":
            self.evict_tokens(count)
        elif how == "flush":
            self.flush(space)
        else:
            for _ in range(count % 4):
                self.evict_one()

    def evict(self, num_bytes: int) -> None:
        idle = self.tree.idle_bytes
        freed = self.tree.evict(num_bytes)
        assert freed == idle - self.tree.idle_bytes
        if freed < num_bytes:
            assert self.tree.evict_one() is None

    def evict_one(self) -> None:
        keys = {n: key for n in self.tree.nodes() if (key := self.tree.memory_key(n)) is not None}
        step = self.tree.evict_one()
        if step is None:
            assert not keys
        else:
            assert all((keys[step.node], step.node.id) <= (key, n.id) for n, key in keys.items())

    def evict_tokens(self, num_tokens: int) -> None:
        free, used = len(self.oracle.free_ids), self.tree.used_bytes
        bare = {n for n in self.tree.nodes() if not (n.holds_memory or n.children or n.lock_ref)}
        freed = self.tree.evict_tokens(num_tokens)
        # Ids without memory go first, so none are left where memory went with ids.
        assert self.tree.used_bytes == used or not bare & set(self.tree.nodes())
        assert len(self.oracle.free_ids) - free == freed
        assert freed >= min(num_tokens, self._removable())

    def _removable(self) -> int:
        """Tokens of nodes under which nobody locks or reads anything."""
        held = {step for node, _ in self.held for step in node.path()}
        return sum(len(node) for node in self.tree.nodes() if node not in held)

    def flush(self, space: Namespace) -> None:
        others = {p for p in self.oracle.entries if p[0] != space}
        self.tree.flush({space})
        assert others == {p for p in self.oracle.entries if p[0] != space}
        if not any(node.namespace == space for node, _ in self.held):
            assert not any(p[0] == space for p in self.oracle.entries)

    @invariant()
    def everything_adds_up(self) -> None:
        tree, oracle = self.tree, self.oracle
        tree.check()
        # Ids: free + evictable + protected + in flight = total.
        counted = tree.evictable_tokens + tree.protected_tokens + oracle.in_flight
        assert len(oracle.free_ids) + counted == TOTAL_IDS
        in_tree = [i for entry in oracle.entries.values() for i in entry.ids]
        running = [i for _, _, ids in self.running for i in ids]
        assert sorted(in_tree + running + oracle.free_ids) == list(range(TOTAL_IDS))
        # Memory: just the ids of nodes with memory of their own have some.
        resident = {
            i for e in oracle.entries.values() if e.state is not State.HOLLOW for i in e.ids
        }
        assert oracle.with_memory == resident | set(running)
        read = sum(n.bytes for n in {s for n, r in self.held if r for s in self._reads(n)})
        assert tree.used_bytes == tree.idle_bytes + read
        assert {p for n in tree.nodes() for p in oracle.prefixes(n)} == set(oracle.entries)
        for node in tree.nodes():
            entry = oracle.entries[oracle.prefixes(node)[-1]]
            assert (node.state, node.thin) == (entry.state, entry.thin)
            assert node.snapshot is entry.snapshot

    def _reads(self, node: Node[list[int]]) -> list[Node[Any]]:
        return [node] if node.snapshot is not None else node.path()


def run(examples: int, steps: int) -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        TreeMachine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_ten_thousand_random_steps() -> None:
    run(examples=250, steps=50)


@pytest.mark.slow
def test_many_more_random_steps() -> None:
    run(examples=1000, steps=200)
