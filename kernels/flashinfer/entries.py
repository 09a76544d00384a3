"""Streams as entries of FlashInfer's batch: which pages, which rows of the queries, which mask.

FlashInfer knows one mask per launch, causal or not, with at most one sliding window, and attends to
whole page lists. What a query sees of a stream is two ranges of token indices, sinks and window
(`kernels.layout.PagedStreams`). So a stream becomes one entry, or two whose results are merged by
their log-sum-exp:

    index       0 .. sinks | .................. | begin ........ index of the query
    sinks       pages from 0, `last_page_len` ends them after the last sink, no mask
    window                          pages from the one that holds `begin`; the edge inside that
                                    page is the launch's `window_left`, counted from the end

Entries that share a mask (causal, window_left) share a launch. All numbers here are known to the
host without asking the device.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sglang_kv.kernels.layout import GAP, KV_LEN, NUM_SINKS, WINDOW_LEFT

Ints = NDArray[np.int64]


class Mask(NamedTuple):
    """The mask of a launch, in FlashInfer's terms; ``window_left`` -1: none."""

    causal: bool
    window_left: int


@dataclass(frozen=True)
class Entries:
    """The entries of one launch, one element of each array per entry.

    An entry is rows ``row_begin .. row_end`` of the queries of one KV head, and ``num_pages`` pages
    of a request's list from ``first_page`` on, the last of which holds ``last_page_len`` tokens.
    ``sinks``: it is sinks apart from their window; such entries come last.
    """

    mask: Mask
    request: Ints
    head: Ints
    row_begin: Ints
    row_end: Ints
    first_page: Ints
    num_pages: Ints
    last_page_len: Ints
    sinks: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.request)

    @property
    def pages(self) -> bytes:
        """What the page lists depend on, as bytes; equal bytes mean equal lists of places."""
        shape = (self.request, self.head, self.row_begin, self.row_end)
        return b"".join(a.tobytes() for a in (*shape, self.first_page, self.num_pages, self.sinks))


