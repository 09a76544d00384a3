"""Head pages by reference: how many are held for later and read by nobody, at the cost of the pages
that an operation names and not of the pool."""

from __future__ import annotations

import random
from typing import Any, ClassVar

import numpy as np
import pytest

from sglang_kv.pool import HeadPagePool


def recounted(pool: HeadPagePool) -> int:
    """The slow way: over all pages."""
    return sum(
        0 < held == refs for held, refs in zip(pool.held.tolist(), pool.refs.tolist(), strict=True)
    )


def test_idle_pages_follow_holders_and_readers() -> None:
    pool = HeadPagePool(20)
    pages = pool.alloc(6)
    pool.hold(pages)  # a snapshot of what a request still has
    assert pool.num_idle == 0
    pool.release(pages)
    assert pool.num_idle == 6
    pool.hold(pages[:2])  # another snapshot shares two of them
    assert pool.num_idle == 6
    pool.share(pages[1:4])  # somebody reads three
    assert pool.num_idle == 3
    assert pool.let_go(pages) == 2  # the last two; one is held again, three are read
    assert pool.num_idle == recounted(pool) == 1
    pool.check()
    pool.release(pages[1:4])
    assert (pool.num_idle, pool.num_used) == (2, 2)
    assert pool.let_go(pages[:2]) == 2
    assert (pool.num_idle, pool.num_used) == (0, 0)
    pool.check()


@pytest.mark.parametrize("seed", range(5))
def test_idle_pages_agree_with_a_recount(seed: int) -> None:
    rng, pool = random.Random(seed), HeadPagePool(60)
    read, held, most = list[Any](), list[Any](), 0
    for _ in range(600):
        what = rng.choice(
            ("alloc", "alloc", "share", "release", "release", "hold", "hold", "let_go")
        )
        some = rng.choice(read + held) if read or held else None
        if what == "alloc" and pool.num_free >= 9:
            read.append(pool.alloc(rng.randrange(1, 9)))
        elif what in ("share", "hold") and some is not None and len(read) + len(held) < 20:
            part = some[: rng.randrange(1, len(some) + 1)]
            (pool.share if what == "share" else pool.hold)(part)
            (read if what == "share" else held).append(part)
        elif what == "release" and read:
            pool.release(read.pop(rng.randrange(len(read))))
        elif what == "let_go" and held:
            pool.let_go(held.pop(rng.randrange(len(held))))
        pool.check()
        assert pool.num_idle == recounted(pool)
        most = max(most, pool.num_idle)
    assert most > 2
    pool.reset()
    pool.check()
    assert pool.num_idle == recounted(pool) == 0


def test_a_wrong_count_is_noticed() -> None:
    pool = HeadPagePool(20)
    pages = pool.alloc(6)
    with pytest.raises(AssertionError, match="let go that nobody held"):
        pool.let_go(pages)
    pool.hold(pages)
    pool.release(pages)
    pool.num_idle -= 1
    with pytest.raises(AssertionError, match="idle head pages are counted wrongly"):
        pool.check()
    pool.num_idle += 1
    pool.held[pages[0]] += 1
    with pytest.raises(AssertionError, match="held without a reference"):
        pool.check()


class Watched(np.ndarray):
    """An array that remembers how much of it was ever looked at in one step."""

    largest: ClassVar[int] = 0

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        plain = [np.asarray(each) for each in inputs]
        Watched.largest = max(Watched.largest, *(each.size for each in plain))
        kwargs = {k: tuple(map(np.asarray, v)) if k == "out" else v for k, v in kwargs.items()}
        return getattr(ufunc, method)(*plain, **kwargs)


def test_nothing_looks_at_the_whole_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Watched, "largest", 0)
    pool = HeadPagePool(100_000)
    pool.refs, pool.held = pool.refs.view(Watched), pool.held.view(Watched)
    pages = pool.alloc(10)
    pool.hold(pages)
    pool.release(pages)
    pool.share(pages[:3])
    assert (pool.num_idle, Watched.largest) == (7, 10)
    pool.release(pages[:3])
    pool.let_go(pages)
    assert (pool.num_idle, Watched.largest) == (0, 10)
    assert int((pool.refs > 0).sum()) == 0
    assert Watched.largest == 100_000  # it would have been seen
