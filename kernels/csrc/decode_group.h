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

#if SGLANG_KV_AVX512
constexpr int kBlock = 64;  // keys scored before their values are read
// A row is fetched while the one of the block before it is read.
constexpr int kAhead = 2 * kBlock;
constexpr bool kPagesInTurn = false;
#else
// Narrow vectors take so many instructions per row that few misses are under way at a time. So rows
// are read from all pages of a block in turn: the CPU's own prefetcher then follows as many streams,
// and has to find the start of each half as often. (Zen 3, pages of 16 in random order: half as fast
// again as a page at a time.)
constexpr int kBlock = 128;
constexpr int kAhead = 16;
constexpr bool kPagesInTurn = true;
#endif

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

// Where up to kBlock consecutive keys of a stream lie, in the order in which they are read.
template <typename T>
struct KeyBlock {
  const T* rows[kBlock];
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
    widen_rows(s, rows, count, wide, wide + kBlock * s.head_dim);
    pad();
  }
  void pad() {
    // Scoring goes by sixteen: repeat a row that is certainly there, and mask its score.
    for (int i = count; i % kLanes; ++i) rows[i] = rows[count - 1];
  }
  // Starts reading the keys and values of `many` rows that are not to be read where they lie.
  void fetch(int begin, int many, int64_t row_size, int64_t v_offset) const {
    for (int i = begin; i < std::min(begin + many, count); ++i) {
      prefetch_row(rows[i], row_size);
      prefetch_row(rows[i] + v_offset, row_size);
    }
  }
};

// Rows in the order in which they are read: the keys of a block, its values, the next block's keys
// and values.
template <typename T>
class ReadingOrder {
 public:
  void set(const KeyBlock<T>& block, const KeyBlock<T>& next, int64_t v_offset) {
    const T** to = append(block, v_offset, kBlock, rows_);
    to = append(next, v_offset, kAhead, to);
    const T** end = rows_ + 2 * block.count + kAhead + kLanes;
    if (to < end) std::fill(to, end, block.rows[0]);
  }
  // What to fetch when the n-th row is read, and those after it.
  const T* const* soon(int n) const { return rows_ + n + kAhead; }

 private:
  // At most `most` keys, then as many values. Returns where it ended.
  static const T** append(const KeyBlock<T>& block, int64_t v_offset, int most, const T** to) {
    const int count = std::min(block.count, most);
    for (int i = 0; i < count; ++i) {
      to[i] = block.rows[i];
      to[count + i] = block.rows[i] + v_offset;
    }
    return to + 2 * count;
  }

  const T* rows_[4 * kBlock + kAhead + kLanes];
};

}  // namespace sglang_kv
