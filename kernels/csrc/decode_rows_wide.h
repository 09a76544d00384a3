// Decode's inner loops for 32 registers of 16 lanes: one head's scores of sixteen keys at a time.
#pragma once

#include <cstdint>
#include <cstring>

#include "decode_group.h"

namespace sglang_kv {

// Adds 32 dimensions of sixteen keys to their scores; half of them where a row ends earlier.
template <typename T, bool kBf16Dot, bool kHalf>
SGLANG_KV_INLINE void score_pair(const T* const* keys, const GroupQueries& q, int g, int64_t d,
                                 F32x16 (&acc)[kLanes]) {
  if constexpr (kBf16Dot) {
    const I32x16 query = load_as<I32x16>(q.raw[g] + d);
    I32x16 key = {};
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
      std::memcpy(&key, keys[i] + d, kHalf ? sizeof key / 2 : sizeof key);
      acc[i] = dot_bf16(acc[i], key, query);
    }
  } else {
    const F32x16 qa = load(q.f32[g] + d), qb = load(q.f32[g] + d + kLanes);
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
      F32x16 a, b;
      if constexpr (kHalf) {
        load_half_pair(keys[i] + d, a, b);
      } else {
        load_pair(keys[i] + d, a, b);
      }
      acc[i] = fma(b, qb, fma(a, qa, acc[i]));
    }
  }
}

// Scores of sixteen keys for one query head.
template <typename T, bool kBf16Dot>
SGLANG_KV_INLINE F32x16 score_keys(const T* const* keys, const GroupQueries& q, int g,
                                   int64_t head_dim) {
  F32x16 acc[kLanes] = {};
  int64_t d = 0;
  for (; d + 2 * kLanes <= head_dim; d += 2 * kLanes) {
    score_pair<T, kBf16Dot, false>(keys, q, g, d, acc);
  }
  if (d < head_dim) score_pair<T, kBf16Dot, true>(keys, q, g, d, acc);
  return reduce_rows(acc);
}

// Scores of sixteen keys from the n-th of a block on, for each query head. On the way, fetches the
// sixteen rows `soon`, if any.
template <typename T, bool kBf16Dot, int kHeads>
SGLANG_KV_INLINE void score_strip(const T* const* keys, const GroupQueries& q, int64_t head_dim,
                                  int n, const T* const* soon, float (*scores)[kBlock]) {
  for (int i = 0; soon && i < kLanes; ++i) prefetch_row(soon[i], head_dim);
  for (int g = 0; g < kHeads; ++g) {
    store(scores[g] + n, score_keys<T, kBf16Dot>(keys, q, g, head_dim));
  }
}

// acc = acc * decay + weights x values, for kPairs x 32 dimensions from d on. On the way, fetches
// the rows `soon`, if any.
template <typename T, int kHeads, int kPairs, bool kHalf>
SGLANG_KV_KERNEL void weigh_pairs(const KeyBlock<T>& block, int64_t v_offset, int64_t d,
                                   const float (*weights)[kBlock], const float* decay,
                                   float (*acc)[kMaxHeadDim], const T* const* soon,
                                   int64_t head_dim) {
  F32x16 sum[kHeads][2 * kPairs] = {};
  for (int n = 0; n < block.count; ++n) {
    if (soon) prefetch_row(soon[n], head_dim);
    F32x16 v[2 * kPairs];
    for (int p = 0; p < kPairs; ++p) {
      const T* from = block.rows[n] + v_offset + d + 2 * kLanes * p;
      if constexpr (kHalf) {
        load_half_pair(from, v[2 * p], v[2 * p + 1]);
      } else {
        load_pair(from, v[2 * p], v[2 * p + 1]);
      }
    }
    for (int g = 0; g < kHeads; ++g) {
      const F32x16 w = splat(weights[g][n]);
      for (int i = 0; i < 2 * kPairs; ++i) sum[g][i] = fma(w, v[i], sum[g][i]);
    }
  }
  for (int g = 0; g < kHeads; ++g) {
    for (int i = 0; i < 2 * kPairs; ++i) {
      float* at = acc[g] + d + kLanes * i;
      store(at, fma(load(at), splat(decay[g]), sum[g][i]));
    }
  }
}

// acc = acc * decay + weights x values for all dimensions. On the way, fetches the rows `soon`, if
// any.
template <typename T, int kHeads>
SGLANG_KV_INLINE void weigh_values(const KeyBlock<T>& block, int64_t v_offset, int64_t head_dim,
                                   const float (*weights)[kBlock], const float* decay,
                                   float (*acc)[kMaxHeadDim], const T* const* soon) {
  // Two pairs of dimensions at a time as long as the accumulators leave registers for the values.
  constexpr int kPairs = kHeads <= 6 ? 2 : 1;
  int64_t d = 0;
  for (; d + 2 * kLanes * kPairs <= head_dim; d += 2 * kLanes * kPairs) {
    weigh_pairs<T, kHeads, kPairs, false>(block, v_offset, d, weights, decay, acc,
                                          d == 0 ? soon : nullptr, head_dim);
  }
  if (d + 2 * kLanes <= head_dim) {
    weigh_pairs<T, kHeads, 1, false>(block, v_offset, d, weights, decay, acc, nullptr, head_dim);
    d += 2 * kLanes;
  }
  if (d < head_dim) {
    weigh_pairs<T, kHeads, 1, true>(block, v_offset, d, weights, decay, acc, nullptr, head_dim);
  }
}

}  // namespace sglang_kv
