// Sixteen floats at a time, on whatever registers the target has.
//
// Decides the element arithmetic of every kernel: one register of AVX-512, two of AVX2, four of NEON
// or SSE. Compiled with -ffp-contract=off, so that nothing is fused or reordered but what is written
// as such here: float32 results are the same bits on every level that has fused multiply-add.
#pragma once

#include "base.h"

#if defined(__AVX512F__)
#include "reg_avx512.h"
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "reg_avx2.h"
#else
#include "reg_portable.h"
#endif

namespace baton {

constexpr int kRegLanes = sizeof(Reg) / sizeof(float);
constexpr int kRegs = kLanes / kRegLanes;

// --- sixteen lanes ------------------------------------------------------------------------------

struct F16 {
  Reg r[kRegs];
};

#define BATON_EACH BATON_UNROLL for (int i = 0; i < kRegs; ++i)

BATON_INLINE F16 splat(float a) {
  F16 out;
  BATON_EACH out.r[i] = reg_splat(a);
  return out;
}
BATON_INLINE F16 load(const float* p) {
  F16 out;
  BATON_EACH out.r[i] = reg_load(p + i * kRegLanes);
  return out;
}
BATON_INLINE F16 load(const Bf16* p) {
  F16 out;
  BATON_EACH out.r[i] = reg_widen(p + i * kRegLanes);
  return out;
}
BATON_INLINE F16 load(const Half* p) {
  F16 out;
  BATON_EACH out.r[i] = reg_widen(p + i * kRegLanes);
  return out;
}
BATON_INLINE void store(float* p, const F16& a) {
  BATON_EACH reg_store(p + i * kRegLanes, a.r[i]);
}
// Rounds to the nearest, ties to even.
BATON_INLINE void store(Bf16* p, const F16& a) {
  BATON_EACH reg_narrow(p + i * kRegLanes, a.r[i]);
}
BATON_INLINE F16 fma(const F16& a, const F16& b, const F16& c) {
  F16 out;
  BATON_EACH out.r[i] = reg_fma(a.r[i], b.r[i], c.r[i]);
  return out;
}
BATON_INLINE F16 operator+(const F16& a, const F16& b) {
  F16 out;
  BATON_EACH out.r[i] = a.r[i] + b.r[i];
  return out;
}
BATON_INLINE F16 operator-(const F16& a, const F16& b) {
  F16 out;
  BATON_EACH out.r[i] = a.r[i] - b.r[i];
  return out;
}
BATON_INLINE F16 operator*(const F16& a, const F16& b) {
  F16 out;
  BATON_EACH out.r[i] = a.r[i] * b.r[i];
  return out;
}
BATON_INLINE F16 operator/(const F16& a, const F16& b) {
  F16 out;
  BATON_EACH out.r[i] = a.r[i] / b.r[i];
  return out;
}
BATON_INLINE F16 max(const F16& a, const F16& b) {
  F16 out;
  BATON_EACH out.r[i] = reg_max(a.r[i], b.r[i]);
  return out;
}
// `a` in lanes low <= lane < high, else `other`.
BATON_INLINE F16 between(const F16& a, int low, int high, const F16& other) {
  F16 out;
  BATON_EACH out.r[i] = reg_between(a.r[i], i * kRegLanes, low, high, other.r[i]);
  return out;
}
// Halves are joined again and again: lane i with lane i + 8, then i + 4, ...
BATON_INLINE float sum(const F16& a) {
  alignas(64) float t[kLanes];
  store(t, a);
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) t[i] += t[i + half];
  return t[0];
}
BATON_INLINE float top(const F16& a) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps(a.r[0]);
#else
  alignas(64) float t[kLanes];
  store(t, a);
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) t[i] = t[i] > t[i + half] ? t[i] : t[i + half];
  return t[0];
#endif
}

#if !defined(__AVX512F__)
// See reg_avx512.h.
BATON_INLINE Reg reg_kept(Reg x, Reg least) { return reg_min(reg_splat(128.0f), reg_max(least, x)); }
template <bool>
BATON_INLINE Reg reg_scale(Reg x, Reg least, Reg a, Reg n) {
  return reg_zero_below(x, least, a * reg_pow2(n));
}
#endif

