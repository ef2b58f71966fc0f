#include "outliers.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include "isa.h"

namespace afm {
namespace {

// How many eighths of the elements may be below 1 / part of the largest: before outliers are taken out, after, and of
// what further passes start from.
struct Spread {
  float part;
  int64_t before, after, further;
};

// int8 is chosen for its speed: an error that excluding a few outliers can't repair stays, unless nearly nothing would be left.
Spread spread_of(int digits) { return digits == 2 ? Spread{128, 3, 3, 3} : Spread{32, 4, 6, 1}; }

constexpr float kStep = 254;  // from a pass's unit to the next pass's: half a unit becomes 127

// The largest magnitudes of a vector, in descending order, and their columns.
struct Largest {
  static constexpr int kCount = kMaxOutliers + 1;
  float magnitudes[kCount] = {};
  int32_t columns[kCount] = {};

  Largest(const float* x, int64_t cols) {
    // As many stretches as are looked for have a maximum of `least` or more: what is below it is none of them.
    constexpr int64_t kStretch = 32;
    std::vector<float> maxima;
    for (int64_t k = 0; k < cols; k += kStretch) {
      maxima.push_back(kernels().largest(x + k, std::min(kStretch, cols - k)));
    }
    float least = 0;
    if (maxima.size() > kCount) {
      std::vector<float> sorted = maxima;
      std::nth_element(sorted.begin(), sorted.begin() + kCount - 1, sorted.end(), std::greater<float>());
      least = sorted[kCount - 1];
    }
    for (int64_t k = 0; k < cols; k += kStretch) {
      if (maxima[k / kStretch] < least) continue;
      for (int64_t i = k; i < std::min(k + kStretch, cols); ++i) {
        const float magnitude = std::fabs(x[i]);
        if (magnitude >= least && magnitude > magnitudes[kCount - 1]) insert(magnitude, i);
      }
    }
  }

  void insert(float magnitude, int64_t column) {
    int at = kCount - 1;
    for (; at > 0 && magnitudes[at - 1] < magnitude; --at) {
      magnitudes[at] = magnitudes[at - 1];
      columns[at] = columns[at - 1];
    }
    magnitudes[at] = magnitude;
    columns[at] = static_cast<int32_t>(column);
  }
};

// How many of x's elements are below a limit.
class Elements {
 public:
  Elements(const float* x, int64_t cols) : x_(x), cols_(cols) {}

  // True if at most `eighths` eighths of the numbers that are not 0 are below `limit`.
  bool few_below(float limit, int64_t eighths) {
    const int64_t below = kernels().count_below(x_, cols_, limit);
    if (8 * below <= eighths * cols_) return true;  // whatever number of them are 0
    if (zeros_ < 0) zeros_ = kernels().count_below(x_, cols_, kNegligible);
    return 8 * (below - zeros_) <= eighths * (cols_ - zeros_);
  }

 private:
  const float* const x_;
  const int64_t cols_;
  int64_t zeros_ = -1;
};

}  // namespace

Extra find_outliers(const float* x, int64_t cols, int digits, Outliers& found) {
  found.count = 0;
  const Spread spread = spread_of(digits);
  const float largest = kernels().largest(x, cols);
  Elements elements(x, cols);
  if (!std::isfinite(largest) || elements.few_below(largest / spread.part, spread.before)) return Extra::none;
  const Largest top(x, cols);
  auto mended_by = [&](int64_t count, int64_t eighths) {
    return elements.few_below(top.magnitudes[count] / spread.part, eighths);
  };
  if (!mended_by(kMaxOutliers, spread.after)) return Extra::passes;
  int64_t most = kMaxOutliers;
  for (int64_t too_few = 0; most - too_few > 1;) {
    const int64_t middle = (most + too_few) / 2;
    (mended_by(middle, spread.before) ? most : too_few) = middle;
  }
  found.count = most;
  for (int64_t i = 0; i < most; ++i) {
    found.columns[i] = top.columns[i];
    found.values[i] = x[top.columns[i]];
  }
  return Extra::outliers;
}

bool needs_pass(const float* x, int64_t cols, int digits, int further) {
  const Spread spread = spread_of(digits);
  const float limit = kernels().largest(x, cols) / spread.part / std::pow(kStep, static_cast<float>(further));
  return !Elements(x, cols).few_below(limit, spread.further);
}

}  // namespace afm
