"""Who goes first, in each order, told as stories with the exact sequence of evictions."""

from __future__ import annotations

import math
import random

import pytest

from sglang_kv.radix.importance import Decay
from sglang_kv.radix.key import Key
from sglang_kv.radix.node import Node
from sglang_kv.radix.orders import ORDERS, order
from sglang_kv.radix.owner import Owner
from sglang_kv.radix.tree import RadixTree

A, B, C, D = ([10 * i + 1, 10 * i + 2] for i in range(4))
NAMES = {1: "A", 11: "B", 21: "C", 31: "D"}


def use(tree: RadixTree[range], tokens: list[int], density: float | None = None) -> None:
    """A request with this prompt, whose window gave all pages the same."""
    key = Key.of(tokens)
    tree.match(key)
    done = tree.insert(key, range(len(tokens)))
    pages = None if density is None else [density] * (done.node.end // tree.page_size)
    tree.credit(done.node, pages, goes_on=done.goes_on)


def evictions(tree: RadixTree[range]) -> str:
    names = ""
    while (step := tree.evict_one()) is not None:
        names += NAMES[int(step.node.tokens[0])]
        tree.check()
    return names


def story(name: str) -> RadixTree[range]:
    """A three times, B twice, then C and D once, and A's last use is the oldest."""
    tree: RadixTree[range] = RadixTree(2, order_name=name)
    for tokens in (A, A, A, B, B, C, D):
        use(tree, tokens, density=1.0)
    return tree


@pytest.mark.parametrize(
    ("name", "expected"),
    [("lru", "ABCD"), ("lfu", "CDBA"), ("slru", "CDAB"), ("importance", "CDBA"), ("cost", "ABCD")],
)
def test_the_same_story_in_each_order(name: str, expected: str) -> None:
    assert evictions(story(name)) == expected


def test_lfu_and_slru_differ_in_what_was_used_again() -> None:
    orders = {}
    for name in ("lfu", "slru"):
        tree: RadixTree[range] = RadixTree(2, order_name=name)
        for tokens in (B, B, A, A, A, B, C, A, B, B):
            use(tree, tokens)
        tree.match(Key.of(A))  # recency alone
        orders[name] = evictions(tree)
    assert orders == {"lfu": "CAB", "slru": "CBA"}


def test_importance_goes_by_density_and_then_by_recency() -> None:
    tree: RadixTree[range] = RadixTree(2)
    for tokens, density in ((A, 0.3), (B, 0.1), (C, 0.2), (D, 0.1)):
        use(tree, tokens, density)
    assert evictions(tree) == "BDCA"


def test_importance_is_per_byte_and_by_what_it_costs() -> None:
    class Skewed(Owner[range]):
        def weigh(self, node: Node[range]) -> int:
            return len(node) * (4 if node.tokens[0] == B[0] else 1)

        def cost(self, node: Node[range]) -> float:
            return len(node) * (3.0 if node.tokens[0] == A[0] else 1.0)

    tree = RadixTree(2, owner=Skewed())
    for tokens, density in ((A, 0.1), (B, 0.7), (C, 0.2), (D, 0.1)):
        use(tree, tokens, density)
    # A 0.3, B 0.175, C 0.2, D 0.1
    assert evictions(tree) == "DBCA"
    tree = RadixTree(2, owner=Skewed(), order_name="cost")
    for tokens in (A, B, C, D):
        use(tree, tokens)
    assert evictions(tree) == "BCDA"


def test_nothing_measured_goes_before_anything_measured() -> None:
    tree: RadixTree[range] = RadixTree(2)
    use(tree, A, 1e-9)
    use(tree, B)
    use(tree, C, 0.0)
    assert evictions(tree) == "BCA"


def test_old_importance_fades_and_lets_others_pass() -> None:
    fading, lasting = RadixTree(2, half_life=2.0), RadixTree[range](2)
    for tree in (fading, lasting):
        for tokens, density in ((A, 1.0), (C, 0.5), (D, 0.6)):
            use(tree, tokens, density)
    # Two tokens are stored between one and the next: A has 1/4, C 1/4, D 0.6 of its own left.
    assert evictions(fading) == "ACD"
    assert evictions(lasting) == "CDA"


def test_an_unknown_order_is_named() -> None:
    with pytest.raises(ValueError, match="'fifo'; known: importance, lru, lfu, slru, cost"):
        order("fifo", Decay())


@pytest.mark.parametrize("name", ORDERS)
def test_the_same_calls_give_the_same_evictions(name: str) -> None:
    def run() -> list[tuple[int, int, str, int]]:
        rng = random.Random(5)
        tree: RadixTree[range] = RadixTree(2, order_name=name, half_life=100.0)
        log = []
        for _ in range(400):
            tokens = [rng.randrange(3) for _ in range(rng.randrange(2, 14))]
            use(tree, tokens, rng.random())
            while tree.used_bytes > 60:
                step = tree.evict_one()
                assert step is not None
                log.append((step.node.start, step.node.end, step.step, step.freed_bytes))
        tree.check()
        return log

    first = run()
    assert len(first) > 50
    assert run() == first


@pytest.mark.parametrize("name", ORDERS)
def test_the_heap_agrees_with_a_scan(name: str) -> None:
    rng = random.Random(7)
    tree: RadixTree[range] = RadixTree(1, order_name=name, half_life=30.0)
    for _ in range(300):
        use(tree, [rng.randrange(3) for _ in range(rng.randrange(1, 8))], rng.random())
        if tree.used_bytes > 40:
            keys = [(key, n.id) for n in tree.nodes() if (key := tree.memory_key(n)) is not None]
            step = tree.evict_one()
            assert step is not None
            assert step.node.id == min(keys)[1]
            assert math.isfinite(tree.used_bytes)
    tree.check()


def test_what_several_read_outlives_what_one_read() -> None:
    """A beginning that two keys share goes after a document that came later and drew more."""
    tree: RadixTree[range] = RadixTree(2, half_life=100.0)
    for tail in (10, 20):
        done = tree.insert(Key.of([1, 2, 3, 4, tail, tail]), range(6))
        tree.credit(done.node, [1.0, 1.0, 1.0])
    shared = tree.match(Key.of([1, 2, 3, 4])).node
    assert shared.forked
    once = tree.insert(Key.of([7, 8, 9, 9]), range(4)).node
    tree.credit(once, [50.0, 50.0])
    gone = [tuple(step.node.tokens) for step in iter(tree.evict_one, None) if step]
    assert gone[-1] == (1, 2, 3, 4)
    assert (7, 8, 9, 9) in gone[:-1]


def test_a_key_that_only_ends_in_a_node_is_no_second_reader() -> None:
    tree: RadixTree[range] = RadixTree(2)
    tree.credit(tree.insert(Key.of(range(8)), range(8)).node)
    tree.insert(Key.of(range(4)), range(4))  # where its prompt had ended
    assert not any(node.forked for node in tree.nodes())
    tree.match(Key.of(range(8)), limit=6)
    assert not any(node.forked for node in tree.nodes())
    tree.match(Key.of([0, 1, 9, 9]))
    assert [node.end for node in tree.nodes() if node.forked] == [2]
    tail = tree.match(Key.of([0, 1, 2, 3])).node
    tree.credit(tail)
    assert not tail.forked
    assert tail.path()[0].forked


def test_an_answer_that_comes_back_in_other_tokens_is_no_second_reader() -> None:
    """Nobody was credited for the answer, so who goes on beside it is the prompt's reader again."""
    tree: RadixTree[range] = RadixTree(2)
    first = tree.insert(Key.of(range(4)), range(4))
    tree.credit(first.node)
    tree.insert(Key.of(range(8)), range(8))  # with its answer, [4, 8)
    again = [0, 1, 2, 3, 40, 50]
    tree.match(Key.of(again))
    second = tree.insert(Key.of(again), range(6))
    assert second.goes_on
    tree.credit(second.node, goes_on=True)
    assert not any(node.forked for node in tree.nodes())
    # A part of the answer comes back as it was.
    tree.insert(Key.of([*again, 60, 61, 62, 63]), range(10))
    partly = [*again, 60, 61, 70, 71]
    tree.match(Key.of(partly))
    third = tree.insert(Key.of(partly), range(10))
    assert third.goes_on
    assert not any(node.forked for node in tree.nodes())
    # Another prompt that leaves a credited one is another reader.
    other = tree.insert(Key.of([0, 1, 2, 3, 80, 81]), range(6))
    assert not other.goes_on
    assert [node.end for node in tree.nodes() if node.forked] == [4]
