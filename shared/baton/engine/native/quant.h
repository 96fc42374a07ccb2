// Matrix products with weights of 8 or 4 bits: C[m, n] = A[m, k] * W[n, k]^T.
//
// Decides how such weights lie and what is computed from them. Along k every 32 elements of a column
// share a scale (and, of 4 bits, a least value): w = scale * code + least. Codes are whole numbers
// that bfloat16 holds exactly, so nothing is rounded when they are unpacked: 32 codes are multiplied
// and summed as the left operand's dtype is, then the scale is applied, then the least value times
// the sum of the 32 left elements; both in float32. One chain of these for every number of rows, so a
// row's result is its own here too.
//
// A *slab* is what 32 columns have of 32 elements along k, contiguous, slab after slab along k:
//   Half scale[32];  Half least[32] (4 bits only);  uint32_t words[...][32]
// A word holds 8 (4 bits) or 4 (8 bits) elements of one column; of each pair the first one lies in
// the lower half of the word.
#pragma once

#include <type_traits>

#include "buffer.h"
#include "tile.h"

namespace baton {

// Elements along k that share a scale.
constexpr int kShared = 32;
constexpr int kSharedPairs = kShared / 2;

enum WeightKind { kFull = 0, kInt8 = 1, kInt4 = 2 };

// Rows of the largest tile.
constexpr int kSlabRows = Tile<Bf16>::rows;
// From so many rows on a group is unpacked once, for all of its tiles.
constexpr int kRowsUnpacked = 2 * kSlabRows + 1;

template <class T>
struct Pairs : FloatPairs {};
#if defined(__AVX512BF16__)
template <>
struct Pairs<Bf16> : Product<Bf16> {};
#endif

struct Words {
  IntReg r[kRegs];
};

struct CodesBase {
  static BATON_INLINE Words load(const uint32_t* p) {
    Words out;
    BATON_EACH out.r[i] = reg_words(p + i * kRegLanes);
    return out;
  }
};

struct Int4 : CodesBase {
  static constexpr bool kLeast = true;
  static constexpr int kPairs = 4;  // of a word
  static BATON_INLINE FloatPairs::B pair(const Words& words, int number, const FloatPairs*) {
    FloatPairs::B out;
    BATON_EACH {
      out.first.r[i] = reg_nibble(words.r[i], 4 * number);
      out.second.r[i] = reg_nibble(words.r[i], 16 + 4 * number);
    }
    return out;
  }
#if defined(__AVX512BF16__)
  // Both halves of a word are looked up at once; of an index the lowest five bits count, and the
  // fifth is the next code's, so the table stands there twice.
  static BATON_INLINE __m512bh pair(const Words& words, int number, const Product<Bf16>*) {
    alignas(64) static constexpr uint16_t kCodes[32] = {
        0,      0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120,
        0x4130, 0x4140, 0x4150, 0x4160, 0x4170, 0,      0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0,
        0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170};
    const IntReg which = _mm512_srli_epi32(words.r[0], 4 * number);
    return (__m512bh)_mm512_permutexvar_epi16(which, _mm512_load_si512(kCodes));
  }
#endif
};

struct Int8 : CodesBase {
  static constexpr bool kLeast = false;
  static constexpr int kPairs = 2;
  static BATON_INLINE FloatPairs::B pair(const Words& words, int number, const FloatPairs*) {
    FloatPairs::B out;
    BATON_EACH {
      out.first.r[i] = reg_byte(words.r[i], 8 * number);
      out.second.r[i] = reg_byte(words.r[i], 16 + 8 * number);
    }
    return out;
  }
#if defined(__AVX512BF16__)
  static BATON_INLINE __m512bh pair(const Words& words, int number, const Product<Bf16>*) {
    const IntReg first = _mm512_castps_si512(reg_byte(words.r[0], 8 * number));
    const IntReg second = _mm512_castps_si512(reg_byte(words.r[0], 16 + 8 * number));
    // A code's float has its lower half empty.
    return (__m512bh)_mm512_or_si512(_mm512_srli_epi32(first, 16), second);
  }
#endif
};

// Unpacked before, for many rows.
template <class T>
struct Unpacked {
  using B = typename Pairs<T>::B;
  static constexpr int kPairs = 1;
  static BATON_INLINE B load(const B* p) { return *p; }
  static BATON_INLINE B pair(const B& b, int, const void*) { return b; }
};

template <class Q>
struct Slab {
  static constexpr int kWords = kSharedPairs / Q::kPairs;
  Half scale[kGroup];
  Half least[Q::kLeast ? kGroup : 0];
  uint32_t words[kWords][kGroup];
};

// block[R][C * 16] += A[R, 32] * one slab. `codes` are the slab's own words, or unpacked pairs, whose
// vectors of one step are `step` apart; `sums` are those of the 32 left elements of each row.
template <class T, class Q, class Codes, int R, int C, class Code>
BATON_INLINE void multiply_slab(const Act<T>* a, ptrdiff_t lda, const Code* codes, int step,
                                const Slab<Q>& slab, int column, const float* sums,
                                ptrdiff_t sums_step, float* block) {
  using P = Pairs<T>;
  F16 partial[R][C];
  clear(partial);
  for (int word = 0; word < kSharedPairs / Codes::kPairs; ++word) {
    decltype(Codes::load(codes)) raw[C];
    BATON_UNROLL for (int j = 0; j < C; ++j) raw[j] = Codes::load(codes + j * step);
    codes += kGroup / kLanes * step;
    BATON_UNROLL for (int number = 0; number < Codes::kPairs; ++number) {
      typename P::B right[C];
      BATON_UNROLL for (int j = 0; j < C; ++j)
        right[j] = Codes::pair(raw[j], number, static_cast<const P*>(nullptr));
      BATON_UNROLL for (int i = 0; i < R; ++i) {
        const typename P::A left = P::left(a + i * lda);
        BATON_UNROLL for (int j = 0; j < C; ++j) P::add(partial[i][j], left, right[j]);
      }
      a += 2;
    }
  }
  BATON_UNROLL for (int j = 0; j < C; ++j) {
    const int at = column + j * kLanes;
    const F16 scale = load(slab.scale + at);
    F16 least{};
    if constexpr (Q::kLeast) least = load(slab.least + at);
    BATON_UNROLL for (int i = 0; i < R; ++i) {
      float* out = block + i * kGroup + at;
      F16 sum = fma(scale, partial[i][j], load(out));
      if constexpr (Q::kLeast) sum = fma(splat(sums[i * sums_step]), least, sum);
      store(out, sum);
    }
  }
}

// Some rows of one group of 32 columns into block[rows][32].
template <class T, class Q, class Codes>
struct SlabRows {
  using B = typename Pairs<T>::B;
  const Act<T>* a;
  ptrdiff_t lda;
  const Slab<Q>* slabs;
  const B* unpacked;  // [k / 2][2], or null
  int count;          // slabs
  const float* sums;  // [rows][count]
  bool ahead;
  float* block;