def visible_ranges(
    index: Ints, desc: NDArray[np.int32], page_size: int, layer_window_left: Ints | int
) -> tuple[Ints, Ints, Ints]:
    """What queries see of their streams: sinks ``[first, second)``, and ``[third, index]``.

    - `index`: token index of each query, none negative
    - `desc`: int32 [..., 4], its streams' (kv_len, gap, num_sinks, window_left)
    - `layer_window_left`: the layer's own sliding window, -1 for none

    All broadcast. Equal to `kernels.attention.visible_ranges`, for many queries at once.
    """
    gap, sinks, window = (desc[..., i].astype(np.int64) for i in (GAP, NUM_SINKS, WINDOW_LEFT))
    sink_end = -(-sinks // page_size) * page_size
    position = np.where(index < sink_end, index, index + gap)

    def first_within(distance: Ints | int) -> Ints:
        """Index of the oldest token within a distance; a negative one reaches everything."""
        oldest = np.where(np.less(distance, 0), 0, np.maximum(position - distance, 0))
        return np.where(oldest < sink_end, oldest, np.maximum(oldest - gap, sink_end))

    everything = first_within(layer_window_left)
    begin = np.maximum(first_within(window), everything)
    sink_stop = np.minimum(sinks, index + 1)
    # Neighbours are one range, unless what lay between them was dropped.
    dropped = (gap > 0) & (begin >= sink_end)
    near = (begin < sink_stop) | ((begin == sink_stop) & ~dropped)
    none = (window < 0) | (sink_stop <= everything)
    one = near & ~none
    begin = np.where(one, everything, begin)
    one |= none
    return np.where(one, 0, everything), np.where(one, 0, sink_stop), begin


def decode_entries(
    desc: NDArray[np.int32], page_size: int, layer_window_left: Sequence[int]
) -> list[list[Entries]]:
    """The launches of each layer, for one query per request: the newest token of its streams.

    - `desc`: int32 [batch, layers, kv_heads, 4]
    - `layer_window_left`: each layer's own sliding window, -1 for none

    Empty streams have no entry.
    """
    by_layer = np.ascontiguousarray(desc.transpose(1, 0, 2, 3))  # [layers, batch, kv_heads, 4]
    keys = [(by_layer[i].tobytes(), w) for i, w in enumerate(layer_window_left)]
    first = {key: i for i, key in reversed(list(enumerate(keys)))}
    distinct = sorted(first.values())  # most policies treat all layers alike
    windows = np.asarray(layer_window_left, dtype=np.int64)[distinct, None, None]
    found = dict(
        zip(distinct, _decode_launches(by_layer[distinct], page_size, windows), strict=True)
    )
    return [found[first[key]] for key in keys]


def _decode_launches(
    desc: NDArray[np.int32], page_size: int, windows: Ints
) -> Iterator[list[Entries]]:
    kv_len = desc[..., KV_LEN].astype(np.int64)
    index = np.maximum(kv_len - 1, 0)
    sink_begin, sink_stop, begin = visible_ranges(index, desc, page_size, windows)
    bound = _bound(desc[..., WINDOW_LEFT].astype(np.int64), windows)
    # Where no window ends, or its edge is a page's, the page list alone says what is seen. An edge
    # that moves with every token is left to the mask even then: else the launch would change.
    free = (begin % page_size == 0) & (index - begin != bound)
    sinks_left = np.where(sink_begin % page_size == 0, -1, sink_stop - 1 - sink_begin)
    # Windows before sinks: [layers, 2, batch, kv_heads]
    there = np.stack([kv_len > 0, (kv_len > 0) & (sink_stop > sink_begin)], axis=1)
    left = np.stack([np.where(free, -1, index - begin), sinks_left], axis=1)
    start, stop = np.stack([begin, sink_begin], axis=1), np.stack([kv_len, sink_stop], axis=1)
    page = start // page_size
    pages, last = -(-stop // page_size) - page, (stop - 1) % page_size + 1
    shape = left.shape[1:]
    sinks, request, head = (a.reshape(-1) for a in np.indices(shape))
    for layer in range(len(desc)):
        masks, kinds = left[layer].reshape(-1), there[layer].reshape(-1)
        values = np.unique(masks[kinds]).tolist()
        launches = []
        for window_left in values:
            if len(values) == 1 and kinds.all():
                these: Any = slice(None)
            else:
                these = np.flatnonzero(kinds & (masks == window_left))
            row = request[these]
            launches.append(
                Entries(
                    Mask(False, window_left),
                    request=row,
                    head=head[these],
                    row_begin=row,
                    row_end=row + 1,
                    first_page=page[layer].reshape(-1)[these],
                    num_pages=pages[layer].reshape(-1)[these],
                    last_page_len=last[layer].reshape(-1)[these],
                    sinks=sinks[these].astype(bool),
                )
            )
        yield launches


def _bound(window: Ints, layer_window: Ints) -> Ints:
    """The narrower of two windows, -1: none."""
    far = np.iinfo(np.int64).max
    wide = np.minimum(
        np.where(window < 0, far, window), np.where(layer_window < 0, far, layer_window)
    )
    return np.where(wide == far, -1, wide)


# -- several queries per request --


class Piece(NamedTuple):
    """Rows of a request's new tokens, and the token indices that they attend to under ``mask``."""

    row_begin: int
    row_end: int
    start: int
    stop: int
    mask: Mask
    sinks: bool


@functools.lru_cache(maxsize=4096)
def extend_pieces(
    num_queries: int, stream: tuple[int, int, int, int], page_size: int, layer_window_left: int
) -> list[Piece]:
    """What the last ``num_queries`` tokens of a stream see of it, in as few pieces as can be.

    ``stream`` is (kv_len, gap, num_sinks, window_left); it holds the queries' tokens already. A
    stream that a window has long passed is two pieces, one that it has not yet reached is one;
    rows in between, no more than there are sinks, are pieces of their own.
    """
    kv_len, _, _, window = stream
    if kv_len == 0 or num_queries == 0:
        return []
    index = np.arange(kv_len - num_queries, kv_len)
    desc = np.broadcast_to(np.array(stream, dtype=np.int32), (num_queries, 4))
    sink_begin, sink_stop, begin = visible_ranges(index, desc, page_size, layer_window_left)
    bound = int(_bound(np.array(window), np.array(layer_window_left)))
    return [
        *_window_pieces(index, begin, bound, page_size),
        *_sink_pieces(sink_begin, sink_stop, page_size),
    ]


def _window_pieces(index: Ints, begin: Ints, bound: int, page_size: int) -> list[Piece]:
    pieces, row = [], 0
    while row < len(index):
        base = int(begin[row]) // page_size * page_size
        # A page list from `base` on: rows that see all of it up to themselves, or a window of it.
        end, left = row + _leading(begin[row:] == base), -1
        if bound >= 0:
            moving = row + _leading(begin[row:] == np.maximum(base, index[row:] - bound))
            if moving > end or (moving == end and index[row] - begin[row] == bound):
                end, left = moving, bound
        if end == row:  # neither: a window that reaches past the gap, one row at a time
            end, left = row + 1, int(index[row] - begin[row])
        stop = int(index[end - 1]) + 1
        pieces.append(Piece(row, end, base, stop, Mask(end - row > 1, left), False))
        row = end
    return pieces


def _sink_pieces(begin: Ints, stop: Ints, page_size: int) -> list[Piece]:
    pieces, row = [], 0
    while row < len(begin):
        first, last = int(begin[row]), int(stop[row])
        end = row + 1
        if first % page_size == 0:
            end = row + _leading((begin[row:] == first) & (stop[row:] == last))
        if last > first:
            left = -1 if first % page_size == 0 else last - 1 - first
            base = first // page_size * page_size
            pieces.append(Piece(row, end, base, last, Mask(False, left), True))
        row = end
    return pieces


def _leading(holds: NDArray[np.bool_]) -> int:
    """How many at the front are true."""
    return len(holds) if holds.all() else int(holds.argmin())


def extend_entries(
    desc: NDArray[np.int32],
    qo_indptr: Sequence[int],
    page_size: int,
    layer_window_left: Sequence[int],
) -> list[list[Entries]]:
    """As `decode_entries`, for the rows ``qo_indptr[b] .. qo_indptr[b + 1]`` of each request."""
    batch, num_layers, num_heads, _ = desc.shape
    launches: list[list[Entries]] = []
    known: dict[tuple[bytes, int], list[Entries]] = {}
    for layer in range(num_layers):
        key = (desc[:, layer].tobytes(), layer_window_left[layer])
        if key not in known:
            found: dict[Mask, list[tuple[int, ...]]] = defaultdict(list)
            for b in range(batch):
                first, count = qo_indptr[b], qo_indptr[b + 1] - qo_indptr[b]
                for head in range(num_heads):
                    stream = tuple(desc[b, layer, head].tolist())
                    for p in extend_pieces(count, stream, page_size, layer_window_left[layer]):
                        pages = -(-p.stop // page_size) - p.start // page_size
                        last = (p.stop - 1) % page_size + 1
                        rows = (first + p.row_begin, first + p.row_end)
                        place = (p.start // page_size, pages, last, int(p.sinks))
                        found[p.mask].append((b, head, *rows, *place))
            known[key] = [_extend_launch(mask, found[mask]) for mask in sorted(found)]
        launches.append(known[key])
    return launches


def _extend_launch(mask: Mask, rows: list[tuple[int, ...]]) -> Entries:
    rows = sorted(rows, key=lambda row: row[-1])  # windows before sinks; nothing else moves
    request, head, begin, end, page, pages, last, sinks = np.array(rows, dtype=np.int64).T
    return Entries(mask, request, head, begin, end, page, pages, last, sinks.astype(bool))
