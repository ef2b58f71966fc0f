#include "low_rank.h"

#include <algorithm>

namespace afm {
namespace {

constexpr int64_t kVectors = 16;           // vectors of a call of `shrink`
constexpr int64_t kPieceBytes = 32 << 10;  // bytes of A in a piece
constexpr int64_t kRows = 4;               // rows of A that `shrink` takes at a time

int64_t divide_up(int64_t value, int64_t by) { return (value + by - 1) / by; }

}  // namespace

LowRankProduct::LowRankProduct(const Adapters& adapters, const PackedMatrix& weight, int64_t start, int64_t count,
                               int64_t vectors, LowRankScratch& scratch)
    : adapters_(adapters), rows_(weight.rows), cols_(weight.cols) {
  left_.set(0);
  if (adapters.count == 0) return;
  sort(start, count, vectors, scratch);
  hidden_ = scratch.hidden.get<float>(count * width_);
}

void LowRankProduct::read(const float* x) {
  x_ = x;
  cut();
  left_.set(pieces_);
}

// Puts the vectors of one adapter side by side, so that its numbers are read once for all of them.
void LowRankProduct::sort(int64_t start, int64_t count, int64_t vectors, LowRankScratch& scratch) {
  int32_t* order = scratch.order.get<int32_t>(count);
  order_ = order;
  int64_t found = 0;
  for (int64_t slot = 0; slot < adapters_.count; ++slot) {
    const Adapter& adapter = adapters_.list[slot];
    if (adapter.rank == 0) continue;
    const int64_t first = found;
    for (int64_t m = 0; m < count; ++m) {
      const int64_t row = (start + m) * adapters_.batch / vectors;
      if (adapters_.slots[row] == slot) order[found++] = static_cast<int32_t>(m);
    }
    if (found == first) continue;
    groups_[n_groups_++] = {&adapter, adapters_.scales[slot], first, found - first, 0, 0};
    width_ = std::max(width_, adapters_.n_sections * adapter.rank);
  }
}

void LowRankProduct::cut() {
  for (int g = 0; g < n_groups_; ++g) {
    Group& group = groups_[g];
    const int64_t rows = inner_rows(group), row_bytes = cols_ * size_of(group.adapter->numbers.type);
    const int64_t few = std::max(kPieceBytes / row_bytes / kRows * kRows, kRows);
    group.row_step = std::min(few, rows);
    group.first_piece = pieces_;
    pieces_ += divide_up(rows, group.row_step);
  }
}

void LowRankProduct::shrink(int64_t piece) {
  int g = n_groups_ - 1;
  while (groups_[g].first_piece > piece) --g;
  const Group& group = groups_[g];
  const int64_t row = (piece - group.first_piece) * group.row_step;
  shrink(group, row, std::min(group.row_step, inner_rows(group) - row), x_, order_ + group.first, group.count, hidden_);
  left_.count_down();
}

void LowRankProduct::shrink(const float* x, int64_t first, int64_t n) const {
  for (int g = 0; g < n_groups_; ++g) {
    const Group& group = groups_[g];
    const int32_t *end = order_ + group.first + group.count, *next = order_ + group.first;
    next = std::lower_bound(next, end, first);
    while (next < end && *next < first + n) {
      int32_t vectors[kVectors];
      int64_t count = 0;
      for (; count < kVectors && next < end && *next < first + n; ++next) {
        vectors[count++] = static_cast<int32_t>(*next - first);
      }
      shrink(group, 0, inner_rows(group), x, vectors, count, hidden_ + first * width_);
    }
  }
}

// hidden = scale * A x for rows [row, row + rows) of A and some vectors.
void LowRankProduct::shrink(const Group& group, int64_t row, int64_t rows, const float* x, const int32_t* vectors,
                            int64_t count, float* hidden) const {
  const Adapter& adapter = *group.adapter;
  kernels().shrink({adapter.numbers, adapter.a + row * cols_, rows, cols_, x, cols_, vectors, count, group.scale,
                    hidden + row, width_});
}

PrefetchRows LowRankProduct::ahead(int64_t begin) const {
  PrefetchRows ahead;
  for (ahead.count = 0; ahead.count < n_groups_; ++ahead.count) {
    const Adapter& adapter = *groups_[ahead.count].adapter;
    const int64_t size = size_of(adapter.numbers.type);
    ahead.data[ahead.count] =
        static_cast<const char*>(adapter.numbers.data) + (adapter.b + begin * adapter.rank) * size;
    ahead.row_bytes[ahead.count] = adapter.rank * size;
  }
  return ahead;
}

void LowRankProduct::add(int64_t begin, int64_t end, float* out, int64_t stride) const {
  if (n_groups_ == 0) return;
  left_.wait();
  int64_t from = begin;
  for (int64_t s = 0; s < adapters_.n_sections && from < end; ++s) {
    const int64_t to = std::min(end, adapters_.sections[s]);
    if (to <= from) continue;
    for (int g = 0; g < n_groups_; ++g) {
      const Group& group = groups_[g];
      const Adapter& adapter = *group.adapter;
      kernels().expand({adapter.numbers, adapter.b, adapter.rank, from, to, hidden_ + s * adapter.rank, width_,
                        order_ + group.first, group.count, out + (from - begin), stride});
    }
    from = to;
  }
}

}  // namespace afm
