// Where the tokens of a stream lie, and which of them a query may see.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace sglang_kv {

// Token indices [begin, end) of one stream.
struct Range {
  int64_t begin = 0;
  int64_t end = 0;

  int64_t size() const { return end > begin ? end - begin : 0; }
  bool contains(Range r) const { return begin <= r.begin && r.end <= end; }
  bool intersects(Range r) const { return begin < r.end && r.begin < end; }
};

// Two disjoint ranges in ascending order; either may be empty.
struct Visible {
  Range sinks;
  Range window;

  bool contains(Range r) const { return sinks.contains(r) || window.contains(r); }
  bool intersects(Range r) const { return sinks.intersects(r) || window.intersects(r); }
};

// One KV head of one layer of one request.
struct Stream {
  const int32_t* pages;  // [max_pages]
  int32_t kv_len;
  int32_t gap;
  int32_t num_sinks;
  int32_t window_left;
};

// The one place that turns logical positions into token indices.
//
//   index      0 ...... s .......... i ......       s = sink pages x page_size
//   position   0 ...... s | gap | .. t ......       t = i + gap from s on
//
// The query at position t sees itself and every earlier key p that is no further back than
// `layer_window_left`, and is a sink or no further back than `window_left`. Positions grow with
// indices, so both conditions are lower bounds on the index.
inline Visible visible_ranges(const Stream& s, int64_t page_size, int64_t index,
                              int64_t layer_window_left) {
  if (index < 0) return {};
  const int64_t sink_end = (s.num_sinks + page_size - 1) / page_size * page_size;
  const int64_t position = index < sink_end ? index : index + s.gap;
  const auto first_within = [&](int64_t distance) -> int64_t {
    const int64_t oldest = position - distance;
    if (distance < 0 || oldest <= 0) return 0;
    return oldest < sink_end ? oldest : std::max(sink_end, oldest - s.gap);
  };
  const Range all = {first_within(layer_window_left), index + 1};
  if (s.window_left < 0) return {{}, all};
  const Range window = {std::max(first_within(s.window_left), all.begin), index + 1};
  const Range sinks = {all.begin, std::min<int64_t>(s.num_sinks, index + 1)};
  if (sinks.size() == 0) return {{}, window};
  // Neighbours, unless what lay between them was dropped.
  const bool dropped = s.gap > 0 && window.begin >= sink_end;
  if (window.begin < sinks.end || (window.begin == sinks.end && !dropped)) return {{}, all};
  return {sinks, window};
}

struct Fp8;

// The streams of a batch in one layer, and the pool that holds them. Strides are in bytes.
struct Streams {
  const char* pages;
  int64_t num_pages;
  int64_t page_stride;
  int64_t kv_stride;  // from a page's K to its V
  int64_t page_size;
  int64_t head_dim;
  int64_t element_size;
  const Fp8* fp8;  // the format of 8-bit pages; null for others

  const int32_t* table;  // [slots, layers, kv_heads, max_pages]
  const int32_t* desc;   // [slots, layers, kv_heads, 4]
  const int32_t* slots;  // [batch]
  int64_t batch;
  int64_t num_layers;
  int64_t num_kv_heads;
  int64_t max_pages;
  int64_t layer;

  Stream operator()(int64_t request, int64_t kv_head) const {
    const int64_t row = (slots[request] * num_layers + layer) * num_kv_heads + kv_head;
    const int32_t* d = desc + 4 * row;
    return {table + row * max_pages, d[0], d[1], d[2], d[3]};
  }

  // A page id from a table that others write. An id outside the pool is noted, and read as page 0,
  // because a thread of a parallel region has nobody to throw to.
  char* page(int32_t id, std::atomic<bool>& bad_page) const {
    if (id < 0 || id >= num_pages) {
      bad_page.store(true, std::memory_order_relaxed);
      id = 0;
    }
    return const_cast<char*>(pages) + id * page_stride;
  }

  // What a row takes, in elements of T.
  template <typename T>
  int64_t row_size() const {
    return head_dim * element_size / static_cast<int64_t>(sizeof(T));
  }

  // Addresses of the K rows of `range`, in order. Returns their number.
  template <typename T>
  int key_rows(const Stream& stream, Range range, const T** rows,
               std::atomic<bool>& bad_page) const {
    int count = 0;
    int64_t page_index = range.begin / page_size;
    int64_t slot = range.begin % page_size;
    for (int64_t left = range.size(); left > 0; ++page_index, slot = 0) {
      const char* base = page(stream.pages[page_index], bad_page);
      const int64_t run = std::min(left, page_size - slot);
      for (int64_t i = 0; i < run; ++i) {
        rows[count++] = reinterpret_cast<const T*>(base + (slot + i) * head_dim * element_size);
      }
      left -= run;
    }
    return count;
  }
};

}  // namespace sglang_kv
