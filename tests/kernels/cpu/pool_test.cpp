// Runs loops on the pool in all ways that there are, with threads that come late, too, and drives the choice of how
// many share a loop by times that are made up. Prints what was wrong.
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "pool_size.h"
#include "pool.h"

using afm::PoolSize;
using afm::ThreadPool;

namespace {

std::atomic<int> failures{0};

void check(bool good, const char* what) {
  if (good) return;
  ++failures;
  std::puts(what);
}

void sleep_for(int microseconds) { std::this_thread::sleep_for(std::chrono::microseconds(microseconds)); }

// ---- The choice, by made-up times

constexpr int64_t kMillisecond = 1000000;

// How other processes delay loops of that number of threads.
struct Machine {
  int64_t (*speed)(int threads);         // work in a millisecond
  int64_t (*lost)(int threads);          // of the millisecond, while one of them was late
  double (*off_core)(int threads);       // the caller
};

int64_t nothing_lost(int) { return 0; }
int64_t half_of_it(int threads) { return threads > 1 ? kMillisecond / 2 : 0; }
double never_off(int) { return 0.01; }
double half_off(int) { return 0.5; }

void run_loop(PoolSize& pool_size, const Machine& machine) {
  const int64_t lost = machine.lost(pool_size.size());
  pool_size.loop_ended({machine.speed(pool_size.size()), kMillisecond, lost, lost > 0});
  if (pool_size.window_is_full()) pool_size.judge(machine.off_core(pool_size.size()));
}

// Number of loops with `threads` threads, of 5000.
int loops_with(int threads, PoolSize& pool_size, const Machine& machine) {
  int found = 0;
  for (int i = 0; i < 5000; ++i, run_loop(pool_size, machine)) found += pool_size.size() == threads;
  return found;
}

int64_t together(int threads) { return 200 * threads; }
int64_t alone_is_faster(int threads) { return threads == 1 ? 100 : 40; }
int64_t alone_is_slower(int threads) { return threads == 1 ? 60 : 100; }

void nobody_is_late() {
  PoolSize pool_size(4);
  check(loops_with(4, pool_size, {together, nothing_lost, never_off}) == 5000, "threads were sent away on a quiet machine");
}

void late_threads_go_and_come_back() {
  for (const Machine& busy : {Machine{alone_is_faster, half_of_it, never_off}, {alone_is_faster, nothing_lost, half_off}}) {
    PoolSize pool_size(2);
    const int alone = loops_with(1, pool_size, busy);
    check(alone > 4500, "a thread that slows the loops down took part in many");
    check(alone < 4950, "a thread that slowed the loops down was not tried again");
    const Machine quiet = {together, nothing_lost, never_off};
    check(loops_with(2, pool_size, quiet) > 3500, "a thread that could help again came back late");
    check(loops_with(2, pool_size, quiet) == 5000, "a thread that came back was sent away");
  }
}

void late_threads_that_help_stay() {
  for (const Machine& busy : {Machine{alone_is_slower, half_of_it, never_off}, {alone_is_slower, nothing_lost, half_off}}) {
    PoolSize pool_size(2);
    const int both = loops_with(2, pool_size, busy);
    check(both > 4500, "a thread was sent away although loops are slower without it");
    check(both < 5000, "it was never tried whether loops are faster with fewer threads");
  }
}

void only_the_late_ones_go() {
  PoolSize pool_size(16);
  const Machine busy = {[](int threads) -> int64_t { return threads == 16 ? 50 : threads * 10; },
                        [](int threads) { return threads == 16 ? kMillisecond / 2 : 0; }, never_off};
  check(loops_with(15, pool_size, busy) > 4500, "the late one of 16 threads stayed, or others went");
}

// Long loops, and long waits, take longer windows: a speed is never measured over one or two loops.
void a_speed_is_that_of_several_loops() {
  PoolSize pool_size(2);
  int loops = 0;
  for (; !pool_size.window_is_full(); ++loops) pool_size.loop_ended({1, 400 * kMillisecond, 0, 0});
  check(loops >= 5, "a speed was measured over a few loops");
}

// ---- Loops

// Every index once, whatever the sizes.
void covers(int64_t count, int64_t chunk) {
  std::vector<std::atomic<int>> seen(count);
  std::atomic<bool> shaped{true};
  ThreadPool& pool = ThreadPool::shared();
  pool.parallel_for(count, chunk, [&](int64_t begin, int64_t end, int thread) {
    if (begin % chunk || end - begin > chunk || thread < 0 || thread >= pool.threads()) shaped = false;
    for (int64_t i = begin; i < end; ++i) ++seen[i];
  });
  bool once = true;
  for (auto& n : seen) once = once && n == 1;
  check(once, "an index was left out or visited twice");
  check(shaped, "a piece has another shape, or a thread another number");
}

void exceptions_reach_the_caller() {
  bool thrown = false;
  try {
    ThreadPool::shared().parallel_for(1000, 1, [&](int64_t i, int64_t) {
      if (i == 37) throw std::runtime_error("37");
    });
  } catch (const std::runtime_error& error) {
    thrown = error.what() == std::string("37");
  }
  check(thrown, "an exception did not reach the caller");
  covers(100, 3);
}

void loops_of_all_kinds(int threads) {
  ThreadPool::configure(threads);
  ThreadPool& pool = ThreadPool::shared();
  check(pool.threads() == threads, "the pool has another size");
  for (int round = 0; round < 300; ++round) covers(1 + round * 7 % 101, 1 + round % 13);
  covers(0, 1);

  std::atomic<int> calls{0};
  pool.parallel_for(10, 1, [&](int64_t, int64_t) {
    pool.parallel_for(10, 1, [&](int64_t, int64_t) { ++calls; });
  });
  check(calls == 100, "a loop inside a loop lost some of its pieces");
  exceptions_reach_the_caller();

  std::vector<std::thread> callers;  // loops of several threads at once
  for (int i = 0; i < 4; ++i) {
    callers.emplace_back([] {
      for (int j = 0; j < 200; ++j) covers(50, 2);
    });
  }
  for (auto& caller : callers) caller.join();

  sleep_for(5000);  // workers sleep by now
  covers(64, 1);
}

// Workers that keep their callers waiting, as if others had their cores: pieces sleep, so that it does not matter
// what else the machine does.
void late_workers_are_left_out(int threads) {
  ThreadPool::configure(threads);
  ThreadPool& pool = ThreadPool::shared();
  int loops = 0;
  for (; loops < 1000 && pool.active_threads() == threads; ++loops) {
    std::atomic<int> calls{0};
    pool.parallel_for(8, 1, [&](int64_t, int64_t, int thread) {
      ++calls;
      sleep_for(thread == 0 ? 100 : 5000);
    });
    check(calls == 8, "a loop with late workers lost some of its pieces");
  }
  check(pool.active_threads() < threads, "workers that are late again and again took part in every loop");
  exceptions_reach_the_caller();
  for (loops = 0; loops < 1000 && pool.active_threads() < threads; ++loops) {
    std::atomic<int> calls{0};
    pool.parallel_for(2 * threads, 1, [&](int64_t, int64_t) {
      ++calls;
      sleep_for(1000);
    });
    check(calls == 2 * threads, "a loop of fewer threads lost some of its pieces");
  }
  check(pool.active_threads() == threads, "workers that are late no more stayed away");
  covers(1000, 1);
}

// What pieces wait for, longer than they spin.
void a_countdown_wakes_who_sleeps() {
  ThreadPool::configure(3);
  afm::Countdown left;
  left.set(1);
  std::atomic<int> early{0};
  std::atomic<bool> done{false};
  ThreadPool::shared().parallel_for(6, 1, [&](int64_t i, int64_t) {
    if (i == 0) {
      sleep_for(3000);
      done = true;
      left.count_down();
    } else {
      left.wait();
      early += !done;
    }
  });
  check(early == 0, "a piece did not wait for an earlier one");
}

}  // namespace

int main() {
  nobody_is_late();
  late_threads_go_and_come_back();
  late_threads_that_help_stay();
  only_the_late_ones_go();
  a_speed_is_that_of_several_loops();
  for (int threads : {1, 2, 5}) loops_of_all_kinds(threads);
  for (int threads : {2, 4}) late_workers_are_left_out(threads);
  a_countdown_wakes_who_sleeps();
  std::fflush(stdout);
  _exit(failures != 0);  // the workers never end
}
