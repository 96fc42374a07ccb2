// Working memory that is kept from step to step.
#pragma once

#include <memory>

#include "base.h"

namespace baton {

// Grows, never shrinks; aligned for vectors, with room to read a whole vector at its end.
template <class E>
class Buffer {
 public:
  E* sized(size_t count) {
    if (count > count_) {
      memory_.reset(new char[(count + kLanes) * sizeof(E) + 64]);
      count_ = count;
    }
    const auto address = reinterpret_cast<uintptr_t>(memory_.get());
    return reinterpret_cast<E*>((address + 63) / 64 * 64);
  }

 private:
  std::unique_ptr<char[]> memory_;
  size_t count_ = 0;
};

}  // namespace baton
