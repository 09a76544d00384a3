"""The physical ledger's bottom: head pages, counted by reference.

A *head page* holds ``page_size`` tokens of one KV head of one layer, K and V. All layers
and heads of a rank draw from one pool, so what one stream drops any other can take.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Pages = NDArray[np.int32]


class HeadPagePool:
    """Free list and reference counts over page ids ``0 .. num_pages - 1``; no tensors.

    Contract: `alloc` hands out pages with one reference each; a page returns to the free
    list when its last reference is given up, and nothing else frees it. Callers reserve
    before they allocate, so running dry in `alloc` is a bookkeeping bug and raises.

    Some references are *held* for later and read by nobody: those of snapshots. How many pages have
    no other is counted as references come and go, since admission asks for it again and again.
    """

    def __init__(self, num_pages: int):
        if num_pages <= 0:
            raise ValueError(f"num_pages must be positive, got {num_pages}")
        self.num_pages = num_pages
        self.refs = np.zeros(num_pages, dtype=np.int32)
        self.held = np.zeros(num_pages, dtype=np.int32)  #: of ``refs``, those that are held
        self._free = np.empty(num_pages, dtype=np.int32)
        self.reset()

    def reset(self) -> None:
        """Forget all references; every page is free."""
        self.refs[:] = 0
        self.forget_held()
        # A stack whose top is the lowest id: young pools touch little memory.
        self._free[:] = np.arange(self.num_pages - 1, -1, -1, dtype=np.int32)
        self._num_free = self.num_pages
        self.changes = 0  # grows with every change: tells whether a check is due

    @property
    def num_free(self) -> int:
        return self._num_free

    @property
    def num_used(self) -> int:
        return self.num_pages - self._num_free

    def alloc(self, count: int) -> Pages:
        """``count`` pages, one reference each. ``[count]`` int32."""
        if count > self._num_free:
            raise RuntimeError(
                f"head-page pool exhausted: {count} wanted, {self._num_free} of "
                f"{self.num_pages} free (admission should have prevented this)"
            )
        self.changes += 1
        top = self._num_free
        pages = self._free[top - count : top][::-1].copy()
        self._num_free = top - count
        self.refs[pages] = 1
        return pages

    def share(self, pages: Pages) -> None:
        """One more reference to each of ``pages`` (distinct, all in use)."""
        assert (self.refs[pages] > 0).all(), "a free page was shared"
        self.changes += 1
        self.num_idle -= self._count_idle(pages)
        self.refs[pages] += 1

    def release(self, pages: Pages) -> int:
        """Give up one reference to each of ``pages`` (distinct); return how many became free."""
        if not len(pages):
            return 0
        self.changes += 1
        refs = self.refs[pages] - 1
        assert (refs >= 0).all(), "a head page was freed twice"
        self.refs[pages] = refs
        self.num_idle += self._count_idle(pages)
        free = pages[refs == 0]
        self._free[self._num_free : self._num_free + len(free)] = free
        self._num_free += len(free)
        return len(free)

    # -- references that nobody reads by --

    def hold(self, pages: Pages) -> None:
        """`share`, for later."""
        self.share(pages)
        self.held[pages] += 1
        self._num_held += len(pages)
        self.num_idle += self._count_idle(pages)

    def let_go(self, pages: Pages) -> int:
        """`release` what was held."""
        assert (self.held[pages] > 0).all(), "a head page was let go that nobody held"
        self.num_idle -= self._count_idle(pages)
        self.held[pages] -= 1
        self._num_held -= len(pages)
        return self.release(pages)

    def forget_held(self) -> None:
        """Who held pages has gone, and `reset` is about to follow."""
        self.held[:] = 0
        self._num_held = 0
        self.num_idle = 0  #: pages all of whose references are held

    def _count_idle(self, pages: Pages) -> int:
        """Of ``pages``, those with held references and no others. O(pages given)."""
        if not self._num_held:
            return 0
        held = self.held[pages]
        return int(np.count_nonzero((held > 0) & (held == self.refs[pages])))

    def check(self) -> None:
        """Raise unless free list and counts agree exactly (O(num_pages); for tests and idle)."""
        free = self._free[: self._num_free]
        if len(np.unique(free)) != len(free):
            raise AssertionError("a head page is on the free list twice")
        if (self.refs[free] != 0).any():
            raise AssertionError("a referenced head page is on the free list")
        if int((self.refs > 0).sum()) != self.num_used:
            raise AssertionError("a head page is neither free nor referenced")
        if (self.held > self.refs).any() or int(self.held.sum()) != self._num_held:
            raise AssertionError("a head page is held without a reference")
        if int(((self.held > 0) & (self.held == self.refs)).sum()) != self.num_idle:
            raise AssertionError("idle head pages are counted wrongly")
