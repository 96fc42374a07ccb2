// The core board: what the workers of a host tell each other of their cores, in memory they share.
//
// Decides what the word of a core says. Only the worker that owns the core writes it, so nobody waits
// for anybody; whoever reads it may be wrong for as long as a store takes to be seen. The file that it
// lies in is `baton.runtime.core_board`'s.
#pragma once

#include <time.h>

#include <atomic>
#include <cstdint>
#include <vector>

namespace baton {

// So long after a step its owner wants the core again sooner than lending it would pay.
constexpr uint64_t kHeldNs = 5'000'000;
constexpr uint64_t kComputing = ~uint64_t(0);

inline uint64_t monotonic_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return uint64_t(now.tv_sec) * 1'000'000'000 + uint64_t(now.tv_nsec);
}

// One core's. 0: it has no owner, or one that tells nothing; `kComputing`; or until when it counts as
// taken: 1 is what an owner begins with.
struct alignas(64) CoreLine {
  std::atomic<uint64_t> word;

  bool is_idle(uint64_t now) const {
    return word.load(std::memory_order_relaxed) - 1 < now;  // 0 is the latest of all times then
  }
  bool is_idle() const { return is_idle(monotonic_ns()); }
};
static_assert(sizeof(CoreLine) == 64 && std::atomic<uint64_t>::is_always_lock_free);

// A core that may be borrowed.
struct Loan {
  int core;
  const CoreLine* line;
};

// The cores of one worker, and those it may borrow.
struct Cores {
  std::vector<CoreLine*> own;
  std::vector<Loan> loans;

  void tell(uint64_t word) const {
    for (CoreLine* line : own) line->word.store(word, std::memory_order_relaxed);
  }
};

}  // namespace baton
