// column_sums: check, then run.
#include <vector>

#include "checks.h"
#include "scores.h"

namespace sglang_kv {
namespace {

const float* lse_data(TensorView lse, TensorView q) {
  require_cpu(lse, "lse", 2);
  SGLANG_KV_REQUIRE(is_f32(lse), "lse must be float32");
  SGLANG_KV_REQUIRE(lse.IsContiguous(), "lse must be contiguous");
  SGLANG_KV_REQUIRE(lse.size(0) == q.size(0) && lse.size(1) == q.size(1),
                    "lse is [" << lse.size(0) << ", " << lse.size(1) << "], q has " << q.size(0)
                               << " tokens of " << q.size(1) << " heads");
  return static_cast<const float*>(lse.data_ptr());
}

ColumnArgs column_args(const AttentionArgs& a, const Streams& s, TensorView first_query,
                       const float* lse, TensorView scores, TensorView score_slots) {
  require_cpu(scores, "scores", 4);
  SGLANG_KV_REQUIRE(is_f32(scores), "scores must be float32");
  SGLANG_KV_REQUIRE(scores.IsContiguous(), "scores must be contiguous");
  SGLANG_KV_REQUIRE(scores.size(1) == s.num_layers && scores.size(2) == s.num_kv_heads,
                    "scores has " << scores.size(1) << " layers of " << scores.size(2)
                                  << " heads, table has " << s.num_layers << " of "
                                  << s.num_kv_heads);
  ColumnArgs c = {};
  c.first_query = int_data<int32_t>(first_query, "first_query", 1);
  c.lse = lse;
  c.scores = static_cast<float*>(scores.data_ptr());
  c.score_slots = int_data<int32_t>(score_slots, "score_slots", 1);
  c.width = scores.size(3);
  SGLANG_KV_REQUIRE(first_query.size(0) == s.batch, "first_query has " << first_query.size(0)
                                                        << " entries for " << s.batch << " slots");
  SGLANG_KV_REQUIRE(score_slots.size(0) == s.batch, "score_slots has " << score_slots.size(0)
                                                        << " entries for " << s.batch << " slots");
  std::vector<bool> taken(scores.size(0));
  for (int64_t b = 0; b < s.batch; ++b) {
    const int32_t slot = c.score_slots[b], first = c.first_query[b];
    if (slot == -1) continue;
    SGLANG_KV_REQUIRE(slot >= 0 && slot < scores.size(0), "score_slots[" << b << "] is " << slot
                                                              << ", scores has "
                                                              << scores.size(0));
    SGLANG_KV_REQUIRE(!taken[slot], "score_slots names " << slot << " twice");
    taken[slot] = true;
    SGLANG_KV_REQUIRE(first >= 0 && first <= a.num_queries(b),
                      "first_query[" << b << "] is " << first << ", the request has "
                                     << a.num_queries(b) << " queries");
    for (int64_t h = 0; h < s.num_kv_heads; ++h) {
      SGLANG_KV_REQUIRE(s(b, h).kv_len <= c.width, "scores has width " << c.width << ", request "
                                                       << b << ", head " << h << " has kv_len "
                                                       << s(b, h).kv_len);
    }
  }
  return c;
}

void column_sums_cpu(TensorView q, Optional<TensorView> qo_indptr, TensorView first_query,
                     TensorView lse, TensorView pages, TensorView table, TensorView desc,
                     TensorView slots, int64_t layer, TensorView scores, TensorView score_slots,
                     double sm_scale, double k_scale, double logits_soft_cap,
                     int64_t layer_window_left, int64_t num_threads) {
  const int32_t* indptr = indptr_of(qo_indptr, slots);
  const Streams s = streams_of(pages, table, desc, slots, layer, indptr, q.size(0));
  AttentionArgs a =
      query_args(s, q, sm_scale, k_scale, logits_soft_cap, layer_window_left, num_threads);
  a.qo_indptr = indptr;
  const ColumnArgs c = column_args(a, s, first_query, lse_data(lse, q), scores, score_slots);
  require_pages(column_sums(a, c, s, is_bf16(pages)));
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(column_sums, column_sums_cpu);

}  // namespace sglang_kv
