// Working memory that is kept from step to step.
//
// Decides what of it lies in huge pages: rows that pass a product are thousands of bytes apart, each on
// a page of its own, and small pages crowd each other out of a cache here and there.
#pragma once

#include <sys/mman.h>

#include <cstdlib>
#include <memory>
#include <new>

#include "base.h"

namespace baton {

constexpr size_t kHugePage = 2 << 20;
#if defined(__SANITIZE_ADDRESS__)
constexpr size_t kWorthHuge = size_t(-1);  // what is behind its end must not be there
#else
constexpr size_t kWorthHuge = 96 << 10;
#endif

// Some bytes, aligned for vectors.
class Memory {
 public:
  Memory() = default;
  explicit Memory(size_t bytes) {
    const bool huge = bytes >= kWorthHuge;
    const size_t unit = huge ? kHugePage : 64, size = (bytes + unit - 1) / unit * unit;
    start_.reset(static_cast<char*>(std::aligned_alloc(unit, size)));
    if (!start_) throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
    if (huge) madvise(start_.get(), size, MADV_HUGEPAGE);  // or small ones, where there are none
#endif
  }
  char* start() const { return start_.get(); }

 private:
  struct Free {
    void operator()(char* start) const { std::free(start); }
  };
  std::unique_ptr<char[], Free> start_;
};

// Grows, never shrinks; with room to read a whole vector at its end.
template <class E>
class Buffer {
 public:
  E* sized(size_t count) {
    if (count > count_) {
      memory_ = Memory((count + kLanes) * sizeof(E));
      count_ = count;
    }
    return reinterpret_cast<E*>(memory_.start());
  }

 private:
  Memory memory_;
  size_t count_ = 0;
};

}  // namespace baton
