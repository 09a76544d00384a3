"""The importance-weighted radix tree: prefixes of many requests, stored once.

It knows tokens, not memory. Every node carries a ``value`` with one item per token (SGLang's ids)
and what is physical belongs to an `Owner`, who is asked for bytes and told of every change. One
ledger or two fit:

- ids: `lock` and `unlock` a path, `evict_tokens` when ids run out;
- memory: `read` and `unread` a path, `evict` or `evict_one` when memory runs out. A node that is
  locked and not read may turn *hollow*: its ids stay, matching stops there, and the next insert
  over it fills it with the newcomer's memory. An owner with one ledger locks and reads together.

KV of full attention lies in namespaces without a policy and is shared page by page. KV computed
after a policy dropped something lies under that policy's namespace, as *snapshots*: hollow nodes
with the state of all streams at their end, and valid there only.

Nothing here depends on wall time or on hash order: the same calls give the same evictions.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from sglang_kv.radix.check import check
from sglang_kv.radix.holds import Holds
from sglang_kv.radix.key import Key, Namespace, common_prefix
from sglang_kv.radix.node import Node, State, Thin, V


class Match(NamedTuple):
    """``length`` tokens are there, from the root to the end of ``node`` (the root: nothing).

    If ``node.snapshot`` is not None, that is what serves them; else the values along the path.
    """

    length: int
    node: Node[Any]


class Insertion(NamedTuple):
    """What an insert found.

    Args:
        node: its end is the end of the key's whole pages.
        known: tokens whose ids the tree had: the newcomer's ids for ``[0, known)`` are duplicates.
        filled: ``[start, stop)`` of those that took the newcomer's memory in spite of that.
        goes_on: the key only went on where an earlier one had ended, as a session's next turn does.
    """

    node: Node[Any]
    known: int
    filled: tuple[tuple[int, int], ...]
    goes_on: bool


class RadixTree(Holds[V]):
    """A radix tree over page-aligned tokens.

    Args:
        page_size: tokens of a page; keys are cut to whole pages.
        owner: whose memory it is.
        order_name: who goes first, one of `orders.ORDERS`.
        half_life: stored tokens after which importance counts half.
        thin_first: thin all nodes that the owner thins before any is emptied, not in turn.
    """

    # -- looking up --

    def match(self, key: Key, *, limit: int | None = None, need: Thin | None = None) -> Match:
        """The longest stored prefix of ``key``; its path was used just now.

        Splits the node in which it ends. What is returned is safe while it is locked and read.

        Args:
            limit: match no more than so many tokens.
            need: what the request needs of a thinned node; None: thinned nodes are a miss.
        """
        node, length = self._walk(key, limit, need)
        if length < node.end:
            asked = len(key.tokens) if limit is None else min(limit, len(key.tokens))
            parts = length < asked // self.page_size * self.page_size
            node = self.split(node, length - node.start, forked=parts)
        self._touch(node.path())
        return Match(length, node)

    def peek(self, key: Key, *, limit: int | None = None, need: Thin | None = None) -> int:
        """As many tokens as `match` would find; changes nothing."""
        return self._walk(key, limit, need)[1]

    def known(self, key: Key) -> int:
        """Tokens of ``key`` whose ids the tree has, with memory or without; changes nothing."""
        length = len(key.tokens) // self.page_size * self.page_size
        node, done = self.root, 0
        while done < length:
            page = key.tokens[done : done + self.page_size]
            child = node.children.get(self._child_key(node, key.namespace, page))
            if child is None:
                break
            same = common_prefix(child.tokens, key.tokens[done:length], self.page_size)
            done += same
            if same < len(child):
                break
            node = child
        return done

    def _walk(self, key: Key, limit: int | None, need: Thin | None) -> tuple[Node[V], int]:
        size, tokens = self.page_size, key.tokens
        length = len(tokens) if limit is None else max(0, min(limit, len(tokens)))
        length = length // size * size
        best, found = self.root, 0
        node, done, served = self.root, 0, True
        while done < length:
            at = self._child_key(node, key.namespace, tokens[done : done + size])
            child = node.children.get(at)
            if child is None:
                break
            same = common_prefix(child.tokens, tokens[done:length], size)
            done += same
            whole = same == len(child)
            if served and child.state is State.RESIDENT:
                best, found = child, done
            elif served and whole and child.serves_at_end(need):
                if child.ends_window:
                    best, found = child, done
            else:
                served = False
            if whole and child.snapshot is not None:
                best, found = child, done
            if not whole or not (served or key.namespace.policy):
                break
            node = child
        return best, found

    # -- storing --

    def insert(self, key: Key, value: V, *, prior: float = 0.0) -> Insertion:
        """Store the whole pages of ``key``, every one computed with full attention (which what
        stands behind a thinned node was not).

        Known nodes keep their values; hollow and thinned ones take the newcomer's memory.

        Args:
            value: at least one item per token of the whole pages.
            prior: density that new pages begin with.

        Raises ValueError under a policy's namespace, or if ``value`` is too short.
        """
        if key.namespace.policy is not None:
            raise ValueError("under a policy's namespace only snapshots are stored")
        length = self._whole(key, value)
        filled: list[tuple[int, int]] = []
        path, done = self._descend(key, length)
        for step in path:
            if step.state is not State.RESIDENT:
                self._fill(step, value[step.start : step.end])
                filled.append((step.start, step.end))
        node = path[-1] if path else self.root
        goes_on = done < length and bool(path) and not (node.forked or _asked_behind(node))
        if done < length:
            node = self._attach(node, key, value, done, length, prior, State.RESIDENT)
        return Insertion(node, done, tuple(filled), goes_on)

    def insert_snapshot(
        self, key: Key, value: V, snapshot: Any, *, prior: float = 0.0
    ) -> Insertion:
        """Hang ``snapshot`` (not None) at the end of the whole pages of ``key``.

        The end's earlier snapshot stays, and ``snapshot`` is the caller's again, if there is one:
        ``node.snapshot is snapshot`` tells. Raises ValueError outside a policy's namespace, for an
        empty key, or if ``value`` is too short.
        """
        length = self._whole(key, value)
        if key.namespace.policy is None or length == 0 or snapshot is None:
            raise ValueError("a snapshot needs a policy's namespace and at least one page")
        path, done = self._descend(key, length)
        node = path[-1] if path else self.root
        goes_on = done < length and bool(path) and not (node.forked or _asked_behind(node))
        if done < length:
            node = self._attach(node, key, value, done, length, prior, State.HOLLOW)
        if node.snapshot is None:
            node.snapshot = snapshot
            self._reweigh(node)
            self.owner.stored(node)
            self._refresh(node)
        return Insertion(node, done, (), goes_on)

    def _whole(self, key: Key, value: V) -> int:
        length = len(key.tokens) // self.page_size * self.page_size
        if len(value) < length:
            raise ValueError(f"{len(value)} values for {length} tokens")
        return length

    def _descend(self, key: Key, length: int) -> tuple[list[Node[V]], int]:
        """Known nodes of ``key``, split where it leaves them; and how many tokens they are."""
        path: list[Node[V]] = []
        node, done, tokens = self.root, 0, key.tokens
        while done < length:
            page = tokens[done : done + self.page_size]
            child = node.children.get(self._child_key(node, key.namespace, page))
            if child is None:
                break
            same = common_prefix(child.tokens, tokens[done:length], self.page_size)
            done += same
            node = child if same == len(child) else self.split(child, same, forked=done < length)
            path.append(node)
        self._touch(path)
        return path, done

    def _attach(
        self, parent: Node[V], key: Key, value: V, start: int, end: int, prior: float, state: State
    ) -> Node[V]:
        tokens = key.tokens[start:end].copy()
        density = np.full(len(tokens) // self.page_size, prior, dtype=np.float64)
        self.clock += len(tokens)
        node = Node(
            self._new_id(), parent, key.namespace, tokens, value[start:end], density, self.clock
        )
        node.state = state
        node.last_access = self.accesses
        parent.children[self._child_key(parent, key.namespace, tokens)] = node
        # The root shares nothing, and may have very many children.
        if parent is not self.root and not parent.forked:
            parent.forked = _asked_behind(parent)
        parent.resident_children += state is State.RESIDENT
        parent.kept_children += state is not State.HOLLOW
        self.num_nodes += 1
        self.evictable_tokens += len(node)
        self._reweigh(node)
        if state is not State.HOLLOW:
            self.owner.stored(node)
        self._refresh(node)
        self._refresh(parent)
        return node

    def _fill(self, node: Node[V], donor: V) -> None:
        self.owner.filled(node, donor)
        self.clock += len(node)
        self._set_state(node, State.RESIDENT)
        self._reweigh(node)
        self._refresh(node)

    def split(self, node: Node[V], num_tokens: int, *, forked: bool = False) -> Node[V]:
        """Cut ``node`` after ``num_tokens``; return the upper half. ``node`` is the lower one.

        Locks and readers hold on to both; pages keep their importance, bit by bit. A snapshot stays
        at the end, and so does the window of a thinned node: its upper half is a miss.

        Args:
            forked: a key goes on in another way there; else one only ends there. Two readers part
                there if what it leaves was a prompt's; else that is an answer which the next turn
                gives in other words (thinking left out, or other tokens for the same text).
        """
        if num_tokens % self.page_size or not 0 < num_tokens < len(node) or node.parent is None:
            raise ValueError(f"cannot split {node} after {num_tokens} tokens")
        parent, pages = node.parent, num_tokens // self.page_size
        first, rest = node.tokens[:num_tokens].copy(), node.tokens[num_tokens:].copy()
        upper = Node(
            self._new_id(),
            parent,
            node.namespace,
            first,
            node.value[:num_tokens],
            node.density[:pages].copy(),
            node.stamp,
        )
        upper.state, upper.thin = node.state, node.thin
        upper.ends_window = node.state is not State.THINNED
        upper.lock_ref, upper.hits, upper.last_access = node.lock_ref, node.hits, node.last_access
        upper.forked = node.forked or (forked and node.hits > 0)
        upper.readers = 0 if node.snapshot is not None else node.readers
        upper.resident_children = int(node.state is State.RESIDENT)
        upper.kept_children = int(node.state is not State.HOLLOW)
        parent.children[self._child_key(parent, node.namespace, first)] = upper
        upper.children[self._child_key(upper, node.namespace, rest)] = node
        node.parent, node.start = upper, upper.end
        node.tokens, node.value = rest, node.value[num_tokens:]
        node.density = node.density[pages:].copy()
        self.num_nodes += 1
        self.owner.split(upper, node)
        for half in (upper, node):
            self._reweigh(half)
            self._refresh(half)
        return upper

    # -- checking --

    def check(self) -> None:
        """Raise AssertionError unless everything that is counted agrees with a walk. O(n)."""
        check(self)

    def namespaces(self) -> set[Namespace]:
        """Namespaces that have nodes."""
        return {child.namespace for child in self.root.children.values()}


def _asked_behind(node: Node[Any]) -> bool:
    """Whether a prompt that somebody was credited for goes on behind ``node``."""
    return any(child.hits > 0 for child in node.children.values())
