// Prefetching what is read right after a matrix's rows are multiplied, while they are.
#pragma once

#include <cstdint>

#include "matmul.h"

namespace afm {

// Arrays with `row_bytes[i]` bytes for each of the matrix's rows, from `data[i]` on.
struct PrefetchRows {
  int count = 0;
  const char* data[kMaxAdapters];
  int64_t row_bytes[kMaxAdapters];
};

namespace {  // every instruction set has its own, see isa.h

// Prefetches what belongs to rows [row, row + rows), an equal share at each of `shares` calls of `next_share`: a core
// stalls when too many lines are on their way at once.
class Prefetcher {
 public:
  Prefetcher(const PrefetchRows& ahead, int64_t row, int64_t rows, int64_t shares) : count_(ahead.count) {
    for (int i = 0; i < count_; ++i) {
      next_[i] = ahead.data[i] + row * ahead.row_bytes[i];
      step_[i] = (rows * ahead.row_bytes[i] / shares + kLine - 1) / kLine * kLine;
    }
  }

  void next_share() {
    for (int i = 0; i < count_; ++i) {
      for (const char* end = next_[i] + step_[i]; next_[i] < end; next_[i] += kLine) {
        __builtin_prefetch(next_[i], 0, 2);  // to read, into the second-level cache
      }
    }
  }

 private:
  static constexpr int64_t kLine = 64;
  const int count_;
  const char* next_[kMaxAdapters];
  int64_t step_[kMaxAdapters];
};

}  // namespace
}  // namespace afm
