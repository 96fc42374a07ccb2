// A few threads that do one thing together, again and again.
//
// Decides how they wait: between two things of a step by spinning, since the next comes within
// microseconds; after that on the kernel. When `run` returns, no thread is in the work any more.
#pragma once

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

namespace baton {

class Pool {
 public:
  explicit Pool(int threads) {
    for (int i = 1; i < threads; ++i) threads_.emplace_back([this, i] { serve(i); });
  }
  ~Pool() {
    stop_ = true;
    wake();
    for (auto& thread : threads_) thread.join();
  }
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int size() const { return int(threads_.size()) + 1; }

  // Calls work(thread) on every thread, this one included, and waits for all.
  template <class Work>
  void run(const Work& work) {
    if (threads_.empty()) return work(0);
    call_ = [](const void* what, int thread) { (*static_cast<const Work*>(what))(thread); };
    what_ = &work;
    busy_.store(int(threads_.size()), std::memory_order_relaxed);
    wake();
    work(0);
    for (int spins = 0; busy_.load(std::memory_order_acquire) != 0; ++spins)
      if (spins > kSpins) std::this_thread::yield();
  }

 private:
  static constexpr int kSpins = 20000;

  void wake() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      round_.fetch_add(1, std::memory_order_release);
    }
    woken_.notify_all();
  }

  void serve(int thread) {
    for (unsigned seen = 0;; ++seen) {
      for (int spins = 0; spins < kSpins && round_.load(std::memory_order_acquire) == seen; ++spins)
        pause();
      if (round_.load(std::memory_order_acquire) == seen) {
        std::unique_lock<std::mutex> lock(mutex_);
        woken_.wait(lock, [&] { return round_.load(std::memory_order_acquire) != seen; });
      }
      if (stop_) return;
      call_(what_, thread);
      busy_.fetch_sub(1, std::memory_order_release);
    }
  }

  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }

  std::vector<std::thread> threads_;
  std::mutex mutex_;
  std::condition_variable woken_;
  std::atomic<unsigned> round_{0};
  std::atomic<int> busy_{0};
  std::atomic<bool> stop_{false};
  void (*call_)(const void*, int) = nullptr;
  const void* what_ = nullptr;
};

// The part [first, last) of `count` things that is `thread`'s of `threads`.
struct Share {
  int first, last;
  Share(int count, int thread, int threads)
      : first(int(long(count) * thread / threads)),
        last(int(long(count) * (thread + 1) / threads)) {}
};

}  // namespace baton
