// Decode's inner loops for 16 registers of 8 lanes (AVX2) or fewer lanes: three query heads at a
// time, so that a key read once serves them all and every accumulator stays in a register.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

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

// Thirty-two elements that will be read soon: into L1, as they are next but sixteen.
template <typename T>
SGLANG_KV_INLINE void prefetch_pair(const T* p) {
  const char* from = reinterpret_cast<const char*>(p);
#pragma GCC unroll 2
  for (size_t i = 0; i < 2 * kLanes * sizeof(T); i += 64) __builtin_prefetch(from + i, 0, 3);
}

// Lane sums of sixteen keys for kCount query heads from the g-th on: sums[head][key]. On the way,
// fetches the sixteen rows `soon`, if any.
template <typename T, int kCount, bool kFetch>
SGLANG_KV_KERNEL void multiply_keys(const T* const* keys, const GroupQueries& q, int g,
                                    int64_t head_dim, const T* const* soon,
                                    FloatPart (*sums)[kLanes]) {
  for (int n = 0; n < kLanes; n += kNarrowKeys) {
    const T* const rows[kNarrowKeys] = {keys[n], keys[n + 1], keys[n + 2], keys[n + 3]};
    FloatPart acc[kNarrowKeys][kCount] = {};
    int64_t d = 0;
    for (; d + 2 * kLanes <= head_dim; d += 2 * kLanes) {
#pragma GCC unroll 4
      for (int i = 0; i < kNarrowKeys; ++i) {
        if (kFetch) prefetch_pair(soon[n + i] + d);
        multiply_pair<T, kCount, false>(rows[i], q, g, d, acc[i]);
      }
    }
    if (d < head_dim) {
#pragma GCC unroll 4
      for (int i = 0; i < kNarrowKeys; ++i) {
        if (kFetch) prefetch_pair(soon[n + i] + d);
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
                                  int64_t head_dim, int n, const T* const* soon,
                                  float (*scores)[kBlock]) {
  alignas(64) FloatPart sums[kCount][kLanes];
  if (soon) {
    multiply_keys<T, kCount, true>(keys, q, g, head_dim, soon, sums);
  } else {
    multiply_keys<T, kCount, false>(keys, q, g, head_dim, soon, sums);
  }
  for (int h = 0; h < kCount; ++h) store(scores[g + h] + n, reduce_parts(sums[h]));
}

// Scores of sixteen keys from the n-th of a block on, for each query head. On the way, fetches the
// sixteen rows `soon`, if any.
template <typename T, bool kBf16Dot, int kHeads>
SGLANG_KV_INLINE void score_strip(const T* const* keys, const GroupQueries& q, int64_t head_dim,
                                  int n, const T* const* soon, float (*scores)[kBlock]) {
  static_assert(!kBf16Dot, "an instruction of 512-bit CPUs");
  constexpr int kWhole = kHeads / kNarrowHeads * kNarrowHeads;
  for (int g = 0; g < kWhole; g += kNarrowHeads) {
    score_heads<T, kNarrowHeads>(keys, q, g, head_dim, n, g == 0 ? soon : nullptr, scores);
  }
  if constexpr (kWhole < kHeads) {
    score_heads<T, kHeads - kWhole>(keys, q, kWhole, head_dim, n, kWhole == 0 ? soon : nullptr,
                                    scores);
  }
}

// acc = acc * decay + weights x values for 32 dimensions from d on of `count` keys, the first-th of
// their block and those after it, and kCount query heads. On the way, fetches as much of the rows
// `soon`, if any.
template <typename T, int kCount, bool kHalf, bool kFetch>
SGLANG_KV_KERNEL void weigh_heads(const T* const* rows, int count, int64_t v_offset, int64_t d,
                                  int first, const float (*weights)[kBlock], const float* decay,
                                  float (*acc)[kMaxHeadDim], const T* const* soon) {
  constexpr int kParts = F32x16::kParts;
  const int64_t offset = v_offset + d;
  FloatPart sum[kCount][2 * kParts];
#pragma GCC unroll 3
  for (int h = 0; h < kCount; ++h) {
#pragma GCC unroll 8
    for (int p = 0; p < 2 * kParts; ++p) {
      sum[h][p] = load_part(acc[h] + d + p * kNativeLanes) * decay[h];
    }
  }
  for (int n = 0; n < count; ++n) {
    if (kFetch) prefetch_pair(soon[n] + d);
    const T* value = rows[n] + offset;
#pragma GCC unroll 4
    for (int p = 0; p < kParts; ++p) {
      FloatPart a, b;
      load_some<T, kHalf>(value, p, a, b);
#pragma GCC unroll 3
      for (int h = 0; h < kCount; ++h) {
        sum[h][p] += weights[h][first + n] * a;
        sum[h][kParts + p] += weights[h][first + n] * b;
      }
      forget_reads();
    }
  }
#pragma GCC unroll 3
  for (int h = 0; h < kCount; ++h) {
#pragma GCC unroll 8
    for (int p = 0; p < 2 * kParts; ++p) store_part(acc[h] + d + p * kNativeLanes, sum[h][p]);
  }
}

template <typename T, int kHeads, bool kHalf>
SGLANG_KV_INLINE void weigh_pair(const T* const* rows, int count, int64_t v_offset, int64_t d,
                                 int first, const float (*weights)[kBlock], const float* decay,
                                 float (*acc)[kMaxHeadDim], const T* const* soon) {
  constexpr int kWhole = kHeads / kNarrowHeads * kNarrowHeads;
  constexpr int kRest = kHeads - kWhole;
  const auto weigh = [&](auto heads, auto fetch, int g) {
    weigh_heads<T, decltype(heads)::value, kHalf, decltype(fetch)::value>(
        rows, count, v_offset, d, first, weights + g, decay + g, acc + g, soon);
  };
  using Whole = std::integral_constant<int, kNarrowHeads>;
  using Rest = std::integral_constant<int, kRest>;
  if constexpr (kWhole > 0) {
    soon ? weigh(Whole{}, std::true_type{}, 0) : weigh(Whole{}, std::false_type{}, 0);
    for (int g = kNarrowHeads; g < kWhole; g += kNarrowHeads) {
      weigh(Whole{}, std::false_type{}, g);
    }
    if constexpr (kRest > 0) weigh(Rest{}, std::false_type{}, kWhole);
  } else {
    soon ? weigh(Rest{}, std::true_type{}, 0) : weigh(Rest{}, std::false_type{}, 0);
  }
}

// acc = acc * decay + weights x values for all dimensions, sixteen keys at a time, so that all of a
// row is read at once. On the way, fetches the rows `soon`, if any.
template <typename T, int kHeads>
SGLANG_KV_INLINE void weigh_values(const KeyBlock<T>& block, int64_t v_offset, int64_t head_dim,
                                   const float (*weights)[kBlock], const float* decay,
                                   float (*acc)[kMaxHeadDim], const T* const* soon) {
  float ones[kHeads];
  std::fill(ones, ones + kHeads, 1.f);
  for (int n = 0; n < block.count; n += kLanes) {
    const int count = std::min(kLanes, block.count - n);
    const T* const* next = soon ? soon + n : nullptr;
    const float* by = n ? ones : decay;
    int64_t d = 0;
    for (; d + 2 * kLanes <= head_dim; d += 2 * kLanes) {
      weigh_pair<T, kHeads, false>(block.rows + n, count, v_offset, d, n, weights, by, acc, next);
    }
    if (d < head_dim) {
      weigh_pair<T, kHeads, true>(block.rows + n, count, v_offset, d, n, weights, by, acc, next);
    }
  }
}

}  // namespace sglang_kv
