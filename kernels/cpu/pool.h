// A pool of threads that share loops; knows nothing of MLX.
//
// A decoded token is some 400 short loops with microseconds between them, so workers spin for a while before
// they sleep. Pieces of a loop are handed out one by one: a thread that the system takes off its core delays
// the piece it holds, not its share of all the pieces. Its caller, too, spins for a while and then sleeps until
// that piece is done, and where that takes much of the time, fewer threads take part (`pool_size.h`).
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <type_traits>

#include "pool_size.h"

namespace afm {

class ThreadPool {
 public:
  // The process's pool; a child made by fork gets one of its own.
  static ThreadPool& shared();

  // Size of the shared pool from now on, the calling thread included. Call it while no loop runs.
  static void configure(int threads);

  // Cores that this process may run on.
  static int available_cores();

  // Threads that may take part in a loop, the calling one included.
  int threads() const { return threads_; }

  // Those that do at present: fewer while others use the cores.
  int active_threads() const { return static_cast<int>(active_.load(std::memory_order_relaxed)); }

  // Calls `body(begin, end)` or `body(begin, end, thread)` for consecutive pieces [begin, end) of
  // [0, count), each `chunk` long but the last, on the calling thread (index 0) and the workers. Returns when
  // all are done; an exception of a body stops the loop and is thrown here. A loop inside a loop, or one that
  // starts while another thread's runs, runs on the calling thread alone. `each` is how much there is to do for an
  // index, about as many multiplications: the speeds of loops with more and with fewer threads are compared.
  template <class F>
  void parallel_for(int64_t count, int64_t chunk, F&& body, int64_t each = 1) {
    using Body = std::remove_reference_t<F>;
    auto call = [](void* context, int64_t begin, int64_t end, int thread) {
      Body& f = *static_cast<Body*>(context);
      if constexpr (std::is_invocable_v<Body&, int64_t, int64_t, int>) {
        f(begin, end, thread);
      } else {
        f(begin, end);
      }
    };
    run(count, chunk < 1 ? 1 : chunk, each, call, const_cast<void*>(static_cast<const void*>(&body)));
  }

 private:
  using Call = void (*)(void* context, int64_t begin, int64_t end, int thread);

  explicit ThreadPool(int threads);
  void run(int64_t count, int64_t chunk, int64_t each, Call call, void* context);
  void work(int thread);
  void await_loop(int thread, uint32_t seen);
  int64_t take_pieces(int thread);
  void await_workers(int64_t done, int64_t pieces, LoopTimes& times);

  const int threads_;
  PoolSize pool_size_;  // used by the thread that calls a loop, while no other may

  // The loop in progress. Written by its caller while no worker is inside.
  Call call_ = nullptr;
  void* context_ = nullptr;
  int64_t count_ = 0;
  int64_t chunk_ = 0;
  std::exception_ptr error_;

  alignas(64) std::atomic<int64_t> next_{0};      // first index not handed out
  alignas(64) std::atomic<uint32_t> inside_{0};   // workers in the loop; kOpen while more may enter; kAsleep
  alignas(64) std::atomic<uint32_t> loops_{0};    // started so far: what workers wait for
  alignas(64) std::atomic<uint32_t> sleepers_{0};
  std::atomic<bool> busy_{false};
  std::atomic<bool> failed_{false};
  alignas(64) std::atomic<uint32_t> active_;  // threads from this one on are off duty: they sleep until it changes
};

// What pieces of a loop wait for that need the work of earlier ones. As pieces are handed out in order, some
// thread is at work on whatever a later one waits for; earlier pieces must not throw.
class Countdown {
 public:
  void set(uint32_t count) { left_.store(count, std::memory_order_relaxed); }
  void count_down();
  void wait() const;

 private:
  alignas(64) std::atomic<uint32_t> left_{0};
  mutable std::atomic<uint32_t> sleepers_{0};
};

}  // namespace afm
