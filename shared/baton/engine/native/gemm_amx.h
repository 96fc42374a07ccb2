// Products with bfloat16 weights on tile registers.
//
// Decides nothing of how weights lie: two steps of a packed group, [16][32][2], are two right tiles as
// they stand, and codes of fewer bits become such steps (`quant_amx.h`). Rows go through a group 32 at a
// time; one row takes the same way as many. What becomes of a block of sums is computed while the tile
// registers are busy with the next one.
#pragma once

#include "amx.h"
#include "tile.h"

#if defined(__AMX_BF16__)

namespace baton {

// Bytes of left operands that go through all groups together: they stay in the second-level cache.
constexpr int kBytesTogether = 1 << 20;
constexpr int kLine = 64;

// Full weights: groups of [k / 2][32][2].
class FullRight {
 public:
  FullRight(const void* data, int k) : data_(static_cast<const Bf16*>(data)), k_(k) {}

  // This group from its start; rows go through it `passes` times.
  void find(int group, int passes) {
    group_ = data_ + ptrdiff_t(group) * k_ * kGroup;
    once_ = passes == 1;
    // What comes next in memory: with one pass it is waited for, with several there is time.
    next_ = reinterpret_cast<const char*>(group_) + (once_ ? kAhead : k_ * ptrdiff_t(kLine));
    lines_ = (kTileDepth + passes - 1) / passes;
  }

  // Two tiles, each of whose lines is 128 bytes after the last one: elements `at` and on of this group,
  // of which k has `kTileDepth` more. A pass asks for them in order.
  BATON_INLINE const Bf16* step(int at) {
    if (once_) {
      BATON_UNROLL for (int line = 0; line < kTileDepth; ++line) prefetch(next_ + line * kLine);
    } else {
      for (int line = 0; line < lines_; ++line) prefetch_far(next_ + line * kLine);
    }
    next_ += lines_ * kLine;
    return group_ + ptrdiff_t(at) * kGroup;
  }

  // Copies the elements from `at` to the end of k.
  void rest(int at, Bf16* to) const {
    std::memcpy(static_cast<void*>(to), group_ + ptrdiff_t(at) * kGroup,
                size_t(k_ - at) * kGroup * sizeof(Bf16));
  }

 private:
  const Bf16* data_;
  int k_;
  const Bf16* group_ = nullptr;
  bool once_ = true;
  const char* next_ = nullptr;
  int lines_ = 0;  // to ask for in a step
};

template <class Right>
class TileProduct {
 public:
  // a: [m][lda], of which k are used; weights: as `Right` has them.
  TileProduct(const Bf16* a, ptrdiff_t lda, const void* weights, int k)
      : a_(a), lda_(lda), right_(weights, k), k_(k), whole_(k / kTileDepth * kTileDepth) {}

  // As `each_tile`, in which blocks of fewer rows are given to `done`.
  template <class Done>
  void run(int m, int first, int last, const float* bias, const Done& done) {
    Finished<Done> finished{done};
    alignas(64) float blocks[2][kTilesRows * kGroup];
    int which = 0;
    const int together = rows_together(m);
    for (int begin = 0; begin < m; begin += together) {
      const int end = std::min(m, begin + together);
      for (int group = first; group < last; ++group) {
        find(group, end - begin);
        for (int row = begin; row < end; row += kTilesRows) {
          const int rows = std::min(kTilesRows, end - row);
          float* block = blocks[which ^= 1];
          tiles_.use(rows);
          const Bf16* left = a_ + row * lda_;
          tiles_.two() ? multiply<true>(left, rows, block, finished)
                       : multiply<false>(left, rows, block, finished);
          finished.take(kTilesRows);
          if (bias)
            for (int i = 0; i < rows; ++i)
              for (int j = 0; j < kGroup; ++j) block[i * kGroup + j] += bias[group * kGroup + j];
          finished.next = {row, rows, group, block};
        }
      }
    }
    finished.take(kTilesRows);
  }

 private:
  // The block before, some rows at a time.
  template <class Done>
  struct Finished {
    const Done& done;
    struct {
      int row, rows, group;
      float* block;
    } next{0, 0, 0, nullptr};

    BATON_INLINE void take(int most) {
      const int some = std::min(most, next.rows);
      if (some == 0) return;
      done(next.row, some, next.group, next.block);
      next.row += some;
      next.rows -= some;
      next.block += some * kGroup;
    }
  };

  // Rows that go through all groups together when there are m: even shares, whole tiles.
  int rows_together(int m) const {
    const int most = std::max(2 * kTilesRows, kBytesTogether / (2 * k_) / kTilesRows * kTilesRows);
    const int shares = (m + most - 1) / most, rows = (m + shares - 1) / shares;
    return (rows + kTilesRows - 1) / kTilesRows * kTilesRows;
  }

  void find(int group, int rows) {
    right_.find(group, (rows + kTilesRows - 1) / kTilesRows);
    if (whole_ == k_) return;
    // The last tiles are filled up with zeros.
    std::memset(static_cast<void*>(right_rest_), 0, sizeof right_rest_);
    right_.rest(whole_, right_rest_);
  }

  template <bool Two, class Finished>
  void multiply(const Bf16* left, int rows, float* block, Finished& finished) {
    tiles_.zero<0>();
    tiles_.zero<1>();
    if constexpr (Two) {
      tiles_.zero<2>();
      tiles_.zero<3>();
    }
    const int each = kTilesRows * kTileDepth / std::max(whole_, 1) + 1;
    for (int at = 0; at < whole_; at += kTileDepth) {
      step<Two>(left + at, lda_, right_.step(at));
      finished.take(each);
    }
    if (whole_ < k_) {
      std::memset(static_cast<void*>(left_rest_), 0, sizeof left_rest_);
      for (int i = 0; i < rows; ++i)
        std::memcpy(static_cast<void*>(left_rest_ + i * kTileDepth), left + i * lda_ + whole_,
                    size_t(k_ - whole_) * sizeof(Bf16));
      step<Two>(left_rest_, kTileDepth, right_rest_);
    }
    constexpr ptrdiff_t wide = kGroup * sizeof(float);
    tiles_.store<0>(block, wide);
    tiles_.store<1>(block + kLanes, wide);
    if constexpr (Two) {
      tiles_.store<2>(block + kTileRows * kGroup, wide);
      tiles_.store<3>(block + kTileRows * kGroup + kLanes, wide);
    }
  }

  template <bool Two>
  BATON_INLINE void step(const Bf16* left, ptrdiff_t lda, const Bf16* right) {
    constexpr ptrdiff_t wide = 2 * kGroup * sizeof(Bf16);
    const ptrdiff_t stride = lda * ptrdiff_t(sizeof(Bf16));
    tiles_.load<4>(left, stride);
    tiles_.load<6>(right, wide);
    tiles_.load<7>(right + 2 * kLanes, wide);
    if constexpr (Two) tiles_.load<5>(left + kTileRows * lda, stride);
    tiles_.add<0, 4, 6>();
    tiles_.add<1, 4, 7>();
    if constexpr (Two) {
      tiles_.add<2, 5, 6>();
      tiles_.add<3, 5, 7>();
    }
  }

  const Bf16* a_;
  ptrdiff_t lda_;
  Right right_;
  int k_, whole_;  // of k what fills tiles
  Tiles tiles_;
  alignas(64) Bf16 left_rest_[kTilesRows * kTileDepth];
  alignas(64) Bf16 right_rest_[kTileDepth * kGroup];
};

}  // namespace baton

#endif
