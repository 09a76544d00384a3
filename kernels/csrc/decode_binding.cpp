// decode: check, then run.
#include "checks.h"
#include "decode.h"

namespace sglang_kv {
namespace {

void decode_cpu(TensorView q, Optional<TensorView> sink_q, TensorView out,
                Optional<TensorView> lse, TensorView pages, TensorView table, TensorView desc,
                TensorView slots, int64_t layer, double sm_scale, double k_scale, double v_scale,
                double logits_soft_cap, int64_t layer_window_left, int64_t num_threads) {
  const Streams s = streams_of(pages, table, desc, slots, layer, nullptr, q.size(0));
  const AttentionArgs a = attention_args(s, q, sink_q, out, lse, sm_scale, k_scale, v_scale,
                                         logits_soft_cap, layer_window_left, num_threads);
  require_pages(decode(a, s, is_bf16(pages)));
}

// [sinks begin, sinks end, window begin, window end]
tvm::ffi::Array<int64_t> visible(int64_t index, int64_t gap, int64_t num_sinks,
                                 int64_t window_left, int64_t page_size,
                                 int64_t layer_window_left) {
  const Stream stream = {nullptr, 0, static_cast<int32_t>(gap), static_cast<int32_t>(num_sinks),
                         static_cast<int32_t>(window_left)};
  const Visible v = visible_ranges(stream, page_size, index, layer_window_left);
  return {v.sinks.begin, v.sinks.end, v.window.begin, v.window.end};
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(decode, decode_cpu);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(visible_ranges, visible);

}  // namespace sglang_kv
