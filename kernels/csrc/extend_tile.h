// Extend, the inner part: one tile of queries against the keys it sees.
//
// A tile is some consecutive queries of one request times the query heads of one KV head; its rows
// are (query, head). For each block of keys that any row sees, K is packed once so that keys lie in
// lanes, V once as float, and then six rows at a time go through scores, softmax and values with
// everything in L1. A row's arithmetic is the same whatever tile it is in and whatever the others
// see (a key that a row does not see adds an exact zero), so results do not depend on how a prompt
// is cut into chunks, on batch neighbours or on threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "attention.h"
#include "fp8.h"
#include "key_block.h"

namespace sglang_kv {

constexpr int kTileRows = 192;  // rows that share one packing of K and V

struct ExtendItem {
  int32_t request;
  int32_t kv_head;
  int32_t first_query;  // counted from the request's first query
  int32_t num_queries;
  int64_t cost;  // keys in sight, roughly
};

// What one thread works on.
struct ExtendBuffers {
  float* q;       // [rows, head_dim]; for dot_bf16 as bf16
  float* sink_q;  // as q
  float* acc;     // [rows, head_dim]
  float* max;     // [rows]
  float* sum;     // [rows, 16]: one partial sum per lane
  int32_t* k;     // [head_dim or head_dim / 2, kKeys]: floats, or pairs of bf16
  float* v;       // [kKeys, head_dim]
  float* wide;    // [2, kKeys, head_dim]: where 8-bit rows are widened
  Visible* seen;  // [queries]
};

// acc[r] = acc[r] * decay[r] + weights[r] x v, for six rows and kVectors x 16 dimensions.
template <int kVectors>
SGLANG_KV_KERNEL void weigh_block(const float* weights, const float* v, int64_t head_dim,
                                  int first_key, int last_key, const float* decay, float* acc) {
  F32x16 sum[kRows][kVectors];
#pragma GCC unroll 6
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; ++i) {
      sum[r][i] = load(acc + r * head_dim + kLanes * i) * decay[r];
    }
  }
  for (int n = first_key; n < last_key; ++n) {
    F32x16 value[kVectors];
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; ++i) value[i] = load(v + n * head_dim + kLanes * i);
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) {
      const F32x16 w = splat(weights[r * kKeys + n]);
#pragma GCC unroll 4
      for (int i = 0; i < kVectors; ++i) sum[r][i] = fma(w, value[i], sum[r][i]);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; ++i) store(acc + r * head_dim + kLanes * i, sum[r][i]);
  }
}

template <typename T, bool kBf16Dot>
class ExtendTile {
 public:
  ExtendTile(const AttentionArgs& a, const Streams& s, const ExtendBuffers& buffers,
             std::atomic<bool>& bad_page)
      : a_(a), s_(s), b_(buffers), bad_page_(bad_page) {}

  void run(const ExtendItem& item) {
    const int group = static_cast<int>(a_.group(s_));
    const Stream stream = s_(item.request, item.kv_head);
    const int64_t first_row = a_.first_row(item.request) + item.first_query;
    const int64_t total = a_.num_queries(item.request);
    const int64_t first_index = stream.kv_len - total + item.first_query;
    const int rows = item.num_queries * group;
    const int padded = (rows + kRows - 1) / kRows * kRows;

    read_rows(a_.q, item, rows, padded, b_.q);
    std::fill_n(b_.acc, padded * s_.head_dim, 0.f);
    std::fill_n(b_.max, padded, kNoMax);
    std::fill_n(b_.sum, padded * kLanes, 0.f);

    Range sinks = {INT64_MAX, 0}, window = {INT64_MAX, 0};
    for (int j = 0; j < item.num_queries; ++j) {
      const Visible seen =
          visible_ranges(stream, s_.page_size, first_index + j, a_.layer_window_left);
      b_.seen[j] = seen;
      widen(sinks, seen.sinks);
      widen(window, seen.window);
    }
    own_sink_queries_ = a_.sink_q.data && sinks.size() > 0;
    if (own_sink_queries_) read_rows(a_.sink_q, item, rows, padded, b_.sink_q);

    Range block;
    for (int64_t begin = std::min(sinks.begin, window.begin) / kKeys * kKeys;
         begin < std::max(sinks.end, window.end); begin += kKeys) {
      block = {begin, std::min<int64_t>(begin + kKeys, stream.kv_len)};
      if (!sinks.intersects(block) && !window.intersects(block)) continue;
      pack(stream, block);
      for (int r = 0; r < padded; r += kRows) {
        const int first = r / group, last = std::min(r + kRows - 1, rows - 1) / group;
        attend_rows(r, group, rows, first, last, block);
      }
    }

    for (int r = 0; r < rows; ++r) {
      a_.write_result(first_row + r / group, item.kv_head * group + r % group, s_.head_dim,
                      b_.acc + r * s_.head_dim, b_.max[r], reduce_add(load(b_.sum + r * kLanes)));
    }
  }

