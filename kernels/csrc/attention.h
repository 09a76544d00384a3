// What the ops on queries share: arguments, score scaling, reading queries and writing results.
#pragma once

#include <cstdint>
#include <memory>

#include "streams.h"
#include "vec.h"

namespace sglang_kv {

constexpr int kMaxHeadDim = 256;
constexpr int kMaxGroup = 16;
// Keys scored before their values are read. Both blocks should stay in L1: in fp32 half as many do.
constexpr int kKeys = kHasBf16Dot ? 64 : 32;

// Less KV than this, and waking a second thread costs more than it saves.
constexpr int64_t kParallelBytes = 128 * 1024;

// Running maxima start far below any score, yet finite: -inf minus -inf would be a NaN.
constexpr float kNoMax = -1e30f;

// [total_q, num_qo_heads, head_dim], strides in elements.
struct Queries {
  const void* data;
  int64_t stride_n;
  int64_t stride_h;
  bool is_bf16;

  const bf16* halves(int64_t row, int64_t head) const {
    return static_cast<const bf16*>(data) + row * stride_n + head * stride_h;
  }
  void read(int64_t row, int64_t head, int64_t head_dim, float* to) const {
    const float* floats = static_cast<const float*>(data) + row * stride_n + head * stride_h;
    for (int64_t d = 0; d < head_dim; d += kLanes) {
      store(to + d, is_bf16 ? load(halves(row, head) + d) : load(floats + d));
    }
  }
};

struct AttentionArgs {
  Queries q;
  // What sinks are scored with where they lie apart from the window; without data, q as well.
  Queries sink_q;
  void* out;  // as the queries
  int64_t out_stride_n;
  int64_t out_stride_h;
  bool out_is_bf16;
  float* lse;  // [total_q, num_qo_heads], or null
  const int32_t* qo_indptr;  // [batch + 1]; null: one query per request
  int64_t num_qo_heads;
  float sm_scale;  // of raw scores, the scale of stored keys included
  float v_scale;   // of stored values
  float logits_soft_cap;
  int64_t layer_window_left;
  int num_threads;

  int64_t group(const Streams& s) const { return num_qo_heads / s.num_kv_heads; }
  int64_t first_row(int64_t request) const { return qo_indptr ? qo_indptr[request] : request; }
  int64_t num_queries(int64_t request) const {
    return qo_indptr ? qo_indptr[request + 1] - qo_indptr[request] : 1;
  }

  // After `cap`, multiply raw scores by this to get logits in base 2.
  float log2_scale() const { return logits_soft_cap > 0.f ? 1.f : sm_scale * kLog2e; }

  // Replaces raw scores by base-2 logits under the soft cap; nothing to do without one.
  void cap(float* scores, int count) const {
    if (logits_soft_cap <= 0.f) return;
    const F32x16 in = splat(2.f * kLog2e * sm_scale / logits_soft_cap);
    const F32x16 out = splat(logits_soft_cap * kLog2e);
    for (int i = 0; i < count; i += kLanes) {
      const F32x16 tanh = splat(1.f) - splat(2.f) / (exp2(load(scores + i) * in) + splat(1.f));
      store(scores + i, out * tanh);
    }
  }

  // Divides the accumulated values by their weight. A query that saw nothing gets zeros, and -inf.
  void write_result(int64_t row, int64_t head, int64_t head_dim, const float* acc, float max,
                    float sum) const {
    const float inverse = sum > 0.f ? v_scale / sum : 0.f;
    const int64_t offset = row * out_stride_n + head * out_stride_h;
    for (int64_t d = 0; d < head_dim; d += kLanes) {
      const F32x16 value = load(acc + d) * inverse;
      if (out_is_bf16) {
        store(static_cast<bf16*>(out) + offset + d, value);
      } else {
        store(static_cast<float*>(out) + offset + d, value);
      }
    }
    if (lse) lse[row * num_qo_heads + head] = sum > 0.f ? max + std::log2(sum) : -kInf;
  }
};

// Memory that a thread keeps between calls, so that 30 layers a step do not map and unmap it.
template <typename T>
class Scratch {
 public:
  T* reserve(size_t count) {
    if (count > capacity_) {
      data_.reset(static_cast<T*>(::operator new[](count * sizeof(T), std::align_val_t(64))));
      capacity_ = count;
    }
    return data_.get();
  }

 private:
  struct Free {
    void operator()(T* p) const { ::operator delete[](p, std::align_val_t(64)); }
  };
  std::unique_ptr<T[], Free> data_;
  size_t capacity_ = 0;
};

}  // namespace sglang_kv
