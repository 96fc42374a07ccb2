// Matrix products with packed weights: C[m, n] = A[m, k] * W[n, k]^T.
//
// Decides the packing and the order of a sum. Weights lie in groups of 32 columns, each group
// [k / kStep][32][kStep], so that a product of few rows reads memory as one stream. Every element of
// C is one chain of multiply-adds along k, whatever the number of rows, tile shape or thread: that
// is row invariance, and it costs nothing.
#pragma once

#include <algorithm>

#include "vec.h"

namespace baton {

constexpr int kGroup = 32;
// Rows that are taken through all groups together: what stays in the second-level cache.
constexpr int kRowsTogether = 240;

// The largest register tile has `rows` rows and is sixteen times `columns(rows)` wide: what the
// target's registers hold beside one step's right operands.
template <class T>
struct Tile {
#if defined(__AVX512F__)
  static constexpr int rows = 12;
  static constexpr int columns(int rows) { return rows <= 3 ? 8 : rows <= 6 ? 4 : 2; }
#elif defined(__AVX2__) || defined(__aarch64__)
  static constexpr int rows = sizeof(T) == 4 ? 6 : 4;
  static constexpr int columns(int rows) { return rows <= (sizeof(T) == 4 ? 3 : 1) ? 2 : 1; }
#else
  static constexpr int rows = 2;
  static constexpr int columns(int) { return 1; }
#endif
};

// Bytes that a stream of weights is asked for ahead, where few rows leave the memory waiting.
constexpr int kAhead = 6144;

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

template <int R, int C>
BATON_INLINE void clear(F16 (&sums)[R][C]) {
  BATON_UNROLL for (int i = 0; i < R; ++i)
    BATON_UNROLL for (int j = 0; j < C; ++j) sums[i][j] = splat(0.0f);
}

// Calls `call.run<R>()` for the R in 1 .. most that `rows` is: loops of fixed length need constants.
template <int R, class Call>
BATON_INLINE void with_rows(int rows, const Call& call) {
  if (rows == R) return call.template run<R>();
  if constexpr (R > 1) with_rows<R - 1>(rows, call);
}

template <class T>
struct Weights {
  const T* data;
  const float* bias;  // [n], or null
  int n;
  int k;  // a multiple of kStep

  int groups() const { return (n + kGroup - 1) / kGroup; }
  const T* group(int number) const { return data + ptrdiff_t(number) * k * kGroup; }
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
  void run() const {
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

// Rows of one pass when `left` rows are still to be done: even passes instead of a short last one.
inline int pass_rows(int left, int most) {
  const int passes = (left + most - 1) / most;
  return (left + passes - 1) / passes;
}

// Rows that go through all groups together when there are m: even shares, whole tiles.
inline int rows_together(int m, int tile) {
  const int shares = (m + kRowsTogether - 1) / kRowsTogether;
  const int rows = (m + shares - 1) / shares;
  return (rows + tile - 1) / tile * tile;
}

// Groups `first` .. `last` of A * W^T for m rows. `done(row, rows, group, block)` gets
// float [rows][32] of each tile, bias included.
template <class T, class Done>
void product(const Weights<T>& w, const Act<T>* a, ptrdiff_t lda, int m, int first, int last,
             const Done& done) {
  constexpr int most = Tile<T>::rows;
  const int together = rows_together(m, most);
  for (int begin = 0; begin < m; begin += together) {
    const int end = std::min(m, begin + together);
    for (int group = first; group < last; ++group) {
      for (int row = begin; row < end;) {
        const int rows = pass_rows(end - row, most);
        alignas(64) float block[most * kGroup];
        // One to three rows wait for memory anyway, and the hardware sees that one stream.
        const bool ahead = row == begin && rows > 3;
        with_rows<most>(
            rows, GroupRows<T>{a + row * lda, lda, w.group(group), w.k, ahead, block});
        if (w.bias) {
          for (int i = 0; i < rows; ++i)
            for (int j = 0; j < kGroup; ++j) block[i * kGroup + j] += w.bias[group * kGroup + j];
        }
        done(row, rows, group, block);
        row += rows;
      }
    }
  }
}

}  // namespace baton
