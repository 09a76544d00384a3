"""The prefix tree's changes as SGLang's KV events, for routers that follow what a server holds."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.events import KVCacheEventRecorder
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import split_node_hash_value

from sglang_kv.radix.key import Namespace

if TYPE_CHECKING:
    from sglang_kv.owner import PrefixNode


class AnnouncedNode:
    """What SGLang's recorder reads of a node, and the hashes that it leaves there."""

    def __init__(self, key: RadixKey, parent: AnnouncedNode | None):
        self.key = key
        self.parent = parent
        self.hash_value: list[str] | None = None if parent is not None else []
        self.event_hash_value: list[str] | None = None


class TreeEvents:
    """Stores and removals of what serves everybody: KV of full attention, all of it there.

    Snapshots are never announced: to others, their tokens are what full attention computed.
    """

    def __init__(self, recorder: KVCacheEventRecorder):
        self.recorder = recorder
        self._root = AnnouncedNode(RadixKey(array("q")), None)
        self._of_node: dict[int, AnnouncedNode] = {}

    @classmethod
    def of(cls, params: Any) -> TreeEvents:
        """For SGLang's `CacheInitParams`."""
        return cls(
            KVCacheEventRecorder(
                enabled=params.enable_kv_cache_events and not params.disable,
                page_size=params.page_size,
                dynamo_format=params.dynamo_kv_event_format,
                lora_names=params.kv_event_lora_names,
            )
        )

    def cleared(self) -> None:
        self._of_node.clear()
        self.recorder.record_all_cleared()

    def stored(self, node: PrefixNode) -> None:
        """A node is complete; all nodes above it are."""
        if not self.recorder.enabled:
            return
        assert node.parent is not None
        parent = self._root if node.parent.parent is None else self._of_node[node.parent.id]
        extra_key, salt = _published(node.namespace)
        key = RadixKey(array("q", node.tokens.tolist()), extra_key, cache_salt=salt)
        announced = AnnouncedNode(key, parent)
        self.recorder.record_store(announced)
        self._of_node[node.id] = announced

    def removed(self, node: PrefixNode) -> None:
        """A node has lost memory, if it was announced."""
        announced = self._of_node.pop(node.id, None)
        if announced is not None:
            self.recorder.record_remove(announced)

    def split(self, upper: PrefixNode, lower: PrefixNode) -> None:
        whole = self._of_node.get(lower.id)
        if whole is None:
            return
        length, size = len(upper), self.recorder.page_size
        first = AnnouncedNode(whole.key[:length], whole.parent)
        first.hash_value, whole.hash_value = split_node_hash_value(whole.hash_value, length, size)
        first.event_hash_value, whole.event_hash_value = split_node_hash_value(
            whole.event_hash_value, length, size
        )
        whole.key, whole.parent = whole.key[length:], first
        self._of_node[upper.id] = first


def _published(namespace: Namespace) -> tuple[str | None, str | None]:
    """``extra_key`` and ``cache_salt`` of a namespace in SGLang's events: as clients sent them, but
    that a tenant's blocks are salted with all of the namespace."""
    extra_key = namespace.extra_key
    if namespace.lora_id is not None:  # as SGLang joins them, and takes them apart for events
        extra_key = (extra_key or "") + namespace.lora_id
    salt = namespace.salt if namespace.tenant is None else namespace.digest().hex()
    return extra_key, salt
