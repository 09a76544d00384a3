// A block of 64 keys against rows of queries: what extend and column_sums share.
//
// Keys are packed so that they lie in lanes. A score is then one lane's sum over the dimensions, in
// their order, whatever rows are computed beside it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "attention.h"
#include "rows.h"

namespace sglang_kv {

constexpr int kRows = 6;  // rows of the micro-kernels: 6 x 4 accumulators of 32 registers
constexpr int kKeyVectors = kKeys / kLanes;

// Dwords of a row: floats, or pairs of bf16.
template <bool kBf16Dot>
int64_t packed_depth(int64_t head_dim) {
  return kBf16Dot ? head_dim / 2 : head_dim;
}

// A row of queries as score_block takes it.
template <bool kBf16Dot>
void read_row(const Queries& q, int64_t row, int64_t head, int64_t head_dim, float* to) {
  if constexpr (kBf16Dot) {
    std::memcpy(to, q.halves(row, head), head_dim * sizeof(bf16));
  } else {
    q.read(row, head, head_dim, to);
  }
}

// Sixteen dwords of sixteen rows, as columns; eight where a row ends earlier.
template <typename T, bool kBf16Dot, bool kHalf>
SGLANG_KV_INLINE void pack_square(const T* const* rows, int64_t d, int32_t* k) {
  I32x16 m[kLanes];
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) {
    if constexpr (kBf16Dot) {
      m[i] = I32x16{};
      std::memcpy(&m[i], rows[i] + 2 * d, kHalf ? sizeof m[i] / 2 : sizeof m[i]);
    } else {
      m[i] = as<I32x16>(load(rows[i] + d));
    }
  }
  transpose(m);
#pragma GCC unroll 16
  for (int i = 0; i < (kHalf ? kLanes / 2 : kLanes); ++i) store_as(k + (d + i) * kKeys, m[i]);
}

// Fills the block that the last of `count` rows is in with zeros: slots past the stream's end are
// never read, what they hold may be a NaN.
template <typename T>
void pad_rows(const T** rows, int count) {
  alignas(64) static const T kZeros[kMaxHeadDim] = {};
  std::fill(rows + count, rows + (count + kKeys - 1) / kKeys * kKeys, kZeros);
}

// k[d][key] for sixteen keys of a block.
template <typename T, bool kBf16Dot>
void pack_keys(const T* const* rows, int64_t head_dim, int32_t* k) {
  const int64_t depth = packed_depth<kBf16Dot>(head_dim);
  int64_t d = 0;
  for (; d + kLanes <= depth; d += kLanes) pack_square<T, kBf16Dot, false>(rows, d, k);
  if (d < depth) pack_square<T, kBf16Dot, true>(rows, d, k);
}

// scores[r][key] = q[r] . k[key] for some rows and all keys of the block.
template <bool kBf16Dot, int kCount>
SGLANG_KV_KERNEL void score_block(const float* q, const int32_t* k, int64_t depth, float* scores) {
  for (int first = 0; first < kKeyVectors; first += kVectorsAtOnce) {
    F32x16 acc[kCount][kVectorsAtOnce];
#pragma GCC unroll 6
    for (int r = 0; r < kCount; ++r) {
#pragma GCC unroll 4
      for (int i = 0; i < kVectorsAtOnce; ++i) acc[r][i] = F32x16{};
    }
    for (int64_t d = 0; d < depth; ++d) {
      I32x16 key[kVectorsAtOnce];
#pragma GCC unroll 4
      for (int i = 0; i < kVectorsAtOnce; ++i) {
        key[i] = load_as<I32x16>(k + d * kKeys + (first + i) * kLanes);
      }
#pragma GCC unroll 6
      for (int r = 0; r < kCount; ++r) {
        const F32x16 query = splat(q[r * depth + d]);
#pragma GCC unroll 4
        for (int i = 0; i < kVectorsAtOnce; ++i) {
          if constexpr (kBf16Dot) {
            acc[r][i] = dot_bf16(acc[r][i], as<I32x16>(query), key[i]);
          } else {
            acc[r][i] = fma(query, as<F32x16>(key[i]), acc[r][i]);
          }
        }
      }
    }
#pragma GCC unroll 6
    for (int r = 0; r < kCount; ++r) {
#pragma GCC unroll 4
      for (int i = 0; i < kVectorsAtOnce; ++i) {
        store(scores + r * kKeys + (first + i) * kLanes, acc[r][i]);
      }
    }
  }
}

inline void widen(Range& range, Range by) {
  if (by.size() == 0) return;
  range = {std::min(range.begin, by.begin), std::max(range.end, by.end)};
}

inline int lane_of(int64_t index, Range block) {
  return static_cast<int>(std::clamp<int64_t>(index - block.begin, 0, block.size()));
}

// Scores of one row: those of `sink_scores` for its sinks, -inf for what its query does not see.
inline void mask_row(const Visible& seen, Range block, const float* sink_scores, float* scores) {
  const int sinks_begin = lane_of(seen.sinks.begin, block);
  const int sinks_end = lane_of(seen.sinks.end, block);
  const int window_begin = lane_of(seen.window.begin, block);
  const int window_end = lane_of(seen.window.end, block);
  for (int n = 0; n < kKeys; n += kLanes) {
    store(scores + n,
          max(keep_lanes(load(sink_scores + n), sinks_begin - n, sinks_end - n),
              keep_lanes(load(scores + n), window_begin - n, window_end - n)));
  }
}

}  // namespace sglang_kv
