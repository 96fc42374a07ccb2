// Sixteen floats at a time, on whatever registers the target has.
//
// Decides the element arithmetic of every kernel: one register of AVX-512, two of AVX2, four of NEON
// or SSE. Compiled with -ffp-contract=off, so that nothing is fused or reordered but what is written
// as such here: float32 results are the same bits on every level that has fused multiply-add.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define BATON_INLINE inline __attribute__((always_inline))
#define BATON_UNROLL _Pragma("GCC unroll 16")

namespace baton {

constexpr int kLanes = 16;

// A bfloat16 in memory.
struct Bf16 {
  uint16_t bits;
};

// --- one register -------------------------------------------------------------------------------

#if defined(__AVX512F__)
using Reg = __m512;
using IntReg = __m512i;
BATON_INLINE Reg reg_load(const float* p) { return _mm512_loadu_ps(p); }
BATON_INLINE void reg_store(float* p, Reg a) { _mm512_storeu_ps(p, a); }
BATON_INLINE Reg reg_splat(float a) { return _mm512_set1_ps(a); }
BATON_INLINE Reg reg_fma(Reg a, Reg b, Reg c) { return _mm512_fmadd_ps(a, b, c); }
// Of the two the second wherever either is no number: NaN in `b` stays.
BATON_INLINE Reg reg_max(Reg a, Reg b) { return _mm512_max_ps(a, b); }
BATON_INLINE Reg reg_min(Reg a, Reg b) { return _mm512_min_ps(a, b); }
BATON_INLINE Reg reg_round(Reg a) {
  return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
// 2 ** n of whole n in [-126, 128].
BATON_INLINE Reg reg_pow2(Reg n) {
  const IntReg biased = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
  return _mm512_castsi512_ps(_mm512_slli_epi32(biased, 23));
}
// Zero where x < least, else a.
BATON_INLINE Reg reg_zero_below(Reg x, Reg least, Reg a) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, least, _CMP_NLT_UQ), a);
}
// `a` in lanes low <= lane < high, else `other`; `lane0` is the number of the first lane.
BATON_INLINE Reg reg_between(Reg a, int lane0, int low, int high, Reg other) {
  const IntReg lane = _mm512_add_epi32(
      _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0),
      _mm512_set1_epi32(lane0));
  const __mmask16 in = _mm512_cmpge_epi32_mask(lane, _mm512_set1_epi32(low)) &
                       _mm512_cmplt_epi32_mask(lane, _mm512_set1_epi32(high));
  return _mm512_mask_mov_ps(other, in, a);
}
BATON_INLINE Reg reg_widen(const Bf16* p) {
  const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16));
}
// The halves of 16 pairs: first elements, second elements.
BATON_INLINE Reg reg_first(const Bf16* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16));
}
BATON_INLINE Reg reg_second(const Bf16* p) {
  return _mm512_castsi512_ps(
      _mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32(int(0xffff0000u))));
}
BATON_INLINE void reg_narrow(Bf16* p, Reg a) {
#if defined(__AVX512BF16__)
  const __m256bh narrow = _mm512_cvtneps_pbh(a);
  std::memcpy(p, &narrow, sizeof narrow);
#else
  const IntReg raw = _mm512_castps_si512(a);
  const IntReg odd = _mm512_and_si512(_mm512_srli_epi32(raw, 16), _mm512_set1_epi32(1));
  const IntReg up = _mm512_add_epi32(raw, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 nan = _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
  const IntReg kept = _mm512_mask_mov_epi32(up, nan, _mm512_set1_epi32(0x7fc00000));
  const __m256i narrow = _mm512_cvtepi32_epi16(_mm512_srli_epi32(kept, 16));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow);
#endif
}

