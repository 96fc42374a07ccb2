// What every file of the kernels builds upon: elements in memory, and how loops are written.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define BATON_INLINE inline __attribute__((always_inline))
// Once for all that call it: the same tile is wanted in many places.
#define BATON_ONCE __attribute__((noinline))
#define BATON_UNROLL _Pragma("GCC unroll 16")

namespace baton {

constexpr int kLanes = 16;

// A bfloat16 in memory.
struct Bf16 {
  uint16_t bits;
};
// An IEEE half in memory: finite, the scale of a group of quantised weights.
struct Half {
  uint16_t bits;
};

}  // namespace baton