  template <int R>
  BATON_ONCE void run() const {
    constexpr int C = std::min(Tile<Bf16>::columns(R), kGroup / kLanes);
    std::memset(block, 0, R * kGroup * sizeof(float));
    for (int column = 0; column < kGroup; column += C * kLanes) {
      for (int s = 0; s < count; ++s) {
        const Slab<Q>& slab = slabs[s];
        if (ahead) {
          BATON_UNROLL for (int line = 0; line < int(sizeof slab); line += 64)
            prefetch(reinterpret_cast<const char*>(&slab) + kAhead + line);
        }
        const Act<T>* left = a + s * kShared;
        if constexpr (std::is_same_v<Codes, Q>) {
          multiply_slab<T, Q, Q, R, C>(left, lda, slab.words[0] + column, kLanes, slab, column,
                                       sums + s, count, block);
        } else {
          const B* codes = unpacked + (s * kSharedPairs * kGroup + column) / kLanes;
          multiply_slab<T, Q, Codes, R, C>(left, lda, codes, 1, slab, column, sums + s, count,
                                           block);
        }
      }
    }
  }
};

// All pairs of one group, as Unpacked reads them: [k / 2][2].
template <class T, class Q>
void unpack(const Slab<Q>* slabs, int count, typename Pairs<T>::B* out) {
  for (int s = 0; s < count; ++s)
    for (const auto& line : slabs[s].words) {
      const Words left = Q::load(line), right = Q::load(line + kLanes);
      BATON_UNROLL for (int number = 0; number < Q::kPairs; ++number) {
        *out++ = Q::pair(left, number, static_cast<const Pairs<T>*>(nullptr));
        *out++ = Q::pair(right, number, static_cast<const Pairs<T>*>(nullptr));
      }
    }
}

// sums[m][count]: of each 32 elements of A.
template <class T>
void sum_shared(const Act<T>* a, ptrdiff_t lda, int m, int count, float* sums) {
  for (int i = 0; i < m; ++i)
    for (int s = 0; s < count; ++s) {
      const Act<T>* p = a + i * lda + s * kShared;
      *sums++ = sum(load(p) + load(p + kLanes));
    }
}

// A product with quantised weights, for `each_tile`.
template <class T, class Q>
class SlabProduct {
 public:
  SlabProduct(const void* data, const Act<T>* a, ptrdiff_t lda, int m, int k)
      : slabs_(static_cast<const Slab<Q>*>(data)), a_(a), lda_(lda), count_(k / kShared) {
    thread_local Buffer<float> sums;
    sums_ = sums.sized(size_t(m) * count_);
    if constexpr (Q::kLeast) sum_shared<T>(a, lda, m, count_, sums_);
  }

  void begin(int group, int rows) {
    unpacked_ = nullptr;
    if (rows < kRowsUnpacked) return;
    thread_local Buffer<B> memory;
    unpacked_ = memory.sized(size_t(count_) * kSharedPairs * kGroup / kLanes);
    unpack<T, Q>(of(group), count_, unpacked_);
  }

  void tile(int row, int rows, int group, bool ahead, float* block) const {
    const Act<T>* left = a_ + row * lda_;
    const float* sums = sums_ + ptrdiff_t(row) * count_;
    if (unpacked_)
      // Even passes of more than two whole tiles have at least half a tile.
      with_rows<kSlabRows, kSlabRows / 2>(
          rows, SlabRows<T, Q, Unpacked<T>>{left, lda_, of(group), unpacked_, count_, sums, false,
                                            block});
    else
      with_rows<kSlabRows>(rows, SlabRows<T, Q, Q>{left, lda_, of(group), nullptr, count_, sums,
                                                   ahead, block});
  }

 private:
  using B = typename Pairs<T>::B;
  const Slab<Q>* of(int group) const { return slabs_ + ptrdiff_t(group) * count_; }

  const Slab<Q>* slabs_;
  const Act<T>* a_;
  ptrdiff_t lda_;
  int count_;  // slabs of a group
  float* sums_;
  B* unpacked_ = nullptr;
};

}  // namespace baton
