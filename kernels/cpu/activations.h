// Vectors as the kernels want them: normed, and turned into integers.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <vector>

#include "isa.h"
#include "matmul.h"
#include "outliers.h"
#include "scratch.h"

namespace afm {

enum class Path {
  vector,  // integer kernels, one vector at a time
  matrix,  // integer kernels, several vectors at a time
  floats,  // rows are turned into float32: groups that no register holds a whole number of, and palettes that no
           // kernel takes
};

inline bool is_grouped(const PackedMatrix& w) { return w.groups > 1; }
inline int64_t row_bytes(const PackedMatrix& w) { return w.cols * w.bits / 8; }

Path path_of(const PackedMatrix& w, int64_t vectors);

// Integers of some of the vectors, whose products are added up over the passes.
struct Pass {
  int64_t count = 0;
  const int32_t* vectors = nullptr;  // (count,) which ones; null: all of them
  int digits = 2;
  int64_t digit_bytes = 0;  // of one vector
  const int8_t* x = nullptr;
  const float* scales = nullptr;  // (count,) value of one unit
  const float* sums = nullptr;    // (count, sum_groups)

  const int8_t* vector(int64_t i) const { return x + i * digit_bytes; }
};

// Vectors [start, start + count) of the activations, in their order.
struct Prepared {
  Path path = Path::vector;
  int64_t count = 0;
  int64_t sum_groups = 1;
  const std::vector<Pass>* passes = nullptr;  // none for Path::floats
  const Outliers* outliers = nullptr;         // (count,); null where no vector has any
  const float* floats = nullptr;  // (count, K), for palettes, Path::floats and adapters of few vectors
};

// What `Prepared` points to, until the next call.
struct PrepareScratch {
  struct OfPass {
    Scratch digits, scales, sums;
    std::vector<int32_t> vectors;
  };
  std::vector<Pass> passes;
  std::deque<OfPass> of_passes;
  std::vector<Extra> extras;
  std::vector<Outliers> outliers;
  Scratch floats, norm, spread, rests;
};

// Vectors that adapters take at a time, from the second-level cache.
constexpr int64_t kTogether = 16;

// Takes vectors [first, first + n) of the `count` as floats (n, K) while they are in the caches.
using TakeFloats = std::function<void(const float* x, int64_t first, int64_t n)>;

// `adapted`: whether adapters need the vectors as floats. More than kTogether of them are handed to `take`, which has
// to be there then, some at a time and by any thread; fewer stay in `Prepared`.
Prepared prepare(const Activations& x, const PackedMatrix& w, bool adapted, int64_t start, int64_t count,
                 PrepareScratch& scratch, const TakeFloats& take = {});

}  // namespace afm