// 2 ** x within 2 units in the last place; exactly 1 at 0; 0 below -126 (nothing is subnormal);
// infinite above 127.5; NaN stays. The polynomial is a minimax one of 2 ** f on [-0.5, 0.5]. `Low`:
// nothing is above 127, which is a little faster where the target scales by powers of two.
template <bool Low = false>
BATON_INLINE F16 exp2(const F16& x) {
  F16 out;
  BATON_EACH {
    const Reg least = reg_splat(-126.0f);
    const Reg kept = reg_kept(x.r[i], least);
    const Reg whole = reg_round(kept);
    const Reg f = kept - whole;
    Reg p = reg_splat(1.535336188319500e-4f);
    p = reg_fma(p, f, reg_splat(1.339887440266574e-3f));
    p = reg_fma(p, f, reg_splat(9.618437357674640e-3f));
    p = reg_fma(p, f, reg_splat(5.550332471162809e-2f));
    p = reg_fma(p, f, reg_splat(2.402264791363012e-1f));
    p = reg_fma(p, f, reg_splat(6.931472028550421e-1f));
    p = reg_fma(p, f, reg_splat(1.0f));
    out.r[i] = reg_scale<Low>(x.r[i], least, p, whole);
  }
  return out;
}

constexpr float kLog2E = 1.44269504088896341f;

BATON_INLINE F16 sigmoid(const F16& x) {
  const F16 one = splat(1.0f);
  return one / (one + exp2(x * splat(-kLog2E)));
}
BATON_INLINE F16 tanh(const F16& x) {
  const F16 one = splat(1.0f);
  return one - splat(2.0f) / (one + exp2(x * splat(2.0f * kLog2E)));
}

// --- products along K ---------------------------------------------------------------------------

// What a matrix product of elements T needs: K advances by `kStep` elements a step; `Act` is how the
// left operand lies in memory (rounded to T in any case); `B` holds kStep x 16 right elements.
template <class T>
struct Product;

template <>
struct Product<float> {
  static constexpr int kStep = 1;
  using Act = float;
  using A = F16;
  using B = F16;
  static BATON_INLINE A left(const Act* p) { return splat(*p); }
  static BATON_INLINE B right(const float* p) { return load(p); }
  static BATON_INLINE void add(F16& sum, const A& a, const B& b) { sum = fma(a, b, sum); }
};

// Two elements along K at a time, as floats: first the even, then the odd one.
struct FloatPairs {
  using Act = float;
  struct A {
    F16 first, second;
  };
  using B = A;
  static BATON_INLINE A left(const Act* p) { return {splat(p[0]), splat(p[1])}; }
  static BATON_INLINE void add(F16& sum, const A& a, const B& b) {
    sum = fma(a.second, b.second, fma(a.first, b.first, sum));
  }
};

#if defined(__AVX512BF16__)
template <>
struct Product<Bf16> {
  static constexpr int kStep = 2;
  using Act = Bf16;
  using A = __m512bh;
  using B = __m512bh;
  static BATON_INLINE A left(const Act* p) {
    int32_t pair;
    std::memcpy(&pair, p, sizeof pair);
    return (__m512bh)_mm512_set1_epi32(pair);
  }
  static BATON_INLINE B right(const Bf16* p) { return (__m512bh)_mm512_loadu_si512(p); }
  static BATON_INLINE void add(F16& sum, const A& a, const B& b) {
    sum.r[0] = _mm512_dpbf16_ps(sum.r[0], a, b);
  }
};
#else
// The left operand is a float that was rounded to bfloat16 all the same.
template <>
struct Product<Bf16> : FloatPairs {
  static constexpr int kStep = 2;
  static BATON_INLINE B right(const Bf16* p) {
    B out;
    BATON_EACH {
      out.first.r[i] = reg_first(p + 2 * i * kRegLanes);
      out.second.r[i] = reg_second(p + 2 * i * kRegLanes);
    }
    return out;
  }
};
#endif

template <class T>
using Act = typename Product<T>::Act;

// Stores, rounded to T, as T or as float.
template <class T, class Out>
BATON_INLINE void put_as(Out* p, const F16& a) {
  if constexpr (sizeof(Out) == sizeof(T)) {
    store(p, a);
  } else {
    T rounded[kLanes];
    store(rounded, a);
    store(p, load(rounded));
  }
}
// Stores what the next product reads as its left operand.
template <class T>
BATON_INLINE void put(Act<T>* p, const F16& a) {
  put_as<T>(p, a);
}
// The same of two vectors that follow each other.
template <class T>
BATON_INLINE void put(Act<T>* p, const F16& a, const F16& b) {
#if defined(__AVX512BF16__)
  if constexpr (sizeof(Act<T>) == 2) {
    const __m512bh both = _mm512_cvtne2ps_pbh(b.r[0], a.r[0]);
    std::memcpy(static_cast<void*>(p), &both, sizeof both);
    return;
  }
#endif
  put<T>(p, a);
  put<T>(p + kLanes, b);
}

BATON_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }
BATON_INLINE void prefetch_far(const void* p) { __builtin_prefetch(p, 0, 2); }

}  // namespace baton
