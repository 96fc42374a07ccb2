// What attention computes of some query rows and one tile of keys: scores, and weighted values.
//
// Decides register tiles and what memory is asked for meanwhile; where keys and values come from, which
// of them a query sees and what their weights are is `attention.h`'s.
#pragma once

#include "buffer.h"
#include "gemm.h"

namespace baton {

// Keys of one tile. Part of the arithmetic: another value is another kernel set.
constexpr int kTile = 128;
// A tile is looked at in panels of one vector of keys; a block holds whole panels.
constexpr int kPanels = kTile / kLanes;
// Query rows (tokens x heads of one group) that pass a tile together.
constexpr int kQueryRows = 192;

template <class T>
struct AttentionScratch;
template <class T>
struct Panels;

// How query rows pass a tile: shapes here, `scores` and `values` below, after what they read.
template <class T>
class Passes {
 public:
  static constexpr int kMost = Tile<T>::rows;  // query rows of one pass
  static constexpr int kDepth = kLanes;        // a query is filled up with zeros to a multiple of it
  static constexpr int kTogether = kLanes;     // keys whose values stand together

  static int pass(int left) { return pass_rows(left, kMost); }
  void scores(const AttentionScratch<T>& s, const Panels<T>& tile, int first, int rows, int panels,
              bool ahead) const;
  void values(const AttentionScratch<T>& s, const Panels<T>& tile, int first, int rows, int panels,
              bool ahead, const float* factors) const;
};

// One thread's working memory.
template <class T>
struct AttentionScratch {
  int width;  // head_dim, whole vectors
  int depth;  // of a query
  Memory memory;
  Act<T>* q;        // [kQueryRows][depth]
  float* out;       // [kQueryRows][width]
  float* masses;    // [kQueryRows][16]
  float* tops;      // [kQueryRows], and a vector may be read at its end
  float* scores;    // [rows][kTile]
  Act<T>* weights;  // [rows][kTile]
  T* joined;        // V of keys that do not stand together in the arena, or are not all there

  explicit AttentionScratch(int head_dim)
      : width(head_dim),
        depth((head_dim + Passes<T>::kDepth - 1) / Passes<T>::kDepth * Passes<T>::kDepth) {
    constexpr int rows = Passes<T>::kMost;
    size_t used = 0;
    auto part = [&](size_t bytes) {
      const size_t at = used;
      used += (bytes + 63) / 64 * 64;
      return at;
    };
    const size_t parts[] = {part(sizeof(Act<T>) * kQueryRows * depth),
                            part(sizeof(float) * kQueryRows * width),
                            part(sizeof(float) * kQueryRows * kLanes),
                            part(sizeof(float) * (kQueryRows + kLanes)),
                            part(sizeof(float) * rows * kTile),
                            part(sizeof(Act<T>) * rows * kTile),
                            part(sizeof(T) * kTile * width)};
    memory = Memory(used);
    char* base = memory.start();
    q = reinterpret_cast<Act<T>*>(base + parts[0]);
    out = reinterpret_cast<float*>(base + parts[1]);
    masses = reinterpret_cast<float*>(base + parts[2]);
    tops = reinterpret_cast<float*>(base + parts[3]);
    scores = reinterpret_cast<float*>(base + parts[4]);
    weights = reinterpret_cast<Act<T>*>(base + parts[5]);
    joined = reinterpret_cast<T*>(base + parts[6]);
  }
};

// One head's panels of one tile, and what memory is asked for while they are used.
template <class T>
struct Panels {
  const T* keys[kPanels];      // K of 16 keys: rows of 16 * s, `stride` apart
  const T* values[kPanels];    // V of 16 keys: [16 / s][width][s]
  const T* together[kPanels];  // V of `kTogether` keys: the same, and zeros where nothing is
  const T* next[kPanels];      // K that comes after this tile's V
  ptrdiff_t stride;
  int found;  // panels
};

// scores[R][16 * panels] of R query rows.
template <class T>
struct Scores {
  const AttentionScratch<T>& s;
  const Panels<T>& tile;
  int first;  // query row
  int panels;
  bool ahead;

