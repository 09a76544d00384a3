"""Device functions: where the tokens of a stream lie, and which of them a query sees.

The C++ twin is `csrc/streams.h`.
"""
# Triton reads the types of a kernel's arguments from the call, not from annotations.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,no-any-return,untyped-decorator,misc"

import triton
import triton.language as tl


@triton.jit
def find_stream(
    table_ptr, desc_ptr, slots_ptr, request, kv_head, layer, num_layers, num_kv_heads, max_pages
):
    """A stream's page list, and its (kv_len, gap, num_sinks, window_left)."""
    slot = tl.load(slots_ptr + request).to(tl.int64)
    row = (slot * num_layers + layer) * num_kv_heads + kv_head
    at = desc_ptr + row * 4
    return (
        table_ptr + row * max_pages,
        tl.load(at),
        tl.load(at + 1),
        tl.load(at + 2),
        tl.load(at + 3),
    )


@triton.jit
def first_within(position, distance, sink_end, gap):
    """The first index that lies no further back than `distance`; 0 where that is negative."""
    oldest = position - distance
    later = tl.where(oldest < sink_end, oldest, tl.maximum(sink_end, oldest - gap))
    return tl.where((distance < 0) | (oldest <= 0), 0, later)


@triton.jit
def lower_bounds(index, gap, num_sinks, window_left, layer_window_left, PAGE_SIZE: tl.constexpr):
    """First index in the layer's window, first one in the policy's too, and the sink pages' end.

    Positions grow with indices, so all of this does as well.
    """
    sink_end = (num_sinks + PAGE_SIZE - 1) // PAGE_SIZE * PAGE_SIZE
    position = tl.where(index < sink_end, index, index + gap)
    begin = first_within(position, layer_window_left, sink_end, gap)
    window_begin = tl.maximum(first_within(position, window_left, sink_end, gap), begin)
    return begin, window_begin, sink_end


@triton.jit
def visible_ranges(index, gap, num_sinks, window_left, layer_window_left, PAGE_SIZE: tl.constexpr):
    """What the queries at `index`, one or a block of them, see of their stream.

    Sinks [0] to [1], which lie apart from the window, and the window from [2] up to the query
    itself. Where nothing lies between them the window holds both.
    """
    begin, window_begin, sink_end = lower_bounds(
        index, gap, num_sinks, window_left, layer_window_left, PAGE_SIZE
    )
    sinks_stop = tl.minimum(num_sinks, index + 1)
    has_sinks = (window_left >= 0) & (sinks_stop > begin)
    dropped = (gap > 0) & (window_begin >= sink_end)
    apart = has_sinks & ((window_begin > sinks_stop) | ((window_begin == sinks_stop) & dropped))
    joined = has_sinks & (apart == 0)
    return (
        tl.where(apart, begin, 0),
        tl.where(apart, sinks_stop, 0),
        tl.where(joined, begin, window_begin),
    )


@triton.jit
def blocks_in_sight(
    index,
    stop,
    gap,
    num_sinks,
    window_left,
    layer_window_left,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Blocks of keys, aligned, that hold whatever the queries from `index` to `stop` see.

    Returns where those with sinks begin, how many they are, where the others begin, and how many
    all are. Bounds move up with the index, so the first query's lower ones hold for all.
    """
    begin, window_begin, _ = lower_bounds(
        index, gap, num_sinks, window_left, layer_window_left, PAGE_SIZE
    )
    sinks_begin = begin // BLOCK_N * BLOCK_N
    sinks_stop = tl.minimum(num_sinks, stop)
    has_sinks = (window_left >= 0) & (sinks_stop > begin)
    sink_blocks = tl.where(has_sinks, (sinks_stop - sinks_begin + BLOCK_N - 1) // BLOCK_N, 0)
    window_begin = tl.maximum(
        sinks_begin + sink_blocks * BLOCK_N, window_begin // BLOCK_N * BLOCK_N
    )
    window_blocks = (tl.maximum(stop - window_begin, 0) + BLOCK_N - 1) // BLOCK_N
    return sinks_begin, sink_blocks, window_begin, sink_blocks + window_blocks


@triton.jit
def split_of(blocks, MIN_BLOCKS: tl.constexpr, MAX_SPLITS: tl.constexpr):
    """Blocks per split, and how many splits hold any, for a stream that sees `blocks`."""
    per_split = tl.maximum((blocks + MAX_SPLITS - 1) // MAX_SPLITS, MIN_BLOCKS)
    return per_split, (blocks + per_split - 1) // per_split


@triton.jit
def block_start(block, sinks_begin, sink_blocks, window_begin, BLOCK_N: tl.constexpr):
    """The first key of one of `blocks_in_sight`."""
    return tl.where(
        block < sink_blocks,
        sinks_begin + block * BLOCK_N,
        window_begin + (block - sink_blocks) * BLOCK_N,
    )


@triton.jit
def token_offsets(
    page_list, index, in_stream, page_stride, PAGE_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr
):
    """Where the K of the tokens at `index` begins, in elements of the pool; int64."""
    page = tl.load(page_list + index // PAGE_SIZE, mask=in_stream, other=0).to(tl.int64)
    return page * page_stride + index % PAGE_SIZE * HEAD_DIM


@triton.jit
def find_tile(tile, indptr_ptr, batch, TILE: tl.constexpr):
    """Which request a tile of `TILE` rows belongs to, and which of its tiles it is.

    Request b has the tiles from `indptr[b] // TILE + b` on, which leaves room for a broken one
    each; some at its end may hold no row.
    """
    before = tile * 0
    for first in range(0, batch, 128):
        request = first + tl.arange(0, 128)
        begin = tl.load(indptr_ptr + request, mask=request < batch, other=0)
        starts = (begin // TILE + request <= tile) & (request < batch)
        before += tl.sum(starts.to(tl.int32), 0)
    request = before - 1
    return request, tile - (tl.load(indptr_ptr + request) // TILE + request)
