"""Every invariant of the tree, recounted by a walk over all nodes."""

from __future__ import annotations

from typing import Any

import numpy as np

from sglang_kv.radix.books import Books
from sglang_kv.radix.heap import LazyHeap
from sglang_kv.radix.node import Node, State
from sglang_kv.radix.orders import OrderKey


def check(tree: Books[Any]) -> None:
    """Raise AssertionError, with what is wrong, unless ``tree`` is in order. O(nodes)."""
    nodes = list(tree.nodes())
    for node in (tree.root, *nodes):
        _check_children(tree, node)
    for node in nodes:
        _check_node(tree, node)
    idle = [node for node in nodes if node.readers == 0]
    locked = [node for node in nodes if node.lock_ref]
    for name, counted, found in (
        ("nodes", tree.num_nodes, len(nodes)),
        ("distinct ids", tree.num_nodes, len({node.id for node in nodes})),
        ("used bytes", tree.used_bytes, sum(node.bytes for node in nodes)),
        ("idle bytes", tree.idle_bytes, sum(node.bytes for node in idle)),
        (
            "idle bytes of snapshots",
            tree.idle_snapshot_bytes,
            sum(node.bytes for node in idle if node.snapshot is not None),
        ),
        ("protected tokens", tree.protected_tokens, sum(map(len, locked))),
        (
            "evictable tokens",
            tree.evictable_tokens,
            sum(map(len, nodes)) - tree.protected_tokens,
        ),
    ):
        assert counted == found, f"{counted} {name} counted, {found} found"
    _check_heap("memory", tree.memory, {n: tree.memory_key(n) for n in nodes})
    _check_heap("leaves", tree.leaves, {n: tree.leaf_key(n) for n in nodes})


def _check_node(tree: Books[Any], node: Node[Any]) -> None:
    parent = node.parent
    assert parent is not None, f"{node} has no parent"
    size, pages = tree.page_size, len(node) // tree.page_size
    assert node.start == parent.end, f"{node} does not follow {parent}"
    assert len(node) == pages * size > 0, f"{node} is not in whole pages"
    assert len(node.value) == len(node), f"{node} has {len(node.value)} values"
    assert parent is tree.root or parent.namespace == node.namespace, f"{node} changed namespace"
    assert node.state >= parent.state, f"{node} has more memory than {parent}"
    assert (node.thin is not None) == (node.state is State.THINNED), f"{node}: {node.thin}"
    assert node.ends_window or node.state is State.THINNED, f"{node} has no window"
    assert node.namespace.policy is None or node.state is State.HOLLOW, f"{node} in a policy's"
    assert node.namespace.policy is not None or node.snapshot is None, f"snapshot at {node}"
    assert node.lock_ref >= 0 <= node.readers, f"{node}: locks or readers below zero"
    assert node.readers == 0 or node.holds_memory, f"{node} is read without memory"
    assert node.bytes == tree.owner.weigh(node), f"{node}: {node.bytes} bytes"
    assert node.cost == tree.owner.cost(node), f"{node}: cost {node.cost}"
    assert node.density.shape == (pages,), f"{node}: density {node.density.shape}"
    assert np.isfinite(node.density).all(), f"{node}: density not finite"
    assert (node.density >= 0).all(), f"{node}: density below zero"
    assert node.stamp <= tree.clock, f"{node} is from the future"
    assert node.last_access <= tree.accesses, f"{node} was used in the future"


def _check_children(tree: Books[Any], node: Node[Any]) -> None:
    below = list(node.children.values())
    for at, child in node.children.items():
        assert child.parent is node, f"{child} is not a child of {node}"
        page = child.tokens[: tree.page_size].tobytes()
        expected = (child.namespace, page) if node is tree.root else page
        assert at == expected, f"{child} hangs at the wrong place"
    resident = sum(child.state is State.RESIDENT for child in below)
    kept = sum(child.state is not State.HOLLOW for child in below)
    assert node.resident_children == resident, f"{node}: {resident} children are resident"
    assert node.kept_children == kept, f"{node}: {kept} children have memory"
    if node is tree.root:
        return
    # Whoever holds on to a child holds on to its parent, and each holder to one child at most.
    assert node.lock_ref >= sum(c.lock_ref for c in below), f"{node}: locks below without its own"
    if node.namespace.policy is None:
        assert node.readers >= sum(c.readers for c in below), f"{node}: read below, not here"


def _check_heap(name: str, heap: LazyHeap[Any], expected: dict[Node[Any], OrderKey | None]) -> None:
    keys = {node.id: key for node, key in expected.items() if key is not None}
    assert heap.key_of == keys, f"{name}: the heap differs from a walk"
    assert heap.num_entries <= heap.most_entries, (
        f"{name}: {heap.num_entries} entries for {len(keys)} candidates"
    )
    first = heap.peek()
    least = min(keys.items(), key=lambda item: (item[1], item[0]), default=None)
    assert (first.id if first else None) == (least[0] if least else None), f"{name}: wrong top"
