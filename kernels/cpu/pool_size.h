// How many threads share a loop: all of them, or fewer while others use the cores. Knows no threads and no clock.
//
// A thread that the system takes off its core keeps the others waiting for as long as a time slice, which is many
// loops; and two of ours may have to share a core. When such waiting takes much of the time, the loops go on with
// fewer threads for a while, and how fast they then are decides: which is better depends on the neighbours, and on
// how the system divides its cores among processes, sessions or threads.
#pragma once

#include <cstdint>

namespace afm {

// How one loop went, measured by the thread that called it.
struct LoopTimes {
  int64_t work = 0;  // how much there was to do, in any unit that all loops share
  int64_t all = 0;   // nanoseconds from its start to its end
  int64_t lost = 0;  // nanoseconds in which the caller waited for threads that should have been done
  int late = 0;      // number of those threads
};

class PoolSize {
 public:
  explicit PoolSize(int all) : all_(all), size_(all) {}

  // Threads for the next loop, from 1 to all.
  int size() const { return size_; }

  void loop_ended(const LoopTimes& times);

  // True if enough loops have ended for `judge`.
  bool window_is_full() const;

  // Chooses the size from the loops since the last call; true if it changed. `off_core`: share of the time in which the
  // caller was ready to run and had no core.
  bool judge(double off_core);

 private:
  struct Window {
    int64_t work = 0, all = 0, lost = 0, longest = 0;
    int late = 0;
  };

  bool resize(int size);

  const int all_;
  int size_;
  Window window_;
  // While another size is tried: the size and speed that it is compared with.
  bool trying_ = false;
  int kept_ = 0;
  double kept_speed_ = 0;
  int since_trial_ = 0;  // windows since the last trial
  int next_trial_ = 0;   // windows from a trial to the next
};

}  // namespace afm
