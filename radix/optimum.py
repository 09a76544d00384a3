"""The most that any cache of a size could have hit, told with the whole trace in hand.

The bound is Belady's at page granularity, with bypass. A page is a prefix: equal tokens after equal
tokens in an equal namespace. Each request reads its pages one by one; on every read the cache keeps
those whose next read comes soonest, the one just read included. That is the best schedule of unit
pages (intervals between reads, on as many machines as there are pages of memory, taken by earliest
end).

It bounds every tree that does not thin: while a request runs, its pages and all that survives until
after it lie in memory together, so the tree's contents are a schedule of this kind. And it may beat
every tree: it also hits pages behind a missing one, makes no room for a request as a whole, and
knows the future.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from sglang_kv.radix.key import Namespace, pages_of
from sglang_kv.radix.trace import Request

_NEVER = 1 << 60


def optimum(requests: Sequence[Request], memory_tokens: int, *, page_size: int = 16) -> int:
    """Hit tokens that no tree of ``memory_tokens`` can exceed on ``requests``."""
    reads, counted = _reads(requests, memory_tokens, page_size)
    following = [_NEVER] * len(reads)
    seen: dict[int, int] = {}
    for at in range(len(reads) - 1, -1, -1):
        nearest = seen.get(reads[at], _NEVER)
        # A page that is computed anyway when it is next read need not be kept until then.
        following[at] = nearest if nearest != _NEVER and counted[nearest] else _NEVER
        seen[reads[at]] = at
    capacity, hits = memory_tokens // page_size, 0
    kept: dict[int, int] = {}  # page -> its next read
    furthest: list[tuple[int, int]] = []
    for at, page in enumerate(reads):
        if kept.pop(page, None) is not None and counted[at]:
            hits += 1
        if following[at] == _NEVER:
            continue
        kept[page] = following[at]
        heapq.heappush(furthest, (-following[at], page))
        while len(kept) > capacity:
            when, victim = heapq.heappop(furthest)
            if kept.get(victim) == -when:
                del kept[victim]
    return hits * page_size


def _reads(
    requests: Sequence[Request], memory_tokens: int, page_size: int
) -> tuple[list[int], list[bool]]:
    """Pages in the order in which they are read, and whether finding one saves anything."""
    reads: list[int] = []
    counted: list[bool] = []
    ids: dict[tuple[int | Namespace, bytes], int] = {}
    for request in requests:
        pages = pages_of(request.key().tokens, page_size)
        if len(pages) * page_size > memory_tokens:
            continue
        usable = (request.prompt_tokens - 1) // page_size
        before: int | Namespace = request.namespace
        for index, page in enumerate(pages):
            before = ids.setdefault((before, page), len(ids))
            reads.append(before)
            counted.append(index < usable)
    return reads, counted