#elif defined(__AVX2__) && defined(__FMA__)
using Reg = __m256;
using IntReg = __m256i;
BATON_INLINE Reg reg_load(const float* p) { return _mm256_loadu_ps(p); }
BATON_INLINE void reg_store(float* p, Reg a) { _mm256_storeu_ps(p, a); }
BATON_INLINE Reg reg_splat(float a) { return _mm256_set1_ps(a); }
BATON_INLINE Reg reg_fma(Reg a, Reg b, Reg c) { return _mm256_fmadd_ps(a, b, c); }
BATON_INLINE Reg reg_max(Reg a, Reg b) { return _mm256_max_ps(a, b); }
BATON_INLINE Reg reg_min(Reg a, Reg b) { return _mm256_min_ps(a, b); }
BATON_INLINE Reg reg_round(Reg a) {
  return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
BATON_INLINE Reg reg_pow2(Reg n) {
  const IntReg biased = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23));
}
BATON_INLINE Reg reg_zero_below(Reg x, Reg least, Reg a) {
  return _mm256_and_ps(_mm256_cmp_ps(x, least, _CMP_NLT_UQ), a);
}
BATON_INLINE Reg reg_between(Reg a, int lane0, int low, int high, Reg other) {
  const IntReg lane = _mm256_add_epi32(_mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0),
                                       _mm256_set1_epi32(lane0));
  const IntReg below = _mm256_cmpgt_epi32(_mm256_set1_epi32(low), lane);
  const IntReg under = _mm256_cmpgt_epi32(_mm256_set1_epi32(high), lane);
  return _mm256_blendv_ps(other, a, _mm256_castsi256_ps(_mm256_andnot_si256(below, under)));
}
BATON_INLINE Reg reg_widen(const Bf16* p) {
  const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(raw), 16));
}
BATON_INLINE Reg reg_first(const Bf16* p) {
  const IntReg raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(raw, 16));
}
BATON_INLINE Reg reg_second(const Bf16* p) {
  const IntReg raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm256_castsi256_ps(_mm256_and_si256(raw, _mm256_set1_epi32(int(0xffff0000u))));
}
BATON_INLINE void reg_narrow(Bf16* p, Reg a) {
  const IntReg raw = _mm256_castps_si256(a);
  const IntReg odd = _mm256_and_si256(_mm256_srli_epi32(raw, 16), _mm256_set1_epi32(1));
  const IntReg up = _mm256_add_epi32(raw, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const IntReg nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
  const IntReg kept =
      _mm256_srli_epi32(_mm256_blendv_epi8(up, _mm256_set1_epi32(0x7fc00000), nan), 16);
  const IntReg joined = _mm256_permute4x64_epi64(_mm256_packus_epi32(kept, kept), 0x08);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(joined));
}

