// extend: check, then run.
#include "checks.h"
#include "extend.h"

namespace sglang_kv {
namespace {

void extend_cpu(TensorView q, Optional<TensorView> sink_q, TensorView qo_indptr, TensorView out,
                Optional<TensorView> lse, TensorView pages, TensorView table, TensorView desc, TensorView slots,
                int64_t layer, double sm_scale, double k_scale, double v_scale,
                double logits_soft_cap, int64_t layer_window_left, int64_t num_threads) {
  const int32_t* indptr = indptr_of(qo_indptr, slots);
  const Streams s = streams_of(pages, table, desc, slots, layer, indptr, q.size(0));
  AttentionArgs a = attention_args(s, q, sink_q, out, lse, sm_scale, k_scale, v_scale, logits_soft_cap,
                                   layer_window_left, num_threads);
  a.qo_indptr = indptr;
  require_pages(extend(a, s, is_bf16(pages)));
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(extend, extend_cpu);

}  // namespace sglang_kv
