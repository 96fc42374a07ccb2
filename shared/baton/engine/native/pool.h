// A few threads that do one thing together, again and again: a region.
//
// Decides how they wait: between two regions of a step by spinning, since the next comes within
// microseconds; after that on the kernel. When `run` returns, no thread is in the work any more.
//
// Also decides who takes part. The pool's own threads always do. A borrowed one runs on a core of
// another worker while that one's word says that nothing is computed there: it joins a region that is
// still open, never one that can do without it, so one that is asleep or has no core delays nobody.
// It takes some of the work at a time, looks at the word before it takes more, and has little weight and
// a short slice, so that whoever belongs on the core goes first (see docs/adr/0028-borrowed-cores.md).
#pragma once

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "board.h"

namespace baton {

// Who takes part in a region.
struct Crew {
  int threads;   // all of them
  int borrowed;  // of these
};

// One thread's part in a region.
struct Seat {
  int thread;            // 0 .. Pool::most() - 1
  const CoreLine* line;  // of a borrowed core, or null
  bool served = false;   // has had its even share

  // Whether it may go on: a borrowed core may be wanted back.
  bool stays() const { return !line || line->is_idle(); }
};

class Pool {
 public:
  explicit Pool(int threads, Cores cores = {}) : cores_(std::move(cores)) {
    for (int i = 1; i < threads; ++i) add({-1, nullptr});
    for (const Loan& loan : cores_.loans) add(loan);
    own_ = threads;
  }
  ~Pool() {
    stop_ = true;
    ++round_;
    for (auto& one : helpers_) call(*one);
    for (auto& one : helpers_) one->thread.join();
  }
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  // This thread, the pool's own ones and all that may be borrowed.
  int most() const { return int(helpers_.size()) + 1; }

  // A step will begin at once, perhaps: whoever is on the worker's cores is to leave. From any thread,
  // while no step runs.
  void claim() const { cores_.tell(monotonic_ns() + kHeldNs); }
  // A step begins, or has ended: the worker's cores are taken, or will be free soon. It may be one
  // that borrows none.
  void begin(bool borrows = true) {
    borrows_ = borrows;
    cores_.tell(kComputing);
    all_ns_ = borrowed_ns_ = 0;
    since_ = 0;
  }
  // Returns for which share of the step's time the cores that may be borrowed were.
  double end() {
    const uint64_t now = monotonic_ns();
    cores_.tell(now + kHeldNs);
    if (since_ != 0) count(now, 0);
    return all_ns_ > 0 ? borrowed_ns_ / all_ns_ : 0.0;
  }

  Crew own() const { return {own_, 0}; }

  // Who can take part in the region that comes next.
  Crew gather() {
    if (cores_.loans.empty() || !borrows_) return own();
    const uint64_t now = monotonic_ns();
    int borrowed = 0;
    for (auto& one : helpers_) {
      if (!one->loan.line) continue;
      one->invited = now >= one->shunned_until && one->loan.line->is_idle(now) &&
                     !one->homeless.load(std::memory_order_relaxed);
      borrowed += one->invited;
    }
    count(now, borrowed);
    return {own_ + borrowed, borrowed};
  }

  // Calls work(seat) on the threads of the crew, this one included, and waits for all that came.
  template <class Work>
  void run(const Crew& crew, const Work& work) {
    Seat seat{0, nullptr};
    if (crew.threads == 1) return work(seat);
    call_ = [](const void* what, Seat& seat) { (*static_cast<const Work*>(what))(seat); };
    what_ = &work;
    const uint64_t open = uint64_t(++round_) << 32 | kOpen;
    state_.store(open | uint64_t(own_ - 1), std::memory_order_release);
    for (auto& one : helpers_)
      if (!one->loan.line || (crew.borrowed && one->invited)) call(*one);
    work(seat);
    state_.fetch_and(~kOpen, std::memory_order_acq_rel);
    await();
  }

