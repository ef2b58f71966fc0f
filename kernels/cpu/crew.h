// How many threads share a loop: all of them, or fewer while others use the cores. Knows no threads and no clock.
//
// A thread that the system takes off its core keeps the others waiting for as long as a time slice, which is many
// loops. When that takes much of the time, the loops go on with fewer threads for a while, and how fast they then
// are decides: which is better depends on the neighbours, on who shares a core with whom, and on how the system
// divides its time among processes or threads.
#pragma once

#include <cstdint>

namespace afm {

// What a loop's caller saw of it.
struct LoopTimes {
  int64_t work = 0;  // how much there was to do, in any unit that all loops share
  int64_t all = 0;   // nanoseconds from its start to its end
  int64_t lost = 0;  // of these, in which it waited for threads that should have been done
  int late = 0;      // those threads
};

class Crew {
 public:
  explicit Crew(int all) : all_(all), size_(all) {}

  // Threads for the next loop, from 1 to all.
  int size() const { return size_; }

  // Whether the size changed.
  bool loop_ended(const LoopTimes& times);

 private:
  struct Window {
    int64_t work = 0, all = 0, lost = 0, longest = 0;
    int late = 0;
  };

  bool window_ended(const Window& window);
  bool resize(int size);

  const int all_;
  int size_;
  Window window_;
  // While another size is tried: what it is compared with.
  bool trying_ = false;
  int kept_ = 0;
  double kept_speed_ = 0;
  int since_trial_ = 0;  // windows
  int next_trial_ = 0;
};

}  // namespace afm
