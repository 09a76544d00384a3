// Decode, the inner part: the query heads of one KV head against a run of its tokens.
//
// Keys and values are read where they lie, once. What is slow is memory, so while one block of keys
// is computed the next one is on its way.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "attention.h"
#include "rows.h"

namespace sglang_kv {

constexpr int kHeadsAtOnce = 8;  // query heads whose accumulators fit the registers together

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

// Adds 32 dimensions of sixteen keys to their scores; half of them where a row ends earlier.
template <typename T, bool kBf16Dot, bool kHalf>
SGLANG_KV_INLINE void score_pair(const T* const* keys, const GroupQueries& q, int g, int64_t d,
                                 F32x16 (&acc)[kLanes]) {
  if constexpr (kBf16Dot) {
    const I32x16 query = load_as<I32x16>(q.raw[g] + d);
    I32x16 key = {};
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
      std::memcpy(&key, keys[i] + d, kHalf ? sizeof key / 2 : sizeof key);
      acc[i] = dot_bf16(acc[i], key, query);
    }
  } else {
    const F32x16 qa = load(q.f32[g] + d), qb = load(q.f32[g] + d + kLanes);
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
      F32x16 a, b;
      if constexpr (kHalf) {
        load_half_pair(keys[i] + d, a, b);
      } else {
        load_pair(keys[i] + d, a, b);
      }
      acc[i] = fma(b, qb, fma(a, qa, acc[i]));
    }
  }
}

// Scores of sixteen keys for one query head.
template <typename T, bool kBf16Dot>
SGLANG_KV_INLINE F32x16 score_keys(const T* const* keys, const GroupQueries& q, int g,
                                   int64_t head_dim) {
  F32x16 acc[kLanes] = {};
  int64_t d = 0;
  for (; d + 2 * kLanes <= head_dim; d += 2 * kLanes) {
    score_pair<T, kBf16Dot, false>(keys, q, g, d, acc);
  }
  if (d < head_dim) score_pair<T, kBf16Dot, true>(keys, q, g, d, acc);
  return reduce_rows(acc);
}

// Where up to kKeys consecutive keys of a stream lie.
template <typename T>
struct KeyBlock {
  const T* rows[kKeys + kLanes];
  int count = 0;

  void gather(const Streams& s, const Stream& stream, Range range, std::atomic<bool>& bad_page) {
    count = s.key_rows(stream, range, rows, bad_page);
    // Scoring goes by sixteen: repeat a row that is certainly there, and mask its score.
    for (int i = count; i % kLanes; ++i) rows[i] = rows[count - 1];
  }
};

// acc = acc * decay + weights x values, for kPairs x 32 dimensions from d on. On the way, fetches
// the values of the block `prefetch`, if any.
template <typename T, int kHeads, int kPairs, bool kHalf>
SGLANG_KV_KERNEL void weigh_values(const KeyBlock<T>& block, int64_t v_offset, int64_t d,
                                   const float (*weights)[kKeys], const float* decay,
                                   float (*acc)[kMaxHeadDim], const KeyBlock<T>* prefetch,
                                   int64_t head_dim) {
  F32x16 sum[kHeads][2 * kPairs] = {};
  for (int n = 0; n < block.count; ++n) {
    if (prefetch && n < prefetch->count) prefetch_row(prefetch->rows[n] + v_offset, head_dim);
    F32x16 v[2 * kPairs];
    for (int p = 0; p < kPairs; ++p) {
      const T* from = block.rows[n] + v_offset + d + 2 * kLanes * p;
      if constexpr (kHalf) {
        load_half_pair(from, v[2 * p], v[2 * p + 1]);
      } else {
        load_pair(from, v[2 * p], v[2 * p + 1]);
      }
    }
    for (int g = 0; g < kHeads; ++g) {
      const F32x16 w = splat(weights[g][n]);
      for (int i = 0; i < 2 * kPairs; ++i) sum[g][i] = fma(w, v[i], sum[g][i]);
    }
  }
  for (int g = 0; g < kHeads; ++g) {
    for (int i = 0; i < 2 * kPairs; ++i) {
      float* at = acc[g] + d + kLanes * i;
      store(at, fma(load(at), splat(decay[g]), sum[g][i]));
    }
  }
}

// kHeads query heads against the tokens of one split.
template <typename T, bool kBf16Dot, int kHeads>
void attend_split(const AttentionArgs& a, const Streams& s, const DecodeItem& item, int64_t head,
                  PartialState* state, std::atomic<bool>& bad_page) {
  // Two pairs of dimensions at a time as long as the accumulators leave registers for the values.
  constexpr int kPairs = kVectorsAtOnce > 1 && kHeads <= 6 ? 2 : 1;
  const Stream stream = s(item.request, item.kv_head);
  const int64_t v_offset = s.kv_stride / static_cast<int64_t>(sizeof(T));
  const int64_t dim = s.head_dim;

  GroupQueries q;
  const bool own_queries = item.are_sinks && a.sink_q.data;
  read_group<T>(own_queries ? a.sink_q : a.q, item.request, head, kHeads, dim, q);
  alignas(64) float weights[kHeads][kKeys];
  alignas(64) float acc[kHeads][kMaxHeadDim] = {};
  F32x16 sums[kHeads] = {};
  float maxima[kHeads], decay[kHeads];
  for (float& m : maxima) m = kNoMax;
  const F32x16 scale = splat(a.log2_scale());

  KeyBlock<T> blocks[2];
  KeyBlock<T>* block = &blocks[0];
  KeyBlock<T>* next = &blocks[1];
  const auto block_at = [&](int64_t begin) -> Range {
    return {begin, std::min(begin + kKeys, item.tokens.end)};
  };
  next->gather(s, stream, block_at(item.tokens.begin), bad_page);
  for (int n = 0; n < next->count; ++n) {
    prefetch_row(next->rows[n], dim);
    prefetch_row(next->rows[n] + v_offset, dim);
  }
  for (int64_t begin = item.tokens.begin; begin < item.tokens.end; begin += kKeys) {
    std::swap(block, next);
    next->count = 0;
    if (begin + kKeys < item.tokens.end) {
      next->gather(s, stream, block_at(begin + kKeys), bad_page);
    }

    const int strips = (block->count + kLanes - 1) / kLanes * kLanes;
    for (int n = 0; n < strips; n += kLanes) {
      for (int i = n; i < std::min(n + kLanes, next->count); ++i) prefetch_row(next->rows[i], dim);
      for (int g = 0; g < kHeads; ++g) {
        store(weights[g] + n, score_keys<T, kBf16Dot>(block->rows + n, q, g, dim));
      }
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

    int64_t d = 0;
    for (; d + 2 * kLanes * kPairs <= dim; d += 2 * kLanes * kPairs) {
      weigh_values<T, kHeads, kPairs, false>(*block, v_offset, d, weights, decay, acc,
                                             d == 0 ? next : nullptr, dim);
    }
    if (d + 2 * kLanes <= dim) {
      weigh_values<T, kHeads, 1, false>(*block, v_offset, d, weights, decay, acc, nullptr, dim);
      d += 2 * kLanes;
    }
    if (d < dim) {
      weigh_values<T, kHeads, 1, true>(*block, v_offset, d, weights, decay, acc, nullptr, dim);
    }
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
