// Threads that wait for each other: asleep, until a word changes.
//
// `std::atomic::wait` calls sched_yield before it sleeps. On a machine that others use, too, each such call gives a
// thread's time slice away, milliseconds that it does not get back; a thread that sleeps keeps its claim to the core.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#endif

namespace afm {

// Sleeps while `word` is `value`; may return early.
inline void sleep_while(const std::atomic<uint32_t>& word, uint32_t value) {
#if defined(__linux__)
  static_assert(sizeof word == sizeof(uint32_t));
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
#else
  word.wait(value);
#endif
}

// Wakes all who sleep on `word`.
inline void wake(std::atomic<uint32_t>& word) {
#if defined(__linux__)
  syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
#else
  word.notify_all();
#endif
}

// One step of a waiting loop: lets the core's other thread go ahead.
inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Calls `done()` until it is true, for at most `nanoseconds`; returns its last value.
template <class Done>
bool spin(int64_t nanoseconds, Done done) {
  if (done()) return true;
  constexpr int kLooksPerClock = 64;
  const auto until = std::chrono::steady_clock::now() + std::chrono::nanoseconds(nanoseconds);
  do {
    for (int i = 0; i < kLooksPerClock; ++i, relax()) {
      if (done()) return true;
    }
  } while (std::chrono::steady_clock::now() < until);
  return done();
}

}  // namespace afm
