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

#include "crew.h"
#include "pool.h"

using afm::Crew;
using afm::LoopTimes;
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

// Loops of a millisecond, `speed(threads)` of work each, until `wanted` threads are chosen; how many it took.
template <class Speed>
int loops_until(Crew& crew, int wanted, int64_t lost, int late, Speed speed) {
  for (int loops = 0; loops < 5000; ++loops) {
    if (crew.size() == wanted) return loops;
    const bool several = crew.size() > 1;
    crew.loop_ended({speed(crew.size()), kMillisecond, several ? lost : 0, several ? late : 0});
  }
  return -1;
}

void nobody_is_late() {
  Crew crew(4);
  for (int i = 0; i < 5000; ++i) {
    crew.loop_ended({100, kMillisecond, 0, 0});
    check(crew.size() == 4, "threads were sent away that nobody waited for");
  }
}

void late_threads_go_and_come_back() {
  Crew crew(2);
  auto alone_is_faster = [](int threads) { return threads == 1 ? 100 : 40; };
  auto alone_is_slower = [](int threads) { return 200 * threads; };
  check(loops_until(crew, 1, kMillisecond / 2, 1, alone_is_faster) > 0, "a thread that is late stayed");
  int alone = 0, loops = 0;  // neighbours that stay: it is tried again, more and more seldom
  for (; loops < 5000; ++loops) {
    alone += crew.size() == 1;
    const bool both = crew.size() == 2;
    crew.loop_ended({alone_is_faster(crew.size()), kMillisecond, both ? kMillisecond / 2 : 0, both});
  }
  check(alone > 0.9 * loops, "a thread that is always late was tried too often");
  check(alone < loops, "a thread that was late was never tried again");
  check(loops_until(crew, 2, 0, 0, alone_is_slower) >= 0, "a thread that is late no more stayed away");
  for (int i = 0; i < 1000; ++i) crew.loop_ended({alone_is_slower(crew.size()), kMillisecond, 0, 0});
  check(crew.size() == 2, "a thread that came back was sent away");
}

void late_threads_that_help_stay() {
  Crew crew(2);
  int both = 0, loops = 0;
  for (; loops < 5000; ++loops) {
    both += crew.size() == 2;
    const bool late = crew.size() == 2;
    crew.loop_ended({crew.size() == 2 ? 100 : 60, kMillisecond, late ? kMillisecond / 2 : 0, late});
  }
  check(both > 0.9 * loops, "a thread was sent away although loops are slower without it");
  check(both < loops, "it was never tried whether loops are faster without a late thread");
}

void only_the_late_ones_go() {
  Crew crew(16);
  auto one_too_many = [](int threads) { return threads == 16 ? 50 : threads * 10; };
  check(loops_until(crew, 15, kMillisecond / 2, 1, one_too_many) > 0, "the late one of 16 threads stayed");
  for (int i = 0; i < 1000; ++i) {
    const bool all = crew.size() == 16;
    crew.loop_ended({one_too_many(crew.size()), kMillisecond, all ? kMillisecond / 2 : 0, all});
    check(crew.size() >= 15, "threads were sent away that nobody waited for");
  }
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
  for (int threads : {1, 2, 5}) loops_of_all_kinds(threads);
  for (int threads : {2, 4}) late_workers_are_left_out(threads);
  a_countdown_wakes_who_sleeps();
  std::fflush(stdout);
  _exit(failures != 0);  // the workers never end
}
