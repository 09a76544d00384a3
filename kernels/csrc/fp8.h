// 8-bit floats, as torch and GPUs have them: rows of them read as float, and floats stored as them.
//
// One path serves both formats, and one all ops: a block of rows is widened into a buffer, and the
// kernels for float read it there. That adds no instance of a kernel to the build, and each value
// is exact: a float holds every number of either format.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "attention.h"
#include "streams.h"
#include "vec.h"

namespace sglang_kv {

// Below its sign bit, a number's bits are a piece of a float's, shifted, with another bias.
struct Fp8 {
  int32_t shift;    // 23 - bits of mantissa
  int32_t rebias;   // 127 - bias of the exponent, where a float has its exponent
  int32_t largest;  // the largest finite number's bits; above it are infinity and NaN

  // The smallest number with a whole mantissa, as bits of a float.
  int32_t least_normal() const { return rebias + (1 << 23); }
};

constexpr Fp8 kE4m3 = {20, 120 << 23, 0x7e};  // up to 448, no infinity
constexpr Fp8 kE5m2 = {21, 112 << 23, 0x7b};  // up to 57344
constexpr int32_t kFp8Nan = 0x7f;

// Sixteen bytes with their sign.
SGLANG_KV_INLINE I32x16 load_bytes(const uint8_t* p) {
#if SGLANG_KV_AVX512
  typedef int8_t Bytes __attribute__((vector_size(kLanes)));
  Bytes bytes;
  std::memcpy(&bytes, p, sizeof bytes);
  return __builtin_convertvector(bytes, I32x16);
#else
  I32x16 wide;
  for (int i = 0; i < I32x16::kParts; ++i) {
    typedef int8_t Bytes __attribute__((vector_size(kNativeLanes)));
    Bytes bytes;
    std::memcpy(&bytes, p + i * kNativeLanes, sizeof bytes);
    wide.part[i] = __builtin_convertvector(bytes, I32x16::Part);
  }
  return wide;
#endif
}

SGLANG_KV_INLINE F32x16 widen(const Fp8& f, const uint8_t* p) {
  const I32x16 bytes = load_bytes(p);
  const I32x16 size = bytes & 0x7f;
  const I32x16 least = I32x16{} + f.least_normal();
  const I32x16 bits = (size << f.shift) + f.rebias;
  // Without a leading one: read with one, and take it off again.
  const F32x16 below = as<F32x16>(bits + (1 << 23)) - as<F32x16>(least);
  // Infinity and NaN have all bits of the exponent, and so has a float's: the bias counts twice.
  const I32x16 whole = bits + ((size > I32x16{} + f.largest) & f.rebias);
  const F32x16 value = select(least > bits, below, as<F32x16>(whole));
  return as<F32x16>(as<I32x16>(value) + (bytes & INT32_MIN));
}

// Rounds to nearest even; what is too large becomes the largest number, and NaN stays NaN.
SGLANG_KV_INLINE void store(const Fp8& f, uint8_t* p, F32x16 v) {
  const I32x16 all = as<I32x16>(v);
  const I32x16 size = all & INT32_MAX;
  const I32x16 is_nan = size > I32x16{} + 0x7f800000;
  const I32x16 largest = I32x16{} + ((f.largest << f.shift) + f.rebias);
  const I32x16 bits = select(size > largest, largest, size);
  const I32x16 half = I32x16{} + ((1 << (f.shift - 1)) - 1);
  const I32x16 normal = (bits - (I32x16{} + f.rebias) + half + ((bits >> f.shift) & 1)) >> f.shift;
  // Beside this number the last bit of a float is worth one of ours: the sum rounds.
  const I32x16 magic = I32x16{} + (f.rebias + ((f.shift + 1) << 23));
  const I32x16 below = as<I32x16>(as<F32x16>(bits) + as<F32x16>(magic)) - magic;
  const I32x16 least = I32x16{} + f.least_normal();
  const I32x16 code = select(is_nan, I32x16{} + kFp8Nan, select(least > bits, below, normal));
  const I32x16 byte = code + (all >> 31 & 0x80);
  for (int i = 0; i < kLanes; ++i) p[i] = static_cast<uint8_t>(byte[i]);
}

// If the pages hold 8-bit floats, widens the keys of `rows` into `to`, [count, head_dim], and the
// values into `values` of that shape, unless it is null. `rows` then point there.
template <typename T>
void widen_rows(const Streams& s, const T** rows, int count, float* to, float* values) {
  if constexpr (std::is_same_v<T, float>) {
    if (!s.fp8) return;
    const Fp8 f = *s.fp8;
    for (int n = 0; n < count; ++n) {
      const uint8_t* k = reinterpret_cast<const uint8_t*>(rows[n]);
      rows[n] = to + n * s.head_dim;
      for (int64_t d = 0; d < s.head_dim; d += kLanes) {
        store(to + n * s.head_dim + d, widen(f, k + d));
        if (values) store(values + n * s.head_dim + d, widen(f, k + s.kv_stride + d));
      }
    }
  }
}

// How far the value of a row lies behind its key, in elements of T: in its page, or where
// `widen_rows` put both, values behind the keys of a block of at most `keys`.
template <typename T>
int64_t block_v_offset(const Streams& s, int keys) {
  return s.fp8 ? keys * s.head_dim : s.kv_stride / static_cast<int64_t>(sizeof(T));
}

}  // namespace sglang_kv
