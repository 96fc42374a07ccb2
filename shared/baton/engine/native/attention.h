// Paged attention straight over the arena, for decoding rows and prompt chunks alike.
//
// Decides the arithmetic: keys are visited in tiles of absolute positions, from the first one a query
// sees to its own; a tile's scores, weights (rounded to the stored dtype) and weighted values are
// each one chain of multiply-adds, joined by the online softmax of Milakov & Gimelshein 2018. What a
// query must not see has weight exactly zero and changes nothing, so whether it is visited, and with
// whom a query shares a pass, does not matter: that is row invariance.
//
// K and V lie in the arena in the order in which a matrix product reads them ("lanes"), so nothing is
// rearranged before use: of one block, layer and head
//   K  [head_dim / s][block_size][s]      V  [block_size / s][head_dim][s]
// with s = 1 for float32 and 2 for bfloat16.
#pragma once

#include <atomic>
#include <cmath>
#include <limits>
#include <memory>

#include "gemm.h"

namespace baton {

// Keys of one tile. Part of the arithmetic: another value is another kernel set.
constexpr int kTile = 128;
// A tile is looked at in panels of one vector of keys; a block holds whole panels.
constexpr int kPanels = kTile / kLanes;
// Query rows (tokens x heads of one group) that pass a tile together.
constexpr int kQueryRows = 192;
constexpr float kNothingYet = -1e30f;

// The KV cache: a block is [layers][2][kv_heads], each part as above.
struct Layout {
  int layers, kv_heads, head_dim, block_size;

  ptrdiff_t head() const { return ptrdiff_t(head_dim) * block_size; }
  ptrdiff_t unit() const { return head() * kv_heads; }
  ptrdiff_t block() const { return unit() * 2 * layers; }
};

// One sequence's part of a step.
struct Row {
  int begin;       // place of its first token among the packed ones
  int count;       // tokens
  int start;       // position of the first
  int blocks_max;  // blocks of the arena
  const int32_t* blocks;
  void* arena;
};

struct AttentionKind {
  float scale;
  float softcap;  // 0: none
  int window;     // positions a query sees, itself included; 0: all
};

template <class T>
struct Kv {
  const Layout& layout;
  int layer;

  // K of a logical block, all heads; V follows it.
  T* keys(const Row& row, int block) const {
    return static_cast<T*>(row.arena) + row.blocks[block] * layout.block() +
           2 * layer * layout.unit();
  }
};

// Stores K and V of one token: float [kv_heads][head_dim] each.
template <class T>
void store_kv(const Kv<T>& kv, const Row& row, int position, const float* key, const float* value) {
  constexpr int step = Product<T>::kStep;
  const Layout& layout = kv.layout;
  const int size = layout.block_size, width = layout.head_dim, at = position % size;
  T* keys = kv.keys(row, position / size);
  T* values = keys + layout.unit();
  for (int head = 0; head < layout.kv_heads; ++head) {
    for (int d = 0; d < width; d += kLanes) {
      T k[kLanes], v[kLanes];
      store(k, load(key + head * width + d));
      store(v, load(value + head * width + d));
      for (int i = 0; i < kLanes; i += step)
        std::memcpy(keys + (d + i) * size + at * step, k + i, step * sizeof(T));
      for (int i = 0; i < kLanes; ++i) values[(at / step * width + d + i) * step + at % step] = v[i];
    }
    keys += layout.head();
    values += layout.head();
  }
}

// One thread's working memory.
template <class T>
struct AttentionScratch {
  int width;  // head_dim, whole vectors
  std::unique_ptr<char[]> memory;
  Act<T>* q;        // [kQueryRows][width]
  float* out;       // [kQueryRows][width]
  float* masses;    // [kQueryRows][16]
  float* tops;      // [kQueryRows]
  float* scores;    // [rows][kTile]
  Act<T>* weights;  // [rows][kTile]
  T* tail;          // [16 / s][width][s]: V of a panel that is not filled, zeros where nothing is

