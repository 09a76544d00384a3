// Products of a few rows with a bf16 weight, in fp32: for CPUs whose matrix library has no bf16.
//
// A decode step reads every weight once and uses it for each row of the batch, so the weights are
// widened in registers on their way from memory; a copy in fp32 would be twice the bytes. Widened in
// their order they would need shuffles, which take longer than the products. So even and odd
// elements are widened apart, by a shift and a mask, and the rows' elements are laid out to match.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "attention.h"
#include "rows.h"
#include "vec.h"

namespace sglang_kv {

constexpr int kRowsAtOnce = 4;         // of x, for two outputs: as many sums fit the registers
constexpr int64_t kOutputsAtOnce = 8;  // of one thread at a time: half a cache line of outputs
constexpr int64_t kAheadRows = 4;      // of the weight: fetched while the rows before are read

// One native vector, so that sums stay in registers; kStep elements make two of them.
#if SGLANG_KV_AVX512
using LinearPart = F32x16;
constexpr int kPartLanes = kLanes;
SGLANG_KV_INLINE void widen(const bf16* p, LinearPart& even, LinearPart& odd) {
  load_pair(p, even, odd);
}
SGLANG_KV_INLINE LinearPart load_linear(const float* p) { return load(p); }
SGLANG_KV_INLINE void store_linear(float* p, LinearPart v) { store(p, v); }
SGLANG_KV_INLINE LinearPart reduce_linear(const LinearPart (&sums)[kLanes]) {
  return reduce_rows(sums);
}
#else
using LinearPart = FloatPart;
constexpr int kPartLanes = kNativeLanes;
SGLANG_KV_INLINE void widen(const bf16* p, LinearPart& even, LinearPart& odd) {
  load_pair_part(p, 0, even, odd);
}
SGLANG_KV_INLINE LinearPart load_linear(const float* p) { return load_part(p); }
SGLANG_KV_INLINE void store_linear(float* p, LinearPart v) { store_part(p, v); }
SGLANG_KV_INLINE LinearPart reduce_linear(const LinearPart (&sums)[kNativeLanes]) {
  return reduce_part(sums);
}
#endif
constexpr int kStep = 2 * kPartLanes;

// The same of a row's last elements, if they are fewer than kStep; those behind them are zero.
SGLANG_KV_INLINE void widen_some(const bf16* p, int64_t count, LinearPart& even, LinearPart& odd) {
  bf16 padded[kStep] = {};
  std::copy_n(p, count, padded);
  widen(padded, even, odd);
}

// Rows of x as they are multiplied: fp32 [rows, `stride`], of each kStep elements first the even
// ones and then the odd ones.
class LinearRows {
 public:
  LinearRows(const bf16* x, int64_t rows, int64_t size)
      : stride_((size + kStep - 1) / kStep * kStep), values_(rows * stride_) {
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t k = 0; k < size; k += kStep) {
        LinearPart even, odd;
        widen_some(x + r * size + k, std::min<int64_t>(kStep, size - k), even, odd);
        float* to = values_.data() + r * stride_ + k;
        store_linear(to, even);
        store_linear(to + kPartLanes, odd);
      }
    }
  }
  const float* row(int64_t r) const { return values_.data() + r * stride_; }
  int64_t stride() const { return stride_; }

 private:
  int64_t stride_;
  std::vector<float> values_;
};

// Adds kStep elements of kOutputs rows of the weight times those of kRows rows of x.
template <int kOutputs, int kRows, int kSums>
SGLANG_KV_INLINE void multiply_step(const LinearPart (&even)[kOutputs],
                                    const LinearPart (&odd)[kOutputs], const float* x,
                                    int64_t stride, LinearPart (&sums)[kSums]) {
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
    const LinearPart x_even = load_linear(x + r * stride);
    const LinearPart x_odd = load_linear(x + r * stride + kPartLanes);
#pragma GCC unroll 4
    for (int o = 0; o < kOutputs; ++o) {
      sums[o * kRows + r] += even[o] * x_even;
      sums[o * kRows + r] += odd[o] * x_odd;
    }
  }
}

