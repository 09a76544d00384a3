// One query per stream, split over the sequence.
//
// A long stream is cut every `kSplit` tokens, whoever shares the batch and however many threads
// run, so neither changes a bit of the result. Threads take splits as they come; whoever finishes
// the last one of a stream merges the stream's partial states, in order.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <new>
#include <vector>

#include "decode_split.h"

namespace sglang_kv {

constexpr int64_t kSplit = 512;

template <typename T, bool kBf16Dot>
void attend_group(const AttentionArgs& a, const Streams& s, const DecodeItem& item,
                  PartialState* states, std::atomic<bool>& bad_page) {
  using Attend = void (*)(const AttentionArgs&, const Streams&, const DecodeItem&, int64_t,
                          PartialState*, std::atomic<bool>&);
  constexpr Attend kAttend[kHeadsAtOnce] = {
      attend_split<T, kBf16Dot, 1>, attend_split<T, kBf16Dot, 2>, attend_split<T, kBf16Dot, 3>,
      attend_split<T, kBf16Dot, 4>, attend_split<T, kBf16Dot, 5>, attend_split<T, kBf16Dot, 6>,
      attend_split<T, kBf16Dot, 7>, attend_split<T, kBf16Dot, 8>};
  const int group = static_cast<int>(a.group(s));
  for (int g = 0; g < group; g += kHeadsAtOnce) {
    const int heads = std::min(kHeadsAtOnce, group - g);
    kAttend[heads - 1](a, s, item, item.kv_head * group + g, states + g, bad_page);
  }
}

// Merges the splits of each query head of one stream, in their order, and writes the result.
inline void merge_splits(const AttentionArgs& a, const Streams& s, int64_t request,
                         int64_t kv_head, const PartialState* states, int64_t num_splits) {
  const int64_t group = a.group(s);
  for (int64_t g = 0; g < group; ++g) {
    alignas(64) float acc[kMaxHeadDim] = {};
    float max = kNoMax, sum = 0.f;
    for (int64_t i = 0; i < num_splits; ++i) max = std::max(max, states[i * group + g].max);
    for (int64_t i = 0; i < num_splits; ++i) {
      const PartialState& state = states[i * group + g];
      const float weight = exp2(state.max - max);
      sum += state.sum * weight;
      for (int64_t d = 0; d < s.head_dim; d += kLanes) {
        store(acc + d, fma(load(state.acc + d), splat(weight), load(acc + d)));
      }
    }
    a.write_result(request, kv_head * group + g, s.head_dim, acc, max, sum);
  }
}

// Attends every request's last token to its streams. False if a page table named a page that the
// pool has not; the results are then meaningless.
inline bool decode(const AttentionArgs& a, const Streams& s, bool kv_is_bf16) {
  struct Pending {
    std::atomic<int32_t> splits;
    int64_t first_item;
    int64_t num_items;
  };
  static thread_local std::vector<DecodeItem> items;
  static thread_local Scratch<Pending> pending_scratch;
  static thread_local Scratch<PartialState> state_scratch;
  items.clear();
  Pending* pending = pending_scratch.reserve(s.batch * s.num_kv_heads);
  int64_t tokens = 0;
  for (int64_t b = 0; b < s.batch; ++b) {
    for (int64_t h = 0; h < s.num_kv_heads; ++h) {
      const int64_t first_item = static_cast<int64_t>(items.size());
      const Stream stream = s(b, h);
      const Visible seen =
          visible_ranges(stream, s.page_size, stream.kv_len - 1, a.layer_window_left);
      for (const bool are_sinks : {true, false}) {
        const Range range = are_sinks ? seen.sinks : seen.window;
        for (int64_t begin = range.begin; begin < range.end;) {
          const int64_t end = std::min((begin / kSplit + 1) * kSplit, range.end);
          items.push_back(
              {static_cast<int32_t>(b), static_cast<int32_t>(h), {begin, end}, are_sinks});
          begin = end;
        }
        tokens += range.size();
      }
      const int64_t count = static_cast<int64_t>(items.size()) - first_item;
      Pending* p = new (&pending[b * s.num_kv_heads + h]) Pending;
      p->splits = static_cast<int32_t>(count);
      p->first_item = first_item;
      p->num_items = count;
      if (count == 0) merge_splits(a, s, b, h, nullptr, 0);
    }
  }

  const int64_t group = a.group(s);
  const int64_t num_items = static_cast<int64_t>(items.size());
  const DecodeItem* item = items.data();
  PartialState* states = state_scratch.reserve(num_items * group);
  const bool bf16_dot = kHasBf16Dot && kv_is_bf16 && a.q.is_bf16;
  const auto attend = bf16_dot     ? attend_group<bf16, kHasBf16Dot>
                      : kv_is_bf16 ? attend_group<bf16, false>
                                   : attend_group<float, false>;
  std::atomic<int64_t> next_item{0};
  std::atomic<bool> bad_page{false};
  const bool parallel = 2 * tokens * s.head_dim * s.element_size >= kParallelBytes;
#pragma omp parallel num_threads(a.num_threads) if (parallel)
  for (int64_t i; (i = next_item.fetch_add(1)) < num_items;) {
    attend(a, s, item[i], states + i * group, bad_page);
    Pending& p = pending[item[i].request * s.num_kv_heads + item[i].kv_head];
    if (p.splits.fetch_sub(1) == 1) {  // this thread was the last one at this stream
      merge_splits(a, s, item[i].request, item[i].kv_head, states + p.first_item * group,
                   p.num_items);
    }
  }
  return !bad_page;
}

}  // namespace sglang_kv