 private:
  static constexpr int kSpins = 20000;
  // A borrowed thread that is waited for longer than this many spins may have no core: others run
  // there. If so, the core is left alone for as long as it made us wait.
  static constexpr int kPatience = 4000;
  // Of borrowed threads in the kernel's scheduler.
  static constexpr int kNice = 10;
  static constexpr uint64_t kSliceNs = 200'000;
  // A region's state: its number, whether one may join it, and how many are in it beside `run`.
  static constexpr uint64_t kOpen = uint64_t(1) << 31, kInside = kOpen - 1;

  struct alignas(64) Helper {
    Loan loan;
    int number;
    std::thread thread;
    std::atomic<uint32_t> called{0};  // the last region that it was called to
    std::atomic<uint32_t> asleep{0};
    std::atomic<bool> inside{false};
    std::atomic<bool> homeless{false};  // the kernel does not let it onto the core
    // These are `run`'s thread's.
    bool invited = false;
    bool late = false;
    uint64_t ran_ns = 0;
    uint64_t shunned_until = 0;
  };

  void add(const Loan& loan) {
    helpers_.push_back(std::make_unique<Helper>());
    Helper& one = *helpers_.back();
    one.loan = loan;
    one.number = int(helpers_.size());
    one.thread = std::thread([this, &one] { serve(one); });
  }

  void call(Helper& one) {
    one.called.store(round_);  // in one order with `asleep`: one of both sees what the other stored
    if (one.asleep.load()) futex(one.called, FUTEX_WAKE_PRIVATE, 1);
  }

  void serve(Helper& me) {
    if (me.loan.line) settle(me);
    for (uint32_t seen = 0;;) {
      seen = next_call(me, seen);
      if (stop_) return;
      Seat seat{me.number, me.loan.line};
      if (me.loan.line) {
        if (me.homeless || !seat.stays() || !join(me, seen)) continue;
      }
      call_(what_, seat);
      me.inside.store(false, std::memory_order_relaxed);
      state_.fetch_sub(1, std::memory_order_release);
    }
  }

  uint32_t next_call(Helper& me, uint32_t seen) {
    const auto called = [&] { return me.called.load(std::memory_order_acquire); };
    for (int spins = 0; spins < kSpins; ++spins) {
      if (called() != seen) return called();
      // Nobody spins on a core that is wanted back.
      if (me.loan.line && spins % 256 == 255 && !me.loan.line->is_idle()) break;
      pause();
    }
    me.asleep.store(1);
    while (me.called.load() == seen) futex(me.called, FUTEX_WAIT_PRIVATE, seen);
    me.asleep.store(0, std::memory_order_relaxed);
    if (me.loan.line) settle(me);
    return called();
  }

  // A borrowed thread's way into a region: while it is open, and the one that it was called to.
  bool join(Helper& me, uint32_t round) {
    me.inside.store(true, std::memory_order_relaxed);
    uint64_t state = state_.load(std::memory_order_relaxed);
    while (state >> 32 == round && state & kOpen)
      if (state_.compare_exchange_weak(state, state + 1, std::memory_order_acq_rel)) return true;
    me.inside.store(false, std::memory_order_relaxed);
    return false;
  }

  // Waits until nobody is in the region any more.
  void await() {
    uint64_t since = 0;
    bool lent = false;
    for (int spins = 0; state_.load(std::memory_order_acquire) & kInside; ++spins) {
      if (spins == kPatience) {
        since = monotonic_ns();
        for (auto& one : helpers_) {
          one->late = one->loan.line && one->inside.load(std::memory_order_relaxed);
          lent |= one->late;
          if (one->late) one->ran_ns = ran_ns(*one);
        }
      }
      // Who yields again and again is made to wait for it later; a lent core is not helped by that.
      spins > kSpins && !lent ? std::this_thread::yield() : pause();
    }
    if (since == 0) return;
    const uint64_t now = monotonic_ns(), waited = now - since;
    for (auto& one : helpers_) {
      if (!std::exchange(one->late, false)) continue;
      const uint64_t ran = ran_ns(*one) - one->ran_ns;
      if (2 * ran < waited) one->shunned_until = now + (waited - ran);
    }
  }

