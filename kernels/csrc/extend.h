// Several queries per stream: the last tokens of a prompt, a chunk of it, or all of it.
//
// Tiles of queries are independent; threads take them as they come, the long ones first.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

#include "extend_tile.h"

namespace sglang_kv {

template <typename T, bool kBf16Dot>
void extend_items(const AttentionArgs& a, const Streams& s, const std::vector<ExtendItem>& items,
                  std::atomic<int64_t>& next_item, std::atomic<bool>& bad_page) {
  static thread_local Scratch<float> floats;
  static thread_local Scratch<Visible> seen;
  constexpr int64_t kRowsMax = kTileRows + kRows;
  const int64_t dim = s.head_dim;
  float* p = floats.reserve((3 * kRowsMax + 4 * kKeys) * dim + kRowsMax * (kLanes + 1));
  ExtendBuffers buffers;
  buffers.q = p;
  buffers.sink_q = buffers.q + kRowsMax * dim;
  buffers.acc = buffers.sink_q + kRowsMax * dim;
  buffers.k = reinterpret_cast<int32_t*>(buffers.acc + kRowsMax * dim);
  buffers.v = reinterpret_cast<float*>(buffers.k) + kKeys * dim;
  buffers.wide = buffers.v + kKeys * dim;
  buffers.sum = buffers.wide + 2 * kKeys * dim;
  buffers.max = buffers.sum + kRowsMax * kLanes;
  buffers.seen = seen.reserve(kTileRows);

  ExtendTile<T, kBf16Dot> tile(a, s, buffers, bad_page);
  const int64_t count = static_cast<int64_t>(items.size());
  for (int64_t i; (i = next_item.fetch_add(1)) < count;) tile.run(items[i]);
}

// Attends the last queries of every request to its streams. False as in decode().
inline bool extend(const AttentionArgs& a, const Streams& s, bool kv_is_bf16) {
  const int64_t group = a.group(s);
  const int64_t queries_per_tile = kTileRows / group;
  std::vector<ExtendItem> items;
  for (int64_t b = 0; b < s.batch; ++b) {
    const int64_t total = a.num_queries(b);
    for (int64_t h = 0; h < s.num_kv_heads; ++h) {
      const Stream stream = s(b, h);
      for (int64_t q = 0; q < total; q += queries_per_tile) {
        const int64_t count = std::min(queries_per_tile, total - q);
        const int64_t last = stream.kv_len - total + q + count - 1;
        const Visible seen = visible_ranges(stream, s.page_size, last, a.layer_window_left);
        items.push_back({static_cast<int32_t>(b), static_cast<int32_t>(h),
                         static_cast<int32_t>(q), static_cast<int32_t>(count),
                         count * (seen.sinks.size() + seen.window.size() + kKeys)});
      }
    }
  }
  // Long ones first, so that no thread is left with one at the end.
  std::stable_sort(items.begin(), items.end(),
                   [](const ExtendItem& x, const ExtendItem& y) { return x.cost > y.cost; });

  const bool bf16_dot = kHasBf16Dot && kv_is_bf16 && a.q.is_bf16;
  const auto run = bf16_dot     ? extend_items<bf16, kHasBf16Dot>
                   : kv_is_bf16 ? extend_items<bf16, false>
                                : extend_items<float, false>;
  std::atomic<int64_t> next_item{0};
  std::atomic<bool> bad_page{false};
#pragma omp parallel num_threads(a.num_threads) if (items.size() > 1)
  run(a, s, items, next_item, bad_page);
  return !bad_page;
}

}  // namespace sglang_kv
