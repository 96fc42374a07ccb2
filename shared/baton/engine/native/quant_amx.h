// Products with weights of 8 or 4 bits on tile registers.
//
// Decides that 32 codes, unpacked to bfloat16, are one product of tiles, whose sums are scaled as
// `quant.h` says: one step along k, one scale. One row takes the same way as many.
#pragma once

#include "amx.h"
#include "quant.h"

#if defined(__AMX_BF16__)

namespace baton {

static_assert(kShared == kTileDepth, "a slab is one step of tiles");

template <class Q>
class TileSlabProduct {
 public:
  // a: [m][lda], of which k are used; data: slabs, see `quant.h`.
  TileSlabProduct(const void* data, const Bf16* a, ptrdiff_t lda, int m, int k)
      : slabs_(static_cast<const Slab<Q>*>(data)), a_(a), lda_(lda), count_(k / kShared) {
    thread_local Buffer<float> sums;
    sums_ = sums.sized(size_t(m) * count_);
    if constexpr (Q::kLeast) sum_shared<Bf16>(a, lda, m, count_, sums_);
  }

  // As `each_tile`.
  template <class Done>
  void run(int m, int first, int last, const float* bias, const Done& done) {
    alignas(64) float block[kTilesRows * kGroup];
    const int together = rows_together(m, kTilesRows);
    for (int begin = 0; begin < m; begin += together) {
      const int end = std::min(m, begin + together);
      for (int group = first; group < last; ++group) {
        find(group, end - begin);
        for (int row = begin; row < end; row += kTilesRows) {
          const int rows = std::min(kTilesRows, end - row);
          tiles_.use(rows);
          std::memset(block, 0, sizeof block);
          // Slabs' sums are scaled while the next slabs' are computed.
          for (int s = 0; s < count_ + kAtOnce; s += kAtOnce) {
            for (int next = s; next < std::min(count_, s + kAtOnce); ++next) multiply(row, next);
            if (s > 0) scale_some(row, rows, s - kAtOnce, block);
          }
          if (bias)
            for (int i = 0; i < rows; ++i)
              for (int j = 0; j < kGroup; ++j) block[i * kGroup + j] += bias[group * kGroup + j];
          done(row, rows, group, block);
        }
      }
    }
  }

 private:
  using B = Pairs<Bf16>::B;
  static constexpr int kAtOnce = 2;  // slabs
  static constexpr int kVectors = kSharedPairs * kGroup / kLanes;  // of an unpacked slab

  void find(int group, int rows) {
    group_ = slabs_ + ptrdiff_t(group) * count_;
    unpacked_ = nullptr;
    if (rows <= kTilesRows) return;
    thread_local Buffer<B> memory;
    unpacked_ = memory.sized(size_t(count_) * kVectors);
    unpack<Bf16, Q>(group_, count_, unpacked_);
  }

  void multiply(int row, int s) {
    const B* codes;
    if (unpacked_) {
      codes = unpacked_ + ptrdiff_t(s) * kVectors;
    } else {
      BATON_UNROLL for (int line = 0; line < int(sizeof(Slab<Q>)); line += 64)
        prefetch(reinterpret_cast<const char*>(group_ + s) + kAhead + line);
      unpack<Bf16, Q>(group_ + s, 1, codes_[s % 2]);
      codes = codes_[s % 2];
    }
    constexpr ptrdiff_t wide = kGroup / kLanes * sizeof(B);
    const ptrdiff_t stride = lda_ * ptrdiff_t(sizeof(Bf16));
    const Bf16* left = a_ + row * lda_ + s * kShared;
    float* out = partial_[s % (2 * kAtOnce)];
    constexpr ptrdiff_t line = kGroup * sizeof(float);
    tiles_.load<4>(left, stride);
    tiles_.load<6>(codes, wide);
    tiles_.load<7>(codes + 1, wide);
    tiles_.zero<0>();
    tiles_.zero<1>();
    tiles_.add<0, 4, 6>();
    tiles_.add<1, 4, 7>();
    if (tiles_.two()) {
      tiles_.load<5>(left + kTileRows * lda_, stride);
      tiles_.zero<2>();
      tiles_.zero<3>();
      tiles_.add<2, 5, 6>();
      tiles_.add<3, 5, 7>();
    }
    tiles_.store<0>(out, line);
    tiles_.store<1>(out + kLanes, line);
    if (tiles_.two()) {
      tiles_.store<2>(out + kTileRows * kGroup, line);
      tiles_.store<3>(out + kTileRows * kGroup + kLanes, line);
    }
  }

  // Adds the scaled sums of slabs `s` and on, at most `kAtOnce`.
  void scale_some(int row, int rows, int s, float* block) const {
    with_rows<kAtOnce>(std::min(kAtOnce, count_ - s), Scale{*this, row, rows, s, block});
  }
  struct Scale {
    const TileSlabProduct& of;
    int row, rows, s;
    float* block;

    template <int N>
    void run() const {
      for (int column = 0; column < kGroup; column += kLanes) {
        F16 scale[N], least[N];
        BATON_UNROLL for (int j = 0; j < N; ++j) {
          scale[j] = load(of.group_[s + j].scale + column);
          if constexpr (Q::kLeast) least[j] = load(of.group_[s + j].least + column);
        }
        const float* sums = of.sums_ + ptrdiff_t(row) * of.count_ + s;
        for (int i = 0; i < rows; ++i, sums += of.count_) {
          float* out = block + i * kGroup + column;
          F16 sum = load(out);
          BATON_UNROLL for (int j = 0; j < N; ++j) {
            const float* partial = of.partial_[(s + j) % (2 * kAtOnce)];
            sum = fma(scale[j], load(partial + i * kGroup + column), sum);
            if constexpr (Q::kLeast) sum = fma(splat(sums[j]), least[j], sum);
          }
          store(out, sum);
        }
      }
    }
  };

  const Slab<Q>* slabs_;
  const Bf16* a_;
  ptrdiff_t lda_;
  int count_;  // slabs of a group
  float* sums_;
  const Slab<Q>* group_ = nullptr;
  B* unpacked_ = nullptr;  // this group's, or null
  Tiles tiles_;
  alignas(64) float partial_[2 * kAtOnce][kTilesRows * kGroup];
  B codes_[2][kVectors];
};

}  // namespace baton

#endif
