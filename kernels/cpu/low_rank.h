// What adapters add to a product: `scale * B (A x)`, for each vector with its own adapter. The threads that multiply
// with the matrix share both steps.
#pragma once

#include <cstdint>

#include "isa.h"
#include "matmul.h"
#include "pool.h"
#include "scratch.h"

namespace afm {

struct LowRankScratch {
  Scratch order, hidden;
};

class LowRankProduct {
 public:
  // For vectors [start, start + count) of `vectors`.
  LowRankProduct(const Adapters& adapters, const PackedMatrix& weight, int64_t start, int64_t count, int64_t vectors,
                 LowRankScratch& scratch);

  bool empty() const { return n_groups_ == 0; }

  // Of many vectors, products with A are for whoever has some of these in its caches: `x` (n, K) in float32, from the
  // `first` of the `count` on. Each vector must come once, before `add`; any threads may call this.
  void shrink(const float* x, int64_t first, int64_t n) const;

  // Of few vectors, which are x (count, K) in float32, they come in pieces, each to be computed once, by any thread.
  // There are none before this is called.
  void read(const float* x);
  int64_t pieces() const { return pieces_; }
  void shrink(int64_t piece);

  // What `add` will read of B, for rows of the matrix from `begin` on.
  PrefetchRows ahead(int64_t begin) const;

  // out (count, stride) += B h for rows [begin, end) of the matrix; waits until all pieces are there.
  void add(int64_t begin, int64_t end, float* out, int64_t stride) const;

 private:
  // The vectors of one adapter: `count` numbers in `order_` from `first` on.
  struct Group {
    const Adapter* adapter;
    float scale;
    int64_t first, count;
    int64_t row_step;  // rows of A in a piece
    int64_t first_piece;
  };

  void sort(int64_t start, int64_t count, int64_t vectors, LowRankScratch& scratch);
  void cut();
  void shrink(const Group& group, int64_t row, int64_t rows, const float* x, const int32_t* vectors, int64_t count,
              float* hidden) const;
  int64_t inner_rows(const Group& group) const { return adapters_.n_sections * group.adapter->rank; }

  const Adapters& adapters_;
  const int64_t rows_, cols_;
  const float* x_ = nullptr;
  Group groups_[kMaxAdapters];
  int n_groups_ = 0;
  int64_t pieces_ = 0;
  const int32_t* order_ = nullptr;
  float* hidden_ = nullptr;  // (count, width_): each vector's scale * A x, section after section
  int64_t width_ = 0;
  Countdown left_;
};

}  // namespace afm
