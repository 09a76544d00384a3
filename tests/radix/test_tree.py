"""Stories of a few requests, told to the last token."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest

from sglang_kv.radix.key import Key, Namespace, common_prefix, pages_of
from sglang_kv.radix.node import Node, State
from sglang_kv.radix.owner import Owner
from sglang_kv.radix.tree import RadixTree


class Recorder(Owner[Any]):
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []

    def stored(self, node: Node[Any]) -> None:
        self.log.append(("stored", node.start, node.end))

    def split(self, upper: Node[Any], lower: Node[Any]) -> None:
        self.log.append(("split", upper.start, upper.end, lower.end))

    def filled(self, node: Node[Any], donor: Any) -> None:
        self.log.append(("filled", node.state.name, list(node.value), list(donor)))

    def emptied(self, node: Node[Any]) -> None:
        self.log.append(("emptied", node.start, node.end))

    def removed(self, node: Node[Any]) -> None:
        self.log.append(("removed", node.start, node.end, node.holds_memory))


def lru_tree(page_size: int = 2) -> tuple[RadixTree[Any], Recorder]:
    owner = Recorder()
    return RadixTree(page_size, owner=owner, order_name="lru"), owner


def values(node: Node[Any]) -> list[int]:
    return [item for step in node.path() for item in step.value]


def test_two_prompts_share_their_beginning() -> None:
    tree, owner = lru_tree()
    first = tree.insert(Key.of([1, 2, 3, 4, 5, 6]), range(6))
    assert (first.known, first.node.end) == (0, 6)
    second = tree.insert(Key.of([1, 2, 3, 4, 9, 9, 7]), range(10, 17))
    assert (second.known, second.node.end) == (4, 6)  # the seventh token is no whole page
    assert values(second.node) == [0, 1, 2, 3, 14, 15]
    assert owner.log == [("stored", 0, 6), ("split", 0, 4, 6), ("stored", 4, 6)]
    match = tree.match(Key.of([1, 2, 3, 4, 5, 6, 8, 8]))
    assert match.length == 6
    assert values(match.node) == [0, 1, 2, 3, 4, 5]
    assert tree.match(Key.of([1, 2, 3, 5])).length == 2  # page by page
    assert tree.match(Key.of([1])).node is tree.root
    assert tree.match(Key.of([1, 2, 3, 4]), limit=3).length == 2
    tree.check()


def test_peek_changes_nothing() -> None:
    tree, owner = lru_tree()
    tree.insert(Key.of([1, 2, 3, 4]), range(4))
    before = (tree.num_nodes, tree.accesses, len(owner.log))
    assert tree.peek(Key.of([1, 2, 7, 7])) == 2
    assert (tree.num_nodes, tree.accesses, len(owner.log)) == before


def test_keys_from_the_host_are_not_copied() -> None:
    ids = array("q", [1, 2, 3, 4])
    key = Key.of(ids)
    ids[0] = 9
    assert key.tokens.tolist() == [9, 2, 3, 4]
    tree, _ = lru_tree()
    tree.insert(key, range(4))
    ids[0] = 1  # the tree has its own
    assert tree.peek(Key.of([9, 2, 3, 4])) == 4
    tree.check()
    with pytest.raises(ValueError, match="one dimension"):
        Key.of(np.zeros((2, 2), dtype=np.int64))
    assert len(Key.of(array("q")).tokens) == 0


def test_common_prefix_counts_whole_pages() -> None:
    a, b = np.arange(10), np.array([0, 1, 2, 3, 4, 9, 6])
    assert [common_prefix(a, b, size) for size in (1, 2, 4, 16)] == [5, 4, 4, 0]
    assert common_prefix(a, a[:0], 2) == 0
    assert pages_of(a, 4) == [a[:4].tobytes(), a[4:8].tobytes()]


# -- namespaces --


def test_joined_strings_would_collide_and_tuples_do_not() -> None:
    tree, _ = lru_tree()
    tree.insert(Key.of([1, 2, 3, 4], Namespace(extra_key="a", lora_id="bc")), range(4))
    for other in (
        Namespace(extra_key="abc"),
        Namespace(extra_key="ab", lora_id="c"),
        Namespace(extra_key="abc", lora_id=""),
        Namespace(tenant="a", lora_id="bc"),
        Namespace(),
    ):
        assert tree.peek(Key.of([1, 2, 3, 4], other)) == 0
        assert other.digest() != Namespace(extra_key="a", lora_id="bc").digest()


@pytest.mark.parametrize("field", Namespace._fields)
def test_every_part_of_a_namespace_keeps_apart(field: str) -> None:
    tree, _ = lru_tree()
    parts: list[str | None] = [None, "", "x", "y"]
    spaces = [Namespace(**{field: part}) for part in parts]
    assert len({space.digest() for space in spaces}) == 4
    if field == "policy":
        return  # see the tests of snapshots
    nodes = [
        tree.insert(Key.of([1, 2], space), range(2 * i, 2 * i + 2)).node
        for i, space in enumerate(spaces)
    ]
    assert len({id(node) for node in nodes}) == 4
    for i, space in enumerate(spaces):
        assert values(tree.match(Key.of([1, 2, 3, 4], space)).node) == [2 * i, 2 * i + 1]
    assert tree.namespaces() == set(spaces)
    tree.check()


def test_flushing_one_tenant_leaves_the_others_alone() -> None:
    tree, owner = lru_tree()
    a, b = Namespace(tenant="a"), Namespace(tenant="b")
    for space in (a, b):
        tree.insert(Key.of([1, 2, 3, 4], space), range(4))
        tree.insert(Key.of([1, 2, 5, 6], space), range(4))
    held = tree.match(Key.of([1, 2, 5, 6], a)).node
    tree.lock(held)
    tree.read(held)
    assert tree.flush({a}) == 4  # somebody is reading them
    assert tree.peek(Key.of([1, 2, 3, 4], a)) == 2
    tree.unread(held)
    assert tree.flush({a}) == 0
    assert tree.peek(Key.of([1, 2, 5, 6], a)) == 0  # hollow: its ids are still locked
    tree.unlock(held)
    assert tree.flush({a}) == 0
    assert tree.namespaces() == {b}
    assert tree.peek(Key.of([1, 2, 5, 6], b)) == 4
    tree.check()
    assert ("removed", 0, 2, False) in owner.log


# -- locks and readers --


def test_locks_move_tokens_between_evictable_and_protected() -> None:
    tree, _ = lru_tree()
    one = tree.insert(Key.of([1, 2, 3, 4]), range(4)).node
    two = tree.insert(Key.of([1, 2, 7, 8]), range(4)).node
    assert (tree.evictable_tokens, tree.protected_tokens) == (6, 0)
    assert tree.lock(one) == 4
    assert tree.lock(two) == 2
    assert tree.lock(two) == 0
    assert (tree.evictable_tokens, tree.protected_tokens) == (0, 6)
    assert tree.evict_tokens(100) == 0
    assert [tree.unlock(one), tree.unlock(two), tree.unlock(two)] == [2, 0, 4]
    with pytest.raises(ValueError, match="was not locked"):
        tree.unlock(two)
    with pytest.raises(ValueError, match="was not read"):
        tree.unread(two)
    assert tree.lock(tree.root) == 0
    tree.check()
    assert tree.evict_tokens(3) == 4
    with pytest.raises(ValueError, match="has left the tree"):
        tree.lock(one)


def test_a_split_keeps_both_halves_held() -> None:
    tree, _ = lru_tree()
    node = tree.insert(Key.of([1, 2, 3, 4, 5, 6]), range(6)).node
    tree.lock(node)
    tree.read(node)
    upper = tree.match(Key.of([1, 2])).node
    assert upper is node.parent
    assert (upper.lock_ref, upper.readers) == (1, 1)
    assert tree.evict_one() is None
    tree.unread(node)
    tree.unlock(node)
    tree.check()
    assert tree.idle_bytes == tree.used_bytes == 6


def test_what_is_locked_and_not_read_turns_hollow_and_is_filled_again() -> None:
    tree, owner = lru_tree()
    key = Key.of([1, 2, 3, 4, 5, 6])
    node = tree.insert(key, range(6)).node
    tree.lock(node)
    owner.log.clear()
    step = tree.evict_one()
    assert step is not None
    assert (step.step, step.freed_bytes, node.state) == ("empty", 6, State.HOLLOW)
    assert tree.evict_one() is None
    assert (tree.used_bytes, tree.protected_tokens) == (0, 6)
    assert tree.peek(key) == 0
    with pytest.raises(ValueError, match="has lost memory"):
        tree.read(node)
    # A newcomer with only the first four tokens fills these, and no more.
    found = tree.insert(Key.of([1, 2, 3, 4]), range(10, 14))
    assert (found.known, found.filled) == (4, ((0, 4),))
    assert values(found.node) == [0, 1, 2, 3]  # the ids stay
    assert tree.peek(key) == 4
    assert owner.log == [
        ("emptied", 0, 6),
        ("split", 0, 4, 6),
        ("filled", "HOLLOW", [0, 1, 2, 3], [10, 11, 12, 13]),
    ]
    tree.check()
    tree.unlock(node)
    assert tree.evict_tokens(1) == 2  # ids that nobody holds and nothing backs go first
    assert tree.used_bytes == tree.evictable_tokens == 4
    tree.check()


def test_memory_goes_from_the_leaves_upward() -> None:
    tree, _ = lru_tree()
    leaf = tree.insert(Key.of([1, 2, 3, 4]), range(4)).node
    upper = tree.match(Key.of([1, 2])).node  # used last, and still it goes last
    tree.lock(leaf)
    steps = [tree.evict_one(), tree.evict_one(), tree.evict_one()]
    assert [s.node if s else None for s in steps] == [leaf, upper, None]
    tree.check()


# -- snapshots --

POLICY = Namespace(policy="streamingllm:4+64")


def test_a_snapshot_serves_at_its_end_and_nowhere_else() -> None:
    tree, owner = lru_tree()
    state = object()
    key = Key.of([1, 2, 3, 4], POLICY)
    node = tree.insert_snapshot(key, range(4), state).node
    assert tree.match(Key.of([1, 2, 3, 4, 5, 6], POLICY)) == (4, node)
    assert tree.peek(Key.of([1, 2, 3, 9], POLICY)) == 0
    assert tree.peek(Key.of([1, 2, 3, 4])) == 0
    assert tree.peek(key._replace(namespace=Namespace(policy="streamingllm:4+32"))) == 0
    # The next turn hangs below; the first may go while the second stays.
    later = tree.insert_snapshot(Key.of([1, 2, 3, 4, 5, 6], POLICY), range(6), object())
    assert (later.known, later.goes_on) == (4, True)
    step = tree.evict_one()
    assert step is not None
    assert (step.step, step.node) == ("snapshot", node)
    assert tree.peek(key) == 0
    assert tree.peek(Key.of([1, 2, 3, 4, 5, 6], POLICY)) == 6
    tree.check()
    assert tree.evict(100) == 2
    assert owner.log[-1] == ("removed", 4, 6, True)
    assert tree.evict_tokens(1) == 4  # the ids of what has no snapshot any more
    tree.check()


def test_a_snapshot_stays_at_the_end_of_what_is_split() -> None:
    tree, _ = lru_tree()
    first, second = object(), object()
    long = Key.of([1, 2, 3, 4], POLICY)
    node = tree.insert_snapshot(long, range(4), first).node
    tree.read(node)
    short = tree.insert_snapshot(Key.of([1, 2], POLICY), range(2), second)
    assert short.known == 2
    assert node.snapshot is first
    assert short.node.snapshot is second
    assert short.node.readers == 0  # who reads a snapshot reads nothing above it
    assert tree.insert_snapshot(long, range(4), object()).node.snapshot is first
    tree.check()
    tree.unread(node)
    tree.check()


def test_policies_store_snapshots_and_only_policies_do() -> None:
    tree, _ = lru_tree()
    with pytest.raises(ValueError, match="only snapshots"):
        tree.insert(Key.of([1, 2], POLICY), range(2))
    with pytest.raises(ValueError, match="needs a policy"):
        tree.insert_snapshot(Key.of([1, 2]), range(2), object())
    with pytest.raises(ValueError, match="at least one page"):
        tree.insert_snapshot(Key.of([1], POLICY), range(1), object())
    with pytest.raises(ValueError, match="3 values for 4 tokens"):
        tree.insert(Key.of([1, 2, 3, 4]), range(3))
    with pytest.raises(ValueError, match="page_size"):
        RadixTree(0)
    tree.check()


def test_reset_forgets_everything() -> None:
    tree, _ = lru_tree()
    node = tree.insert(Key.of([1, 2, 3, 4]), range(4)).node
    tree.lock(node)
    tree.reset()
    assert (tree.num_nodes, tree.used_bytes, tree.protected_tokens) == (0, 0, 0)
    assert tree.evict_one() is None
    tree.check()


def test_check_finds_what_is_wrong() -> None:
    tree, _ = lru_tree()
    node = tree.insert(Key.of([1, 2, 3, 4]), range(4)).node
    for spoil in ("bytes", "lock_ref", "last_access", "start", "resident_children"):
        good = getattr(node, spoil)
        setattr(node, spoil, good + 1)
        with pytest.raises(AssertionError):
            tree.check()
        setattr(node, spoil, good)
        tree.check()


def test_ids_are_known_with_memory_or_without() -> None:
    tree, owner = lru_tree()
    node = tree.insert(Key.of(range(8)), range(8)).node
    tree.lock(node)
    assert tree.evict_one() is not None
    assert node.state is State.HOLLOW
    assert tree.peek(Key.of(range(8))) == 0
    assert [tree.known(Key.of(range(n))) for n in (8, 7, 3, 1)] == [8, 6, 2, 0]
    assert tree.known(Key.of([0, 1, 2, 9, 4, 5])) == 2
    assert tree.known(Key.of(range(8), Namespace(tenant="b"))) == 0
    assert owner.log == [("stored", 0, 8), ("emptied", 0, 8)]  # looking splits nothing


def test_a_node_may_go_out_of_turn() -> None:
    tree, owner = lru_tree()
    key = Key.of(range(8), Namespace(policy="p"))
    first = tree.insert_snapshot(key._replace(tokens=key.tokens[:4]), range(4), "early").node
    last = tree.insert_snapshot(key, range(8), "late").node
    tree.read(last)
    with pytest.raises(ValueError, match="cannot be dropped"):
        tree.drop(last)
    assert tree.drop(first).step == "snapshot"  # its ids stay: `last` hangs below it
    with pytest.raises(ValueError, match="cannot be dropped"):
        tree.drop(first)
    tree.unread(last)
    assert tree.drop(last).step == "remove"
    tree.check()
    upper = tree.insert(Key.of(range(4)), range(4)).node
    lower = tree.insert(Key.of(range(6)), range(6)).node
    with pytest.raises(ValueError, match="cannot be dropped"):
        tree.drop(upper)
    assert tree.drop(lower).step == tree.drop(upper).step == "remove"
    assert owner.log[-1] == ("removed", 0, 4, True)
