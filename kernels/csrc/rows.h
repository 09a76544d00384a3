// Rows of keys and values: how they are fetched, read, multiplied, reduced and turned into columns.
#pragma once

#include <cstdint>
#include <cstring>

#include "vec.h"

namespace sglang_kv {

// Thirty-two elements as two vectors, in the order that is cheapest for the type: halves for float,
// even and odd elements for bf16 (a shift and a mask, no shuffle). `store_pair` undoes it.
SGLANG_KV_INLINE void load_pair(const float* p, F32x16& a, F32x16& b) {
  a = load(p);
  b = load(p + kLanes);
}
SGLANG_KV_INLINE void load_pair(const bf16* p, F32x16& a, F32x16& b) {
  const U32x16 both = load_as<U32x16>(p);
  a = as<F32x16>(both << 16u);
  b = as<F32x16>(both & 0xffff0000u);
}
#if !SGLANG_KV_AVX512
// One native vector of each, the `part`-th.
SGLANG_KV_INLINE void load_pair_part(const float* p, int part, FloatPart& a, FloatPart& b) {
  a = load_part(p + part * kNativeLanes);
  b = load_part(p + kLanes + part * kNativeLanes);
}
SGLANG_KV_INLINE void load_pair_part(const bf16* p, int part, FloatPart& a, FloatPart& b) {
  U32x16::Part both;
  std::memcpy(&both, p + 2 * part * kNativeLanes, sizeof both);
  a = reinterpret_cast<FloatPart>(both << 16u);
  b = reinterpret_cast<FloatPart>(both & 0xffff0000u);
}
#endif
// The same with only the first sixteen elements in memory; the others read as zero.
SGLANG_KV_INLINE void load_half_pair(const float* p, F32x16& a, F32x16& b) {
  a = load(p);
  b = F32x16{};
}
SGLANG_KV_INLINE void load_half_pair(const bf16* p, F32x16& a, F32x16& b) {
  bf16 padded[2 * kLanes] = {};
  std::memcpy(padded, p, kLanes * sizeof(bf16));
  load_pair(padded, a, b);
}
template <typename T>
SGLANG_KV_INLINE void store_pair(float* p, F32x16 a, F32x16 b);
template <>
SGLANG_KV_INLINE void store_pair<float>(float* p, F32x16 a, F32x16 b) {
  store(p, a);
  store(p + kLanes, b);
}
template <>
SGLANG_KV_INLINE void store_pair<bf16>(float* p, F32x16 a, F32x16 b) {
  for (int i = 0; i < kLanes; ++i) {
    p[2 * i] = a[i];
    p[2 * i + 1] = b[i];
  }
}

// Into L2, which can wait for three times as many lines as L1: on Zen 4 pages scattered over memory
// then arrive as fast as a sequential read, and at two thirds of that when prefetched into L1.
template <typename T>
SGLANG_KV_INLINE void prefetch_row(const T* row, int64_t head_dim) {
  const char* p = reinterpret_cast<const char*>(row);
  for (int64_t i = 0; i < head_dim * static_cast<int64_t>(sizeof(T)); i += 64) {
    __builtin_prefetch(p + i, 0, 2);
  }
}

// acc + the product of 32 bf16 of a with 32 of b, summed in pairs.
SGLANG_KV_INLINE F32x16 dot_bf16(F32x16 acc, I32x16 a, I32x16 b) {
#if SGLANG_KV_AVX512_BF16
  return _mm512_dpbf16_ps(acc, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
#else
  const U32x16 ua = as<U32x16>(a), ub = as<U32x16>(b);
  acc = fma(as<F32x16>(ua & 0xffff0000u), as<F32x16>(ub & 0xffff0000u), acc);
  return fma(as<F32x16>(ua << 16u), as<F32x16>(ub << 16u), acc);
#endif
}

#if !SGLANG_KV_AVX512
// Lane i of the result is the sum of r[i]'s lanes; as many of r as a native vector has.
SGLANG_KV_INLINE FloatPart reduce_part(const FloatPart* r) {
#if defined(__AVX__)
  // Pairs of rows share a vector after each step, as in reduce_rows below.
  const __m256 a = _mm256_hadd_ps(_mm256_hadd_ps(r[0], r[1]), _mm256_hadd_ps(r[2], r[3]));
  const __m256 b = _mm256_hadd_ps(_mm256_hadd_ps(r[4], r[5]), _mm256_hadd_ps(r[6], r[7]));
  return _mm256_permute2f128_ps(a, b, 0x20) + _mm256_permute2f128_ps(a, b, 0x31);
#else
  FloatPart sums;
  for (int i = 0; i < kNativeLanes; ++i) {
    sums[i] = 0.f;
    for (int j = 0; j < kNativeLanes; ++j) sums[i] += r[i][j];
  }
  return sums;
#endif
}
// The same of sixteen.
SGLANG_KV_INLINE F32x16 reduce_parts(const FloatPart* r) {
  F32x16 sums;
  for (int i = 0; i < F32x16::kParts; ++i) sums.part[i] = reduce_part(r + i * kNativeLanes);
  return sums;
}
#endif

// Lane i of the result is the sum of r[i].
SGLANG_KV_INLINE F32x16 reduce_rows(const F32x16 (&r)[kLanes]) {
#if SGLANG_KV_AVX512
  // Each step adds the halves of two vectors, which leaves rows in this order of 128-bit groups and
  // of lanes in a group; taking the rows in that order makes the result come out straight.
  constexpr int kGroup[4] = {0, 8, 4, 12};
  constexpr int kLane[4] = {0, 2, 1, 3};
  F32x16 s[kLanes];
  for (int i = 0; i < kLanes; ++i) s[kGroup[i / 4] + kLane[i % 4]] = r[i];
  for (int i = 0; i < 8; ++i)
    s[i] = _mm512_shuffle_f32x4(s[i], s[i + 8], 0x44) + _mm512_shuffle_f32x4(s[i], s[i + 8], 0xee);
  for (int i = 0; i < 4; ++i)
    s[i] = _mm512_shuffle_f32x4(s[i], s[i + 4], 0x88) + _mm512_shuffle_f32x4(s[i], s[i + 4], 0xdd);
  for (int i = 0; i < 2; ++i)
    s[i] = _mm512_shuffle_ps(s[i], s[i + 2], 0x44) + _mm512_shuffle_ps(s[i], s[i + 2], 0xee);
  return _mm512_shuffle_ps(s[0], s[1], 0x88) + _mm512_shuffle_ps(s[0], s[1], 0xdd);
#else
  FloatPart halves[kLanes];
  for (int i = 0; i < kLanes; ++i) {
    halves[i] = r[i].part[0];
    for (int p = 1; p < F32x16::kParts; ++p) halves[i] += r[i].part[p];
  }
  return reduce_parts(halves);
#endif
}

// Transposes a 16 x 16 matrix of dwords in place.
SGLANG_KV_INLINE void transpose(I32x16 (&m)[kLanes]) {
#if SGLANG_KV_AVX512
  __m512i a[kLanes], b[kLanes];
  for (int i = 0; i < kLanes; ++i) a[i] = reinterpret_cast<__m512i>(m[i]);
  for (int i = 0; i < kLanes; i += 2) {
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  }
  for (int i = 0; i < kLanes; i += 4) {
    for (int j = 0; j < 2; ++j) {
      a[i + 2 * j] = _mm512_unpacklo_epi64(b[i + j], b[i + j + 2]);
      a[i + 2 * j + 1] = _mm512_unpackhi_epi64(b[i + j], b[i + j + 2]);
    }
  }
  // a[4 i + j] holds column j of each 128-bit group, for rows 4 i .. 4 i + 3.
  for (int j = 0; j < 4; ++j) {
    const __m512i even_low = _mm512_shuffle_i32x4(a[j], a[4 + j], 0x88);
    const __m512i odd_low = _mm512_shuffle_i32x4(a[j], a[4 + j], 0xdd);
    const __m512i even_high = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0x88);
    const __m512i odd_high = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0xdd);
    b[j] = _mm512_shuffle_i32x4(even_low, even_high, 0x88);
    b[8 + j] = _mm512_shuffle_i32x4(even_low, even_high, 0xdd);
    b[4 + j] = _mm512_shuffle_i32x4(odd_low, odd_high, 0x88);
    b[12 + j] = _mm512_shuffle_i32x4(odd_low, odd_high, 0xdd);
  }
  for (int i = 0; i < kLanes; ++i) m[i] = reinterpret_cast<I32x16>(b[i]);
#else
  for (int i = 0; i < kLanes; ++i) {
    for (int j = 0; j < i; ++j) {
      const int32_t t = m[i][j];
      m[i].set(j, m[j][i]);
      m[j].set(i, t);
    }
  }
#endif
}

}  // namespace sglang_kv
