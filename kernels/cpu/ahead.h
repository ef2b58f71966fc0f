// Memory beside a matrix that will be read once its rows are multiplied: it is asked for meanwhile.
#pragma once

#include <cstdint>

#include "matmul.h"

namespace afm {

// For each of the matrix's rows, `row_bytes[i]` of every `data[i]`.
struct Ahead {
  int count = 0;
  const char* data[kMaxAdapters];
  int64_t row_bytes[kMaxAdapters];
};

namespace {  // every instruction set has its own, see isa.h

// Asks for what belongs to rows [row, row + rows), a share at each of `shares` calls: a core waits when it asks for
// more lines than it can keep track of.
class Asking {
 public:
  Asking(const Ahead& ahead, int64_t row, int64_t rows, int64_t shares) : count_(ahead.count) {
    for (int i = 0; i < count_; ++i) {
      next_[i] = ahead.data[i] + row * ahead.row_bytes[i];
      step_[i] = (rows * ahead.row_bytes[i] / shares + kLine - 1) / kLine * kLine;
    }
  }

  void ask() {
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