  explicit AttentionScratch(int head_dim) : width(head_dim) {
    constexpr int rows = Tile<T>::rows;
    size_t used = 0;
    auto part = [&](size_t bytes) {
      const size_t at = used;
      used += (bytes + 63) / 64 * 64;
      return at;
    };
    const size_t parts[] = {part(sizeof(Act<T>) * kQueryRows * width),
                            part(sizeof(float) * kQueryRows * width),
                            part(sizeof(float) * kQueryRows * kLanes),
                            part(sizeof(float) * kQueryRows),
                            part(sizeof(float) * rows * kTile),
                            part(sizeof(Act<T>) * rows * kTile),
                            part(sizeof(T) * kLanes * width)};
    memory.reset(new char[used + 64]);
    char* base = memory.get() + (64 - reinterpret_cast<uintptr_t>(memory.get()) % 64) % 64;
    q = reinterpret_cast<Act<T>*>(base + parts[0]);
    out = reinterpret_cast<float*>(base + parts[1]);
    masses = reinterpret_cast<float*>(base + parts[2]);
    tops = reinterpret_cast<float*>(base + parts[3]);
    scores = reinterpret_cast<float*>(base + parts[4]);
    weights = reinterpret_cast<Act<T>*>(base + parts[5]);
    tail = reinterpret_cast<T*>(base + parts[6]);
  }
};

// One head's panels of one tile, and what memory is asked for while they are used.
template <class T>
struct Panels {
  const T* keys[kPanels];    // K of 16 keys: rows of 16 * s, `stride` apart
  const T* values[kPanels];  // V of 16 keys: [16 / s][width][s]
  const T* next[kPanels];    // K that comes after this tile's V
  ptrdiff_t stride;
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
      const Act<T>* q = s.q + first * s.width;
      for (int d = 0; d < s.width; d += P::kStep, q += P::kStep) {
        typename P::B right[C];
        BATON_UNROLL for (int j = 0; j < C; ++j) {
          // A line of K is as many bytes as a line of V, and there are as many.
          if (Ahead) prefetch(tile.values[panel + j] + d * kLanes);
          right[j] = P::right(tile.keys[panel + j] + d / P::kStep * tile.stride);
        }
        BATON_UNROLL for (int i = 0; i < R; ++i) {
          const typename P::A left = P::left(q + i * s.width);
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
        const T* values = tile.values[panel] + column * P::kStep;
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

// Attention of some KV heads' query groups, for some tokens of one row.
struct Part {
  const Row& row;
  int head, heads;  // KV heads
  int from, tokens;
};

template <class T>
class PartAttention {
 public:
  PartAttention(const Kv<T>& kv, const AttentionKind& kind, const Part& part, int group,
                AttentionScratch<T>& scratch)
      : kv_(kv), kind_(kind), part_(part), group_(group), rows_(part.tokens * group),
        position_(part.row.start + part.from), s_(scratch) {}

  // `query` and `out` are float [tokens][query_stride], Out [tokens][out_stride], of the row.
  template <class Out>
  void run(const float* query, ptrdiff_t query_stride, Out* out, ptrdiff_t out_stride) {
    for (int i = 0; i < part_.heads * rows_; ++i)
      take_query(i, query + token_of(i) * query_stride + head_of(i) * s_.width);
    const int last = position_ + part_.tokens - 1;
    const int seen = kind_.window > 0 ? std::max(0, position_ - kind_.window + 1) : 0;
    for (int base = seen / kTile * kTile; base <= last; base += kTile) {
      const int keys = std::min(kTile, last + 1 - base);
      for (int head = 0; head < part_.heads; ++head) {
        find(base, keys, last, head);
        for (int i = 0; i < rows_;) {
          const int rows = pass_rows(rows_ - i, Tile<T>::rows);
          pass(base, head * rows_, i, rows);
          i += rows;
        }
      }
    }
    for (int i = 0; i < part_.heads * rows_; ++i)
      give(i, out + token_of(i) * out_stride + head_of(i) * s_.width);
  }

 private:
  // Query row i is [head][token][query head of the group].
  ptrdiff_t token_of(int i) const { return part_.from + i % rows_ / group_; }
  ptrdiff_t head_of(int i) const { return (part_.head + i / rows_) * group_ + i % group_; }

  void take_query(int i, const float* from) {
    for (int d = 0; d < s_.width; d += kLanes) {
      put<T>(s_.q + i * s_.width + d, load(from + d));
      store(s_.out + i * s_.width + d, splat(0.0f));
    }
    s_.tops[i] = kNothingYet;
    store(s_.masses + i * kLanes, splat(0.0f));
  }

  // Finds one head's panels of the tile's first `keys` positions.
  void find(int base, int keys, int last, int head) {
    const Layout& layout = kv_.layout;
    const ptrdiff_t offset = (part_.head + head) * layout.head();
    tile_.stride = ptrdiff_t(layout.block_size) * Product<T>::kStep;
    for (int panel = 0; panel * kLanes < keys; ++panel) {
      const int at = base + panel * kLanes;
      tile_.keys[panel] = keys_at(at) + offset;
      tile_.values[panel] = values_at(at) + offset;
      const int later = std::min(at + kTile, last);
      tile_.next[panel] = head + 1 < part_.heads ? tile_.keys[panel] + layout.head()
                                                 : keys_at(later) + part_.head * layout.head();
    }
    const int filled = keys % kLanes;
    if (filled == 0) return;
    // What nobody has written may be anything, and zero times that no number.
    const T*& values = tile_.values[keys / kLanes];
    std::memset(s_.tail, 0, sizeof(T) * kLanes * s_.width);
    constexpr int step = Product<T>::kStep;
    std::memcpy(s_.tail, values, sizeof(T) * (filled / step * step) * s_.width);
    if (filled % step)
      for (int d = 0; d < s_.width; ++d) {
        const ptrdiff_t i = (filled / step * s_.width + d) * step;
        s_.tail[i] = values[i];
      }
    values = s_.tail;
  }

  // The panel of a position, first head.
  const T* keys_at(int position) const {
    const int size = kv_.layout.block_size;
    return kv_.keys(part_.row, position / size) +
           position % size / kLanes * kLanes * Product<T>::kStep;
  }
  const T* values_at(int position) const {
    const int size = kv_.layout.block_size;
    return kv_.keys(part_.row, position / size) + kv_.layout.unit() +
           ptrdiff_t(position % size / kLanes * kLanes) * s_.width;
  }

  // Takes `rows` query rows of one head, from row `first` of the head, whose rows begin at `at`,
  // past the tile.
  void pass(int base, int at, int first, int rows) {
    const int lowest = position_ + first / group_;
    const int highest = position_ + (first + rows - 1) / group_;
    if (highest < base) return;
    if (kind_.window > 0 && base + kTile <= lowest - kind_.window + 1) return;
    const int keys = std::min(kTile, highest + 1 - base);
    const int panels = (keys + kLanes - 1) / kLanes;
    // One token's K and V are read once, so they come from memory, in order.
    const bool ahead = part_.tokens == 1;
    with_rows<Tile<T>::rows>(rows, Scores<T>{s_, tile_, at + first, panels, ahead});
    float factors[Tile<T>::rows];
    for (int i = 0; i < rows; ++i) {
      const int position = position_ + (first + i) / group_;
      const int high = std::min(kTile, position + 1 - base);
      const int low = kind_.window > 0 ? std::max(0, position - kind_.window + 1 - base) : 0;
      factors[i] = weigh(at + first + i, s_.scores + i * kTile, s_.weights + i * kTile,
                         panels * kLanes, std::min(low, kTile), std::max(high, 0));
    }
    with_rows<Tile<T>::rows>(rows, Values<T>{s_, tile_, at + first, panels, ahead, factors});
  }

  // Turns one row's scores into weights; keys outside low .. high get none. Returns what the sums so
  // far are to be multiplied by.
  float weigh(int i, float* scores, Act<T>* weights, int columns, int low, int high) {
    const F16 hidden = splat(-std::numeric_limits<float>::infinity());
    float scale = kind_.scale;
    if (kind_.softcap > 0) {
      const F16 inner = splat(kind_.scale / kind_.softcap), outer = splat(kind_.softcap);
      for (int c = 0; c < columns; c += kLanes)
        store(scores + c, outer * tanh(load(scores + c) * inner));
      scale = 1.0f;
    }
    F16 largest = hidden;
    for (int c = 0; c < columns; c += kLanes) {
      F16 line = load(scores + c);
      if (c < low || c + kLanes > high) {
        line = between(line, low - c, high - c, hidden);
        store(scores + c, line);
      }
      largest = max(line, largest);
    }
    const float before = s_.tops[i];
    const float now = std::max(before, top(largest) * (scale * kLog2E));
    const F16 factor = exp2(splat(before - now));
    const F16 steep = splat(scale * kLog2E), offset = splat(-now);
    F16 mass = load(s_.masses + i * kLanes) * factor;
    for (int c = 0; c < columns; c += kLanes) {
      const F16 weight = exp2(fma(load(scores + c), steep, offset));
      mass = mass + weight;
      put<T>(weights + c, weight);
    }
    s_.tops[i] = now;
    store(s_.masses + i * kLanes, mass);
    float scalar[kLanes];
    store(scalar, factor);
    return scalar[0];
  }

  template <class Out>
  void give(int i, Out* to) {
    const F16 share = splat(1.0f / sum(load(s_.masses + i * kLanes)));
    for (int d = 0; d < s_.width; d += kLanes)
      put_as<T>(to + d, load(s_.out + i * s_.width + d) * share);
  }

  const Kv<T>& kv_;
  const AttentionKind& kind_;
  const Part& part_;
  const int group_, rows_, position_;
  AttentionScratch<T>& s_;
  Panels<T> tile_;
};

// Attention of all rows of one layer, shared between threads by a counter. A row of one token is
// one part with several heads, so that its K and V are read in the order of memory; a prompt chunk is
// cut into parts of one head and as many tokens as pass a tile together.
template <class T>
class Attention {
 public:
  Attention(const Kv<T>& kv, const AttentionKind& kind, int heads, const Row* rows, int count,
            int threads)
      : kv_(kv), kind_(kind), rows_(rows), count_(count), group_(heads / kv.layout.kv_heads),
        tokens_(std::max(1, kQueryRows / group_)) {
    const int all = kv.layout.kv_heads;
    const int parts = std::min(all, (threads + count - 1) / count);
    heads_ = std::min(kQueryRows / group_, (all + parts - 1) / parts);
  }

  // Takes part until nothing is left. query: float [tokens][query_stride], out: Out [tokens]
  // [out_stride], both by place among the packed tokens.
  template <class Out>
  void take_part(AttentionScratch<T>& scratch, const float* query, ptrdiff_t query_stride,
                 Out* out, ptrdiff_t out_stride) {
    int passed = 0, r = 0;  // parts of the rows before row r
    while (r < count_) {
      const int number = next_.fetch_add(1, std::memory_order_relaxed);
      while (r < count_ && number >= passed + parts(rows_[r])) passed += parts(rows_[r++]);
      if (r == count_) return;
      const Row& row = rows_[r];
      const Part some = part(row, number - passed);
      PartAttention<T>(kv_, kind_, some, group_, scratch)
          .run(query + row.begin * query_stride, query_stride, out + row.begin * out_stride,
               out_stride);
    }
  }

 private:
  static int shares(int count, int size) { return (count + size - 1) / size; }

  int parts(const Row& row) const {
    const int all = kv_.layout.kv_heads;
    return row.count == 1 ? shares(all, heads_) : shares(row.count, tokens_) * all;
  }

  Part part(const Row& row, int number) const {
    const int all = kv_.layout.kv_heads;
    if (row.count == 1) {
      const int head = number * heads_;
      return {row, head, std::min(heads_, all - head), 0, 1};
    }
    // From the end: the last tokens see most, so what is left to the end is short.
    const int from = (shares(row.count, tokens_) - 1 - number / all) * tokens_;
    return {row, number % all, 1, from, std::min(tokens_, row.count - from)};
  }

  const Kv<T>& kv_;
  const AttentionKind& kind_;
  const Row* rows_;
  const int count_, group_, tokens_;
  int heads_;
  std::atomic<int> next_{0};
};

}  // namespace baton
