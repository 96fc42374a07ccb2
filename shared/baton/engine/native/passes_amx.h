// A pass of query rows over a tile of keys, on tile registers.
//
// Decides that a decoding row takes the same way as a prompt chunk: up to 32 query rows, 32 dimensions
// of a head or 32 keys at a time. 16 keys of K are right tiles as they lie in the arena; of V 32 keys
// have to stand together, which `PartAttention::join` sees to. A sum in a tile is never subnormal, so
// that adding nothing to it changes nothing.
#pragma once

#include "amx.h"
#include "passes.h"

#if defined(__AMX_BF16__)

#include <type_traits>

namespace baton {

template <>
class Passes<Bf16> {
 public:
  static constexpr int kMost = kTilesRows;
  static constexpr int kDepth = kTileDepth;
  static constexpr int kTogether = kTileDepth;

  static int pass(int left) { return std::min(left, kMost); }

  // scores[rows][16 * panels].
  void scores(const AttentionScratch<Bf16>& s, const Panels<Bf16>& tile, int first, int rows,
              int panels, bool ahead) {
    tiles_.use(rows);
    const Bf16* q = s.q + first * s.depth;
    for (int panel = 0; panel < panels; panel += 2) {
      const bool both = panel + 1 < panels;
      if (tiles_.two())
        both ? panels_of<true, true>(s, q, tile, panel, ahead)
             : panels_of<true, false>(s, q, tile, panel, ahead);
      else
        both ? panels_of<false, true>(s, q, tile, panel, ahead)
             : panels_of<false, false>(s, q, tile, panel, ahead);
    }
  }

  // out[rows][width] = out * factor + weights * values.
  void values(const AttentionScratch<Bf16>& s, const Panels<Bf16>& tile, int first, int rows,
              int panels, bool ahead, const float* factors) {
    tiles_.use(rows);
    float* out = s.out + ptrdiff_t(first) * s.width;
    for (int i = 0; i < rows; ++i) {
      if (factors[i] == 1.0f) continue;
      const F16 factor = splat(factors[i]);
      for (int d = 0; d < s.width; d += kLanes)
        baton::store(out + i * s.width + d, baton::load(out + i * s.width + d) * factor);
    }
    for (int column = 0; column < s.width; column += 2 * kLanes) {
      const bool both = column + kLanes < s.width;
      if (tiles_.two())
        both ? columns_of<true, true>(s, tile, out, column, panels, ahead)
             : columns_of<true, false>(s, tile, out, column, panels, ahead);
      else
        both ? columns_of<false, true>(s, tile, out, column, panels, ahead)
             : columns_of<false, false>(s, tile, out, column, panels, ahead);
    }
  }

 private:
  // Of the sums those that there are: `Two` row tiles, `Both` column tiles.
  template <bool Two, bool Both, class Call>
  BATON_INLINE void each_sum(const Call& call) {
    call(Number<0>{}, 0, 0);
    if constexpr (Both) call(Number<1>{}, 0, 1);
    if constexpr (Two) call(Number<2>{}, 1, 0);
    if constexpr (Two && Both) call(Number<3>{}, 1, 1);
  }
  template <int N>
  using Number = std::integral_constant<int, N>;

  template <bool Two, bool Both>
  BATON_INLINE void step(const Bf16* left, ptrdiff_t left_stride, const Bf16* first,
                         const Bf16* second, ptrdiff_t right_stride) {
    tiles_.load<4>(left, left_stride);
    tiles_.load<6>(first, right_stride);
    if constexpr (Both) tiles_.load<7>(second, right_stride);
    if constexpr (Two)
      tiles_.load<5>(reinterpret_cast<const char*>(left) + kTileRows * left_stride, left_stride);
    tiles_.add<0, 4, 6>();
    if constexpr (Both) tiles_.add<1, 4, 7>();
    if constexpr (Two) tiles_.add<2, 5, 6>();
    if constexpr (Two && Both) tiles_.add<3, 5, 7>();
  }

  template <bool Two, bool Both>
  void panels_of(const AttentionScratch<Bf16>& s, const Bf16* q, const Panels<Bf16>& tile, int panel,
                 bool ahead) {
    each_sum<Two, Both>([&](auto sum, int, int) { tiles_.zero<sum.value>(); });
    const ptrdiff_t stride = s.depth * ptrdiff_t(sizeof(Bf16));
    for (int d = 0; d < s.width; d += kTileDepth) {
      const int some = std::min(kTileDepth, s.width - d);
      const Bf16* keys[2] = {};
      for (int j = 0; j <= int(Both); ++j) {
        // A line of K is as many bytes as a line of V, and there are as many.
        if (ahead)
          for (int line = 0; line < some / 2; ++line)
            prefetch(tile.values[panel + j] + (d / 2 + line) * 2 * kLanes);
        keys[j] = tile.keys[panel + j] + d / 2 * tile.stride;
      }
      if (some == kTileDepth) {
        step<Two, Both>(q + d, stride, keys[0], keys[1], tile.stride * ptrdiff_t(sizeof(Bf16)));
        continue;
      }
      // A head that ends within a tile; a query has zeros there.
      alignas(64) Bf16 rest[2][kTileDepth * kLanes] = {};
      for (int j = 0; j <= int(Both); ++j)
        for (int line = 0; line < some / 2; ++line)
          std::memcpy(rest[j] + line * 2 * kLanes, keys[j] + line * tile.stride, 64);
      step<Two, Both>(q + d, stride, rest[0], rest[1], 64);
    }
    each_sum<Two, Both>([&](auto sum, int i, int j) {
      tiles_.store<sum.value>(s.scores + i * kTileRows * kTile + (panel + j) * kLanes,
                              kTile * sizeof(float));
    });
  }

  template <bool Two, bool Both>
  void columns_of(const AttentionScratch<Bf16>& s, const Panels<Bf16>& tile, float* out, int column,
                  int panels, bool ahead) {
    const ptrdiff_t wide = s.width * ptrdiff_t(sizeof(float));
    const auto place = [&](int i, int j) { return out + i * kTileRows * s.width + column + j * kLanes; };
    each_sum<Two, Both>([&](auto sum, int i, int j) { tiles_.load<sum.value>(place(i, j), wide); });
    constexpr int each = kTogether / kLanes, lines = (Both ? 2 : 1) * kLanes / 2;
    for (int panel = 0; panel < panels; panel += each) {
      if (ahead)
        for (int i = panel; i < panel + each && i < tile.found; ++i)
          for (int line = 0; line < lines; ++line)
            prefetch(tile.next[i] + (column / 2 + line) * tile.stride);
      const Bf16* values = tile.together[panel / each] + column * 2;
      step<Two, Both>(s.weights + panel * kLanes, kTile * sizeof(Bf16), values, values + 2 * kLanes,
                      s.width * ptrdiff_t(2 * sizeof(Bf16)));
    }
    each_sum<Two, Both>([&](auto sum, int i, int j) { tiles_.store<sum.value>(place(i, j), wide); });
  }

  Tiles tiles_;
};

}  // namespace baton

#endif
