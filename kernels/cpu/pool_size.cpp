#include "pool_size.h"

#include <algorithm>

namespace afm {
namespace {

// Nanoseconds, and loops, that a speed is measured over at least: several of the system's time slices, and several
// loops as long as the longest of them.
constexpr int64_t kWindow = 30000000;
constexpr int64_t kLoops = 6;
// A machine that nobody else uses takes a thread off its core for less than a hundredth of the time.
constexpr double kOffCore = 1.0 / 8;
// Windows from a trial to the next: few at first because the neighbours may be gone soon, in the end so many that
// trials cost little.
constexpr int kFewest = 2, kMost = 32;

}  // namespace

void PoolSize::loop_ended(const LoopTimes& times) {
  window_.work += times.work;
  window_.all += times.all;
  window_.lost += times.lost;
  window_.longest = std::max(window_.longest, times.all);
  window_.late = std::max(window_.late, times.late);
}

bool PoolSize::window_is_full() const { return window_.all >= std::max(kWindow, kLoops * window_.longest); }

bool PoolSize::judge(double off_core) {
  const Window window = window_;
  window_ = {};
  const double speed = static_cast<double>(window.work) / window.all;
  ++since_trial_;
  if (trying_) {
    trying_ = false;
    since_trial_ = 0;
    if (speed > kept_speed_) {
      next_trial_ = kFewest;
      return false;
    }
    next_trial_ = std::min(2 * next_trial_, kMost);
    return resize(kept_);
  }
  const int late = std::max(1, window.late), fewer = std::max(1, size_ - late);
  // Waiting took more than half of the time that the late threads' share of the work takes.
  const bool waits = 2 * window.lost * size_ > window.all * late;
  const bool held_up = fewer < size_ && (waits || off_core > kOffCore);
  if (!held_up && size_ == all_) {
    next_trial_ = 0;
    return false;
  }
  if (since_trial_ < next_trial_) return false;
  if (next_trial_ == 0) next_trial_ = kFewest;
  trying_ = true;
  kept_ = size_;
  kept_speed_ = speed;
  return resize(held_up ? fewer : all_);
}

bool PoolSize::resize(int size) {
  const bool changed = size != size_;
  size_ = size;
  return changed;
}

}  // namespace afm
