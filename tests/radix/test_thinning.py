"""Thinned nodes: what they weigh, whom they serve, and what a split makes of them."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_kv.radix.key import Key
from sglang_kv.radix.node import Node, State, Thin
from sglang_kv.radix.owner import Owner
from sglang_kv.radix.tree import RadixTree

KEPT = Thin("gates-1", frozenset({(0, 1), (2, 0)}), sinks=2, recent=4)


class FourHeads(Owner[Any]):
    """Four streams of a byte per token; two of them stream in a thinned node."""

    def __init__(self, thins: bool = True) -> None:
        self.thins = thins
        self.log: list[tuple[Any, ...]] = []

    def weigh(self, node: Node[Any]) -> int:
        if node.state is State.HOLLOW:
            return 0
        if node.thin is None:
            return 4 * len(node)
        sinks = max(0, min(len(node), node.thin.sinks - node.start))
        return 2 * len(node) + 2 * min(len(node), sinks + node.thin.recent)

    def plan_thin(self, node: Node[Any]) -> Thin | None:
        return KEPT if self.thins and len(node) > KEPT.sinks + KEPT.recent else None

    def thinned(self, node: Node[Any]) -> None:
        self.log.append(("thinned", node.start, node.end))

    def filled(self, node: Node[Any], donor: Any) -> None:
        self.log.append(("filled", node.state.name, node.start, node.end))


def thinned_tree(length: int = 20) -> tuple[RadixTree[Any], FourHeads, Node[Any]]:
    owner = FourHeads()
    tree: RadixTree[Any] = RadixTree(2, owner=owner, order_name="lru")
    node = tree.insert(Key.of(range(length)), range(length)).node
    step = tree.evict_one()
    assert step is not None
    assert (step.step, step.node) == ("thin", node)
    return tree, owner, node


def test_a_node_is_thinned_before_its_retrieval_heads_lose_anything() -> None:
    tree, owner, node = thinned_tree()
    assert (node.state, node.thin, tree.used_bytes) == (State.THINNED, KEPT, 40 + 12)
    assert owner.log == [("thinned", 0, 20)]
    tree.check()
    step = tree.evict_one()
    assert step is not None
    assert (step.step, step.freed_bytes) == ("remove", 52)
    tree.check()


def test_every_node_is_thinned_before_one_is_emptied_if_worth_is_equal() -> None:
    owner = FourHeads()
    tree: RadixTree[Any] = RadixTree(2, owner=owner)  # importance per byte
    for first in (100, 200, 300):
        tokens = range(first, first + 20)
        tree.credit(tree.insert(Key.of(tokens), range(20)).node, [1.0] * 10)
    steps = []
    while (step := tree.evict_one()) is not None:
        steps.append((step.step, int(step.node.tokens[0])))
        tree.check()
    assert steps == [
        ("thin", 100),
        ("thin", 200),
        ("thin", 300),
        ("remove", 100),
        ("remove", 200),
        ("remove", 300),
    ]


@pytest.mark.parametrize(
    ("need", "length"),
    [
        (None, 0),  # dense: a miss
        (KEPT, 20),
        (Thin("gates-1", frozenset({(2, 0)}), 1, 3), 20),  # needs less
        (Thin("gates-2", KEPT.retrieval, 2, 4), 0),
        (Thin("gates-1", frozenset({(0, 1), (2, 1)}), 2, 4), 0),
        (Thin("gates-1", KEPT.retrieval, 3, 4), 0),
        (Thin("gates-1", KEPT.retrieval, 2, 5), 0),
    ],
)
def test_it_serves_at_its_end_those_who_need_no_more(need: Thin | None, length: int) -> None:
    tree, _, node = thinned_tree()
    match = tree.match(Key.of(range(24)), need=need)
    assert match.length == length
    assert match.node is (node if length else tree.root)
    assert tree.peek(Key.of(range(18)), need=need) == 0  # not inside
    assert tree.peek(Key.of(range(24)), need=need, limit=19) == 0
    tree.check()


def test_a_resident_beginning_serves_the_dense_and_the_whole_serves_the_thin() -> None:
    owner = FourHeads()
    tree: RadixTree[Any] = RadixTree(2, owner=owner, order_name="lru")
    lower = tree.insert(Key.of(range(20)), range(20)).node
    tree.match(Key.of(range(8)))
    tree.thin(lower, KEPT)
    assert tree.peek(Key.of(range(20))) == 8
    assert tree.peek(Key.of(range(20)), need=KEPT) == 20
    assert tree.peek(Key.of(range(18)), need=KEPT) == 8
    tree.check()


def test_every_thinned_node_on_the_way_has_to_have_enough() -> None:
    tree, _, node = thinned_tree()
    tree.insert(Key.of(range(20)), range(20))
    child = tree.insert(Key.of(range(40)), range(40)).node
    less = Thin("gates-1", frozenset({(2, 0)}), sinks=2, recent=4)
    tree.thin(child, KEPT)
    tree.thin(node, less)
    assert tree.peek(Key.of(range(40)), need=KEPT) == 0
    assert tree.peek(Key.of(range(40)), need=less) == 40
    assert tree.peek(Key.of(range(22)), need=less) == 20
    tree.check()


def test_the_upper_half_of_a_thinned_node_is_a_miss() -> None:
    tree, _, node = thinned_tree()
    upper = tree.split(node, 8)
    tree.check()
    assert (upper.state, upper.thin, upper.ends_window) == (State.THINNED, KEPT, False)
    assert tree.peek(Key.of(range(8)), need=KEPT) == 0
    assert tree.peek(Key.of([*range(8), 99, 99]), need=KEPT) == 0
    assert tree.peek(Key.of(range(20)), need=KEPT) == 20  # its pages still serve the end
    # When the end has gone nobody needs the beginning, however recently it was used.
    other = tree.insert(Key.of([50, 51]), range(2)).node
    tree.match(Key.of(range(20)), need=KEPT)
    steps = [tree.evict_one(), tree.evict_one(), tree.evict_one()]
    assert [step.node if step else None for step in steps] == [other, node, upper]
    tree.insert(Key.of(range(20)), range(20))
    tree.check()


def test_the_useless_upper_half_goes_before_anything_else() -> None:
    tree, _, node = thinned_tree()
    upper = tree.split(node, 8)
    tree.evict_one()
    tree.insert(Key.of([50, 51]), range(2))
    step = tree.evict_one()
    assert step is not None
    assert step.node is upper


def test_a_dense_newcomer_fills_a_thinned_node() -> None:
    tree, owner, node = thinned_tree()
    done = tree.insert(Key.of([*range(10), 77, 78]), range(100, 112))
    assert (done.known, done.filled) == (10, ((0, 10),))
    assert owner.log[1:] == [("filled", "THINNED", 0, 10)]
    assert tree.peek(Key.of(range(20))) == 10
    assert tree.peek(Key.of(range(20)), need=KEPT) == 20
    assert node.state is State.THINNED
    tree.check()
    tree.insert(Key.of(range(20)), range(20))
    assert (node.state, node.thin, node.ends_window) == (State.RESIDENT, None, True)
    tree.check()


def test_an_inner_node_is_thinned_once_nothing_under_it_is_resident() -> None:
    tree, _, node = thinned_tree()
    tree.insert(Key.of(range(20)), range(20))
    child = tree.insert(Key.of(range(40)), range(40)).node
    with pytest.raises(ValueError, match="cannot be thinned"):
        tree.thin(node, KEPT)
    steps = [tree.evict_one() for _ in range(4)]
    assert [(s.node, s.step) for s in steps if s] == [
        (child, "thin"),
        (node, "thin"),
        (child, "remove"),
        (node, "remove"),
    ]
    tree.check()


def test_what_is_read_is_not_thinned() -> None:
    tree, _, node = thinned_tree()
    tree.insert(Key.of(range(20)), range(20))
    tree.lock(node)
    tree.read(node)
    assert tree.evict_one() is None
    with pytest.raises(ValueError, match="cannot be thinned"):
        tree.thin(node, KEPT)
    tree.unread(node)
    assert [s.step for s in (tree.evict_one(), tree.evict_one()) if s] == ["thin", "empty"]
    assert node.state is State.HOLLOW
    tree.check()


def test_thinned_first_means_all_before_any_is_emptied() -> None:
    """Whatever they are worth; in their order, and then the thinned ones in theirs."""

    def steps(thin_first: bool) -> list[tuple[str, int]]:
        tree: RadixTree[Any] = RadixTree(2, owner=FourHeads(), thin_first=thin_first)
        for first, worth in ((100, 1.0), (200, 1000.0)):
            tokens = range(first, first + 20)
            tree.credit(tree.insert(Key.of(tokens), range(20)).node, [worth] * 10)
        found = []
        while (step := tree.evict_one()) is not None:
            found.append((step.step, int(step.node.tokens[0])))
            tree.check()
        return found

    assert steps(True) == [("thin", 100), ("thin", 200), ("remove", 100), ("remove", 200)]
    assert steps(False) == [("thin", 100), ("remove", 100), ("thin", 200), ("remove", 200)]