#else  // portable: the compiler's own vectors, four lanes, NEON or SSE or scalars
typedef float Reg __attribute__((vector_size(16)));
typedef int32_t IntReg __attribute__((vector_size(16)));
typedef uint32_t UintReg __attribute__((vector_size(16)));
BATON_INLINE Reg reg_load(const float* p) {
  Reg a;
  std::memcpy(&a, p, sizeof a);
  return a;
}
BATON_INLINE void reg_store(float* p, Reg a) { std::memcpy(p, &a, sizeof a); }
BATON_INLINE Reg reg_splat(float a) { return Reg{a, a, a, a}; }
#if defined(__aarch64__)
BATON_INLINE Reg reg_fma(Reg a, Reg b, Reg c) {
  return Reg{__builtin_fmaf(a[0], b[0], c[0]), __builtin_fmaf(a[1], b[1], c[1]),
             __builtin_fmaf(a[2], b[2], c[2]), __builtin_fmaf(a[3], b[3], c[3])};
}
#else
BATON_INLINE Reg reg_fma(Reg a, Reg b, Reg c) { return a * b + c; }
#endif
BATON_INLINE Reg reg_max(Reg a, Reg b) { return a > b ? a : b; }
BATON_INLINE Reg reg_min(Reg a, Reg b) { return a < b ? a : b; }
BATON_INLINE Reg reg_round(Reg a) {  // |a| < 2 ** 22 here
  const Reg magic = reg_splat(12582912.0f);
  return (a + magic) - magic;
}
BATON_INLINE Reg reg_pow2(Reg n) {
  const IntReg biased = (__builtin_convertvector(n, IntReg) + 127) << 23;
  return reinterpret_cast<Reg>(biased);
}
BATON_INLINE Reg reg_zero_below(Reg x, Reg least, Reg a) {
  return x < least ? reg_splat(0.0f) : a;
}
BATON_INLINE Reg reg_between(Reg a, int lane0, int low, int high, Reg other) {
  const IntReg lane = IntReg{0, 1, 2, 3} + lane0;
  return ((lane >= low) & (lane < high)) ? a : other;
}
BATON_INLINE Reg reg_widen(const Bf16* p) {
  const UintReg raw = {p[0].bits, p[1].bits, p[2].bits, p[3].bits};
  return reinterpret_cast<Reg>(raw << 16);
}
BATON_INLINE Reg reg_first(const Bf16* p) {
  UintReg raw;
  std::memcpy(&raw, p, sizeof raw);
  return reinterpret_cast<Reg>(raw << 16);
}
BATON_INLINE Reg reg_second(const Bf16* p) {
  UintReg raw;
  std::memcpy(&raw, p, sizeof raw);
  return reinterpret_cast<Reg>(raw & 0xffff0000u);
}
BATON_INLINE void reg_narrow(Bf16* p, Reg a) {
  const UintReg raw = reinterpret_cast<UintReg>(a);
  const UintReg up = (raw + ((raw >> 16) & 1) + 0x7fff) >> 16;
  const UintReg kept = a == a ? up : UintReg{0x7fc0, 0x7fc0, 0x7fc0, 0x7fc0};
  for (int i = 0; i < 4; ++i) p[i].bits = uint16_t(kept[i]);
}
#endif

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

// 2 ** x within 2 units in the last place; exactly 1 at 0; 0 below -126 (nothing is subnormal);
// infinite above 127.5; NaN stays. The polynomial is a minimax one of 2 ** f on [-0.5, 0.5].
BATON_INLINE F16 exp2(const F16& x) {
  F16 out;
  BATON_EACH {
    const Reg least = reg_splat(-126.0f);
    const Reg kept = reg_min(reg_splat(128.0f), reg_max(least, x.r[i]));
    const Reg whole = reg_round(kept);
    const Reg f = kept - whole;
    Reg p = reg_splat(1.535336188319500e-4f);
    p = reg_fma(p, f, reg_splat(1.339887440266574e-3f));
    p = reg_fma(p, f, reg_splat(9.618437357674640e-3f));
    p = reg_fma(p, f, reg_splat(5.550332471162809e-2f));
    p = reg_fma(p, f, reg_splat(2.402264791363012e-1f));
    p = reg_fma(p, f, reg_splat(6.931472028550421e-1f));
    p = reg_fma(p, f, reg_splat(1.0f));
    out.r[i] = reg_zero_below(x.r[i], least, p * reg_pow2(whole));
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
template <>
struct Product<Bf16> {
  static constexpr int kStep = 2;
  using Act = float;  // rounded to bfloat16 all the same
  struct A {
    F16 first, second;
  };
  using B = A;
  static BATON_INLINE A left(const Act* p) { return {splat(p[0]), splat(p[1])}; }
  static BATON_INLINE B right(const Bf16* p) {
    B out;
    BATON_EACH {
      out.first.r[i] = reg_first(p + 2 * i * kRegLanes);
      out.second.r[i] = reg_second(p + 2 * i * kRegLanes);
    }
    return out;
  }
  static BATON_INLINE void add(F16& sum, const A& a, const B& b) {
    sum = fma(a.second, b.second, fma(a.first, b.first, sum));
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

BATON_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }
BATON_INLINE void prefetch_far(const void* p) { __builtin_prefetch(p, 0, 2); }

}  // namespace baton
