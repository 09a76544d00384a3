"""What a policy will do to one request, in positions and counts.

A plan is all that the ledger and the scheduler need: it depends on the policy, the prompt's length
and the model's shape, never on scores, so that memory is accounted for before anything is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sglang_kv.compression.base import Compressor, PolicyError

if TYPE_CHECKING:
    from sglang_kv.compression.gates import HeadGates

Counts = NDArray[np.int64]
Mask = NDArray[np.bool_]


class Geometry(NamedTuple):
    """The streams of one request on this rank, and the gates of the model's heads."""

    num_layers: int
    num_kv_heads: int
    page_size: int
    gates: HeadGates | None = None
    #: Which of the model's KV heads this rank holds.
    heads: slice = slice(None)
    #: Some layers have a sliding window of their own.
    sliding_layers: bool = False
    #: Ranks of the tensor-parallel group, each with its own heads and the same requests.
    num_ranks: int = 1

    @property
    def num_streams(self) -> int:
        return self.num_layers * self.num_kv_heads

    def per_layer(self, tokens: Sequence[int]) -> Counts:
        """One count per layer, for each of its heads. ``[layers, kv_heads]``"""
        return np.repeat(np.array(tokens, dtype=np.int64)[:, None], self.num_kv_heads, axis=1)

    def require_even(self, what: str) -> None:
        """Raise `PolicyError` where ranks would hold unequal numbers of pages for one request:
        each decides by its own ledger whom to admit, and they must decide alike."""
        if self.num_ranks > 1:
            raise PolicyError(
                f"{what} gives heads unequal memory, which is not supported with tensor "
                f"parallelism (--tp-size {self.num_ranks})"
            )

    def head_weights(self) -> NDArray[np.float32]:
        """The gates of this rank's heads, 1 where there are none. ``[layers, kv_heads]``"""
        if self.gates is None:
            return np.ones((self.num_layers, self.num_kv_heads), dtype=np.float32)
        return self.gates.values[:, self.heads]


