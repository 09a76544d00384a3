// Decode, the inner part: the query heads of one KV head against a run of its tokens.
//
// Keys and values are read where they lie, once. What is slow is memory, so while one block of keys
// is computed the next one is on its way.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "attention.h"
#if SGLANG_KV_AVX512
#include "decode_rows_wide.h"
#else
#include "decode_rows_narrow.h"
#endif
#include "fp8.h"

namespace sglang_kv {

struct DecodeItem {
  int32_t request;
  int32_t kv_head;
  Range tokens;
  bool are_sinks;  // apart from the window
};

// One query head over one split: values weighted by 2^(logit - max), and the sum of the weights.
struct alignas(64) PartialState {
  float acc[kMaxHeadDim];
  float max;
  float sum;
};

// kHeads query heads against the tokens of one split.
template <typename T, bool kBf16Dot, int kHeads>
void attend_split(const AttentionArgs& a, const Streams& s, const DecodeItem& item, int64_t head,
                  PartialState* state, std::atomic<bool>& bad_page) {
  const Stream stream = s(item.request, item.kv_head);
  const int64_t dim = s.head_dim;
  const int64_t v_offset = block_v_offset<T>(s, kBlock);
  // The next block is fetched where its pages are; 8-bit rows are widened when their turn comes.
  const int64_t next_v_offset = s.kv_stride / static_cast<int64_t>(sizeof(T));
  const int64_t row_size = s.row_size<T>();
  static thread_local Scratch<float> wide_scratch;
  float* wide = s.fp8 ? wide_scratch.reserve(2 * kBlock * dim) : nullptr;

  GroupQueries q;
  const bool own_queries = item.are_sinks && a.sink_q.data;
  read_group<T>(own_queries ? a.sink_q : a.q, item.request, head, kHeads, dim, q);
  alignas(64) float weights[kHeads][kBlock];
  alignas(64) float acc[kHeads][kMaxHeadDim] = {};
  F32x16 sums[kHeads] = {};
  float maxima[kHeads], decay[kHeads];
  for (float& m : maxima) m = kNoMax;
  const F32x16 scale = splat(a.log2_scale());

  KeyBlock<T> blocks[2];
  KeyBlock<T>* block = &blocks[0];
  KeyBlock<T>* next = &blocks[1];
  ReadingOrder<T> order;
  const auto block_at = [&](int64_t begin) -> Range {
    return {begin, std::min(begin + kBlock, item.tokens.end)};
  };
  next->gather(s, stream, block_at(item.tokens.begin), bad_page);
  next->fetch(0, std::min(kAhead, kBlock), row_size, next_v_offset);
  for (int64_t begin = item.tokens.begin; begin < item.tokens.end; begin += kBlock) {
    std::swap(block, next);
    next->count = 0;
    if (begin + kBlock < item.tokens.end) {
      next->gather(s, stream, block_at(begin + kBlock), bad_page);
    }
    if (s.fp8) {
      block->widen(s, wide);
    } else {
      order.set(*block, *next, v_offset);
    }

    const int strips = (block->count + kLanes - 1) / kLanes * kLanes;
    for (int n = 0; n < strips; n += kLanes) {
      if (s.fp8) next->fetch(n, kLanes, row_size, next_v_offset);
      score_strip<T, kBf16Dot, kHeads>(block->rows + n, q, dim, n, s.fp8 ? nullptr : order.soon(n),
                                       weights);
    }
    for (int g = 0; g < kHeads; ++g) {
      a.cap(weights[g], strips);
      float* last = weights[g] + strips - kLanes;
      store(last, keep_lanes(load(last), 0, block->count - (strips - kLanes)));
      F32x16 top = load(weights[g]);
      for (int n = kLanes; n < strips; n += kLanes) top = max(top, load(weights[g] + n));
      const float new_max = std::max(maxima[g], reduce_max(top) * scale[0]);
      decay[g] = exp2(maxima[g] - new_max);
      maxima[g] = new_max;
      sums[g] *= decay[g];
      for (int n = 0; n < strips; n += kLanes) {
        const F32x16 w = exp2(fma(load(weights[g] + n), scale, splat(-new_max)));
        store(weights[g] + n, w);
        sums[g] += w;
      }
    }

    weigh_values<T, kHeads>(*block, v_offset, dim, weights, decay, acc,
                            s.fp8 ? nullptr : order.soon(block->count));
  }

  for (int g = 0; g < kHeads; ++g) {
    for (int64_t d = 0; d < dim; d += 2 * kLanes) {
      store_pair<T>(state[g].acc + d, load(acc[g] + d), load(acc[g] + d + kLanes));
    }
    state[g].max = maxima[g];
    state[g].sum = reduce_add(sums[g]);
  }
}

}  // namespace sglang_kv
