// Attention that each key received: a second pass over queries and keys, from the log-sum-exp that
// the first one left.
//
// Work is cut by keys, never by queries. Threads take runs of keys as they come, the long ones
// first; nobody else adds to the sums of a run.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

#include "scores_tile.h"

namespace sglang_kv {

template <typename T, bool kBf16Dot>
void add_columns(const AttentionArgs& a, const ColumnArgs& c, const Streams& s,
                 const std::vector<ColumnItem>& items, std::atomic<int64_t>& next_item,
                 std::atomic<bool>& bad_page) {
  static thread_local Scratch<float> floats;
  static thread_local Scratch<Visible> seen;
  float* p = floats.reserve((kRunKeys + kColumnRows + kLanes) * s.head_dim + kColumnRows);
  ColumnBuffers buffers;
  buffers.k = reinterpret_cast<int32_t*>(p);
  buffers.q = p + kRunKeys * s.head_dim;
  buffers.wide = buffers.q + kColumnRows * s.head_dim;
  buffers.bias = buffers.wide + kLanes * s.head_dim;
  buffers.seen = seen.reserve(kColumnRows);

  ColumnTile<T, kBf16Dot> tile(a, c, s, buffers, bad_page);
  const int64_t count = static_cast<int64_t>(items.size());
  for (int64_t i; (i = next_item.fetch_add(1)) < count;) tile.run(items[i]);
}

// The keys that a stream's last queries see between them, from that at token `index` on: two
// disjoint ranges of whole blocks. Bounds move up with the index, so the first query's lower ones
// hold for all.
inline Visible blocks_in_sight(const Stream& stream, int64_t page_size, int64_t index,
                               int64_t layer_window_left) {
  const Visible seen = visible_ranges(stream, page_size, index, layer_window_left);
  const auto down = [](int64_t i) { return i / kKeys * kKeys; };
  const Range window = {down(seen.window.begin), stream.kv_len};
  if (seen.sinks.size() == 0) return {{}, window};
  const Range sinks = {down(seen.sinks.begin), down(seen.sinks.end + kKeys - 1)};
  if (window.begin <= sinks.end) return {{}, {sinks.begin, window.end}};
  return {sinks, window};
}

// Adds the weights that every request's scored queries give to their keys. False as in decode().
inline bool column_sums(const AttentionArgs& a, const ColumnArgs& c, const Streams& s,
                        bool kv_is_bf16) {
  std::vector<ColumnItem> items;
  int64_t pairs = 0;
  for (int64_t b = 0; b < s.batch; ++b) {
    const int64_t total = a.num_queries(b);
    if (c.score_slots[b] < 0 || c.first_query[b] == total) continue;
    for (int64_t h = 0; h < s.num_kv_heads; ++h) {
      const Stream stream = s(b, h);
      if (stream.kv_len == 0) continue;
      const int64_t first_index = stream.kv_len - total + c.first_query[b];
      const Visible blocks =
          blocks_in_sight(stream, s.page_size, first_index, a.layer_window_left);
      for (const Range range : {blocks.sinks, blocks.window}) {
        for (int64_t begin = range.begin; begin < range.end; begin += kRunKeys) {
          const Range keys = {begin, std::min(begin + kRunKeys, range.end)};
          const int64_t queries = stream.kv_len - std::max(first_index, begin);
          items.push_back({static_cast<int32_t>(b), static_cast<int32_t>(h), keys,
                           queries * keys.size()});
          pairs += items.back().cost;
        }
      }
    }
  }
  // Long ones first, so that no thread is left with one at the end.
  std::stable_sort(items.begin(), items.end(),
                   [](const ColumnItem& x, const ColumnItem& y) { return x.cost > y.cost; });

  const bool bf16_dot = kHasBf16Dot && kv_is_bf16 && a.q.is_bf16;
  const auto run = bf16_dot     ? add_columns<bf16, kHasBf16Dot>
                   : kv_is_bf16 ? add_columns<bf16, false>
                                : add_columns<float, false>;
  std::atomic<int64_t> next_item{0};
  std::atomic<bool> bad_page{false};
  const bool parallel = pairs * s.head_dim * s.element_size >= kParallelBytes;
#pragma omp parallel num_threads(a.num_threads) if (parallel)
  run(a, c, s, items, next_item, bad_page);
  return !bad_page;
}

}  // namespace sglang_kv
