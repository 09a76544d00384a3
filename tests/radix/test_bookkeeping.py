"""What the tree's books cost: no more than the work that is done, counted and not timed."""

from __future__ import annotations

import heapq
import random
from typing import Any

import pytest

from sglang_kv.radix import heap
from sglang_kv.radix.dump import as_json
from sglang_kv.radix.key import Key, Namespace
from sglang_kv.radix.node import Node
from sglang_kv.radix.tree import RadixTree


class Counted:
    """`heapq` for `LazyHeap`: how many entries were pushed, and how many each rebuild left."""

    heappop = staticmethod(heapq.heappop)

    def __init__(self) -> None:
        self.pushed = 0
        self.rebuilt: list[int] = []

    def heappush(self, entries: list[Any], entry: Any) -> None:
        self.pushed += 1
        heapq.heappush(entries, entry)

    def heapify(self, entries: list[Any]) -> None:
        self.rebuilt.append(len(entries))
        heapq.heapify(entries)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    counts = Counted()
    monkeypatch.setattr(heap, "heapq", counts)
    return counts


def leaves(count: int, order: str = "lru") -> tuple[RadixTree[range], list[Node[range]]]:
    tree: RadixTree[range] = RadixTree(2, order_name=order)
    return tree, [tree.insert(Key.of([i, i]), range(2)).node for i in range(count)]


def test_a_node_that_goes_and_comes_back_leaves_no_copies(counted: Counted) -> None:
    """Unlocked, a node has the key that it had, and its old entry is as good as the new one."""
    tree, (node, *_) = leaves(20)
    for _ in range(2000):
        tree.lock(node)
        tree.unlock(node)
        assert tree.leaves.num_entries <= 2 * 20 + 64
    tree.check()
    assert counted.pushed == 2 * 20 + 2000
    # A rebuild leaves one entry per node (of 20, or of 19 without the locked one), and the next one
    # is as many pushes away as there are nodes, and 64 more.
    assert counted.rebuilt
    assert set(counted.rebuilt) <= {19, 20}
    assert len(counted.rebuilt) <= 2000 // (19 + 64)


def test_rebuilds_cost_no_more_than_what_was_pushed(counted: Counted) -> None:
    """In a random life: nodes come, are used, are held on to, and go."""
    tree, held = leaves(0, "importance")[0], list[Node[range]]()
    rng = random.Random(0)
    for index in range(2500):
        done = tree.insert(Key.of([rng.randrange(300), 0, 1, index % 7]), range(4))
        tree.credit(done.node, [1.0, 0.5], goes_on=done.goes_on)
        if rng.random() < 0.5:
            tree.lock(done.node)
            held.append(done.node)
        if held and rng.random() < 0.55:
            tree.unlock(held.pop(rng.randrange(len(held))))
        if index % 50 == 0:
            for _ in range(40):
                tree.evict_one()
        if index % 250 == 0:
            tree.check()
    assert len(counted.rebuilt) > 10
    assert sum(counted.rebuilt) <= counted.pushed


def test_a_heap_shrinks_with_its_nodes() -> None:
    """What has left the tree is not kept alive by an entry that nobody will ever look at."""
    tree, nodes = leaves(1000)
    for node in nodes:
        tree.lock(node)
    assert (len(tree.leaves), tree.leaves.num_entries <= 64) == (0, True)
    tree.check()


def test_a_heap_that_grows_past_its_bound_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    tree, _ = leaves(3)
    tree.check()
    monkeypatch.setattr(heap, "SLACK", -4)
    with pytest.raises(AssertionError, match="memory: 3 entries for 3 candidates"):
        tree.check()


def test_idle_snapshots_are_counted_as_they_come_and_go() -> None:
    policy = Namespace(policy="streamingllm:4+64")

    tree: RadixTree[range] = RadixTree(2)
    tree.insert(Key.of([1, 2]), range(2))
    nodes = [
        tree.insert_snapshot(Key.of(range(length), policy), range(length), object()).node
        for length in (4, 6, 8)
    ]
    assert (tree.idle_bytes, tree.idle_snapshot_bytes) == (2 + 8, 8)
    tree.read(nodes[1])
    tree.check()
    assert (tree.idle_bytes, tree.idle_snapshot_bytes) == (2 + 6, 6)
    tree.split(nodes[0], 2)
    tree.drop(nodes[2])
    tree.check()
    assert (tree.idle_bytes, tree.idle_snapshot_bytes) == (2 + 2, 2)
    tree.unread(nodes[1])
    tree.flush({policy})
    tree.check()
    assert (tree.idle_bytes, tree.idle_snapshot_bytes) == (2, 0)
    tree.idle_snapshot_bytes = 1
    with pytest.raises(AssertionError, match="1 idle bytes of snapshots counted, 0 found"):
        tree.check()


@pytest.mark.parametrize("order", ["importance", "lru"])
def test_a_short_dump_is_the_beginning_of_the_long_one(order: str) -> None:
    """Of many children only those are sorted that are shown."""
    tree: RadixTree[range] = RadixTree(2, order_name=order)
    rng = random.Random(1)
    for _ in range(400):
        ids = [rng.randrange(60), 0, rng.randrange(4), 1, rng.randrange(3), 2]
        done = tree.insert(Key.of(ids), range(6))
        if rng.random() < 0.7:  # the others are worth nothing, and all the same
            tree.credit(done.node, [rng.random()] * 3, goes_on=done.goes_on)
    whole = as_json(tree)["nodes"]
    assert len(whole) == tree.num_nodes > 300
    for most in (0, 1, 2, 7, 59, 60, 61, 200, len(whole), len(whole) + 5):
        assert as_json(tree, most=most)["nodes"] == whole[:most]