  // How long a thread has had a core.
  static uint64_t ran_ns(Helper& one) {
    clockid_t clock;
    timespec ran{};
    if (pthread_getcpuclockid(one.thread.native_handle(), &clock) == 0) clock_gettime(clock, &ran);
    return uint64_t(ran.tv_sec) * 1'000'000'000 + uint64_t(ran.tv_nsec);
  }

  // Onto the borrowed core, with less weight than others there; with a slice that is short, so that it
  // is soon its turn when it was displaced in a piece of work, but longer than that of event loops
  // (`baton.runtime.slices`), which displace it at once. Done anew after each sleep: whoever starts or
  // hurries a process gives all its threads the process's own cores.
  static void settle(Helper& me) {
    cpu_set_t* set = CPU_ALLOC(me.loan.core + 1);
    const size_t size = CPU_ALLOC_SIZE(me.loan.core + 1);
    CPU_ZERO_S(size, set);
    CPU_SET_S(me.loan.core, size, set);
    const bool there = sched_setaffinity(0, size, set) == 0;
    CPU_FREE(set);
    struct {  // struct sched_attr, see sched_setattr(2)
      uint32_t size, policy;
      uint64_t flags;
      int32_t nice;
      uint32_t priority;
      uint64_t runtime, deadline, period;
    } wanted{sizeof wanted, SCHED_OTHER, 0, kNice, 0, kSliceNs, 0, 0};
    const bool light = syscall(SYS_sched_setattr, 0, &wanted, 0) == 0 ||
                       setpriority(PRIO_PROCESS, 0, kNice) == 0;
    me.homeless.store(!there || !light, std::memory_order_relaxed);
  }

  // The time since the last look goes to the crew that was found then.
  void count(uint64_t now, int borrowed) {
    if (since_ != 0) {
      const double spent = double(now - since_);
      all_ns_ += spent;
      borrowed_ns_ += spent * last_borrowed_ / double(cores_.loans.size());
    }
    since_ = now;
    last_borrowed_ = borrowed;
  }

  static long futex(std::atomic<uint32_t>& word, int operation, uint32_t value) {
    return syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), operation, value, nullptr, nullptr,
                   0);
  }

  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }

  const Cores cores_;
  int own_ = 1;
  bool borrows_ = true;
  std::vector<std::unique_ptr<Helper>> helpers_;  // first the pool's own, then one for each loan
  std::atomic<uint64_t> state_{0};
  std::atomic<bool> stop_{false};
  uint32_t round_ = 0;
  void (*call_)(const void*, Seat&) = nullptr;
  const void* what_ = nullptr;
  double all_ns_ = 0, borrowed_ns_ = 0;  // of the step
  uint64_t since_ = 0;
  int last_borrowed_ = 0;
};

// The part [first, last) of `count` things that is `thread`'s of `threads`.
struct Share {
  int first, last;
  Share(int count, int thread, int threads)
      : first(int(long(count) * thread / threads)),
        last(int(long(count) * (thread + 1) / threads)) {}
};

// Things given out in a region. Threads of our own take even shares, each in one piece. With a borrowed
// core, which may be slower, come late or go at any time, everybody takes less and less at a time, and
// never more than `most`.
class Slices {
 public:
  Slices(int count, const Crew& crew, int most) : count_(count), crew_(crew), most_(most) {}

  // What `seat` is to do next; false: nothing is left for it.
  bool next(Seat& seat, int& first, int& last) {
    if (crew_.borrowed == 0) {
      const Share share(count_, seat.thread, crew_.threads);
      first = share.first, last = share.last;
      return !std::exchange(seat.served, true) && first < last;
    }
    if (!seat.stays()) return false;
    first = given_.load(std::memory_order_relaxed);
    do {
      if (first >= count_) return false;
      const int even = (count_ - first) / (2 * crew_.threads);
      last = first + std::max(1, std::min(even, most_));
    } while (!given_.compare_exchange_weak(first, last, std::memory_order_relaxed));
    return true;
  }

 private:
  const int count_;
  const Crew crew_;
  const int most_;
  std::atomic<int> given_{0};
};

}  // namespace baton
