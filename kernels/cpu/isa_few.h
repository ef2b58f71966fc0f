// Rows of codes with one scale each times one vector or a few; part of the units that include it after `isa_common.h`,
// and compiled like them.
//
// Memory is nearly the limit: codes go from memory into registers, and their fields meet the vectors of a tile there.
// Every lane adds up the same columns for any number of vectors, so that a vector's products come out the same whatever
// other vectors there are.
//
// The unit's Isa defines
//   Integers                   a register of integers
//   kTileVectors<BITS, DIGITS>              vectors of a tile, at most
//   tile_rows<BITS, DIGITS>(int vectors)    rows that a number of vectors meet at once
// and after this file the unit defines `add_few_rows`.
#pragma once

#include <utility>

#include "isa.h"

namespace afm {
namespace {

constexpr int64_t kPanelRows = 8;  // that meet a strip of a tile's digits while it is in the first-level cache
constexpr int64_t kStripDigits = 16 << 10;  // bytes

// A strip of columns.
struct FewStrip {
  int64_t begin, bytes;  // of a row's codes
  bool first, last;
};

// Prefetches while codes of ROWS rows are multiplied: where a strip is a whole row, as RowsPrefetcher does, else the same
// strip of the rows that are `ahead` bytes behind.
template <int ROWS>
class FewPrefetcher {
 public:
  FewPrefetcher(const MatrixJob& job, const FewStrip& strip, const uint8_t* codes, int64_t ahead)
      : in_order_(strip.first && strip.last),
        row_bytes_(job.row_bytes),
        rows_(codes, job.row_bytes),
        at_(codes + ahead) {}

  // For the next Isa::kBytes of every row.
  void next() {
    if (in_order_) return rows_.next();
    for (int r = 0; r < ROWS; ++r) Isa::prefetch(at_ + r * row_bytes_);
    at_ += Isa::kBytes;
  }

 private:
  const bool in_order_;
  const int64_t row_bytes_;
  RowsPrefetcher<ROWS> rows_;
  const uint8_t* at_;
};

// What strips of a panel add up for a tile: integers, and their floats after the last strip.
template <int DIGITS, int VECTORS>
struct FewSums {
  static constexpr int kLanes = Isa::kLanes, kSums = (VECTORS * kPanelRows + kLanes - 1) / kLanes * kLanes;
  Isa::Integers integers[VECTORS][DIGITS][kPanelRows];
  Isa::Lanes lanes[kSums];  // of vector v and row r: v * kPanelRows + r
};

// Adds a strip's products of rows [row, row + ROWS) of a panel, whose codes are at `codes`, and asks for what is `ahead`
// bytes further on.
template <int BITS, int DIGITS, int ROWS, int VECTORS>
inline void add_few_rows(const MatrixJob& job, const FewStrip& strip, const uint8_t* codes, const int8_t* x,
                         int64_t ahead, int64_t row, FewSums<DIGITS, VECTORS>& all);

// A panel's products with vectors [first, first + VECTORS).
template <int BITS, int DIGITS, int ROWS, int VECTORS>
void multiply_few_tile(const MatrixJob& job, int64_t row, int64_t first) {
  FewSums<DIGITS, VECTORS> sums;
  const int64_t rows = smaller(kPanelRows, job.rows - row);
  const int64_t digits = VECTORS * job.x_row_bytes, strips = (digits + kStripDigits - 1) / kStripDigits;
  const int64_t bytes = (job.row_bytes + 64 * strips - 1) / (64 * strips) * 64;
  // Where a strip is done, the next panel's is wanted after the rest of this panel.
  const int64_t ahead = kPanelRows * job.row_bytes;
  for (int64_t begin = 0; begin < job.row_bytes; begin += bytes) {
    const FewStrip strip = {begin, smaller(bytes, job.row_bytes - begin), begin == 0, begin + bytes >= job.row_bytes};
    const uint8_t* codes = job.codes + row * job.row_bytes + begin;
    const int8_t* x = job.x + first * job.x_row_bytes + begin * (8 / BITS) * DIGITS;
    int64_t r = 0;
    for (; r + ROWS <= rows; r += ROWS) {
      add_few_rows<BITS, DIGITS, ROWS, VECTORS>(job, strip, codes + r * job.row_bytes, x, ahead, r, sums);
    }
    for (; r < rows; ++r) {
      add_few_rows<BITS, DIGITS, 1, VECTORS>(job, strip, codes + r * job.row_bytes, x, ahead, r, sums);
    }
  }
  for (int v = 0; v < VECTORS; ++v) {
    for (int64_t r = rows; r < kPanelRows; ++r) sums.lanes[v * kPanelRows + r] = Isa::zero();
  }
  for (int i = VECTORS * kPanelRows; i < sums.kSums; ++i) sums.lanes[i] = Isa::zero();
  alignas(64) float out[sums.kSums];
  for (int i = 0; i < sums.kSums; i += Isa::kLanes) Isa::reduce(sums.lanes + i, out + i);
  for (int v = 0; v < VECTORS; ++v) {
    float* to = job.out + (first + v) * job.out_stride + row;
    const float* from = out + v * kPanelRows;
    if (rows == kPanelRows) {
      std::memcpy(to, from, kPanelRows * sizeof(float));
    } else {
      for (int64_t r = 0; r < rows; ++r) to[r] = from[r];
    }
  }
}

using FewTile = void (*)(const MatrixJob& job, int64_t row, int64_t first);

template <int BITS, int DIGITS, int... VECTORS>
FewTile few_tile(int64_t vectors, std::integer_sequence<int, VECTORS...>) {
  constexpr FewTile tiles[] = {
      multiply_few_tile<BITS, DIGITS, Isa::tile_rows<BITS, DIGITS>(VECTORS + 1), VECTORS + 1>...};
  return tiles[vectors - 1];
}

template <int BITS, int DIGITS>
void multiply_few(const MatrixJob& job) {
  constexpr int kMost = Isa::kTileVectors<BITS, DIGITS>;
  const int64_t tiles = (job.vectors + kMost - 1) / kMost;
  Prefetcher prefetcher(job.ahead, 0, job.rows, (job.rows + kPanelRows - 1) / kPanelRows);
  for (int64_t row = 0; row < job.rows; row += kPanelRows) {
    prefetcher.next_share();
    for (int64_t t = 0, first = 0, end; t < tiles; ++t, first = end) {  // of about one size
      end = (t + 1) * job.vectors / tiles;
      few_tile<BITS, DIGITS>(end - first, std::make_integer_sequence<int, kMost>())(job, row, first);
    }
  }
}

}  // namespace
}  // namespace afm
