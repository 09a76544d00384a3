// Sixteen-lane vectors, with AVX-512 where the compiler has it and portable otherwise.
//
// Every kernel is written once against this header. F32x16 is one zmm with AVX-512, two ymm with
// AVX2, four NEON registers on Arm, with the usual operators; what those cannot say well has an
// intrinsic version beside the portable one.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && \
    defined(__AVX512VL__)
#define SGLANG_KV_AVX512 1
#include <immintrin.h>
#else
#define SGLANG_KV_AVX512 0
#include "pack.h"
#endif

#if SGLANG_KV_AVX512 && defined(__AVX512BF16__)
#define SGLANG_KV_AVX512_BF16 1
#else
#define SGLANG_KV_AVX512_BF16 0
#endif

#define SGLANG_KV_INLINE inline __attribute__((always_inline))

// For inner loops: in a function of their own, and with each loop over accumulators unrolled, the
// compiler keeps them in registers; otherwise it also stores them all in each round (GCC 12, AVX2).
#define SGLANG_KV_KERNEL __attribute__((noinline))

namespace sglang_kv {

constexpr int kLanes = 16;
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kLog2e = 1.4426950408889634f;

// Whether products of bf16 pairs have an instruction of their own here.
constexpr bool kHasBf16Dot = SGLANG_KV_AVX512_BF16;

// Accumulators of six rows that fit the registers beside their operands, in vectors per row.
constexpr int kVectorsAtOnce = SGLANG_KV_AVX512 ? 4 : 1;

#if SGLANG_KV_AVX512
using F32x16 = float __attribute__((vector_size(64)));
using I32x16 = int32_t __attribute__((vector_size(64)));
using U32x16 = uint32_t __attribute__((vector_size(64)));
using U16x16 = uint16_t __attribute__((vector_size(32)));

template <typename V>
SGLANG_KV_INLINE V select(I32x16 mask, V a, V b) {
  return mask ? a : b;
}
#else
using F32x16 = Pack<float>;
using FloatPart = F32x16::Part;
using I32x16 = Pack<int32_t>;
using U32x16 = Pack<uint32_t>;
#endif

// The same 64 bytes as another type.
template <typename To, typename From>
SGLANG_KV_INLINE To as(From x) {
#if SGLANG_KV_AVX512
  return reinterpret_cast<To>(x);
#else
  To y;
  for (int i = 0; i < To::kParts; ++i) {
    y.part[i] = reinterpret_cast<typename To::Part>(x.part[i]);
  }
  return y;
#endif
}

struct bf16 {
  uint16_t bits;
};

SGLANG_KV_INLINE float to_float(float x) { return x; }
SGLANG_KV_INLINE float to_float(bf16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

SGLANG_KV_INLINE F32x16 splat(float x) {
#if SGLANG_KV_AVX512
  return _mm512_set1_ps(x);
#else
  F32x16 v;
  for (auto& part : v.part) part = x - F32x16::Part{};  // x - 0 is x even for -0: one broadcast
  return v;
#endif
}

// Sixty-four bytes from memory and to it, as any of the types. By native vectors: what is copied in
// smaller pieces and read back whole stalls.
template <typename V>
SGLANG_KV_INLINE V load_as(const void* p) {
  V v;
#if SGLANG_KV_AVX512
  std::memcpy(&v, p, sizeof v);
#else
  const char* from = static_cast<const char*>(p);
  for (int i = 0; i < V::kParts; ++i) {
    std::memcpy(&v.part[i], from + i * sizeof v.part[i], sizeof v.part[i]);
  }
#endif
  return v;
}
template <typename V>
SGLANG_KV_INLINE void store_as(void* p, V v) {
#if SGLANG_KV_AVX512
  std::memcpy(p, &v, sizeof v);
#else
  char* to = static_cast<char*>(p);
  for (int i = 0; i < V::kParts; ++i) {
    std::memcpy(to + i * sizeof v.part[i], &v.part[i], sizeof v.part[i]);
  }
#endif
}

SGLANG_KV_INLINE F32x16 load(const float* p) { return load_as<F32x16>(p); }
SGLANG_KV_INLINE void store(float* p, F32x16 v) { store_as(p, v); }
#if !SGLANG_KV_AVX512
SGLANG_KV_INLINE FloatPart load_part(const float* p) {
  FloatPart v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
SGLANG_KV_INLINE void store_part(float* p, FloatPart v) { std::memcpy(p, &v, sizeof v); }
#endif
SGLANG_KV_INLINE F32x16 load(const bf16* p) {
#if SGLANG_KV_AVX512
  U16x16 half;
  std::memcpy(&half, p, sizeof half);
  return as<F32x16>(__builtin_convertvector(half, U32x16) << 16);
#else
  U32x16 bits;
  for (int i = 0; i < U32x16::kParts; ++i) {
    typedef uint16_t Half __attribute__((vector_size(2 * kNativeLanes)));
    Half half;
    std::memcpy(&half, p + i * kNativeLanes, sizeof half);
    bits.part[i] = __builtin_convertvector(half, U32x16::Part) << 16;
  }
  return as<F32x16>(bits);
#endif
}
// Rounds to nearest even and keeps NaN a NaN, as torch does.
SGLANG_KV_INLINE void store(bf16* p, F32x16 v) {
  const U32x16 bits = as<U32x16>(v);
  const U32x16 rounded = (bits + 0x7fffu + ((bits >> 16u) & 1u)) >> 16u;
  const U32x16 half = select(v == v, rounded, U32x16{} + 0x7fc0u);
#if SGLANG_KV_AVX512
  const U16x16 narrow = __builtin_convertvector(half, U16x16);
  std::memcpy(p, &narrow, sizeof narrow);
#else
  for (int i = 0; i < kLanes; ++i) p[i].bits = static_cast<uint16_t>(half[i]);
#endif
}

SGLANG_KV_INLINE bf16 to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  if (x != x) return {0x7fc0};
  return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

SGLANG_KV_INLINE F32x16 fma(F32x16 a, F32x16 b, F32x16 c) {
#if SGLANG_KV_AVX512
  return _mm512_fmadd_ps(a, b, c);
#else
  return a * b + c;
#endif
}

SGLANG_KV_INLINE F32x16 max(F32x16 a, F32x16 b) {
#if SGLANG_KV_AVX512
  return _mm512_max_ps(a, b);
#elif defined(__AVX__)
  for (int i = 0; i < F32x16::kParts; ++i) a.part[i] = _mm256_max_ps(a.part[i], b.part[i]);
  return a;
#else
  return select(a > b, a, b);
#endif
}

SGLANG_KV_INLINE float reduce_max(F32x16 v) {
#if SGLANG_KV_AVX512
  return _mm512_reduce_max_ps(v);
#else
  FloatPart top = v.part[0];
  for (int i = 1; i < F32x16::kParts; ++i) top = v.part[i] > top ? v.part[i] : top;
  float r = top[0];
  for (int i = 1; i < kNativeLanes; ++i) r = top[i] > r ? top[i] : r;
  return r;
#endif
}

SGLANG_KV_INLINE float reduce_add(F32x16 v) {
#if SGLANG_KV_AVX512
  return _mm512_reduce_add_ps(v);
#else
  F32x16::Part sum = v.part[0];
  for (int i = 1; i < F32x16::kParts; ++i) sum += v.part[i];
  float r = 0.f;
  for (int i = 0; i < kNativeLanes; ++i) r += sum[i];
  return r;
#endif
}

// Lanes [begin, end) of x, and -inf elsewhere.
SGLANG_KV_INLINE F32x16 keep_lanes(F32x16 x, int begin, int end) {
  const I32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return select((lane >= I32x16{} + begin) & (lane < I32x16{} + end), x, splat(-kInf));
}

// 2^x to 1e-7 relative, exactly 1 at 0 and exactly 0 at -inf: merging with an empty state must not
// change a bit.
SGLANG_KV_INLINE F32x16 exp2(F32x16 x) {
#if SGLANG_KV_AVX512
  // Fraction in [0, 1); vreduceps maps -inf to 0, and vscalefps floors its exponent.
  const F32x16 f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
#else
  x = max(x, splat(-200.f));
  I32x16 n = convert<int32_t>(x);
  n += convert<float>(n) > x;  // a true lane is -1: truncation becomes floor
  const F32x16 f = x - convert<float>(n);
#endif
  // Minimax fit of 2^f with the constant fixed to 1.
  F32x16 p = splat(0.00186714599840343f);
  p = fma(p, f, splat(0.009016996249556541f));
  p = fma(p, f, splat(0.0557999387383461f));
  p = fma(p, f, splat(0.24016444385051727f));
  p = fma(p, f, splat(0.6931512951850891f));
  p = fma(p, f, splat(1.f));
#if SGLANG_KV_AVX512
  return _mm512_scalef_ps(p, x);
#else
  const I32x16 largest = I32x16{} + 127;
  const F32x16 scale = as<F32x16>((select(n > largest, largest, n) + 127) << 23);
  return select(n < I32x16{} + -126, F32x16{}, p * scale);
#endif
}
SGLANG_KV_INLINE float exp2(float x) { return exp2(splat(x))[0]; }

}  // namespace sglang_kv
