// The small steps between matrix products: one pass over a row each, where a chain of tensor
// operations would read and write it ten times. Sums are in float, whatever the dtype.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "attention.h"
#include "vec.h"

namespace sglang_kv {

// x = x / rms(x) * weight, rows of `size`; with a residual, x + residual first, which it becomes.
template <typename T>
void rmsnorm(T* x, int64_t x_stride, T* residual, int64_t residual_stride, const T* weight,
             T* out, int64_t rows, int64_t size, float eps, int num_threads) {
#pragma omp parallel for num_threads(num_threads) \
    if (rows * size * static_cast<int64_t>(sizeof(T)) >= kParallelBytes)
  for (int64_t r = 0; r < rows; ++r) {
    const T* row = x + r * x_stride;
    T* kept = residual ? residual + r * residual_stride : nullptr;
    T* to = out + r * size;
    F32x16 sum = {};
    for (int64_t d = 0; d < size; d += kLanes) {
      F32x16 value = load(row + d);
      if (kept) value += load(kept + d);
      sum = fma(value, value, sum);
    }
    const float scale = 1.f / std::sqrt(reduce_add(sum) / static_cast<float>(size) + eps);
    for (int64_t d = 0; d < size; d += kLanes) {
      F32x16 value = load(row + d);
      if (kept) {
        value += load(kept + d);
        store(kept + d, value);
      }
      store(to + d, value * splat(scale) * load(weight + d));
    }
  }
}

// Rotates each head's first `rotary_dim` dimensions, halves against each other, in place.
// `cos_sin`: fp32 [positions, rotary_dim], cosines before sines.
template <typename T>
void rope(T* x, int64_t row_stride, int64_t heads, int64_t head_dim, const int64_t* positions,
          const float* cos_sin, int64_t rotary_dim, int64_t rows, int num_threads) {
  const int64_t half = rotary_dim / 2;
#pragma omp parallel for num_threads(num_threads) \
    if (rows * heads * head_dim * static_cast<int64_t>(sizeof(T)) >= kParallelBytes)
  for (int64_t r = 0; r < rows; ++r) {
    const float* cos = cos_sin + positions[r] * rotary_dim;
    const float* sin = cos + half;
    for (int64_t h = 0; h < heads; ++h) {
      T* low = x + r * row_stride + h * head_dim;
      T* high = low + half;
      for (int64_t d = 0; d < half; d += kLanes) {
        const F32x16 a = load(low + d), b = load(high + d);
        const F32x16 c = load(cos + d), s = load(sin + d);
        store(low + d, a * c - b * s);
        store(high + d, b * c + a * s);
      }
    }
  }
}

// silu(gate) * up, where a row holds the gate's `size` values and then the up's.
template <typename T>
void silu_and_mul(const T* x, int64_t x_stride, T* out, int64_t rows, int64_t size,
                  int num_threads) {
#pragma omp parallel for num_threads(num_threads) \
    if (2 * rows * size * static_cast<int64_t>(sizeof(T)) >= kParallelBytes)
  for (int64_t r = 0; r < rows; ++r) {
    const T* gate = x + r * x_stride;
    const T* up = gate + size;
    for (int64_t d = 0; d < size; d += kLanes) {
      const F32x16 g = load(gate + d);
      const F32x16 e = exp2(g * splat(-kLog2e));
      store(out + r * size + d, g / (splat(1.f) + e) * load(up + d));
    }
  }
}

}  // namespace sglang_kv
