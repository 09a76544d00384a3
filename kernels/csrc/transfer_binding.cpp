// append and gather: check, then run.
#include <string>

#include "checks.h"
#include "transfer.h"

namespace sglang_kv {
namespace {

TokenRows token_rows(TensorView t, const char* name, const Streams& s, int64_t total,
                     double scale, const char* scale_name) {
  require_rows(t, name, s.num_kv_heads, s.head_dim);
  SGLANG_KV_REQUIRE(t.size(0) == total, name << " has " << t.size(0) << " tokens, k has " << total);
  require_scale(scale, scale_name);
  return {t.data_ptr(), t.stride(0), t.stride(1), is_bf16(t), static_cast<float>(scale)};
}

void append_cpu(TensorView k, TensorView v, Optional<TensorView> qo_indptr, TensorView pages,
                TensorView table, TensorView desc, TensorView slots, int64_t layer, double k_scale,
                double v_scale, int64_t num_threads) {
  const int32_t* indptr = indptr_of(qo_indptr, slots);
  const int64_t total = k.size(0);
  const Streams s = streams_of(pages, table, desc, slots, layer, indptr, total);
  const TokenRows keys = token_rows(k, "k", s, total, k_scale, "k_scale");
  const TokenRows values = token_rows(v, "v", s, total, v_scale, "v_scale");
  const auto run = s.fp8 ? append<uint8_t> : is_bf16(pages) ? append<bf16> : append<float>;
  require_pages(run(keys, values, indptr, s, static_cast<int>(num_threads)));
}

// A CSR list whose values lie in [0, limit(i)) for stream i.
template <typename Limit>
Csr csr(TensorView indptr, TensorView indices, const std::string& name, int64_t num_streams,
        const Limit& limit) {
  const std::string indptr_name = name + "_indptr", indices_name = name + "_indices";
  const Csr lists = {int_data<int64_t>(indptr, indptr_name.c_str(), 1),
                     int_data<int64_t>(indices, indices_name.c_str(), 1)};
  SGLANG_KV_REQUIRE(indptr.size(0) == num_streams + 1,
                    indptr_name << " has " << indptr.size(0) << " entries for " << num_streams
                         << " streams");
  SGLANG_KV_REQUIRE(lists.indptr[0] == 0 && lists.indptr[num_streams] == indices.size(0),
                    indptr_name << " must go from 0 to the number of " << indices_name << ", "
                         << indices.size(0));
  for (int64_t i = 0; i < num_streams; ++i) {
    SGLANG_KV_REQUIRE(lists.size(i) >= 0, indptr_name << " decreases at " << i + 1);
  }
  for (int64_t i = 0; i < num_streams; ++i) {
    const int64_t end = limit(i);
    for (int64_t j = 0; j < lists.size(i); ++j) {
      const int64_t value = lists.list(i)[j];
      SGLANG_KV_REQUIRE(value >= 0 && value < end, indices_name << " has " << value
                                                        << " for stream " << i << ", outside [0, "
                                                        << end << ")");
    }
  }
  return lists;
}

void gather_cpu(TensorView pages, TensorView src_indptr, TensorView src_indices,
                TensorView keep_indptr, TensorView keep_indices, TensorView dst_indptr,
                TensorView dst_indices, int64_t num_threads) {
  const Streams pool = pool_of(pages);
  require_cpu(src_indptr, "src_indptr", 1);
  SGLANG_KV_REQUIRE(src_indptr.size(0) > 0, "src_indptr must have at least one entry");
  const int64_t n = src_indptr.size(0) - 1;
  const auto in_pool = [&](int64_t) { return pool.num_pages; };
  const Csr src = csr(src_indptr, src_indices, "src", n, in_pool);
  const Csr keep = csr(keep_indptr, keep_indices, "keep", n,
                       [&](int64_t i) { return src.size(i) * pool.page_size; });
  const Csr dst = csr(dst_indptr, dst_indices, "dst", n, in_pool);
  for (int64_t i = 0; i < n; ++i) {
    SGLANG_KV_REQUIRE(keep.size(i) <= dst.size(i) * pool.page_size,
                      "dst_indices gives stream " << i << " " << dst.size(i)
                                                  << " pages, too few for " << keep.size(i)
                                                  << " tokens");
  }
  gather(pool, n, src, keep, dst, static_cast<int>(num_threads));
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(append, append_cpu);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(gather, gather_cpu);

}  // namespace sglang_kv
