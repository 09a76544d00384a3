// column_sums, the inner part: a run of one stream's keys against all scored queries.
//
// The run is packed once. Queries then come by in ascending order, a tile of them at a time, and
// each row (query, head) adds its weights to the keys' sums before the next one does. The sum of a
// key is so one fixed sequence of additions, starting from what is there already: where a tile or a
// call ends, and who computes beside, changes no bit of it.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "attention.h"
#include "fp8.h"
#include "key_block.h"

namespace sglang_kv {

constexpr int kRunKeys = 8 * kKeys;  // keys that share one reading of the queries
constexpr int kColumnRows = 192;     // rows of a tile, as many as L1 keeps beside a block

// What column_sums has beyond AttentionArgs.
struct ColumnArgs {
  const int32_t* first_query;  // [batch]
  const float* lse;            // [total_q, num_qo_heads]
  float* scores;               // [score_slots, layers, kv_heads, width]
  const int32_t* score_slots;  // [batch]; -1: not scored
  int64_t width;

  float* column(const Streams& s, int64_t request, int64_t kv_head) const {
    const int64_t slot = score_slots[request];
    return scores + ((slot * s.num_layers + s.layer) * s.num_kv_heads + kv_head) * width;
  }
};

struct ColumnItem {
  int32_t request;
  int32_t kv_head;
  Range keys;    // from a multiple of kKeys on, at most kRunKeys
  int64_t cost;  // pairs of query and key, roughly
};

// What one thread works on.
struct ColumnBuffers {
  float* q;       // [rows, head_dim]; for dot_bf16 as bf16
  float* bias;    // [rows]: what to add to a logit to get the logarithm of the weight
  int32_t* k;     // blocks of [head_dim or head_dim / 2, kKeys]: floats, or pairs of bf16
  float* wide;    // [16, head_dim]: where 8-bit keys are widened
  Visible* seen;  // [queries]
};

// sums[key] += 2^(scores[r][key] * scale + bias[r]), row after row.
SGLANG_KV_KERNEL inline void add_weights(const float* scores, float scale, const float* bias,
                                         int rows, float* sums) {
  for (int n = 0; n < kKeys; n += kLanes) {
    F32x16 sum = load(sums + n);
    for (int r = 0; r < rows; ++r) {
      sum += exp2(fma(load(scores + r * kKeys + n), splat(scale), splat(bias[r])));
    }
    store(sums + n, sum);
  }
}

// score_block for a number of rows that is not known when compiling.
template <bool kBf16Dot>
void score_rows(int rows, const float* q, const int32_t* k, int64_t depth, float* scores) {
  using Score = void (*)(const float*, const int32_t*, int64_t, float*);
  constexpr Score kScore[kRows] = {score_block<kBf16Dot, 1>, score_block<kBf16Dot, 2>,
                                   score_block<kBf16Dot, 3>, score_block<kBf16Dot, 4>,
                                   score_block<kBf16Dot, 5>, score_block<kBf16Dot, 6>};
  kScore[rows - 1](q, k, depth, scores);
}

template <typename T, bool kBf16Dot>
class ColumnTile {
 public:
  ColumnTile(const AttentionArgs& a, const ColumnArgs& c, const Streams& s,
             const ColumnBuffers& buffers, std::atomic<bool>& bad_page)
      : a_(a), c_(c), s_(s), b_(buffers), bad_page_(bad_page) {}

  void run(const ColumnItem& item) {
    const Stream stream = s_(item.request, item.kv_head);
    const int64_t total = a_.num_queries(item.request);
    const int64_t first_index = stream.kv_len - total;  // the token index of query 0
    const int64_t queries_per_tile = kColumnRows / a_.group(s_);
    num_rows_ = s_.key_rows(stream, item.keys, rows_, bad_page_);
    pad_rows(rows_, num_rows_);
    fetch(0, kKeys);
    std::fill_n(packed_, kRunKeys / kKeys, false);
    float* column = c_.column(s_, item.request, item.kv_head) + item.keys.begin;
    alignas(64) float sums[kRunKeys] = {};
    std::copy_n(column, item.keys.size(), sums);
    // Earlier queries see none of these keys.
    int64_t query = std::max<int64_t>(c_.first_query[item.request], item.keys.begin - first_index);
    for (; query < total; query += queries_per_tile) {
      const int count = static_cast<int>(std::min(queries_per_tile, total - query));
      add_tile(item, stream, query, count, first_index + query, sums);
    }
    std::copy_n(sums, item.keys.size(), column);
  }

