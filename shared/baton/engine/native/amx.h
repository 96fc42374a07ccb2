// Tile registers: 16 rows of 64 bytes, and the one product that they have.
//
// Decides how the eight registers are used: four hold sums (two row tiles x two column tiles), two the
// left and two the right operand. The product's arithmetic is part of the level: of 32 elements along
// k the even and the odd ones are summed apart, each a chain of multiply-adds, both are added, and that
// goes into the sum so far; what is subnormal counts as zero. It is the same for every row, so how many
// rows a tile has changes nothing.
#pragma once

#include "base.h"

#if defined(__AMX_BF16__)

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

namespace baton {

constexpr int kTileRows = 16;
constexpr int kTileDepth = 32;  // elements along k of one product
// Rows that go through a group of columns together.
constexpr int kTilesRows = 2 * kTileRows;

// Asks the kernel for this process's tile registers, which it must not use before.
inline bool grant_tiles() {
  constexpr int kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
}

#if defined(__SANITIZE_ADDRESS__)
// A sanitizer does not see what a tile reads or writes.
inline void touch(const void* at, ptrdiff_t stride, int rows) {
  for (int row = 0; row < rows; ++row)
    for (int byte = 0; byte < 64; byte += 63)
      (void)*(static_cast<const volatile char*>(at) + row * stride + byte);
}
#else
BATON_INLINE void touch(const void*, ptrdiff_t, int) {}
#endif

// The calling thread's tile registers while this lives.
class Tiles {
 public:
  Tiles() = default;
  ~Tiles() {
    if (rows_) asm volatile("tilerelease");
  }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;

  // Left operands and sums have so many rows from now on, at most `kTilesRows`; sums are undefined.
  void use(int rows) {
    if (rows == rows_) return;
    rows_ = rows;
    struct alignas(64) {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t bytes[16] = {};
      uint8_t rows[16] = {};
    } shape;
    const auto set = [&](int tile, int count) {
      shape.rows[tile] = uint8_t(count);
      shape.bytes[tile] = count ? 64 : 0;
    };
    const int first = rows < kTileRows ? rows : kTileRows, second = rows - first;
    set(0, first), set(1, first), set(4, first);
    set(2, second), set(3, second), set(5, second);
    set(6, kTileRows), set(7, kTileRows);
    asm volatile("ldtilecfg %0" ::"m"(shape));
  }
  int rows() const { return rows_; }
  bool two() const { return rows_ > kTileRows; }

  // Strides are in bytes.
  template <int Tile>
  BATON_INLINE void load(const void* from, ptrdiff_t stride) const {
    touch(from, stride, count<Tile>());
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(Tile) : "memory");
  }
  template <int Tile>
  BATON_INLINE void store(void* to, ptrdiff_t stride) const {
    touch(to, stride, count<Tile>());
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(Tile) : "memory");
  }
  template <int Tile>
  BATON_INLINE void zero() const {
    asm volatile("tilezero %%tmm%c0" ::"i"(Tile));
  }
  template <int Sum, int Left, int Right>
  BATON_INLINE void add() const {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sum), "i"(Left), "i"(Right));
  }

 private:
  template <int Tile>
  int count() const {
    if (Tile >= 6) return kTileRows;
    const bool first = Tile == 0 || Tile == 1 || Tile == 4;
    return first ? std::min(rows_, kTileRows) : rows_ - kTileRows;
  }

  int rows_ = 0;  // 0: the registers are not in use
};

}  // namespace baton

#endif
