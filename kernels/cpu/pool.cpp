#include "pool.h"

#include <pthread.h>

#include <chrono>
#include <mutex>
#include <thread>

#if defined(__linux__)
#include <sched.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace afm {
namespace {

constexpr uint32_t kOpen = 1u << 31;
// Longer than the gaps between a token's loops, short next to a token: an idle process burns no core.
constexpr auto kSpin = std::chrono::microseconds(200);
constexpr int kPausesPerLook = 64;

// Never freed: workers may outlive every static object.
std::atomic<ThreadPool*> instance{nullptr};
std::atomic<int> configured{0};
std::atomic_flag starting = ATOMIC_FLAG_INIT;

inline void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Waits for `done()`; gives the core away now and then, as its owner may be what we wait for.
template <class Done>
void spin_until(Done done) {
  for (int i = 0; !done(); ++i) {
    if (i % 1024 == 1023) std::this_thread::yield();
    pause();
  }
}

}  // namespace

ThreadPool& ThreadPool::shared() {
  if (ThreadPool* pool = instance.load(std::memory_order_acquire)) return *pool;
  static std::once_flag registered;
  // Threads don't survive a fork: the child forgets the pool, and starts another when it needs one.
  std::call_once(registered, [] {
    pthread_atfork(nullptr, nullptr, [] {
      instance.store(nullptr, std::memory_order_release);
      starting.clear(std::memory_order_release);
    });
  });
  spin_until([&] { return !starting.test_and_set(std::memory_order_acquire); });
  ThreadPool* pool = instance.load(std::memory_order_acquire);
  if (pool == nullptr) {
    int wanted = configured.load();
    pool = new ThreadPool(wanted > 0 ? wanted : available_cores());
    instance.store(pool, std::memory_order_release);
  }
  starting.clear(std::memory_order_release);
  return *pool;
}

void ThreadPool::configure(int threads) {
  configured.store(threads);
  instance.store(nullptr, std::memory_order_release);
}

int ThreadPool::available_cores() {
#if defined(__linux__)
  cpu_set_t cores;
  if (sched_getaffinity(0, sizeof cores, &cores) == 0) return CPU_COUNT(&cores);
#endif
  int count = static_cast<int>(std::thread::hardware_concurrency());
  return count > 0 ? count : 1;
}

ThreadPool::ThreadPool(int threads) : threads_(threads) {
  for (int i = 1; i < threads; ++i) std::thread(&ThreadPool::work, this, i).detach();
}

void ThreadPool::run(int64_t count, int64_t chunk, Call call, void* context) {
  if (count <= 0) return;
  if (threads_ == 1 || count <= chunk || busy_.exchange(true, std::memory_order_acquire)) {
    for (int64_t begin = 0; begin < count; begin += chunk) {
      call(context, begin, begin + chunk < count ? begin + chunk : count, 0);
    }
    return;
  }
  call_ = call;
  context_ = context;
  count_ = count;
  chunk_ = chunk;
  next_.store(0, std::memory_order_relaxed);
  failed_.store(false, std::memory_order_relaxed);
  inside_.store(kOpen, std::memory_order_release);
  loops_.fetch_add(1);
  if (sleepers_.load() > 0) loops_.notify_all();

  take_pieces(0);

  // A worker that comes late finds the door closed, and nobody waits for it.
  inside_.fetch_and(~kOpen, std::memory_order_acq_rel);
  spin_until([&] { return inside_.load(std::memory_order_acquire) == 0; });
  std::exception_ptr error = failed_.load() ? std::move(error_) : nullptr;
  error_ = nullptr;
  busy_.store(false, std::memory_order_release);
  if (error) std::rethrow_exception(error);
}

void ThreadPool::take_pieces(int thread) {
  while (true) {
    int64_t begin = next_.fetch_add(chunk_, std::memory_order_relaxed);
    if (begin >= count_) return;
    try {
      call_(context_, begin, begin + chunk_ < count_ ? begin + chunk_ : count_, thread);
    } catch (...) {
      if (!failed_.exchange(true)) error_ = std::current_exception();
      next_.store(count_, std::memory_order_relaxed);
    }
  }
}

void ThreadPool::work(int thread) {
  uint32_t seen = 0;
  while (true) {
    auto until = std::chrono::steady_clock::now() + kSpin;
    while (loops_.load(std::memory_order_acquire) == seen) {
      for (int i = 0; i < kPausesPerLook && loops_.load(std::memory_order_relaxed) == seen; ++i) pause();
      if (std::chrono::steady_clock::now() < until) continue;
      sleepers_.fetch_add(1);
      loops_.wait(seen);
      sleepers_.fetch_sub(1);
      break;
    }
    seen = loops_.load(std::memory_order_acquire);
    uint32_t inside = inside_.load(std::memory_order_acquire);
    while ((inside & kOpen) && !inside_.compare_exchange_weak(inside, inside + 1, std::memory_order_acq_rel)) {
    }
    if (inside & kOpen) {
      take_pieces(thread);
      inside_.fetch_sub(1, std::memory_order_acq_rel);
    }
  }
}

void Countdown::wait() const {
  spin_until([&] { return left_.load(std::memory_order_acquire) == 0; });
}

}  // namespace afm