  template <int R>
  void run() const {
    ahead ? some<R, Tile<T>::columns(R), true>(0) : some<R, Tile<T>::columns(R), false>(0);
  }
  template <int R, int C, bool Ahead>
  void some(int panel) const {
    using P = Product<T>;
    for (; panel + C <= panels; panel += C) {
      F16 sums[R][C];
      clear(sums);
      const Act<T>* q = s.q + first * s.depth;
      for (int d = 0; d < s.width; d += P::kStep, q += P::kStep) {
        typename P::B right[C];
        BATON_UNROLL for (int j = 0; j < C; ++j) {
          // A line of K is as many bytes as a line of V, and there are as many.
          if (Ahead) prefetch(tile.values[panel + j] + d * kLanes);
          right[j] = P::right(tile.keys[panel + j] + d / P::kStep * tile.stride);
        }
        BATON_UNROLL for (int i = 0; i < R; ++i) {
          const typename P::A left = P::left(q + i * s.depth);
          BATON_UNROLL for (int j = 0; j < C; ++j) P::add(sums[i][j], left, right[j]);
        }
      }
      BATON_UNROLL for (int i = 0; i < R; ++i)
        BATON_UNROLL for (int j = 0; j < C; ++j)
          store(s.scores + i * kTile + (panel + j) * kLanes, sums[i][j]);
    }
    if constexpr (C > 1) some<R, C / 2, Ahead>(panel);
  }
};

// out[R][width] = out * factor + weights * values.
template <class T>
struct Values {
  const AttentionScratch<T>& s;
  const Panels<T>& tile;
  int first;  // query row
  int panels;
  bool ahead;
  const float* factors;

  template <int R>
  void run() const {
    ahead ? some<R, Tile<T>::columns(R), true>(0) : some<R, Tile<T>::columns(R), false>(0);
  }
  template <int R, int C, bool Ahead>
  void some(int column) const {
    using P = Product<T>;
    for (; column + C * kLanes <= s.width; column += C * kLanes) {
      float* out = s.out + first * s.width + column;
      F16 sums[R][C];
      BATON_UNROLL for (int i = 0; i < R; ++i) {
        const F16 factor = splat(factors[i]);
        BATON_UNROLL for (int j = 0; j < C; ++j)
          sums[i][j] = load(out + i * s.width + j * kLanes) * factor;
      }
      for (int panel = 0; panel < panels; ++panel) {
        const T* values = tile.together[panel] + column * P::kStep;
        const T* next = tile.next[panel] + column / kLanes * tile.stride;
        const Act<T>* weights = s.weights + panel * kLanes;
        for (int key = 0; key < kLanes; key += P::kStep) {
          if constexpr (Ahead) {
            BATON_UNROLL for (int j = 0; j < C; ++j) prefetch(next + j * tile.stride);
            next += s.width / kLanes * tile.stride;
          }
          typename P::B right[C];
          BATON_UNROLL for (int j = 0; j < C; ++j)
            right[j] = P::right(values + key * s.width + j * kLanes * P::kStep);
          BATON_UNROLL for (int i = 0; i < R; ++i) {
            const typename P::A left = P::left(weights + i * kTile + key);
            BATON_UNROLL for (int j = 0; j < C; ++j) P::add(sums[i][j], left, right[j]);
          }
        }
      }
      BATON_UNROLL for (int i = 0; i < R; ++i)
        BATON_UNROLL for (int j = 0; j < C; ++j)
          store(out + i * s.width + j * kLanes, sums[i][j]);
    }
    if constexpr (C > 1) some<R, C / 2, Ahead>(column);
  }
};

template <class T>
void Passes<T>::scores(const AttentionScratch<T>& s, const Panels<T>& tile, int first, int rows,
                       int panels, bool ahead) const {
  with_rows<kMost>(rows, Scores<T>{s, tile, first, panels, ahead});
}

template <class T>
void Passes<T>::values(const AttentionScratch<T>& s, const Panels<T>& tile, int first, int rows,
                       int panels, bool ahead, const float* factors) const {
  with_rows<kMost>(rows, Values<T>{s, tile, first, panels, ahead, factors});
}

}  // namespace baton
