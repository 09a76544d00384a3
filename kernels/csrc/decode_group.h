// What one decode split works on: the query heads of a KV head, and where a block of keys lies.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "attention.h"
#include "fp8.h"
#include "rows.h"

namespace sglang_kv {

constexpr int kHeadsAtOnce = 8;  // query heads that share one reading of their keys and values
constexpr int kBlock = 64;       // keys scored before their values are read

// Narrow vectors take so many instructions per row that the few misses they can wait for are waited
// for in vain: rows are then read from all pages of a block in turn, and the CPU fetches ahead in
// each of them by itself. (Zen 3: a quarter to a third faster; one page at a time, its prefetcher
// starts anew every 2 KiB.)
constexpr bool kPagesInTurn = !SGLANG_KV_AVX512;

// The query heads of a group, in the form in which rows of T are read.
struct GroupQueries {
  alignas(64) float f32[kHeadsAtOnce][kMaxHeadDim];  // in the order of load_pair<T>
  alignas(64) bf16 raw[kHeadsAtOnce][kMaxHeadDim];   // for dot_bf16
};

template <typename T>
void read_group(const Queries& from, int64_t row, int64_t head, int heads, int64_t head_dim,
                GroupQueries& q) {
  constexpr bool kHalves = sizeof(T) == sizeof(float);
  for (int g = 0; g < heads; ++g) {
    alignas(64) float plain[kMaxHeadDim] = {};
    from.read(row, head + g, head_dim, plain);
    for (int64_t d = 0; d < head_dim; d += 2 * kLanes) {
      for (int i = 0; i < kLanes; ++i) {
        q.f32[g][d + i] = plain[d + (kHalves ? i : 2 * i)];
        q.f32[g][d + kLanes + i] = plain[d + (kHalves ? kLanes + i : 2 * i + 1)];
      }
      store(q.raw[g] + d, load(plain + d));
      store(q.raw[g] + d + kLanes, load(plain + d + kLanes));
    }
  }
}

// Keys that will be read soon; with their values, where `v_offset` says how far behind those lie.
template <typename T>
struct Rows {
  const T* const* rows = nullptr;
  int count = 0;
  int64_t size = 0;  // of a row in its page, in elements of T
  int64_t v_offset = 0;

  SGLANG_KV_INLINE void fetch(int begin, int many) const {
    for (int i = begin; i < std::min(begin + many, count); ++i) {
      prefetch_row(rows[i], size);
      if (v_offset) prefetch_row(rows[i] + v_offset, size);
    }
  }
};

// Where up to kBlock consecutive keys of a stream lie, in the order in which they are read.
template <typename T>
struct KeyBlock {
  const T* rows[kBlock + kLanes];
  int count = 0;

  void gather(const Streams& s, const Stream& stream, Range range, std::atomic<bool>& bad_page) {
    const T* straight[kBlock];
    const bool in_turn = kPagesInTurn && range.begin % s.page_size == 0 && s.page_size < kBlock;
    count = s.key_rows(stream, range, in_turn ? straight : rows, bad_page);
    if (in_turn) take_in_turn(straight, static_cast<int>(s.page_size));
    pad();
  }
  // The first rows of all pages, then the second ones, and so on.
  void take_in_turn(const T* const* straight, int page_size) {
    int n = 0;
    for (int slot = 0; slot < page_size; ++slot) {
      for (int i = slot; i < count; i += page_size) rows[n++] = straight[i];
    }
  }
  // 8-bit rows, into `wide`: [2, kBlock, head_dim].
  void widen(const Streams& s, float* wide) {
    if (!s.fp8) return;
    widen_rows(s, rows, count, wide, wide + kBlock * s.head_dim);
    pad();
  }
  void pad() {
    // Scoring goes by sixteen: repeat a row that is certainly there, and mask its score.
    for (int i = count; i % kLanes; ++i) rows[i] = rows[count - 1];
  }
};

}  // namespace sglang_kv
