// Products of a few rows with a bf16 weight, in fp32: for CPUs whose matrix library has no bf16.
//
// A decode step reads every weight once and uses it for each row of the batch, so the weights are
// widened in registers on their way from memory; a copy in fp32 would be twice the bytes.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention.h"
#include "vec.h"

namespace sglang_kv {

constexpr int64_t kRowsAtOnce = 4;     // accumulators of as many rows fit the registers
constexpr int64_t kOutputsAtOnce = 8;  // of one thread at a time: half a cache line of outputs

// out[n] of `count` rows: their products with one row of the weight, `size` long.
template <int kCount>
SGLANG_KV_KERNEL void dot_rows(const float* x, const bf16* weight, int64_t size, float* out) {
  F32x16 sum[kCount] = {};
  for (int64_t k = 0; k < size; k += kLanes) {
    const F32x16 w = load(weight + k);
    for (int r = 0; r < kCount; ++r) sum[r] = fma(w, load(x + r * size + k), sum[r]);
  }
  for (int r = 0; r < kCount; ++r) out[r] = reduce_add(sum[r]);
}

// out = x @ weight^T + bias. `x`: fp32 [rows, size]; `weight`: [outputs, size]; `out`: [rows,
// outputs]; all contiguous, `size` a multiple of the lanes.
inline void linear(const float* x, const bf16* weight, const bf16* bias, bf16* out, int64_t rows,
                   int64_t outputs, int64_t size, int num_threads) {
  const int64_t blocks = (outputs + kOutputsAtOnce - 1) / kOutputsAtOnce;
#pragma omp parallel for num_threads(num_threads) \
    if (outputs * size * static_cast<int64_t>(sizeof(bf16)) >= kParallelBytes)
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t end = std::min(outputs, (block + 1) * kOutputsAtOnce);
    for (int64_t n = block * kOutputsAtOnce; n < end; ++n) {
      const bf16* row = weight + n * size;
      const float shift = bias ? to_float(bias[n]) : 0.f;
      for (int64_t r = 0; r < rows; r += kRowsAtOnce) {
        float found[kRowsAtOnce];
        const float* from = x + r * size;
        switch (std::min(kRowsAtOnce, rows - r)) {
          case 1: dot_rows<1>(from, row, size, found); break;
          case 2: dot_rows<2>(from, row, size, found); break;
          case 3: dot_rows<3>(from, row, size, found); break;
          default: dot_rows<4>(from, row, size, found);
        }
        for (int64_t i = 0; i < std::min(kRowsAtOnce, rows - r); ++i) {
          out[(r + i) * outputs + n] = to_bf16(found[i] + shift);
        }
      }
    }
  }
}

}  // namespace sglang_kv