class Window(NamedTuple):
    """What a stream's queries see, in FlashInfer's convention.

    A query at logical position ``t`` sees key position ``p`` iff
    ``p < num_sinks or t - p <= window_left``; ``window_left == -1`` sees everything.
    """

    num_sinks: int = 0
    window_left: int = -1

    def sink_pages(self, page_size: int) -> int:
        """Pages that the sinks occupy."""
        return -(-self.num_sinks // page_size)

    def first_page(self, position: int, page_size: int) -> int:
        """First token page after the sinks that a query at ``position`` still needs.

        The one place where the host takes the window's edge from: the page of the oldest position
        that a query anywhere in the page of ``position`` sees, never before the end of the sinks.
        A window that moves page by page never holds more pages than one that moves by tokens,
        and is whole at each page's beginning, where a session may go on.
        """
        sinks = self.sink_pages(page_size)
        if self.window_left < 0:
            return sinks
        return max(sinks, (position // page_size * page_size - self.window_left) // page_size)

    def pages(self, num_tokens: int, page_size: int) -> int:
        """Pages one stream holds once ``num_tokens`` are computed and the rest dropped."""
        total = -(-num_tokens // page_size)
        if self.window_left < 0:
            return total
        dropped = self.first_page(num_tokens, page_size) - self.sink_pages(page_size)
        return total - min(dropped, max(0, total - self.sink_pages(page_size)))


FULL = Window()


@dataclass(frozen=True, eq=False)
class Plan:
    """Keep everything; also what the other plans have in common."""

    geometry: Geometry

    #: Position at which the policy takes hold of a prompt; None: from its first token. Everything
    #: before it is computed with full attention. A chunk ends there, and a retracted request that
    #: is computed again folds at the same place.
    fold_at: int | None = None
    #: Leading tokens whose KV equals full attention's at every layer; None: all of them. Only
    #: these may be matched and published under a plain prefix-cache key.
    dense_prefix: int | None = None
    #: Tokens that may come from the prefix tree; None: no limit.
    match_limit: int | None = None

    def pages(self, num_tokens: int) -> int:
        """Head pages between two steps, with ``num_tokens`` computed, over all streams."""
        return -(-num_tokens // self.geometry.page_size) * self.geometry.num_streams

    def peak_pages(
        self, num_tokens: int, chunk: int | None, *, matched: int = 0, published: int = 0
    ) -> int:
        """Most head pages that a prefill of ``num_tokens`` takes from the pool at once.

        Args:
            num_tokens: length of the prompt.
            chunk: most tokens that one forward computes (``None``: the whole prompt).
            matched: token pages that came from the prefix tree.
            published: token pages that the tree takes over. Others may come to read them, so they
                do not count as given back when this request drops them.
        """
        return self.pages(num_tokens) - matched * self.geometry.num_streams

    def kept_tokens(self, num_tokens: int) -> int:
        """Tokens of ``num_tokens`` that the next query can still see, mean over the streams."""
        return num_tokens

    def next_stop(self, position: int) -> int | None:
        """Where a chunk that begins at ``position`` has to end; None: anywhere."""
        if self.fold_at is not None and position < self.fold_at:
            return self.fold_at
        return None


@dataclass(frozen=True, eq=False)
class WindowPlan(Plan):
    """Some or all streams keep their sinks and a sliding window; the others keep everything."""

    window: Window = FULL
    #: Streams with the window, ``[layers, kv_heads]``; None: all.
    windowed: Mask | None = None
    #: The first forward attends densely in all streams.
    dense_first_chunk: bool = False
    #: Positions are those in the cache: a query that has lost sight of what follows the sinks
    #: stands right behind the window, however far from them it is. All streams have the window.
    cache_positions: bool = False

    @property
    def num_windowed(self) -> int:
        return self.geometry.num_streams if self.windowed is None else int(self.windowed.sum())

    def pages(self, num_tokens: int) -> int:
        g, windowed = self.geometry, self.num_windowed
        full = -(-num_tokens // g.page_size)
        return self.window.pages(num_tokens, g.page_size) * windowed + full * (
            g.num_streams - windowed
        )

    def peak_pages(
        self, num_tokens: int, chunk: int | None, *, matched: int = 0, published: int = 0
    ) -> int:
        """As `Plan.peak_pages`. A matched page saves one only while the request reads it: when its
        window has left it, it stands on its own pages."""
        g, size = self.geometry, self.geometry.page_size
        fresh = -(-num_tokens // size) - matched
        if chunk is None or chunk >= num_tokens:
            return fresh * g.num_streams
        # A chunk may start anywhere inside a page, hence one more page than it fills.
        windowed = self.window.pages(num_tokens, size) + -(-chunk // size) + 1
        dense = -(-(self.fold_at or 0) // size) - matched
        bound = min(fresh, max(windowed + max(0, published - matched), dense))
        return bound * self.num_windowed + fresh * (g.num_streams - self.num_windowed)

    @property
    def last_position(self) -> int:
        """In the cache: where a query stands that sinks are apart from."""
        return self.window.num_sinks + self.window.window_left

    def longest_chunk(self, trained_length: int) -> int:
        """Most tokens that one forward may compute without a position past the trained length,
        once what was dropped no longer counts; may be negative."""
        size, window = self.geometry.page_size, self.window
        # A window is left page by page, and a chunk may begin at the last token of a page.
        held = (window.sink_pages(size) + -(-window.window_left // size)) * size + size - 1
        return trained_length - held

    def kept_tokens(self, num_tokens: int) -> int:
        kept, streams = num_tokens, self.geometry.num_streams
        if num_tokens >= (self.fold_at or 0):
            kept = min(kept, self.window.num_sinks + max(0, self.window.window_left))
        windowed = self.num_windowed
        return round((kept * windowed + num_tokens * (streams - windowed)) / streams)


@dataclass(frozen=True, eq=False)
class FoldPlan(Plan):
    """At ``fold_at``, each stream is cut to a number of tokens that scores choose.

    Args:
        kept: tokens that each stream keeps at ``fold_at``, ``[layers, kv_heads]``.
        score_from: first position whose query is scored.
        score_on: queries after ``fold_at`` are scored too.
        by_page: whole pages stay, by reference; else tokens are gathered into fresh pages.
        adaptive: the heads of a layer share its pages as their scores say; ``kept`` holds the
            mean, and the true counts are known when the fold is done.
        floor: of those, what each stream keeps at least, ``[layers, kv_heads]``.
        interval: every so many tokens after ``fold_at``, streams longer than ``limit`` are
            folded again; None: they grow.
        limit: what such a fold leaves at most, tokens per stream, ``[layers, kv_heads]``; by
            page, in whole pages that the newest tokens have room in (`later_limit`).
    """

    policy: Compressor | None = None
    kept: Counts | None = None
    score_from: int = 0
    score_on: bool = False
    by_page: bool = False
    adaptive: bool = False
    floor: Counts | None = None
    interval: int | None = None
    limit: Counts | None = None

    @classmethod
    def of(
        cls,
        policy: Compressor,
        geometry: Geometry,
        *,
        fold_at: int,
        kept: Counts,
        score_from: int,
        **options: Any,
    ) -> Plan:
        """The plan, or `Plan` itself where nothing is ever dropped."""
        if geometry.sliding_layers:
            raise PolicyError(
                f"kv_compression.method: {policy.name!r} needs full attention in every layer, and "
                "this model has layers with a sliding window"
            )
        plan = cls(geometry, fold_at, policy=policy, kept=kept, score_from=score_from, **options)
        first = plan.first_drop
        if first is None:
            return Plan(geometry)
        # Up to the first drop everything is dense; what is scored has to be computed here.
        return replace(plan, dense_prefix=first, match_limit=min(score_from, first - 1))

    @property
    def folds_prompt(self) -> bool:
        """Whether ``fold_at`` itself drops anything."""
        assert self.kept is not None and self.fold_at is not None  # noqa: PT018
        return bool((self.kept < self.fold_at).any())

    def folds_at(self, position: int) -> bool:
        """Whether streams are cut when ``position`` tokens are computed."""
        assert self.fold_at is not None
        if position == self.fold_at:
            return True
        past = position - self.fold_at
        return self.interval is not None and past > 0 and past % self.interval == 0

    @cached_property
    def first_drop(self) -> int | None:
        """First position at which anything is dropped; None: never."""
        assert self.kept is not None and self.fold_at is not None  # noqa: PT018
        if self.folds_prompt:
            return self.fold_at
        if self.interval is None or self.limit is None:
            return None
        room = int((self.limit - self.kept).min()) + 1  # one more than fits
        return self.fold_at + max(1, -(-room // self.interval)) * self.interval

    def next_stop(self, position: int) -> int | None:
        first = self.first_drop
        if first is None or position < first:
            return first
        if self.interval is None:
            return None
        assert self.fold_at is not None
        return self.fold_at + ((position - self.fold_at) // self.interval + 1) * self.interval

    def target(self, position: int, lengths: Counts) -> Counts:
        """Tokens that the fold at ``position`` leaves of streams of such lengths."""
        assert self.kept is not None
        if position == self.fold_at:
            return np.minimum(self.kept, lengths)
        assert self.limit is not None
        if not self.by_page:
            return np.minimum(self.limit, lengths)
        size = self.geometry.page_size
        left: Counts = np.minimum(lengths, self.limit - -lengths % size)
        return left

    def lengths(self, num_tokens: int) -> Counts:
        """Most tokens in each stream between two steps, with ``num_tokens`` computed."""
        assert self.kept is not None and self.fold_at is not None  # noqa: PT018
        if num_tokens < self.fold_at:
            return np.full_like(self.kept, num_tokens)
        grown: Counts = self.kept + (num_tokens - self.fold_at)
        if self.limit is None or self.interval is None:
            return grown
        # A fold by page leaves the last page partly filled, so less than the limit.
        bound: Counts = np.maximum(self.kept, self.limit) + self.interval
        return np.minimum(grown, bound)

    def pages(self, num_tokens: int) -> int:
        return int((-(-self.lengths(num_tokens) // self.geometry.page_size)).sum())

    def peak_pages(
        self, num_tokens: int, chunk: int | None, *, matched: int = 0, published: int = 0
    ) -> int:
        """As `Plan.peak_pages`: the dense prompt and the private copy stand side by side, since
        the tree may keep the one while the request goes on with the other."""
        g, first = self.geometry, self.first_drop
        if first is None or num_tokens < first:
            return self.pages(num_tokens) - matched * g.num_streams
        dense = (-(-first // g.page_size) - matched) * g.num_streams
        if self.by_page and self.interval is None:
            # What stays is the dense prompt's own.
            return dense + self.pages(num_tokens) - self.pages(first)
        if self.by_page:
            # What later folds drop may be read by others, and is not counted as given back.
            return dense + (-(-(num_tokens - first) // g.page_size) + 1) * g.num_streams
        private = self.pages(num_tokens)
        if self.interval is not None:
            # Between two folds a stream is longer than what the later one leaves.
            private = max(private, (-(-self.interval // g.page_size) + 1) * g.num_streams)
        return dense + private

    def kept_tokens(self, num_tokens: int) -> int:
        assert self.kept is not None and self.fold_at is not None  # noqa: PT018
        if num_tokens <= self.fold_at or self.interval is None or self.limit is None:
            return round(float(self.lengths(num_tokens).mean()))
        since = (num_tokens - self.fold_at) % self.interval
        last = num_tokens - since
        # By page, each fold leaves the last page as full as it is, so one says what all have left.
        held = self.target(last, self.kept + (last - self.fold_at)) + since
        return round(float(held.mean()))
