// Moving tokens: new ones into streams, kept ones into fresh pages.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "attention.h"
#include "fp8.h"
#include "streams.h"
#include "vec.h"

namespace sglang_kv {

// New tokens, [total, num_kv_heads, head_dim]; strides in elements.
struct TokenRows {
  const void* data;
  int64_t stride_n;
  int64_t stride_h;
  bool is_bf16;
  float scale;  // what they are divided by before they are stored
};

// A row into a page; To is uint8_t for 8-bit floats.
template <typename To>
void copy_row(const TokenRows& from, int64_t token, int64_t head, const Streams& s, To* to) {
  constexpr bool kFp8 = std::is_same_v<To, uint8_t>;
  const int64_t offset = token * from.stride_n + head * from.stride_h;
  if (!kFp8 && from.is_bf16 == std::is_same_v<To, bf16> && from.scale == 1.f) {
    std::memcpy(to, static_cast<const To*>(from.data) + offset, s.head_dim * sizeof(To));
    return;
  }
  for (int64_t d = 0; d < s.head_dim; d += kLanes) {
    const F32x16 row = from.is_bf16 ? load(static_cast<const bf16*>(from.data) + offset + d)
                                    : load(static_cast<const float*>(from.data) + offset + d);
    const F32x16 value = row / splat(from.scale);
    if constexpr (kFp8) {
      store(*s.fp8, to + d, value);
    } else {
      store(to + d, value);
    }
  }
}

// Writes each request's tokens at the end of its streams, whose kv_len counts them already. A
// stream of length 0 belongs to a padded row and takes nothing. False as in decode().
template <typename T>
bool append(const TokenRows& k, const TokenRows& v, const int32_t* indptr, const Streams& s,
            int num_threads) {
  const int64_t total = indptr ? indptr[s.batch] - indptr[0] : s.batch;
  const int64_t bytes = total * s.num_kv_heads * s.head_dim * static_cast<int64_t>(sizeof(T));
  std::atomic<bool> bad_page{false};
#pragma omp parallel for collapse(2) num_threads(num_threads) if (bytes >= kParallelBytes)
  for (int64_t b = 0; b < s.batch; ++b) {
    for (int64_t h = 0; h < s.num_kv_heads; ++h) {
      const Stream stream = s(b, h);
      if (stream.kv_len == 0) continue;
      const int64_t begin = indptr ? indptr[b] : b;
      const int64_t count = indptr ? indptr[b + 1] - begin : 1;
      for (int64_t j = 0; j < count; ++j) {
        const int64_t index = stream.kv_len - count + j;
        T* row = reinterpret_cast<T*>(s.page(stream.pages[index / s.page_size], bad_page)) +
                 index % s.page_size * s.head_dim;
        copy_row(k, begin + j, h, s, row);
        copy_row(v, begin + j, h, s, row + s.kv_stride / sizeof(T));
      }
    }
  }
  return !bad_page;
}

// One list of items per stream, end to end.
struct Csr {
  const int64_t* indptr;
  const int64_t* indices;

  const int64_t* list(int64_t i) const { return indices + indptr[i]; }
  int64_t size(int64_t i) const { return indptr[i + 1] - indptr[i]; }
};

// Copies the kept tokens of each stream's source pages into its destination pages, from slot 0 on, in
// order: a stream whose tokens ascend may be compacted in place.
// The caller has checked every index.
inline void gather(const Streams& pool, int64_t num_streams, const Csr& src, const Csr& keep,
                   const Csr& dst, int num_threads) {
  const int64_t row_bytes = pool.head_dim * pool.element_size;
  const int64_t bytes = keep.indptr[num_streams] * row_bytes;
  char* base = const_cast<char*>(pool.pages);
  const auto address = [&](const int64_t* pages, int64_t index) {
    return base + pages[index / pool.page_size] * pool.page_stride +
           index % pool.page_size * row_bytes;
  };
#pragma omp parallel for schedule(static, 1) num_threads(num_threads) if (bytes >= kParallelBytes)
  for (int64_t i = 0; i < num_streams; ++i) {
    const int64_t* tokens = keep.list(i);
    for (int64_t j = 0; j < keep.size(i); ++j) {
      const char* from = address(src.list(i), tokens[j]);
      char* to = address(dst.list(i), j);
      if (from == to) continue;  // compacted in place: nothing before it was dropped
      std::memcpy(to, from, row_bytes);
      std::memcpy(to + pool.kv_stride, from + pool.kv_stride, row_bytes);
    }
  }
}

}  // namespace sglang_kv
