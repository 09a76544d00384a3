"""A tree for a person to look at: as JSON, and as text.

    python -m sglang_kv.radix.dump TREE.json

Prompts are their senders' own, so tokens are left out, and namespaces are told apart by digest,
unless whoever asks has a right to see them.
"""

from __future__ import annotations

import argparse
import heapq
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang_kv.radix.books import Books
from sglang_kv.radix.node import Node
from sglang_kv.radix.orders import OrderKey

#: Tokens of a node that are shown, where they are.
TOKENS = 8


def as_json(tree: Books[Any], *, most: int | None = None, secrets: bool = False) -> dict[str, Any]:
    """The tree as what JSON has: counters, and a list of nodes, parents before their children.

    Args:
        most: nodes at most, of siblings the most important first; None: all.
        secrets: show the first tokens of nodes, and the parts of namespaces.
    """
    nodes: list[dict[str, Any]] = []
    stack = _sorted(tree, tree.root, most)
    while stack and (most is None or len(nodes) < most):
        node = stack.pop()
        nodes.append(_node(tree, node, secrets))
        stack.extend(_sorted(tree, node, None if most is None else most - len(nodes)))
    return {
        "order": tree.order_name,
        "page_size": tree.page_size,
        "clock": tree.clock,
        "num_nodes": tree.num_nodes,
        "used_bytes": tree.used_bytes,
        "idle_bytes": tree.idle_bytes,
        "evictable_tokens": tree.evictable_tokens,
        "protected_tokens": tree.protected_tokens,
        "nodes": nodes,
    }


def as_text(dump: dict[str, Any]) -> str:
    """What `as_json` gave, one line per node, indented by depth."""
    tokens = dump["evictable_tokens"] + dump["protected_tokens"]
    lines = [
        f"{dump['order']}: {dump['num_nodes']} nodes, "
        f"{tokens:,} tokens ({dump['protected_tokens']:,} locked), "
        f"{dump['used_bytes']:,} bytes ({dump['idle_bytes']:,} read by nobody)"
    ]
    depth: dict[int, int] = {}
    for node in dump["nodes"]:
        above = depth.get(node["parent"])
        depth[node["id"]] = 0 if above is None else above + 1
        if above is None:
            lines.append(f"namespace {node['namespace']}")
        lines.append("  " * (depth[node["id"]] + 1) + _line(node))
    left_out = dump["num_nodes"] - len(dump["nodes"])
    return "\n".join([*lines, f"and {left_out} more nodes"] if left_out else lines)


def _sorted(tree: Books[Any], node: Node[Any], most: int | None) -> list[Node[Any]]:
    """Children, the most important last: they are taken from the end. Of more than ``most``, those
    that come first; the root of a busy tree has very many, and few are shown."""

    def place(child: Node[Any]) -> tuple[OrderKey, int]:
        return tree.order(child), child.id

    children = node.children.values()
    if most is None or len(children) <= most:
        return sorted(children, key=place)
    return heapq.nlargest(most, children, key=place)[::-1]


def _node(tree: Books[Any], node: Node[Any], secrets: bool) -> dict[str, Any]:
    assert node.parent is not None
    name = node.namespace
    shown: Any = {part: value for part, value in name._asdict().items() if value is not None}
    found = {
        "id": node.id,
        "parent": node.parent.id,
        "namespace": shown if secrets else name.digest().hex()[:16],
        "start": node.start,
        "end": node.end,
        "state": node.state.name.lower(),
        "snapshot": node.snapshot is not None,
        "bytes": node.bytes,
        "importance": round(float(tree.decay.at(node, tree.clock).mean()), 4),
        "hits": node.hits,
        "locks": node.lock_ref,
        "readers": node.readers,
    }
    if secrets:
        found["tokens"] = node.tokens[:TOKENS].tolist()
    return found


def _line(node: dict[str, Any]) -> str:
    parts = [f"[{node['start']}, {node['end']})", "snapshot" if node["snapshot"] else node["state"]]
    parts += [f"{node['bytes']:,} bytes", f"importance {node['importance']:g}"]
    parts += [f"{node[name]} {name}" for name in ("hits", "locks", "readers") if node[name]]
    if "tokens" in node:
        parts.append(" ".join(map(str, node["tokens"])) + " ...")
    return "  ".join(parts)


def main(argv: Sequence[str] | None = None) -> None:
    """Print a dump as text."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("dump", type=Path, help="JSON of `as_json`, alone or in /server_info")
    dump = json.loads(parser.parse_args(argv).dump.read_text())
    for state in dump.get("internal_states", [{"prefix_tree": dump}]):
        print(as_text(state["prefix_tree"]))


if __name__ == "__main__":
    main()
