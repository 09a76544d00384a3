// Sixteen lanes out of the machine's own vectors, for compilers without 512-bit ones.
//
// GCC accepts a 64-byte vector type anywhere, but keeps it in memory where no register holds it;
// an array of native vectors stays in registers.
#pragma once

#include <cstdint>
#if defined(__AVX__)
#include <immintrin.h>
#endif

namespace sglang_kv {

#if defined(__AVX__)
constexpr int kNativeLanes = 8;
#else
constexpr int kNativeLanes = 4;
#endif

template <typename T>
struct Pack {
  typedef T Part __attribute__((vector_size(kNativeLanes * sizeof(T))));
  static constexpr int kParts = 16 / kNativeLanes;

  Part part[kParts];

  T operator[](int i) const { return part[i / kNativeLanes][i % kNativeLanes]; }
  void set(int i, T x) { part[i / kNativeLanes][i % kNativeLanes] = x; }
};

#define SGLANG_KV_PACK_OPERATOR(op)                                                      \
  template <typename T>                                                                  \
  inline __attribute__((always_inline)) Pack<T> operator op(Pack<T> a, Pack<T> b) {      \
    for (int i = 0; i < Pack<T>::kParts; ++i) a.part[i] = a.part[i] op b.part[i];        \
    return a;                                                                            \
  }                                                                                      \
  template <typename T>                                                                  \
  inline __attribute__((always_inline)) Pack<T> operator op(Pack<T> a, T b) {            \
    for (int i = 0; i < Pack<T>::kParts; ++i) a.part[i] = a.part[i] op b;                \
    return a;                                                                            \
  }                                                                                      \
  template <typename T, typename U>                                                      \
  inline __attribute__((always_inline)) Pack<T>& operator op##=(Pack<T>& a, U b) {       \
    return a = a op b;                                                                   \
  }
SGLANG_KV_PACK_OPERATOR(+)
SGLANG_KV_PACK_OPERATOR(-)
SGLANG_KV_PACK_OPERATOR(*)
SGLANG_KV_PACK_OPERATOR(/)
SGLANG_KV_PACK_OPERATOR(&)
SGLANG_KV_PACK_OPERATOR(<<)
SGLANG_KV_PACK_OPERATOR(>>)
#undef SGLANG_KV_PACK_OPERATOR

// True lanes are -1, as in the compiler's own vectors.
#define SGLANG_KV_PACK_COMPARISON(op)                                                    \
  template <typename T>                                                                  \
  inline __attribute__((always_inline)) Pack<int32_t> operator op(Pack<T> a, Pack<T> b) { \
    Pack<int32_t> mask;                                                                  \
    for (int i = 0; i < Pack<T>::kParts; ++i) mask.part[i] = a.part[i] op b.part[i];     \
    return mask;                                                                         \
  }
SGLANG_KV_PACK_COMPARISON(<)
SGLANG_KV_PACK_COMPARISON(>)
SGLANG_KV_PACK_COMPARISON(>=)
SGLANG_KV_PACK_COMPARISON(==)
#undef SGLANG_KV_PACK_COMPARISON

template <typename T>
inline __attribute__((always_inline)) Pack<T> select(Pack<int32_t> mask, Pack<T> a, Pack<T> b) {
  for (int i = 0; i < Pack<T>::kParts; ++i) a.part[i] = mask.part[i] ? a.part[i] : b.part[i];
  return a;
}

template <typename To, typename From>
inline __attribute__((always_inline)) Pack<To> convert(Pack<From> a) {
  Pack<To> r;
  for (int i = 0; i < Pack<To>::kParts; ++i) {
    r.part[i] = __builtin_convertvector(a.part[i], typename Pack<To>::Part);
  }
  return r;
}

}  // namespace sglang_kv
