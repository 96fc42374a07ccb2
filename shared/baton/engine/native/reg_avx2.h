// One register of eight floats: AVX2 with FMA and F16C.
#pragma once

#include "base.h"

namespace baton {

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
// 2 ** n of whole n in [-126, 128].
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
BATON_INLINE Reg reg_widen(const Half* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
BATON_INLINE IntReg reg_words(const uint32_t* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
BATON_INLINE Reg reg_nibble(IntReg words, int from) {
  const IntReg low = _mm256_and_si256(_mm256_srli_epi32(words, from), _mm256_set1_epi32(15));
  return _mm256_cvtepi32_ps(low);
}
BATON_INLINE Reg reg_byte(IntReg words, int from) {
  return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(words, 24 - from), 24));
}

}  // namespace baton
