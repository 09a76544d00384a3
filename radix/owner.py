"""Whoever owns the memory behind a tree: what it is asked, and what it is told."""

from __future__ import annotations

from typing import Generic

from sglang_kv.radix.node import Node, Thin, V


class Owner(Generic[V]):
    """Overridden by the code that holds the memory. The defaults suit a tree of equal tokens.

    The tree counts what `weigh` says and frees nothing itself. All calls come while a method of
    the tree runs; none of them may call the tree back.
    """

    # -- asked; answers may depend on the node's tokens, place and state only --

    def weigh(self, node: Node[V]) -> int:
        """Bytes of the node's memory, its snapshot's too. Default: 1 per token with memory."""
        return len(node) if node.holds_memory else 0

    def cost(self, node: Node[V]) -> float:
        """What computing the node's tokens again takes, in any unit. Default: 1 per token."""
        return float(len(node))

    def plan_thin(self, node: Node[V]) -> Thin | None:
        """What a resident node may be thinned to; None (default): it is emptied at once."""
        return None

    # -- told; the node is as it will be, unless said otherwise --

    def stored(self, node: Node[V]) -> None:
        """A new node, or a new snapshot at the end of a node."""

    def split(self, upper: Node[V], lower: Node[V]) -> None:
        """``lower`` is the node that was there; ``upper`` is new and took its first tokens."""

    def filled(self, node: Node[V], donor: V) -> None:
        """A hollow or thinned node is about to become resident with the memory of a newcomer,
        whose items for the same tokens are ``donor``. ``node.state`` is still the old one."""

    def thinned(self, node: Node[V]) -> None:
        """The node's streaming heads give up all but what ``node.thin`` says."""

    def emptied(self, node: Node[V]) -> None:
        """The node is about to lose its memory (or its snapshot's); its ids stay."""

    def removed(self, node: Node[V]) -> None:
        """The node has left the tree, with its ids and, if it `holds_memory`, its memory."""
