// Decode's inner loops for 16 registers of 8 lanes (AVX2) or fewer lanes: three query heads at a
// time, so that a key read once serves them all and every accumulator stays in a register.
#pragma once

#include <algorithm>
#include <cstdint>

#include "decode_group.h"

namespace sglang_kv {

constexpr int kNarrowHeads = 3;
constexpr int kNarrowKeys = 4;  // 4 keys x 3 heads accumulate in 12 registers

// What was read before is read again after it. Without it GCC keeps a group's queries in registers,
// and the accumulators on the stack.
SGLANG_KV_INLINE void forget_reads() { asm volatile("" ::: "memory"); }

// The `part`-th native vectors of 32 elements, or of 16 where a row ends earlier.
template <typename T, bool kHalf>
SGLANG_KV_INLINE void load_some(const T* p, int part, FloatPart& a, FloatPart& b) {
  if constexpr (kHalf) {
    F32x16 all_a, all_b;
    load_half_pair(p, all_a, all_b);
    a = all_a.part[part];
    b = all_b.part[part];
  } else {
    load_pair_part(p, part, a, b);
  }
}

// Adds the products of 32 dimensions of one key from d on to its lane sums.
template <typename T, int kCount, bool kHalf>
SGLANG_KV_INLINE void multiply_pair(const T* key, const GroupQueries& q, int g, int64_t d,
                                    FloatPart (&acc)[kCount]) {
#pragma GCC unroll 4
  for (int p = 0; p < F32x16::kParts; ++p) {
    FloatPart a, b;
    load_some<T, kHalf>(key + d, p, a, b);
#pragma GCC unroll 3
    for (int h = 0; h < kCount; ++h) {
      const float* query = q.f32[g + h] + d + p * kNativeLanes;
      acc[h] += a * load_part(query);
      acc[h] += b * load_part(query + kLanes);
    }
    forget_reads();
  }
}

// Lane sums of sixteen keys for kCount query heads from the g-th on: sums[head][key]. On the way,
// fetches the keys `prefetch`.
template <typename T, int kCount>
SGLANG_KV_KERNEL void multiply_keys(const T* const* keys, const GroupQueries& q, int g,
                                    int64_t head_dim, Rows<T> prefetch,
                                    FloatPart (*sums)[kLanes]) {
  for (int n = 0; n < kLanes; n += kNarrowKeys) {
    prefetch.fetch(n, kNarrowKeys);
    const T* const rows[kNarrowKeys] = {keys[n], keys[n + 1], keys[n + 2], keys[n + 3]};
    FloatPart acc[kNarrowKeys][kCount] = {};
    int64_t d = 0;
    for (; d + 2 * kLanes <= head_dim; d += 2 * kLanes) {
#pragma GCC unroll 4
      for (int i = 0; i < kNarrowKeys; ++i) {
        multiply_pair<T, kCount, false>(rows[i], q, g, d, acc[i]);
      }
    }
    if (d < head_dim) {
#pragma GCC unroll 4
      for (int i = 0; i < kNarrowKeys; ++i) {
        multiply_pair<T, kCount, true>(rows[i], q, g, d, acc[i]);
      }
    }
#pragma GCC unroll 4
    for (int i = 0; i < kNarrowKeys; ++i) {
#pragma GCC unroll 3
      for (int h = 0; h < kCount; ++h) sums[h][n + i] = acc[i][h];
    }
  }
}

template <typename T, int kCount>
SGLANG_KV_INLINE void score_heads(const T* const* keys, const GroupQueries& q, int g,
                                  int64_t head_dim, int n, Rows<T> prefetch,
                                  float (*scores)[kBlock]) {
  alignas(64) FloatPart sums[kCount][kLanes];
  multiply_keys<T, kCount>(keys, q, g, head_dim, prefetch, sums);
  for (int h = 0; h < kCount; ++h) store(scores[g + h] + n, reduce_parts(sums[h]));
}

// Scores of sixteen keys from the n-th of a block on, for each query head. On the way, fetches the
// keys `prefetch`.
template <typename T, bool kBf16Dot, int kHeads>
SGLANG_KV_INLINE void score_strip(const T* const* keys, const GroupQueries& q, int64_t head_dim,
                                  int n, Rows<T> prefetch, float (*scores)[kBlock]) {
  static_assert(!kBf16Dot, "an instruction of 512-bit CPUs");
  constexpr int kWhole = kHeads / kNarrowHeads * kNarrowHeads;
  for (int g = 0; g < kWhole; g += kNarrowHeads) {
    score_heads<T, kNarrowHeads>(keys, q, g, head_dim, n, g == 0 ? prefetch : Rows<T>{}, scores);
  }
  if constexpr (kWhole < kHeads) {
    score_heads<T, kHeads - kWhole>(keys, q, kWhole, head_dim, n,
                                    kWhole == 0 ? prefetch : Rows<T>{}, scores);
  }
}

// acc = acc * decay + weights x values for 32 dimensions from d on and kCount query heads. On the
// way, fetches the values of the block `prefetch`, if any.
template <typename T, int kCount, bool kHalf>
SGLANG_KV_KERNEL void weigh_heads(const KeyBlock<T>& block, int64_t v_offset, int64_t d,
                                  int64_t head_dim, const float (*weights)[kBlock],
                                  const float* decay, float (*acc)[kMaxHeadDim],
                                  const KeyBlock<T>* prefetch) {
  constexpr int kParts = F32x16::kParts;
  FloatPart sum[kCount][2 * kParts] = {};
  for (int n = 0; n < block.count; ++n) {
    if (prefetch && n < prefetch->count) prefetch_row(prefetch->rows[n] + v_offset, head_dim);
    const T* value = block.rows[n] + v_offset + d;
#pragma GCC unroll 4
    for (int p = 0; p < kParts; ++p) {
      FloatPart a, b;
      load_some<T, kHalf>(value, p, a, b);
#pragma GCC unroll 3
      for (int h = 0; h < kCount; ++h) {
        sum[h][p] += weights[h][n] * a;
        sum[h][kParts + p] += weights[h][n] * b;
      }
      forget_reads();
    }
  }
#pragma GCC unroll 3
  for (int h = 0; h < kCount; ++h) {
#pragma GCC unroll 8
    for (int p = 0; p < 2 * kParts; ++p) {
      float* at = acc[h] + d + p * kNativeLanes;
      store_part(at, load_part(at) * decay[h] + sum[h][p]);
    }
  }
}

template <typename T, int kHeads, bool kHalf>
SGLANG_KV_INLINE void weigh_pair(const KeyBlock<T>& block, int64_t v_offset, int64_t d,
                                 int64_t head_dim, const float (*weights)[kBlock],
                                 const float* decay, float (*acc)[kMaxHeadDim],
                                 const KeyBlock<T>* prefetch) {
  constexpr int kWhole = kHeads / kNarrowHeads * kNarrowHeads;
  for (int g = 0; g < kWhole; g += kNarrowHeads) {
    weigh_heads<T, kNarrowHeads, kHalf>(block, v_offset, d, head_dim, weights + g, decay + g,
                                        acc + g, g + d == 0 ? prefetch : nullptr);
  }
  if constexpr (kWhole < kHeads) {
    weigh_heads<T, kHeads - kWhole, kHalf>(block, v_offset, d, head_dim, weights + kWhole,
                                           decay + kWhole, acc + kWhole,
                                           kWhole + d == 0 ? prefetch : nullptr);
  }
}

// acc = acc * decay + weights x values for all dimensions.
template <typename T, int kHeads>
SGLANG_KV_INLINE void weigh_values(const KeyBlock<T>& block, int64_t v_offset, int64_t head_dim,
                                   const float (*weights)[kBlock], const float* decay,
                                   float (*acc)[kMaxHeadDim], const KeyBlock<T>* prefetch) {
  int64_t d = 0;
  for (; d + 2 * kLanes <= head_dim; d += 2 * kLanes) {
    weigh_pair<T, kHeads, false>(block, v_offset, d, head_dim, weights, decay, acc, prefetch);
  }
  if (d < head_dim) {
    weigh_pair<T, kHeads, true>(block, v_offset, d, head_dim, weights, decay, acc, prefetch);
  }
}

}  // namespace sglang_kv
