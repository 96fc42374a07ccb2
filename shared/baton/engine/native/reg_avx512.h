// One register of sixteen floats: AVX-512.
#pragma once

#include "base.h"

namespace baton {

using Reg = __m512;
using IntReg = __m512i;
BATON_INLINE Reg reg_load(const float* p) { return _mm512_loadu_ps(p); }
BATON_INLINE void reg_store(float* p, Reg a) { _mm512_storeu_ps(p, a); }
BATON_INLINE Reg reg_splat(float a) { return _mm512_set1_ps(a); }
BATON_INLINE Reg reg_fma(Reg a, Reg b, Reg c) { return _mm512_fmadd_ps(a, b, c); }
// Of the two the second wherever either is no number: NaN in `b` stays.
BATON_INLINE Reg reg_max(Reg a, Reg b) { return _mm512_max_ps(a, b); }
BATON_INLINE Reg reg_round(Reg a) {
  return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
// What of x an exponential computes with: `reg_scale` looks at its ends.
BATON_INLINE Reg reg_kept(Reg x, Reg) { return x; }
// a * 2 ** n of whole n: zero where x < least; infinite from n = 128 on, unless `Low`: there is none.
template <bool Low>
BATON_INLINE Reg reg_scale(Reg x, Reg least, Reg a, Reg n) {
  const Reg out = _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, least, _CMP_NLT_UQ), a, n);
  if (Low) return out;
  const Reg infinite = _mm512_castsi512_ps(_mm512_set1_epi32(0x7f800000));
  return _mm512_mask_mov_ps(out, _mm512_cmp_ps_mask(n, reg_splat(128.0f), _CMP_GE_OQ), infinite);
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
BATON_INLINE Reg reg_widen(const Half* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
BATON_INLINE IntReg reg_words(const uint32_t* p) { return _mm512_loadu_si512(p); }
// Bits `from` .. `from` + 3 of every word as a number of 0 to 15.
BATON_INLINE Reg reg_nibble(IntReg words, int from) {
  const IntReg low = _mm512_and_si512(_mm512_srli_epi32(words, from), _mm512_set1_epi32(15));
  return _mm512_cvtepi32_ps(low);
}
// Bits `from` .. `from` + 7 of every word as a number of -128 to 127.
BATON_INLINE Reg reg_byte(IntReg words, int from) {
  return _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(words, 24 - from), 24));
}

}  // namespace baton
