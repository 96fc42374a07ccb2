// Paged attention straight over the arena, for decoding rows and prompt chunks alike.
//
// Decides the arithmetic: keys are visited in tiles of absolute positions, from the first one a query
// sees to its own; a tile's scores, weights (rounded to the stored dtype) and weighted values are
// each one chain of multiply-adds, joined by the online softmax of Milakov & Gimelshein 2018. What a
// query must not see has weight exactly zero and changes nothing, so whether it is visited, and with
// whom a query shares a pass, does not matter: that is row invariance. (With tile registers the chains
// are theirs, see `amx.h`.)
//
// K and V lie in the arena in the order in which a matrix product reads them ("lanes"), so nothing is
// rearranged before use: of one block, layer and head
//   K  [head_dim / s][block_size][s]      V  [block_size / s][head_dim][s]
// with s = 1 for float32 and 2 for bfloat16.
#pragma once

#include <atomic>
#include <cmath>
#include <limits>

#include "passes_amx.h"
#include "pool.h"

namespace baton {

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
          const int rows = Passes<T>::pass(rows_ - i);
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
      put<T>(s_.q + i * s_.depth + d, load(from + d));
      store(s_.out + i * s_.width + d, splat(0.0f));
    }
    for (int d = s_.width; d < s_.depth; d += kLanes) put<T>(s_.q + i * s_.depth + d, splat(0.0f));
    s_.tops[i] = kNothingYet;
    store(s_.masses + i * kLanes, splat(0.0f));
  }

  // Finds one head's panels of the tile's first `keys` positions, but does not read them yet.
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
    if (part_.tokens > 1) ask_for(base + kTile, last, offset);
    tile_.found = (keys + kLanes - 1) / kLanes;
    keys_ = keys;
    joined_ = false;
  }

  // Asks memory for K and V of the next tile: pieces of blocks, far from each other.
  void ask_for(int base, int last, ptrdiff_t offset) const {
    constexpr int line = 64 / sizeof(T), panel = Product<T>::kStep * kLanes;
    for (int at = base; at < base + kTile && at <= last; at += kLanes) {
      const T *keys = keys_at(at) + offset, *values = values_at(at) + offset;
      for (int d = 0; d < s_.width * kLanes; d += line) {
        prefetch_far(keys + d / panel * tile_.stride + d % panel);
        prefetch_far(values + d);
      }
    }
  }

  // Puts the found keys' values together. What nobody has written may be anything, and zero times that
  // no number.
  void join() {
    joined_ = true;
    constexpr int step = Product<T>::kStep, most = Passes<T>::kTogether;
    for (int first = 0; first < keys_; first += most) {
      const int filled = std::min(most, keys_ - first);
      const T*& together = tile_.together[first / most];
      together = tile_.values[first / kLanes];
      bool apart = filled < most;
      for (int key = kLanes; key < filled; key += kLanes)
        apart |= tile_.values[(first + key) / kLanes] != together + ptrdiff_t(key) * s_.width;
      if (!apart) continue;
      T* to = s_.joined + ptrdiff_t(first) * s_.width;
      together = to;
      for (int key = 0; key < most; key += kLanes, to += kLanes * s_.width) {
        const int some = std::min(kLanes, filled - key), whole = some / step * step;
        if (some < kLanes) std::memset(static_cast<void*>(to), 0, sizeof(T) * kLanes * s_.width);
        if (some <= 0) continue;
        const T* from = tile_.values[(first + key) / kLanes];
        std::memcpy(static_cast<void*>(to), from, sizeof(T) * whole * s_.width);
        if (some % step)
          for (int d = 0; d < s_.width; ++d) {
            const ptrdiff_t i = (whole / step * s_.width + d) * step;
            to[i] = from[i];
          }
      }
    }
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
    constexpr int most = Passes<T>::kTogether;
    const int panels = (keys + most - 1) / most * (most / kLanes);
    // One token's K and V are read once, so they come from memory, in order.
    const bool ahead = part_.tokens == 1;
    passes_.scores(s_, tile_, at + first, rows, (keys + kLanes - 1) / kLanes, ahead);
    alignas(64) float factors[Passes<T>::kMost + kLanes];
    weigh(base, at + first, first, rows, panels * kLanes, factors);
    if (!joined_) join();
    passes_.values(s_, tile_, at + first, rows, panels, ahead, factors);
  }

  // Turns scores into weights; what a row does not see gets none. `factors`: what its sums so far are
  // to be multiplied by. Rows from `i` on, which are `first` and on of their head.
  void weigh(int base, int i, int first, int rows, int columns, float* factors) {
    const bool soft = kind_.softcap > 0;
    const float scale = (soft ? 1.0f : kind_.scale) * kLog2E;
    // By steps, not by rows: what one row waits for in a step, others can be computed in.
    alignas(64) float before[Passes<T>::kMost + kLanes], *now = s_.tops + i;
    for (int row = 0; row < rows; ++row) {
      float* scores = s_.scores + row * kTile;
      if (soft) soften(scores, columns);
      const int position = position_ + (first + row) / group_;
      const int high = std::max(0, std::min(kTile, position + 1 - base));
      const int low = kind_.window > 0 ? std::max(0, position - kind_.window + 1 - base) : 0;
      before[row] = now[row];
      now[row] = std::max(now[row], top(largest(scores, columns, std::min(low, kTile), high)) * scale);
    }
    for (int row = 0; row < rows; row += kLanes)
      store(factors + row, exp2<true>(load(before + row) - load(now + row)));
    const F16 steep = splat(scale);
    for (int row = 0; row < rows; ++row) {
      const float* scores = s_.scores + row * kTile;
      Act<T>* weights = s_.weights + row * kTile;
      float* masses = s_.masses + (i + row) * kLanes;
      const F16 offset = splat(-now[row]);
      F16 mass = load(masses) * splat(factors[row]);
      int c = 0;
      for (; c + 2 * kLanes <= columns; c += 2 * kLanes) {
        const F16 first = exp2<true>(fma(load(scores + c), steep, offset));
        const F16 second = exp2<true>(fma(load(scores + c + kLanes), steep, offset));
        mass = mass + first + second;
        put<T>(weights + c, first, second);
      }
      if (c < columns) {
        const F16 weight = exp2<true>(fma(load(scores + c), steep, offset));
        mass = mass + weight;
        put<T>(weights + c, weight);
      }
      store(masses, mass);
    }
  }

  void soften(float* scores, int columns) const {
    const F16 inner = splat(kind_.scale / kind_.softcap), outer = splat(kind_.softcap);
    for (int c = 0; c < columns; c += kLanes)
      store(scores + c, outer * tanh(load(scores + c) * inner));
  }

  // The largest of each lane of the scores in low .. high; the others become infinitely low.
  static F16 largest(float* scores, int columns, int low, int high) {
    const F16 hidden = splat(-std::numeric_limits<float>::infinity());
    F16 found = hidden;
    for (int c = 0; c < columns; c += kLanes) {
      F16 line = load(scores + c);
      if (c < low || c + kLanes > high) {
        line = between(line, low - c, high - c, hidden);
        store(scores + c, line);
      }
      found = max(line, found);
    }
    return found;
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
  Passes<T> passes_;
  Panels<T> tile_;
  int keys_ = 0;         // found
  bool joined_ = false;  // their values
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

  // Takes part until nothing is left, or `seat` has to go. query: float [tokens][query_stride], out: Out [tokens]
  // [out_stride], both by place among the packed tokens.
  template <class Out>
  void take_part(const Seat& seat, AttentionScratch<T>& scratch, const float* query,
                 ptrdiff_t query_stride, Out* out, ptrdiff_t out_stride) {
    int passed = 0, r = 0;  // parts of the rows before row r
    while (r < count_ && seat.stays()) {
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
    // Head after head, so that K and V stay in a cache for all tokens; from the end: the last tokens see
    // most, so what is left to the end is short.
    const int parts = shares(row.count, tokens_), from = (parts - 1 - number % parts) * tokens_;
    return {row, number / parts, 1, from, std::min(tokens_, row.count - from)};
  }

  const Kv<T>& kv_;
  const AttentionKind& kind_;
  const Row* rows_;
  const int count_, group_, tokens_;
  int heads_;
  std::atomic<int> next_{0};
};

}  // namespace baton
