// One register of four floats: the compiler's own vectors, which become NEON, SSE or scalars.
#pragma once

#include "base.h"

namespace baton {

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
// 2 ** n of whole n in [-126, 128].
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
BATON_INLINE Reg reg_widen(const Half* p) {  // every finite number, subnormal ones too
  const UintReg raw = {p[0].bits, p[1].bits, p[2].bits, p[3].bits};
  const Reg size = reinterpret_cast<Reg>((raw & 0x7fff) << 13) * reg_splat(0x1p112f);
  return reinterpret_cast<Reg>(reinterpret_cast<UintReg>(size) | ((raw & 0x8000) << 16));
}
BATON_INLINE IntReg reg_words(const uint32_t* p) {
  IntReg words;
  std::memcpy(&words, p, sizeof words);
  return words;
}
BATON_INLINE Reg reg_nibble(IntReg words, int from) {
  return __builtin_convertvector((words >> from) & 15, Reg);
}
BATON_INLINE Reg reg_byte(IntReg words, int from) {
  const UintReg up = reinterpret_cast<UintReg>(words) << (24 - from);
  return __builtin_convertvector(reinterpret_cast<IntReg>(up) >> 24, Reg);
}

}  // namespace baton
