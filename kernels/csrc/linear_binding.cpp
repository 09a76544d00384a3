// linear: check, then run.
#include "checks.h"
#include "linear.h"

namespace sglang_kv {
namespace {

const bf16* matrix(TensorView t, const char* name, int ndim) {
  require_cpu(t, name, ndim);
  SGLANG_KV_REQUIRE(is_bf16(t), name << " must be bfloat16");
  SGLANG_KV_REQUIRE(t.IsContiguous(), name << " must be contiguous");
  return static_cast<const bf16*>(t.data_ptr());
}

void linear_cpu(TensorView x, TensorView weight, Optional<TensorView> bias, TensorView out,
                int64_t num_threads) {
  const bf16* from = matrix(x, "x", 2);
  const bf16* by = matrix(weight, "weight", 2);
  const int64_t rows = x.size(0), outputs = weight.size(0), size = weight.size(1);
  SGLANG_KV_REQUIRE(x.size(1) == size,
                    "x has rows of " << x.size(1) << ", weight has rows of " << size);
  SGLANG_KV_REQUIRE(size % kLanes == 0,
                    "weight has rows of " << size << ", not a multiple of " << kLanes);
  const bf16* shift = nullptr;
  if (bias.has_value()) {
    shift = matrix(bias.value(), "bias", 1);
    SGLANG_KV_REQUIRE(bias.value().size(0) == outputs,
                      "bias has " << bias.value().size(0) << " values, weight has " << outputs);
  }
  const bf16* to = matrix(out, "out", 2);
  SGLANG_KV_REQUIRE(out.size(0) == rows && out.size(1) == outputs,
                    "out must be [" << rows << ", " << outputs << "]");
  linear(from, by, shift, const_cast<bf16*>(to), rows, outputs, size,
         static_cast<int>(num_threads));
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(linear, linear_cpu);

}  // namespace sglang_kv
