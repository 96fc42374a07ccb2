// How a matrix product is cut into register tiles, whatever its weights look like.
//
// Decides shapes only. Weights lie in groups of 32 columns; every tile is some rows of one group.
#pragma once

#include <algorithm>

#include "vec.h"

namespace baton {

constexpr int kGroup = 32;
// Rows that are taken through all groups together: what stays in the second-level cache.
constexpr int kRowsTogether = 240;
// Bytes that a stream of weights is asked for ahead, where few rows leave the memory waiting.
constexpr int kAhead = 6144;

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

template <int R, int C>
BATON_INLINE void clear(F16 (&sums)[R][C]) {
  BATON_UNROLL for (int i = 0; i < R; ++i)
    BATON_UNROLL for (int j = 0; j < C; ++j) sums[i][j] = splat(0.0f);
}

// Calls `call.run<R>()` for the R in Least .. most that `rows` is: loops of fixed length need
// constants.
template <int R, int Least = 1, class Call>
BATON_INLINE void with_rows(int rows, const Call& call) {
  if (rows == R) return call.template run<R>();
  if constexpr (R > Least) with_rows<R - 1, Least>(rows, call);
}

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

// Takes m rows through groups `first` .. `last`. `product.begin(group, rows)` comes before the tiles
// of a group, `product.tile(row, rows, group, ahead, block)` fills float [rows][32], and
// `done(row, rows, group, block)` gets it, bias (or null) included.
template <int Most, class Product, class Done>
void each_tile(int m, int first, int last, const float* bias, Product& product, const Done& done) {
  const int together = rows_together(m, Most);
  for (int begin = 0; begin < m; begin += together) {
    const int end = std::min(m, begin + together);
    for (int group = first; group < last; ++group) {
      product.begin(group, end - begin);
      for (int row = begin; row < end;) {
        const int rows = pass_rows(end - row, Most);
        alignas(64) float block[Most * kGroup];
        // One to three rows wait for memory anyway, and the hardware sees that one stream.
        product.tile(row, rows, group, row == begin && rows > 3, block);
        if (bias) {
          for (int i = 0; i < rows; ++i)
            for (int j = 0; j < kGroup; ++j) block[i * kGroup + j] += bias[group * kGroup + j];
        }
        done(row, rows, group, block);
        row += rows;
      }
    }
  }
}

}  // namespace baton
