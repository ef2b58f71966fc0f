#include "pool.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <cinttypes>
#include <cstdio>
#include <mutex>
#include <thread>

#include "sleep.h"

#if defined(__linux__)
#include <sched.h>
#endif

namespace afm {
namespace {

constexpr uint32_t kOpen = 1u << 31;
constexpr uint32_t kAsleep = 1u << 30;  // the caller sleeps until the last worker wakes it
// Longer than the gaps between a token's loops, short next to a token: an idle process burns no core.
constexpr int64_t kSpin = 200000;
// What a caller waits for at least before it sleeps: falling asleep and waking up take about as long.
constexpr int64_t kShortWait = 50000;

// Never freed: workers may outlive every static object.
std::atomic<ThreadPool*> instance{nullptr};
std::atomic<int> configured{0};
std::atomic_flag starting = ATOMIC_FLAG_INIT;

int64_t now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// Share of the time since this thread's last call in which it was ready to run and others had its core; 0 where the
// system doesn't say.
double off_core() {
  static thread_local int64_t last_time = now(), last_delay = 0;
  int64_t delay = 0;
  if (FILE* file = std::fopen("/proc/thread-self/schedstat", "re")) {  // nanoseconds: on a core, waiting for one
    if (std::fscanf(file, "%*d %" SCNd64, &delay) != 1) delay = 0;
    std::fclose(file);
  }
  const int64_t time = now();
  const int64_t passed = std::max<int64_t>(time - last_time, 1);
  const double share = last_delay > 0 ? static_cast<double>(delay - last_delay) / passed : 0;
  last_time = time;
  last_delay = delay;
  return share;
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
  while (starting.test_and_set(std::memory_order_acquire)) std::this_thread::yield();
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

ThreadPool::ThreadPool(int threads) : threads_(threads), pool_size_(threads), active_(threads) {
  for (int i = 1; i < threads; ++i) std::thread(&ThreadPool::work, this, i).detach();
}

void ThreadPool::run(int64_t count, int64_t chunk, int64_t each, Call call, void* context) {
  if (count <= 0) return;
  if (threads_ == 1 || count <= chunk || busy_.exchange(true, std::memory_order_acquire)) {
    for (int64_t begin = 0; begin < count; begin += chunk) {
      call(context, begin, std::min(begin + chunk, count), 0);
    }
    return;
  }
  call_ = call;
  context_ = context;
  count_ = count;
  chunk_ = chunk;
  next_.store(0, std::memory_order_relaxed);
  failed_.store(false, std::memory_order_relaxed);

  LoopTimes times;
  times.work = count * each;
  const int64_t start = now();
  if (pool_size_.size() > 1) {
    inside_.store(kOpen, std::memory_order_release);
    loops_.fetch_add(1);
    if (sleepers_.load() > 0) wake(loops_);
  }
  const int64_t pieces = take_pieces(0);
  const int64_t done = now();
  times.all = done - start;
  if (pool_size_.size() > 1) await_workers(done, pieces, times);
  pool_size_.loop_ended(times);
  if (pool_size_.window_is_full() && pool_size_.judge(off_core())) {
    active_.store(pool_size_.size());
    wake(active_);
  }

  std::exception_ptr error = failed_.load() ? std::move(error_) : nullptr;
  error_ = nullptr;
  busy_.store(false, std::memory_order_release);
  if (error) std::rethrow_exception(error);
}

// Waits for the workers after the caller's own `pieces`, which were done at time `done`.
void ThreadPool::await_workers(int64_t done, int64_t pieces, LoopTimes& times) {
  // Workers that aren't in the loop yet stay out, and nobody waits for them.
  const uint32_t inside = inside_.fetch_and(~kOpen, std::memory_order_acq_rel) & ~kOpen;
  if (inside == 0) return;
  // Each of them holds one piece. A worker that takes twice as long as a piece takes isn't on a core.
  const int64_t expected = std::max(kShortWait, 2 * times.all / std::max<int64_t>(pieces, 1));
  const auto all_out = [&] { return inside_.load(std::memory_order_acquire) == 0; };
  if (!spin(std::min(expected, kSpin), all_out)) {
    uint32_t left = inside_.fetch_or(kAsleep, std::memory_order_acq_rel);
    times.late = static_cast<int>(left);
    for (left |= kAsleep; left != kAsleep; left = inside_.load(std::memory_order_acquire)) sleep_while(inside_, left);
  }
  const int64_t waited = now() - done;
  times.all += waited;
  if (times.late > 0) times.lost = std::max<int64_t>(waited - expected, 0);
}

// Runs pieces until none are left, and returns how many.
int64_t ThreadPool::take_pieces(int thread) {
  for (int64_t pieces = 0;; ++pieces) {
    int64_t begin = next_.fetch_add(chunk_, std::memory_order_relaxed);
    if (begin >= count_) return pieces;
    try {
      call_(context_, begin, std::min(begin + chunk_, count_), thread);
    } catch (...) {
      if (!failed_.exchange(true)) error_ = std::current_exception();
      next_.store(count_, std::memory_order_relaxed);
    }
  }
}

// Returns when another loop than `seen` has begun, for a thread on duty.
void ThreadPool::await_loop(int thread, uint32_t seen) {
  const auto begun = [&] { return loops_.load(std::memory_order_acquire) != seen; };
  while (true) {
    const uint32_t active = active_.load();
    if (thread >= static_cast<int>(active)) {
      sleep_while(active_, active);
    } else if (spin(kSpin, begun)) {
      return;
    } else {
      sleepers_.fetch_add(1);
      sleep_while(loops_, seen);
      sleepers_.fetch_sub(1);
    }
  }
}

void ThreadPool::work(int thread) {
  uint32_t seen = 0;
  while (true) {
    await_loop(thread, seen);
    seen = loops_.load(std::memory_order_acquire);
    uint32_t inside = inside_.load(std::memory_order_acquire);
    while ((inside & kOpen) && !inside_.compare_exchange_weak(inside, inside + 1, std::memory_order_acq_rel)) {
    }
    if (inside & kOpen) {
      take_pieces(thread);
      if (inside_.fetch_sub(1, std::memory_order_acq_rel) == kAsleep + 1) wake(inside_);
    }
  }
}

void Countdown::count_down() {
  if (left_.fetch_sub(1) == 1 && sleepers_.load() > 0) wake(left_);
}

void Countdown::wait() const {
  if (spin(kShortWait, [&] { return left_.load(std::memory_order_acquire) == 0; })) return;
  sleepers_.fetch_add(1);
  while (const uint32_t left = left_.load()) sleep_while(left_, left);
  sleepers_.fetch_sub(1);
}

}  // namespace afm