 private:
  int64_t depth() const { return packed_depth<kBf16Dot>(s_.head_dim); }

  // Sixteen keys at a time, and as many of the next block are put on their way from memory.
  void pack(int block) {
    for (int n = block * kKeys; n < (block + 1) * kKeys; n += kLanes) {
      fetch(n + kKeys, kLanes);
      widen_rows(s_, rows_ + n, kLanes, b_.wide, nullptr);
      pack_keys<T, kBf16Dot>(rows_ + n, s_.head_dim, b_.k + block * kKeys * depth() + n % kKeys);
    }
    packed_[block] = true;
  }

  void fetch(int begin, int size) const {
    for (int n = begin; n < std::min(begin + size, num_rows_); ++n) {
      prefetch_row(rows_[n], s_.row_size<T>());
    }
  }

  // Adds the weights of `count` queries; the first one is token `index` of the stream.
  void add_tile(const ColumnItem& item, const Stream& stream, int64_t query, int count,
                int64_t index, float* sums) {
    Range sinks = {INT64_MAX, 0}, window = {INT64_MAX, 0};
    Range shared = {0, INT64_MAX};  // what all of them see
    for (int j = 0; j < count; ++j) {
      const Visible seen = visible_ranges(stream, s_.page_size, index + j, a_.layer_window_left);
      b_.seen[j] = seen;
      widen(sinks, seen.sinks);
      widen(window, seen.window);
      shared = {std::max(shared.begin, seen.window.begin), std::min(shared.end, seen.window.end)};
    }
    if (!sinks.intersects(item.keys) && !window.intersects(item.keys)) return;

    const int group = static_cast<int>(a_.group(s_));
    const int64_t first_row = a_.first_row(item.request) + query;
    for (int r = 0; r < count * group; ++r) {
      const int64_t row = first_row + r / group, head = item.kv_head * group + r % group;
      read_row<kBf16Dot>(a_.q, row, head, s_.head_dim, b_.q + r * depth());
      const float lse = c_.lse[row * a_.num_qo_heads + head];
      b_.bias[r] = lse == -kInf ? -kInf : -lse;  // who saw nothing gave nothing
    }
    for (int64_t begin = item.keys.begin; begin < item.keys.end; begin += kKeys) {
      const Range block = {begin, std::min<int64_t>(begin + kKeys, item.keys.end)};
      if (!sinks.intersects(block) && !window.intersects(block)) continue;
      const int64_t offset = begin - item.keys.begin;
      if (!packed_[offset / kKeys]) pack(static_cast<int>(offset / kKeys));
      const bool all_see_all = block.size() == kKeys && shared.contains(block);
      add_block(count * group, group, block, all_see_all, b_.k + offset * depth(), sums + offset);
    }
  }

  void add_block(int rows, int group, Range block, bool all_see_all, const int32_t* k,
                 float* sums) {
    alignas(64) float scores[kRows * kKeys];
    const float scale = a_.log2_scale();
    for (int r = 0; r < rows; r += kRows) {
      const int some = std::min(kRows, rows - r);
      if (!all_see_all && !any_sees(r / group, (r + some - 1) / group, block)) continue;
      score_rows<kBf16Dot>(some, b_.q + r * depth(), k, depth(), scores);
      a_.cap(scores, some * kKeys);
      if (!all_see_all) {
        for (int i = 0; i < some; ++i) {
          float* row = scores + i * kKeys;
          mask_row(b_.seen[(r + i) / group], block, row, row);
        }
      }
      add_weights(scores, scale, b_.bias + r, some, sums);
    }
  }

  // Queries [first, last].
  bool any_sees(int first, int last, Range block) const {
    return std::any_of(b_.seen + first, b_.seen + last + 1,
                       [&](const Visible& seen) { return seen.intersects(block); });
  }

  const AttentionArgs& a_;
  const ColumnArgs& c_;
  const Streams& s_;
  const ColumnBuffers& b_;
  std::atomic<bool>& bad_page_;

  // The run at hand: where its keys lie, and which blocks of them are packed.
  const T* rows_[kRunKeys];
  int num_rows_;
  bool packed_[kRunKeys / kKeys];
};

}  // namespace sglang_kv