// Products of kRows rows of x with kOutputs rows of the weight, each `size` long: found[output][row].
// On the way, fetches the weight kAheadRows further on, if kFetch.
template <int kOutputs, int kRows, bool kFetch>
SGLANG_KV_KERNEL void dot_block(const float* x, int64_t stride, const bf16* weight, int64_t size,
                                float* found) {
  // A whole number of vectors, to be reduced together.
  constexpr int kSums = (kOutputs * kRows + kPartLanes - 1) / kPartLanes * kPartLanes;
  LinearPart sums[kSums] = {};
  LinearPart even[kOutputs], odd[kOutputs];
  int64_t k = 0;
  for (; k + kStep <= size; k += kStep) {
#pragma GCC unroll 4
    for (int o = 0; o < kOutputs; ++o) {
      if (kFetch) __builtin_prefetch(weight + (o + kAheadRows) * size + k, 0, 2);
      widen(weight + o * size + k, even[o], odd[o]);
    }
    multiply_step<kOutputs, kRows>(even, odd, x + k, stride, sums);
  }
  if (k < size) {
    for (int o = 0; o < kOutputs; ++o) widen_some(weight + o * size + k, size - k, even[o], odd[o]);
    multiply_step<kOutputs, kRows>(even, odd, x + k, stride, sums);
  }
  for (int i = 0; i < kSums; i += kPartLanes) {
    const auto& some = reinterpret_cast<const LinearPart(&)[kPartLanes]>(sums[i]);
    store_linear(found + i, reduce_linear(some));
  }
}

template <int kRows, bool kFetch>
SGLANG_KV_INLINE void multiply_rows(const LinearRows& x, int64_t r, const bf16* weight,
                                    const bf16* bias, bf16* out, int64_t begin, int64_t end,
                                    int64_t outputs, int64_t size) {
  // One or two rows leave registers for more outputs, whose sums then wait less for each other.
  constexpr int kOutputs = kRows > 2 ? 2 : 4;
  float found[kLanes];
  const auto put = [&](int64_t n, int count) {
    for (int o = 0; o < count; ++o) {
      const float shift = bias ? to_float(bias[n + o]) : 0.f;
      for (int i = 0; i < kRows; ++i) {
        out[(r + i) * outputs + n + o] = to_bf16(found[o * kRows + i] + shift);
      }
    }
  };
  int64_t n = begin;
  for (; n + kOutputs <= end; n += kOutputs) {
    dot_block<kOutputs, kRows, kFetch>(x.row(r), x.stride(), weight + n * size, size, found);
    put(n, kOutputs);
  }
  for (; n < end; ++n) {
    dot_block<1, kRows, kFetch>(x.row(r), x.stride(), weight + n * size, size, found);
    put(n, 1);
  }
}

// out = x @ weight^T + bias. `x`: [rows, size]; `weight`: [outputs, size]; `out`: [rows, outputs];
// all contiguous, `size` a multiple of the lanes.
inline void linear(const bf16* x, const bf16* weight, const bf16* bias, bf16* out, int64_t rows,
                   int64_t outputs, int64_t size, int num_threads) {
  const LinearRows wide(x, rows, size);
  const int64_t blocks = (outputs + kOutputsAtOnce - 1) / kOutputsAtOnce;
#pragma omp parallel for num_threads(num_threads) \
    if (outputs * size * static_cast<int64_t>(sizeof(bf16)) >= kParallelBytes)
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t begin = block * kOutputsAtOnce, end = std::min(outputs, begin + kOutputsAtOnce);
    const auto multiply = [&](auto count, int64_t r) {
      constexpr int kRows = decltype(count)::value;
      if (r == 0) {
        multiply_rows<kRows, true>(wide, r, weight, bias, out, begin, end, outputs, size);
      } else {
        multiply_rows<kRows, false>(wide, r, weight, bias, out, begin, end, outputs, size);
      }
    };
    int64_t r = 0;
    for (; r + kRowsAtOnce <= rows; r += kRowsAtOnce) {
      multiply(std::integral_constant<int, kRowsAtOnce>{}, r);
    }
    switch (rows - r) {
      case 1: multiply(std::integral_constant<int, 1>{}, r); break;
      case 2: multiply(std::integral_constant<int, 2>{}, r); break;
      case 3: multiply(std::integral_constant<int, 3>{}, r); break;
      default: break;
    }
  }
}

}  // namespace sglang_kv
