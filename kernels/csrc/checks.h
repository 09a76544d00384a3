// From framework tensors to raw pointers, with a ValueError that names the argument.
#pragma once

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>

#include <cstdint>

#include "attention.h"
#include "fp8.h"
#include "streams.h"

// A message about the arguments of a public op; `condition` is evaluated once.
#define SGLANG_KV_REQUIRE(condition, message)                        \
  do {                                                               \
    if (!(condition)) TVM_FFI_THROW(ValueError) << message; /*NOLINT*/ \
  } while (false)

namespace sglang_kv {

using tvm::ffi::Optional;
using tvm::ffi::TensorView;

inline bool is_bf16(TensorView t) {
  return t.dtype().code == kDLBfloat && t.dtype().bits == 16 && t.dtype().lanes == 1;
}
inline bool is_f32(TensorView t) {
  return t.dtype().code == kDLFloat && t.dtype().bits == 32 && t.dtype().lanes == 1;
}
// The 8-bit floats of a tensor, or null.
inline const Fp8* fp8_of(TensorView t) {
  if (t.dtype().bits != 8 || t.dtype().lanes != 1) return nullptr;
  if (t.dtype().code == kDLFloat8_e4m3fn) return &kE4m3;
  return t.dtype().code == kDLFloat8_e5m2 ? &kE5m2 : nullptr;
}
inline bool is_int(TensorView t, int bits) {
  return t.dtype().code == kDLInt && t.dtype().bits == bits && t.dtype().lanes == 1;
}

inline void require_cpu(TensorView t, const char* name, int ndim) {
  SGLANG_KV_REQUIRE(t.device().device_type == kDLCPU, name << " must be a CPU tensor");
  SGLANG_KV_REQUIRE(t.ndim() == ndim,
                    name << " must have " << ndim << " dimensions, not " << t.ndim());
}

template <typename Int>
const Int* int_data(TensorView t, const char* name, int ndim) {
  require_cpu(t, name, ndim);
  SGLANG_KV_REQUIRE(is_int(t, 8 * sizeof(Int)), name << " must be int" << 8 * sizeof(Int));
  SGLANG_KV_REQUIRE(t.IsContiguous(), name << " must be contiguous");
  return static_cast<const Int*>(t.data_ptr());
}

// A [tokens, heads, head_dim] tensor of bf16 or fp32 with contiguous rows.
inline void require_rows(TensorView t, const char* name, int64_t heads, int64_t head_dim) {
  require_cpu(t, name, 3);
  SGLANG_KV_REQUIRE(is_bf16(t) || is_f32(t), name << " must be bfloat16 or float32");
  SGLANG_KV_REQUIRE(t.size(2) == head_dim, name << " has head_dim " << t.size(2)
                                                << ", the pages have " << head_dim);
  SGLANG_KV_REQUIRE(heads < 0 || t.size(1) == heads,
                    name << " has " << t.size(1) << " heads, expected " << heads);
  SGLANG_KV_REQUIRE(t.stride(2) == 1, name << " must be contiguous in its last dimension");
}

// The pool alone: geometry, no tables.
inline Streams pool_of(TensorView pages) {
  require_cpu(pages, "pages", 4);
  SGLANG_KV_REQUIRE(pages.size(1) == 2, "pages must be [num_pages, 2, page_size, head_dim]");
  SGLANG_KV_REQUIRE(pages.size(0) > 0, "pages must hold at least one page");
  SGLANG_KV_REQUIRE(pages.stride(3) == 1 && pages.stride(2) == pages.size(3),
                    "pages must hold contiguous tokens; allocate it with allocate_pages");
  Streams s = {};
  s.element_size = pages.dtype().bits / 8;
  s.pages = static_cast<const char*>(pages.data_ptr());
  s.num_pages = pages.size(0);
  s.page_stride = pages.stride(0) * s.element_size;
  s.kv_stride = pages.stride(1) * s.element_size;
  s.page_size = pages.size(2);
  s.head_dim = pages.size(3);
  s.fp8 = fp8_of(pages);
  return s;
}

// `first` null: each request has one new token. Otherwise request b has those of
// [first[b], first[b + 1]), out of `total`.
inline Streams streams_of(TensorView pages, TensorView table, TensorView desc, TensorView slots,
                          int64_t layer, const int32_t* first, int64_t total) {
  Streams s = pool_of(pages);
  SGLANG_KV_REQUIRE(is_bf16(pages) || is_f32(pages) || s.fp8,
                    "pages must be bfloat16, float32, float8_e4m3fn or float8_e5m2");
  SGLANG_KV_REQUIRE(s.head_dim % kLanes == 0 && s.head_dim <= kMaxHeadDim,
                    "pages have head_dim " << s.head_dim << ", expected a multiple of " << kLanes
                                           << " up to " << kMaxHeadDim);
  s.table = int_data<int32_t>(table, "table", 4);
  s.desc = int_data<int32_t>(desc, "desc", 4);
  s.slots = int_data<int32_t>(slots, "slots", 1);
  s.batch = slots.size(0);
  s.num_layers = table.size(1);
  s.num_kv_heads = table.size(2);
  s.max_pages = table.size(3);
  s.layer = layer;
  SGLANG_KV_REQUIRE(desc.size(0) == table.size(0) && desc.size(1) == table.size(1) &&
                        desc.size(2) == table.size(2) && desc.size(3) == 4,
                    "desc must be [slots, layers, kv_heads, 4] with table's first dimensions");
  SGLANG_KV_REQUIRE(layer >= 0 && layer < s.num_layers,
                    "layer is " << layer << ", table has " << s.num_layers);
  if (first) {
    SGLANG_KV_REQUIRE(first[0] == 0 && first[s.batch] == total,
                      "qo_indptr must go from 0 to " << total << " tokens");
  } else {
    SGLANG_KV_REQUIRE(total == s.batch, "there are " << total << " tokens and " << s.batch
                                                     << " slots; without qo_indptr it is one each");
  }
  for (int64_t b = 0; b < s.batch; ++b) {
    SGLANG_KV_REQUIRE(s.slots[b] >= 0 && s.slots[b] < table.size(0),
                      "slots[" << b << "] is " << s.slots[b] << ", table has " << table.size(0));
    const int64_t tokens = first ? first[b + 1] - first[b] : 1;
    SGLANG_KV_REQUIRE(tokens >= 0, "qo_indptr decreases at " << b + 1);
    for (int64_t h = 0; h < s.num_kv_heads; ++h) {
      const Stream stream = s(b, h);
      SGLANG_KV_REQUIRE(stream.kv_len >= 0 && stream.kv_len <= s.max_pages * s.page_size,
                        "desc gives request " << b << ", head " << h << " kv_len " << stream.kv_len
                                              << ", table holds " << s.max_pages * s.page_size);
      SGLANG_KV_REQUIRE(stream.kv_len == 0 || tokens <= stream.kv_len,
                        "desc gives request " << b << ", head " << h << " kv_len " << stream.kv_len
                                              << ", fewer than its " << tokens << " new tokens");
      SGLANG_KV_REQUIRE(stream.gap >= 0 && stream.gap % s.page_size == 0,
                        "desc gives request " << b << ", head " << h << " gap " << stream.gap
                                              << ", not a multiple of the page size");
      SGLANG_KV_REQUIRE(stream.num_sinks >= 0 && stream.window_left >= -1,
                        "desc gives request " << b << ", head " << h << " a negative policy");
    }
  }
  return s;
}

inline Queries queries_of(TensorView q) {
  return {q.data_ptr(), q.stride(0), q.stride(1), is_bf16(q)};
}

inline void require_scale(double scale, const char* name) {
  SGLANG_KV_REQUIRE(scale > 0.0 && scale < kInf,
                    name << " must be positive and finite, not " << scale);
}

// Queries, and how they are scored. What the pages hold times `k_scale` are the keys.
inline AttentionArgs query_args(const Streams& s, TensorView q, double sm_scale, double k_scale,
                                double logits_soft_cap, int64_t layer_window_left,
                                int64_t num_threads) {
  require_rows(q, "q", -1, s.head_dim);
  SGLANG_KV_REQUIRE(q.size(1) % s.num_kv_heads == 0 && q.size(1) / s.num_kv_heads <= kMaxGroup,
                    "q has " << q.size(1) << " heads for " << s.num_kv_heads
                             << " KV heads; at most " << kMaxGroup << " may share one");
  SGLANG_KV_REQUIRE(sm_scale > 0.0, "sm_scale must be positive, not " << sm_scale);
  require_scale(k_scale, "k_scale");
  SGLANG_KV_REQUIRE(logits_soft_cap >= 0.0,
                    "logits_soft_cap must not be negative, it is " << logits_soft_cap);
  AttentionArgs a = {};
  a.q = queries_of(q);
  a.num_qo_heads = q.size(1);
  a.sm_scale = static_cast<float>(sm_scale * k_scale);
  a.v_scale = 1.f;
  a.logits_soft_cap = static_cast<float>(logits_soft_cap);
  a.layer_window_left = layer_window_left;
  a.num_threads = static_cast<int>(num_threads);
  return a;
}

// The arguments that decode and extend share.
inline AttentionArgs attention_args(const Streams& s, TensorView q, Optional<TensorView> sink_q,
                                    TensorView out, Optional<TensorView> lse, double sm_scale,
                                    double k_scale, double v_scale, double logits_soft_cap,
                                    int64_t layer_window_left, int64_t num_threads) {
  AttentionArgs a =
      query_args(s, q, sm_scale, k_scale, logits_soft_cap, layer_window_left, num_threads);
  require_scale(v_scale, "v_scale");
  a.v_scale = static_cast<float>(v_scale);
  if (sink_q.has_value()) {
    const TensorView t = sink_q.value();
    require_rows(t, "sink_q", q.size(1), s.head_dim);
    SGLANG_KV_REQUIRE(t.size(0) == q.size(0),
                      "sink_q has " << t.size(0) << " tokens, q has " << q.size(0));
    SGLANG_KV_REQUIRE(is_bf16(t) == is_bf16(q), "sink_q must have the dtype of q");
    a.sink_q = queries_of(t);
  }
  require_rows(out, "out", q.size(1), s.head_dim);
  SGLANG_KV_REQUIRE(out.size(0) == q.size(0),
                    "out has " << out.size(0) << " tokens, q has " << q.size(0));
  a.out = out.data_ptr();
  a.out_stride_n = out.stride(0);
  a.out_stride_h = out.stride(1);
  a.out_is_bf16 = is_bf16(out);
  if (lse.has_value()) a.lse = static_cast<float*>(lse.value().data_ptr());
  return a;
}

// One entry per request and one more, or null: one query per request.
inline const int32_t* indptr_of(Optional<TensorView> qo_indptr, TensorView slots) {
  if (!qo_indptr.has_value()) return nullptr;
  const int32_t* indptr = int_data<int32_t>(qo_indptr.value(), "qo_indptr", 1);
  require_cpu(slots, "slots", 1);
  SGLANG_KV_REQUIRE(qo_indptr.value().size(0) == slots.size(0) + 1,
                    "qo_indptr has " << qo_indptr.value().size(0) << " entries for "
                                     << slots.size(0) << " slots");
  return indptr;
}

inline void require_pages(bool ok) {
  SGLANG_KV_REQUIRE(ok, "table names a page outside the pool");
}

}  // namespace sglang_kv
