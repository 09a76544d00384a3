"""Decode and extend of one-head pages by FlashInfer's batch wrappers.

Each (request, KV head) is an entry of FlashInfer's batch, with `num_kv_heads=1` and the group's
query heads as `num_qo_heads`; a stream whose sinks lie apart from its window is two, merged by
their log-sum-exp (see `entries`).

**Plans.** What FlashInfer's `plan` computes is a list of tiles, (entry, chunk of `SPLIT_TOKENS`
keys), and with a fixed split size that follows from each entry's own page count. Page ids, page
counts and the length of the last page are read on the device when a layer runs. So one planned
wrapper serves every layer and every step with the same tiles; only the three buffers of the page
table are swapped: `indices` per layer, `last_page_len` per step, `indptr` when a page is added.
FlashInfer's public API has no call for that, and its own planner for CUDA graphs sets the same
attributes. The version is pinned, and tests read the same attributes.

**No waiting.** Lengths and page counts are the host's; nothing here reads from the device. Uploads
come from pinned memory. A wrapper that is planned again was last planned `KEPT_STEPS` steps ago,
since FlashInfer copies a plan from a pinned buffer of the wrapper.

**CUDA graphs** take the Triton path. A captured graph repeats its launches, and here their number
follows from the batch: one per distinct mask, and one set per kind of layer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sglang_kv.kernels.flashinfer import wrappers
from sglang_kv.kernels.flashinfer.entries import Entries, decode_entries, extend_entries
from sglang_kv.kernels.layout import FP8_DTYPES, PagedStreams

#: Keys of a stream that one tile of a decode attends to, 128 KiB of K and V in bf16 at head_dim
#: 128; docs/KERNELS.md has the choice.
SPLIT_TOKENS = 256
#: Steps for which a wrapper that is out of use rests before it is planned again.
KEPT_STEPS = 2
#: Query rows of a tile: those of a group of up to 16 heads.
_TILE_ROWS = 16
_MIB = 1 << 20


class LayerOptions(NamedTuple):
    """What a layer of the model asks of attention; see `kernels.attention.decode`."""

    sm_scale: float
    logits_soft_cap: float = 0.0
    window_left: int = -1
    #: What 8-bit pages hold times these are the keys and values.
    k_scale: float = 1.0
    v_scale: float = 1.0


@dataclass
class Stats:
    """What planning has cost so far."""

    plans: int = 0  # calls of FlashInfer's `plan`
    page_lists: int = 0  # launches whose page lists were laid out anew
    steps: int = 0


@dataclass
class _Launch:
    """Entries that share a mask, on the device."""

    entries: Entries
    wrapper: Any
    num_rows: int
    #: Of `num_rows`, those of entries that are not sinks apart; they come first.
    num_window_rows: int
    rows: Tensor  # int64 [num_rows], of q as [rows x kv_heads]
    in_order: bool  # `rows` counts up from 0
    indptr: Tensor  # int32 [entries + 1]
    places: Tensor  # int64 [pages], of the page table without its layer
    last_page_len: Tensor  # int32 [entries]
    qo_indptr: Tensor | None  # int32 [entries + 1]; None: one row each
    indices: dict[int, Tensor] = field(default_factory=dict)  # by layer


class FlashInferAttention:
    """Plans a batch's attention for all layers, then runs it layer by layer.

        fi.plan_decode(streams, desc, version)
        for layer in ...:
            out = fi.run(q, layer)

    Args:
        layers: of each layer, scale, soft cap, sliding window, and the scales of 8-bit pages.
        num_qo_heads, num_kv_heads, head_dim, page_size: of the model and its pages.
        q_dtype, kv_dtype: of queries and pages.
        device: where they are.

    Raises ValueError, naming the argument, for what FlashInfer has no kernel for.
    """

    def __init__(
        self,
        layers: Sequence[LayerOptions],
        *,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        q_dtype: torch.dtype,
        kv_dtype: torch.dtype,
        device: torch.device | str,
    ):
        self.device = torch.device(device)
        self.layers = list(layers)
        self.group, rest = divmod(num_qo_heads, num_kv_heads)
        if rest:
            raise ValueError(f"num_qo_heads {num_qo_heads}: no multiple of {num_kv_heads}")
        if head_dim not in wrappers.HEAD_DIMS:
            raise ValueError(f"head_dim must be one of {wrappers.HEAD_DIMS}, not {head_dim}")
        if self.group > _TILE_ROWS:
            raise ValueError(f"num_qo_heads: at most {_TILE_ROWS} per KV head, not {self.group}")
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.page_size = page_size
        self.q_dtype = q_dtype
        self.kv_dtype = kv_dtype
        self.stats = Stats()
        self._workspace = torch.zeros(128 * _MIB, dtype=torch.uint8, device=self.device)
        self._planned: dict[Any, Any] = {}  # tiles -> a wrapper planned for them
        self._resting: deque[tuple[int, Any]] = deque()
        self._reserved: dict[int, tuple[int, Tensor]] = {}  # of each wrapper, by id: none is let go
        self._prefill: tuple[list[Any], ...] = tuple([] for _ in range(KEPT_STEPS))
        self._laid_out: dict[Any, list[_Launch]] = {}
        self._by_layer: list[list[_Launch]] = []
        self._streams: PagedStreams | None = None
        # What is missing shows here, not under way.
        self._resting.append((-KEPT_STEPS, wrappers.decode_wrapper(self._workspace)))

    # -- planning --

    def plan_decode(
        self, streams: PagedStreams, slots: NDArray[np.int32], desc: NDArray[np.int32], version: Any
    ) -> None:
        """Plan one query per request: the newest token of each stream, which holds it already.

        - `slots`: the host's `streams.slots`
        - `desc`: the host's `streams.desc`, of the batch alone: int32 [batch, layers, kv_heads, 4]
        - `version`: hashable; equal to the last call's only if no page list of these slots changed
          in between, nor the table that holds them
        """
        self._streams = streams
        self.stats.steps += 1
        windows = [layer.window_left for layer in self.layers]
        launches = decode_entries(desc, self.page_size, windows)
        before, self._laid_out = self._laid_out, {}
        planned, self._planned = self._planned, {}
        classes: dict[Any, list[_Launch]] = {}
        lengths: list[NDArray[np.int64]] = []
        self._by_layer = []
        for layer, options in enumerate(self.layers):
            last = b"".join(e.last_page_len.tobytes() for e in launches[layer])
            lists = (options[:2], tuple((e.mask, e.pages) for e in launches[layer]))
            if (lists, last) not in classes:
                key = (layer, version, slots.tobytes(), lists)
                known = before.get(key)
                if known is None:
                    known = [self._lay_out(e, slots) for e in launches[layer]]
                for launch, entries in zip(known, launches[layer], strict=True):
                    launch.entries = entries
                    launch.wrapper = self._decode_plan(entries, options, planned)
                    lengths.append(entries.last_page_len)
                self._laid_out[key] = classes[lists, last] = known
            self._by_layer.append(classes[lists, last])
        self._resting.extend((self.stats.steps, wrapper) for wrapper in planned.values())
        if lengths:
            uploaded = self._upload(np.concatenate(lengths).astype(np.int32))
            parts = torch.split_with_sizes(uploaded, [len(part) for part in lengths])
            owners = (launch for known in classes.values() for launch in known)
            for launch, part in zip(owners, parts, strict=True):
                launch.last_page_len = part

    def plan_extend(
        self,
        streams: PagedStreams,
        slots: NDArray[np.int32],
        desc: NDArray[np.int32],
        qo_indptr: Sequence[int],
    ) -> None:
        """Plan rows ``qo_indptr[b] .. qo_indptr[b + 1]`` of each request: its newest tokens.

        The other arguments are those of `plan_decode`.
        """
        self._streams = streams
        self.stats.steps += 1
        self._laid_out = {}
        windows = [layer.window_left for layer in self.layers]
        launches = extend_entries(desc, qo_indptr, self.page_size, windows)
        classes: dict[Any, list[_Launch]] = {}
        planned: dict[Any, Any] = {}  # other heads of a layer may make the same tiles
        self._by_layer = []
        for layer, options in enumerate(self.layers):
            key = (id(launches[layer]), options[:2])
            if key not in classes:
                classes[key] = []
                for entries in launches[layer]:
                    launch = self._lay_out(entries, slots)
                    launch.last_page_len = self._upload(entries.last_page_len.astype(np.int32))
                    shape = (entries.row_end - entries.row_begin, entries.num_pages)
                    same = (
                        entries.mask,
                        options[:2],
                        *(a.tobytes() for a in (*shape, entries.last_page_len)),
                    )
                    if same not in planned:
                        launch.wrapper = planned[same] = self._prefill_wrapper(len(planned))
                        self._prefill_plan(launch, options)
                    launch.wrapper = planned[same]
                    classes[key].append(launch)
            self._by_layer.append(classes[key])

    def _lay_out(self, entries: Entries, slots: NDArray[np.int32]) -> _Launch:
        """Where the pages of a launch stand in the page table, and its rows in the queries."""
        assert self._streams is not None
        self.stats.page_lists += 1
        _, num_layers, num_heads, width = self._streams.table.shape
        counts = entries.row_end - entries.row_begin
        num_rows = int(counts.sum())
        each = np.repeat(np.arange(len(entries)), counts)
        token = np.arange(num_rows) - np.repeat(np.cumsum(counts) - counts, counts)
        rows = (entries.row_begin[each] + token) * num_heads + entries.head[each]
        slot = slots[entries.request].astype(np.int64)
        base = (slot * num_layers * num_heads + entries.head) * width + entries.first_page
        indptr = np.concatenate([[0], np.cumsum(entries.num_pages)])
        total = int(indptr[-1])
        # One upload; the page lists are spread out on the device.
        device = self._upload(np.concatenate([base - indptr[:-1], entries.num_pages]))
        start, num_pages = device.view(2, -1).unbind()
        places = torch.repeat_interleave(start, num_pages, output_size=total)
        places += torch.arange(total, device=self.device)
        several = bool((counts != 1).any())
        qo_indptr = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        return _Launch(
            entries=entries,
            wrapper=None,
            num_rows=num_rows,
            num_window_rows=int(counts[~entries.sinks].sum()),
            rows=self._upload(rows),
            in_order=bool((rows == np.arange(num_rows)).all()),
            indptr=self._upload(indptr.astype(np.int32)),
            places=places,
            last_page_len=start[:0].int(),
            qo_indptr=torch.from_numpy(qo_indptr) if several else None,
        )

    def _decode_plan(self, entries: Entries, options: LayerOptions, planned: dict[Any, Any]) -> Any:
        """A wrapper planned for the tiles of ``entries``: one of this step or the last, or anew."""
        split = max(1, SPLIT_TOKENS // self.page_size)  # in pages
        chunks = -(-entries.num_pages // split)
        window = entries.mask.window_left
        # Under a window FlashInfer counts the tiles that it can reach by the page count itself.
        tiles = (chunks if window < 0 else entries.num_pages).tobytes()
        key = (window, options[:2], tiles)
        if key in self._planned:
            return self._planned[key]
        wrapper = planned.pop(key, None)
        if wrapper is None:
            wrapper = self._rested_wrapper()
            self._reserve(wrapper, int(chunks.sum()))
            self._plan(wrapper, entries, options, split)
        self._planned[key] = wrapper
        return wrapper

    def _plan(self, wrapper: Any, entries: Entries, options: LayerOptions, split: int) -> None:
        self.stats.plans += 1
        indptr = np.concatenate([[0], np.cumsum(entries.num_pages)]).astype(np.int32)
        wrapper.plan(
            self._host(indptr),
            torch.empty(0, dtype=torch.int32, device=self.device),  # set per layer: see `run`
            self._host(entries.last_page_len.astype(np.int32)),
            self.group,
            1,
            self.head_dim,
            self.page_size,
            window_left=entries.mask.window_left,
            logits_soft_cap=options.logits_soft_cap,
            q_data_type=self.q_dtype,
            kv_data_type=self.kv_dtype,
            sm_scale=options.sm_scale,
            fixed_split_size=split,
        )

    def _prefill_plan(self, launch: _Launch, options: LayerOptions) -> None:
        self.stats.plans += 1
        entries = launch.entries
        qo_indptr = launch.qo_indptr
        if qo_indptr is None:
            qo_indptr = torch.arange(len(entries) + 1, dtype=torch.int32)
        indptr = np.concatenate([[0], np.cumsum(entries.num_pages)]).astype(np.int32)
        launch.wrapper.plan(
            qo_indptr,
            self._host(indptr),
            torch.empty(0, dtype=torch.int32, device=self.device),
            self._host(entries.last_page_len.astype(np.int32)),
            self.group,
            1,
            self.head_dim,
            self.page_size,
            causal=entries.mask.causal,
            sm_scale=options.sm_scale,
            window_left=entries.mask.window_left,
            logits_soft_cap=options.logits_soft_cap,
            q_data_type=self.q_dtype,
            kv_data_type=self.kv_dtype,
        )

    # -- running --

    def run(
        self, q: Tensor, layer: int, *, sink_q: Tensor | None = None, return_lse: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of the planned rows in one layer.

        `q`, `sink_q` and the results are those of `kernels.attention.extend`; the lse is None
        unless asked for.
        """
        launches = self._by_layer[layer]
        flat = q.reshape(-1, self.group, self.head_dim)  # [rows x kv_heads]
        turned = flat if sink_q is None else sink_q.reshape(flat.shape)
        apart = any(launch.num_window_rows < launch.num_rows for launch in launches)
        out: Tensor | None = None
        lse: Tensor | None = None
        sinks: list[tuple[Tensor | None, Tensor, Tensor]] = []
        for launch in launches:
            queries = self._queries(launch, flat, turned)
            part, part_lse = self._run(launch, queries, layer, return_lse or apart)
            count = launch.num_window_rows
            whole = launch.in_order and launch.num_rows == len(flat)
            if count < launch.num_rows:
                assert part_lse is not None
                where = None if whole and count == 0 else launch.rows[count:]
                sinks.append((where, part[count:], part_lse[count:]))
            if count == len(flat) and whole:
                out, lse = part, part_lse
            elif count:
                if out is None:
                    out, lse = self._nothing(flat)
                out.index_copy_(0, launch.rows[:count], part[:count])
                if part_lse is not None:
                    assert lse is not None
                    lse.index_copy_(0, launch.rows[:count], part_lse[:count])
        if out is None:
            out, lse = self._nothing(flat)
        for where, part, part_lse in sinks:
            assert lse is not None
            self._merge(out, lse, where, part, part_lse)
        return out.view(q.shape), lse.view(q.shape[:2]) if return_lse and lse is not None else None

    def _nothing(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        """What empty streams give."""
        return flat.new_zeros(flat.shape), torch.full(
            flat.shape[:2], -torch.inf, dtype=torch.float32, device=flat.device
        )

    def _run(
        self, launch: _Launch, q: Tensor, layer: int, with_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        assert self._streams is not None
        table, pages = self._streams.table, self._streams.pages
        if layer not in launch.indices:
            of_layer = table.view(-1)[layer * table.stride(1) :]
            launch.indices[layer] = of_layer.index_select(0, launch.places)
        wrapper = launch.wrapper
        # See the module's docstring: FlashInfer reads these when it runs.
        wrapper._paged_kv_indptr_buf = launch.indptr  # noqa: SLF001
        wrapper._paged_kv_indices_buf = launch.indices[layer]  # noqa: SLF001
        wrapper._paged_kv_last_page_len_buf = launch.last_page_len  # noqa: SLF001
        cache = (pages[:, 0].unsqueeze(2), pages[:, 1].unsqueeze(2))  # [pages, page_size, 1, dim]
        scales: dict[str, float] = {}
        if self.kv_dtype in FP8_DTYPES:  # beside the plan: layers that share one differ in them
            options = self.layers[layer]
            scales = {"k_scale": options.k_scale, "v_scale": options.v_scale}
        if with_lse:
            out, lse = wrapper.run(q, cache, return_lse=True, **scales)
            return out, lse
        return wrapper.run(q, cache, **scales), None

    def _queries(self, launch: _Launch, flat: Tensor, turned: Tensor) -> Tensor:
        """A launch's rows of the queries, those of sinks as sinks are scored with."""
        count = launch.num_window_rows
        everything = launch.in_order and launch.num_rows == len(flat)
        if turned is flat or count in (0, launch.num_rows):
            source = turned if count == 0 else flat
            return source if everything else source.index_select(0, launch.rows)
        rows = launch.rows
        return torch.cat((flat.index_select(0, rows[:count]), turned.index_select(0, rows[count:])))

    def _merge(
        self, out: Tensor, lse: Tensor, where: Tensor | None, part: Tensor, part_lse: Tensor
    ) -> None:
        if where is None:
            wrappers.merge_state_in_place(out, lse, part, part_lse)
            return
        some, some_lse = out.index_select(0, where), lse.index_select(0, where)
        wrappers.merge_state_in_place(some, some_lse, part.contiguous(), part_lse.contiguous())
        out.index_copy_(0, where, some)
        lse.index_copy_(0, where, some_lse)

    # -- memory --

    def _rested_wrapper(self) -> Any:
        if self._resting and self._resting[0][0] + KEPT_STEPS <= self.stats.steps:
            return self._resting.popleft()[1]
        return wrappers.decode_wrapper(self._workspace)

    def _prefill_wrapper(self, number: int) -> Any:
        """The wrapper of that number among those whose turn it is."""
        pool = self._prefill[self.stats.steps % KEPT_STEPS]
        while len(pool) <= number:
            pool.append(wrappers.prefill_wrapper(self._workspace))
        return pool[number]

    def _reserve(self, wrapper: Any, tiles: int) -> None:
        """Room for the results of tiles, and for the plan that lists them."""
        partial = tiles * _TILE_ROWS * (self.head_dim + 1) * 4 + _MIB
        listed = tiles * 64 + _MIB
        if partial > len(self._workspace):
            size = 1 << (partial - 1).bit_length()
            self._workspace = torch.zeros(size, dtype=torch.uint8, device=self.device)
        listed = 1 << (listed - 1).bit_length()
        has_room, workspace = self._reserved.get(id(wrapper), (0, None))
        if has_room < listed or workspace is not self._workspace:
            ints = torch.empty(listed, dtype=torch.uint8, device=self.device)
            wrapper.reset_workspace_buffer(self._workspace, ints)
            self._reserved[id(wrapper)] = (listed, self._workspace)

    def _host(self, values: NDArray[np.int32]) -> Tensor:
        """On the host, from where the device can copy without the host waiting."""
        tensor = torch.from_numpy(values)
        return tensor.pin_memory() if self.device.type == "cuda" else tensor

    def _upload(self, values: NDArray[Any]) -> Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(values))
        if self.device.type != "cuda":
            return tensor
        return tensor.pin_memory().to(self.device, non_blocking=True)