 private:
  int64_t depth() const { return packed_depth<kBf16Dot>(s_.head_dim); }

  void read_rows(const Queries& q, const ExtendItem& item, int rows, int padded, float* to) const {
    const int group = static_cast<int>(a_.group(s_));
    const int64_t first_row = a_.first_row(item.request) + item.first_query;
    for (int r = 0; r < padded; ++r) {
      // Padding repeats the last row, so that it needs no case of its own.
      const int row = std::min(r, rows - 1);
      read_row<kBf16Dot>(q, first_row + row / group, item.kv_head * group + row % group,
                         s_.head_dim, to + r * depth());
    }
  }

  void pack(const Stream& stream, Range block) {
    const T* rows[kKeys];
    const int count = s_.key_rows(stream, block, rows, bad_page_);
    const int64_t v_offset = block_v_offset<T>(s_, kKeys);
    widen_rows(s_, rows, count, b_.wide, b_.wide + v_offset);
    for (int n = 0; n < count; ++n) {
      for (int64_t d = 0; d < s_.head_dim; d += kLanes) {
        store(b_.v + n * s_.head_dim + d, load(rows[n] + v_offset + d));
      }
    }
    pad_rows(rows, count);
    for (int n = 0; n < kKeys; n += kLanes) {
      pack_keys<T, kBf16Dot>(rows + n, s_.head_dim, b_.k + n);
    }
  }

  // Six rows, of queries [first, last], against the packed block.
  void attend_rows(int r, int group, int rows, int first, int last, Range block) {
    bool all_see_all = true, own_sinks = false;
    int first_key = kKeys, last_key = 0;
    for (int j = first; j <= last; ++j) {
      const Visible& seen = b_.seen[j];
      all_see_all = all_see_all && block.size() == kKeys && seen.contains(block);
      own_sinks = own_sinks || (own_sink_queries_ && seen.sinks.intersects(block));
      for (const Range range : {seen.sinks, seen.window}) {
        if (!range.intersects(block)) continue;
        first_key = std::min(first_key, lane_of(range.begin, block));
        last_key = std::max(last_key, lane_of(range.end, block));
      }
    }
    if (first_key >= last_key) return;

    alignas(64) float weights[kRows * kKeys];
    score_block<kBf16Dot, kRows>(b_.q + r * depth(), b_.k, depth(), weights);
    a_.cap(weights, kRows * kKeys);
    alignas(64) float sink_scores[kRows * kKeys];
    if (own_sinks) {
      score_block<kBf16Dot, kRows>(b_.sink_q + r * depth(), b_.k, depth(), sink_scores);
      a_.cap(sink_scores, kRows * kKeys);
    }
    if (own_sinks || !all_see_all) {
      for (int i = 0; i < kRows; ++i) {
        float* row = weights + i * kKeys;
        mask_row(b_.seen[std::min(r + i, rows - 1) / group], block,
                 own_sinks ? sink_scores + i * kKeys : row, row);
      }
    }
    alignas(64) float decay[kLanes] = {};
    F32x16 sums[kRows];
    const F32x16 scale = splat(a_.log2_scale());
#pragma GCC unroll 6
    for (int i = 0; i < kRows; ++i) {
      float* row = weights + i * kKeys;
      F32x16 top = load(row);
      for (int n = kLanes; n < kKeys; n += kLanes) top = max(top, load(row + n));
      const float new_max = std::max(b_.max[r + i], reduce_max(top) * scale[0]);
      decay[i] = b_.max[r + i] - new_max;
      b_.max[r + i] = new_max;
      sums[i] = F32x16{};
      for (int n = 0; n < kKeys; n += kLanes) {
        const F32x16 w = exp2(fma(load(row + n), scale, splat(-new_max)));
        store(row + n, w);
        sums[i] += w;
      }
    }
    store(decay, exp2(load(decay)));
    for (int i = 0; i < kRows; ++i) {
      float* at = b_.sum + (r + i) * kLanes;
      store(at, fma(load(at), splat(decay[i]), sums[i]));
    }

    float* acc = b_.acc + r * s_.head_dim;
    int64_t d = 0;
    for (; d + kVectorsAtOnce * kLanes <= s_.head_dim; d += kVectorsAtOnce * kLanes) {
      weigh_block<kVectorsAtOnce>(weights, b_.v + d, s_.head_dim, first_key, last_key, decay,
                                  acc + d);
    }
    for (; d < s_.head_dim; d += kLanes) {
      weigh_block<1>(weights, b_.v + d, s_.head_dim, first_key, last_key, decay, acc + d);
    }
  }

  const AttentionArgs& a_;
  const Streams& s_;
  const ExtendBuffers& b_;
  std::atomic<bool>& bad_page_;

  bool own_sink_queries_ = false;  // in the tile at hand
};

}  // namespace sglang_kv
