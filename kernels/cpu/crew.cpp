#include "crew.h"

#include <algorithm>

namespace afm {
namespace {

// A speed is that of several of the system's time slices, and of several loops, be they long or held up for long.
constexpr int64_t kWindow = 30000000;
constexpr int64_t kLoops = 6;
// Windows from a trial to the next: few at first because neighbours may be gone soon, at last so many that trials cost
// little beside neighbours that stay.
constexpr int kFewest = 2, kMost = 32;

}  // namespace

bool Crew::loop_ended(const LoopTimes& times) {
  window_.work += times.work;
  window_.all += times.all;
  window_.lost += times.lost;
  window_.longest = std::max(window_.longest, times.all);
  window_.late = std::max(window_.late, times.late);
  if (window_.all < std::max(kWindow, kLoops * window_.longest)) return false;
  const Window window = window_;
  window_ = {};
  return window_ended(window);
}

bool Crew::window_ended(const Window& window) {
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
  // Without the late ones, the others could do all the work in so much of the time.
  const int fewer = std::max(1, size_ - window.late);
  const bool held_up = 2 * window.lost * size_ > window.all * window.late && fewer < size_;
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

bool Crew::resize(int size) {
  const bool changed = size != size_;
  size_ = size;
  return changed;
}

}  // namespace afm
