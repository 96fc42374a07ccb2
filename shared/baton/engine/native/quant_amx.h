// Products with weights of 8 or 4 bits on tile registers.
//
// Decides that codes become bfloat16 weights before they are multiplied: scale * code is exact in
// float32, and what comes of adding the least value is rounded once. So weights that were rounded to
// bfloat16 from such codes are found again, and a product has the bits that it has with them. (Scaling
// sums of 32 instead, as `quant.h` does, takes longer than the tiles themselves.) Every 32 elements
// along k that share a scale are one step of tiles. One row takes the same way as many.
#pragma once

#include "gemm_amx.h"
#include "quant.h"

#if defined(__AMX_BF16__)

namespace baton {

static_assert(kShared == kTileDepth, "a slab is one step of tiles");

// Codes stand a column a lane; a line of tiles wants both elements of a pair side by side, and a
// conversion joins two registers end to end. So eight columns (`half` 0: the first ones) take a register,
// each of them two lanes: its first element and its second one.
struct EightColumns {
  BATON_INLINE IntReg of(IntReg values, int half) const {
    return _mm512_permutexvar_epi32(lanes[half], values);
  }
  BATON_INLINE Reg of(Reg values, int half) const {
    return _mm512_permutexvar_ps(lanes[half], values);
  }
  // A constant that would be read from memory each time otherwise, which makes long code of a loop.
  template <class V>
  static BATON_INLINE V held(V value) {
    asm("" : "+v"(value));
    return value;
  }

  const IntReg lanes[2] = {
      held(_mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0)),
      held(_mm512_set_epi32(15, 15, 14, 14, 13, 13, 12, 12, 11, 11, 10, 10, 9, 9, 8, 8))};
};

// What is done to a word of codes. `codes(word, half, number)`: pair `number` of eight columns, as whole
// numbers times `kUnit`.
template <class Q>
struct Codes;
template <>
struct Codes<Int4> {
  static constexpr float kUnit = 1.0f;
  struct Word {
    IntReg half[2];
  };
  BATON_INLINE Word word(IntReg words) const {
    return {{columns.of(words, 0), columns.of(words, 1)}};
  }
  BATON_INLINE Reg codes(const Word& word, int half, int number) const {
    // Of an index the lowest four bits count.
    return _mm512_permutexvar_ps(_mm512_srlv_epi32(word.half[half], down[number]), numbers);
  }
  static BATON_INLINE IntReg bits(int64_t first, int64_t second) {
    return EightColumns::held(_mm512_set1_epi64(second << 32 | first));
  }
  const EightColumns columns;
  const Reg numbers = EightColumns::held(
      _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0));
  const IntReg down[Int4::kPairs] = {bits(0, 16), bits(4, 20), bits(8, 24), bits(12, 28)};
};
template <>
struct Codes<Int8> {
  static constexpr float kUnit = 1 << 24;  // a code is the highest byte of its lane
  using Word = IntReg;
  BATON_INLINE Word word(IntReg words) const { return words; }
  BATON_INLINE Reg codes(Word word, int half, int number) const {
    constexpr __mmask64 kHighest = 0x8888888888888888;
    return _mm512_cvtepi32_ps(
        _mm512_maskz_permutexvar_epi8(kHighest, bytes[half][number], word));
  }
  static BATON_INLINE IntReg from(int half, int number) {
    alignas(64) uint8_t bytes[64];
    for (int i = 0; i < 64; ++i) {
      const int column = i / 8 + 8 * half, second = i / 4 % 2;
      bytes[i] = uint8_t(4 * column + 2 * second + number);
    }
    return EightColumns::held(_mm512_load_si512(bytes));
  }
  const IntReg bytes[2][Int8::kPairs] = {{from(0, 0), from(0, 1)}, {from(1, 0), from(1, 1)}};
};

// One slab as two tiles, [16][32][2]; its like `kAhead` bytes on is asked for.
template <class Q>
BATON_INLINE void round_slab(const Slab<Q>& slab, Bf16* out) {
  const EightColumns columns;
  const Codes<Q> kind;
  BATON_UNROLL for (int line = 0; line < int(offsetof(Slab<Q>, words)); line += 64)
    prefetch(reinterpret_cast<const char*>(&slab) + kAhead + line);
  for (int column = 0; column < kGroup; column += kLanes) {
    const Reg scales = reg_widen(slab.scale + column) * reg_splat(1 / kind.kUnit);
    const Reg scale[2] = {columns.of(scales, 0), columns.of(scales, 1)};
    Reg least[2];
    if constexpr (Q::kLeast) {
      const Reg leasts = reg_widen(slab.least + column);
      least[0] = columns.of(leasts, 0), least[1] = columns.of(leasts, 1);
    }
    const auto weights = [&](const auto& word, int half, int number) {
      const Reg codes = kind.codes(word, half, number);
      if constexpr (Q::kLeast) return reg_fma(codes, scale[half], least[half]);
      return codes * scale[half];
    };
    Bf16* line = out + 2 * column;
    for (const auto& words : slab.words) {
      const auto word = kind.word(reg_words(words + column));
      prefetch(reinterpret_cast<const char*>(words + column) + kAhead);
      BATON_UNROLL for (int number = 0; number < Q::kPairs; ++number, line += 2 * kGroup) {
        const __m512bh rounded =
            _mm512_cvtne2ps_pbh(weights(word, 1, number), weights(word, 0, number));
        _mm512_storeu_si512(line, (IntReg)rounded);
      }
    }
  }
}

// Groups of slabs, for `TileProduct`.
template <class Q>
class SlabRight {
 public:
  SlabRight(const void* data, int k)
      : slabs_(static_cast<const Slab<Q>*>(data)), count_(k / kShared) {}

  void find(int group, int passes) {
    group_ = slabs_ + ptrdiff_t(group) * count_;
    once_ = passes == 1;
    thread_local Buffer<Bf16> memory;
    rounded_ = memory.sized(size_t(once_ ? kRing : count_) * kSlab);
    if (once_) {
      round_next(0);
    } else {
      for (int s = 0; s < count_; ++s) round_slab(group_[s], rounded_ + s * kSlab);
    }
  }

  BATON_INLINE const Bf16* step(int at) {
    const int s = at / kShared;
    if (!once_) return rounded_ + s * kSlab;
    round_next(s + 1);
    return rounded_ + s % kRing * kSlab;
  }

  void rest(int, Bf16*) const {}  // k is a multiple of `kShared`

 private:
  static constexpr int kRing = 2;
  static constexpr ptrdiff_t kSlab = kShared * kGroup;

  // Slab `s`, while the tiles of the one before are multiplied.
  BATON_INLINE void round_next(int s) {
    if (s < count_) round_slab(group_[s], rounded_ + s % kRing * kSlab);
  }

  const Slab<Q>* slabs_;
  int count_;  // slabs of a group
  const Slab<Q>* group_ = nullptr;
  bool once_ = true;
  Bf16* rounded_ = nullptr;
};

}  // namespace baton

#endif
