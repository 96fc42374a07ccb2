// Matrix products with packed weights: C[m, n] = A[m, k] * W[n, k]^T.
//
// Decides the packing of full weights and the order of a sum. Weights lie in groups of 32 columns,
// each group [k / kStep][32][kStep], so that a product of few rows reads memory as one stream. Every
// element of C is one chain of multiply-adds along k, whatever the number of rows, tile shape or
// thread: that is row invariance, and it costs nothing. Weights of 8 and 4 bits are `quant.h`'s; with
// tile registers those for bfloat16 are `gemm_amx.h`'s and `quant_amx.h`'s.
#pragma once

#include <utility>

#include "gemm_amx.h"
#include "quant_amx.h"

namespace baton {

// Whether codes of 8 or 4 bits are rounded to the dtype before they are multiplied.
template <class T>
constexpr bool kCodesRounded = false;
#if defined(__AMX_BF16__)
template <>
constexpr bool kCodesRounded<Bf16> = true;
#endif

// sums[R][C] += A[R, steps * kStep] * B; B's steps are `ldb` elements apart.
template <class T, int R, int C, bool Ahead = false>
BATON_INLINE void multiply(const Act<T>* a, ptrdiff_t lda, const T* b, ptrdiff_t ldb, int steps,
                           F16 (&sums)[R][C]) {
  using P = Product<T>;
  for (int step = 0; step < steps; ++step) {
    if constexpr (Ahead) {
      BATON_UNROLL for (int byte = 0; byte < int(C * kLanes * P::kStep * sizeof(T)); byte += 64)
        prefetch(reinterpret_cast<const char*>(b) + kAhead + byte);
    }
    typename P::B right[C];
    BATON_UNROLL for (int j = 0; j < C; ++j) right[j] = P::right(b + j * kLanes * P::kStep);
    BATON_UNROLL for (int i = 0; i < R; ++i) {
      const typename P::A left = P::left(a + i * lda);
      BATON_UNROLL for (int j = 0; j < C; ++j) P::add(sums[i][j], left, right[j]);
    }
    a += P::kStep;
    b += ldb;
  }
}

template <class T>
struct Weights {
  const void* data;
  const float* bias;  // [n], or null
  int n;
  int k;     // a multiple of kStep; of kShared where they are quantised
  int kind;  // a WeightKind

  int groups() const { return (n + kGroup - 1) / kGroup; }
};

// Some rows of one group into block[rows][32].
template <class T>
struct GroupRows {
  const Act<T>* a;
  ptrdiff_t lda;
  const T* b;
  int k;
  bool ahead;
  float* block;

  template <int R>
  BATON_ONCE void run() const {
    ahead ? columns<R, true>() : columns<R, false>();
  }
  template <int R, bool Ahead>
  void columns() const {
    using P = Product<T>;
    constexpr int C = std::min(Tile<T>::columns(R), kGroup / kLanes);
    for (int column = 0; column < kGroup; column += C * kLanes) {
      F16 sums[R][C];
      clear(sums);
      multiply<T, R, C, Ahead>(a, lda, b + column * P::kStep, kGroup * P::kStep, k / P::kStep,
                               sums);
      BATON_UNROLL for (int i = 0; i < R; ++i)
        BATON_UNROLL for (int j = 0; j < C; ++j)
          store(block + i * kGroup + column + j * kLanes, sums[i][j]);
    }
  }
};

template <class T>
struct FullProduct {
  const Weights<T>& w;
  const Act<T>* a;
  ptrdiff_t lda;

  void begin(int, int) {}
  void tile(int row, int rows, int group, bool ahead, float* block) const {
    const T* right = static_cast<const T*>(w.data) + ptrdiff_t(group) * w.k * kGroup;
    with_rows<Tile<T>::rows>(rows,
                             GroupRows<T>{a + row * lda, lda, right, w.k, ahead, block});
  }
};

// Groups of A * W^T for m rows: those [first, last) that `next(first, last)` gives until it is false;
// for `done` see `each_tile`.
template <class T, class Next, class Done>
void product(const Weights<T>& w, const Act<T>* a, ptrdiff_t lda, int m, Next&& next,
             const Done& done) {
  int first, last;
  if (!next(first, last)) return;
  const auto quantised = [&](auto codes) {
#if defined(__AMX_BF16__)
    if constexpr (kCodesRounded<T>) {
      TileProduct<SlabRight<decltype(codes)>> of(a, lda, w.data, w.k);
      do of.run(m, first, last, w.bias, done);
      while (next(first, last));
      return;
    }
#endif
    SlabProduct<T, decltype(codes)> of(w.data, a, lda, m, w.k);
    do each_tile<kSlabRows>(m, first, last, w.bias, of, done);
    while (next(first, last));
  };
  switch (w.kind) {
    case kInt4:
      return quantised(Int4{});
    case kInt8:
      return quantised(Int8{});
    default:
#if defined(__AMX_BF16__)
      if constexpr (std::is_same_v<T, Bf16>) {
        TileProduct<FullRight> of(a, lda, w.data, w.k);
        do of.run(m, first, last, w.bias, done);
        while (next(first, last));
        return;
      }
#endif
      FullProduct<T> of{w, a, lda};
      do each_tile<Tile<T>::rows>(m, first, last, w.bias, of, done);
      while (next(first, last));
  }
}

// All groups in one piece.
struct AllGroups {
  int left;
  bool operator()(int& first, int& last) {
    first = 0, last = std::exchange(left, 0);
    return last > 0;
  }
};

}  // namespace baton
