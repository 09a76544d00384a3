// rmsnorm, fused_add_rmsnorm, apply_rope, silu_and_mul: check, then run.
#include "checks.h"
#include "elementwise.h"

namespace sglang_kv {
namespace {

// A [rows, size] tensor of bf16 or fp32 whose rows are contiguous and whole vectors.
void require_matrix(TensorView t, const char* name, TensorView like) {
  require_cpu(t, name, 2);
  SGLANG_KV_REQUIRE(is_bf16(t) || is_f32(t), name << " must be bfloat16 or float32");
  SGLANG_KV_REQUIRE(is_bf16(t) == is_bf16(like), name << " must have the dtype of x");
  SGLANG_KV_REQUIRE(t.stride(1) == 1, name << " must be contiguous in its last dimension");
  SGLANG_KV_REQUIRE(t.size(1) % kLanes == 0,
                    name << " has rows of " << t.size(1) << ", not a multiple of " << kLanes);
}

template <typename T>
T* data(TensorView t) {
  return static_cast<T*>(t.data_ptr());
}

void rmsnorm_cpu(TensorView x, Optional<TensorView> residual, TensorView weight, TensorView out,
                 double eps, int64_t num_threads) {
  require_matrix(x, "x", x);
  require_matrix(out, "out", x);
  require_cpu(weight, "weight", 1);
  SGLANG_KV_REQUIRE(is_bf16(weight) == is_bf16(x) && (is_bf16(weight) || is_f32(weight)),
                    "weight must have the dtype of x");
  SGLANG_KV_REQUIRE(weight.size(0) == x.size(1) && weight.stride(0) == 1,
                    "weight must be contiguous and have " << x.size(1) << " values");
  SGLANG_KV_REQUIRE(out.size(0) == x.size(0) && out.size(1) == x.size(1) && out.IsContiguous(),
                    "out must be contiguous and have the shape of x");
  void* kept = nullptr;
  int64_t kept_stride = 0;
  if (residual.has_value()) {
    const TensorView r = residual.value();
    require_matrix(r, "residual", x);
    SGLANG_KV_REQUIRE(r.size(0) == x.size(0) && r.size(1) == x.size(1),
                      "residual must have the shape of x");
    kept = r.data_ptr();
    kept_stride = r.stride(0);
  }
  const auto run = [&](auto* as) {
    using T = std::remove_pointer_t<decltype(as)>;
    rmsnorm<T>(data<T>(x), x.stride(0), static_cast<T*>(kept), kept_stride, data<T>(weight),
               data<T>(out), x.size(0), x.size(1), static_cast<float>(eps),
               static_cast<int>(num_threads));
  };
  is_bf16(x) ? run(static_cast<bf16*>(nullptr)) : run(static_cast<float*>(nullptr));
}

void rope_cpu(TensorView x, TensorView positions, TensorView cos_sin_cache, int64_t head_dim,
              int64_t num_threads) {
  require_matrix(x, "x", x);
  const int64_t* at = int_data<int64_t>(positions, "positions", 1);
  require_cpu(cos_sin_cache, "cos_sin_cache", 2);
  SGLANG_KV_REQUIRE(is_f32(cos_sin_cache) && cos_sin_cache.IsContiguous(),
                    "cos_sin_cache must be contiguous float32");
  const int64_t rotary_dim = cos_sin_cache.size(1);
  SGLANG_KV_REQUIRE(positions.size(0) == x.size(0),
                    "positions has " << positions.size(0) << " entries, x has " << x.size(0));
  SGLANG_KV_REQUIRE(head_dim > 0 && x.size(1) % head_dim == 0,
                    "x has rows of " << x.size(1) << ", not whole heads of " << head_dim);
  SGLANG_KV_REQUIRE(rotary_dim <= head_dim && rotary_dim % (2 * kLanes) == 0,
                    "cos_sin_cache rotates " << rotary_dim << " dimensions, expected a multiple of "
                                             << 2 * kLanes << " up to " << head_dim);
  for (int64_t r = 0; r < x.size(0); ++r) {
    SGLANG_KV_REQUIRE(at[r] >= 0 && at[r] < cos_sin_cache.size(0),
                      "positions[" << r << "] is " << at[r] << ", cos_sin_cache has "
                                   << cos_sin_cache.size(0));
  }
  const auto run = [&](auto* as) {
    using T = std::remove_pointer_t<decltype(as)>;
    rope<T>(data<T>(x), x.stride(0), x.size(1) / head_dim, head_dim, at,
            static_cast<const float*>(cos_sin_cache.data_ptr()), rotary_dim, x.size(0),
            static_cast<int>(num_threads));
  };
  is_bf16(x) ? run(static_cast<bf16*>(nullptr)) : run(static_cast<float*>(nullptr));
}

void silu_and_mul_cpu(TensorView x, TensorView out, int64_t num_threads) {
  require_matrix(x, "x", x);
  require_matrix(out, "out", x);
  SGLANG_KV_REQUIRE(out.size(0) == x.size(0) && 2 * out.size(1) == x.size(1) && out.IsContiguous(),
                    "out must be contiguous and have half the columns of x");
  const auto run = [&](auto* as) {
    using T = std::remove_pointer_t<decltype(as)>;
    silu_and_mul<T>(data<T>(x), x.stride(0), data<T>(out), x.size(0), out.size(1),
                    static_cast<int>(num_threads));
  };
  is_bf16(x) ? run(static_cast<bf16*>(nullptr)) : run(static_cast<float*>(nullptr));
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(rmsnorm, rmsnorm_cpu);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(rope, rope_cpu);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(silu_and_mul, silu_and_mul_cpu);

}  // namespace sglang_kv
