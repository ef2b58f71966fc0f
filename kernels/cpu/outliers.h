// Elements of a vector that are too large to share a scale with the others.
//
// With one scale for all, the largest element sets the unit, and what is far below it is lost. So no more than 3/8
// of the elements that are not 0 may be below 1/128 of the largest; of int8 activations, half below 1/32. Of a vector
// that breaks this, up to `kMaxOutliers` of the largest elements are multiplied separately, as few as repair it. If that many
// don't repair it, none are, and the rounding's remainder of the vector is multiplied in further passes.
#pragma once

#include <cstdint>

namespace afm {

constexpr int kMaxOutliers = 16;

struct Outliers {
  int64_t count = 0;
  int32_t columns[kMaxOutliers];
  float values[kMaxOutliers];
};

// What a vector needs besides its integers.
enum class Extra : uint8_t { none, outliers, passes };

// Says what x (cols,) needs, and finds its outliers where it is those; nothing for an infinity or a NaN.
Extra find_outliers(const float* x, int64_t cols, int digits, Outliers& found);

// True if x needs another pass after `further` passes; each adds one digit, of 1/254 of the previous unit.
bool needs_pass(const float* x, int64_t cols, int digits, int further);

}  // namespace afm
