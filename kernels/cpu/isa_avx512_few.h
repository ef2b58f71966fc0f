// Rows of codes with one scale each times a few vectors, in AVX-512 VNNI; part of `isa_avx512.cpp`, where
// `isa_common.h` comes before.
//
// As with one vector, memory is nearly the limit: codes go from memory into registers, and their fields meet the
// vectors of a tile there. Every lane adds up the same columns as with one vector, so that a vector's products come out
// the same whatever other vectors there are.
#pragma once

#include "isa.h"
#include "isa_avx512.h"

namespace afm {
namespace {

constexpr int64_t kFewVectors = 16;
constexpr int64_t kPanelRows = 8;  // that meet a strip of a tile's digits while it is in the first-level cache
constexpr int64_t kStripDigits = 16 << 10;  // bytes
// Pending sums hide the latency of vpdpbusd (5 cycles, two a cycle): 16 or 12 of them, and two rows of codes.
template <int DIGITS>
constexpr int64_t kFewTileVectors = 8 / DIGITS;

// A strip of columns.
struct FewStrip {
  int64_t begin, bytes;  // of a row's codes
  bool first, last;
};

// What strips of a panel add up for a tile: integers, and their floats after the last strip.
template <int DIGITS, int VECTORS>
struct FewSums {
  __m512i integers[VECTORS][DIGITS][kPanelRows];
  Isa::Lanes lanes[(VECTORS * kPanelRows + 15) / 16 * 16];  // of vector v and row r: v * kPanelRows + r
};

// Rows [row, row + ROWS) of a panel, whose codes are at `codes`.
template <int BITS, int DIGITS, int ROWS, int VECTORS>
inline void add_few_rows(const MatrixJob& job, const FewStrip& strip, const uint8_t* codes, const int8_t* x,
                         int64_t ahead, int64_t row, FewSums<DIGITS, VECTORS>& all) {
  constexpr int kFields = 8 / BITS;
  __m512i sums[VECTORS][DIGITS][ROWS];
#pragma GCC unroll 8
  for (int v = 0; v < VECTORS; ++v) {
#pragma GCC unroll 2
    for (int d = 0; d < DIGITS; ++d) {
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; ++r) {
        sums[v][d][r] = strip.first ? _mm512_setzero_si512() : all.integers[v][d][row + r];
      }
    }
  }
  for (int64_t left = strip.bytes; left > 0; left -= 64, codes += 64, x += 64 * kFields * DIGITS) {
    __m512i bytes[ROWS];
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r) {
      const uint8_t* from = codes + r * job.row_bytes;
      Isa::prefetch(from + ahead);
      bytes[r] = left >= 64 ? Isa::load(from) : Isa::load_part(from, left);
    }
#pragma GCC unroll 4
    for (int p = 0; p < kFields; ++p) {
      __m512i codes_of[ROWS];
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; ++r) {
        codes_of[r] = field<BITS>(bytes[r], p);
      }
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; ++v) {
#pragma GCC unroll 2
        for (int d = 0; d < DIGITS; ++d) {
          const __m512i digits = _mm512_loadu_si512(x + v * job.x_row_bytes + (d * kFields + p) * 64);
#pragma GCC unroll 4
          for (int r = 0; r < ROWS; ++r) multiply_add_registers(sums[v][d][r], codes_of[r], digits);
        }
      }
    }
  }
#pragma GCC unroll 8
  for (int v = 0; v < VECTORS; ++v) {
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r) {
      __m512 total = _mm512_cvtepi32_ps(sums[v][0][r]);
      if constexpr (DIGITS == 2) {
        total = _mm512_fmadd_ps(total, _mm512_set1_ps(256), _mm512_cvtepi32_ps(sums[v][1][r]));
      }
      all.lanes[v * kPanelRows + row + r] = total;
      if (strip.last) continue;
#pragma GCC unroll 2
      for (int d = 0; d < DIGITS; ++d) all.integers[v][d][row + r] = sums[v][d][r];
    }
  }
}

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
  constexpr int kSums = sizeof sums.lanes / sizeof *sums.lanes;
  for (int i = VECTORS * kPanelRows; i < kSums; ++i) sums.lanes[i] = Isa::zero();
  alignas(64) float out[kSums];
  for (int i = 0; i < kSums; i += Isa::kLanes) Isa::reduce(sums.lanes + i, out + i);
  const __mmask8 present = static_cast<__mmask8>((1 << rows) - 1);
  for (int v = 0; v < VECTORS; ++v) {
    _mm256_mask_storeu_ps(job.out + (first + v) * job.out_stride + row, present, _mm256_load_ps(out + v * kPanelRows));
  }
}

using FewTile = void (*)(const MatrixJob& job, int64_t row, int64_t first);

template <int BITS, int DIGITS, int VECTORS>
constexpr FewTile few_tile() {
  if constexpr (VECTORS > kFewTileVectors<DIGITS>) {
    return nullptr;
  } else {
    return multiply_few_tile<BITS, DIGITS, VECTORS * DIGITS <= 4 ? 4 : 2, VECTORS>;
  }
}

template <int BITS, int DIGITS>
constexpr FewTile kFewTiles[] = {
    nullptr,                       few_tile<BITS, DIGITS, 1>(), few_tile<BITS, DIGITS, 2>(),
    few_tile<BITS, DIGITS, 3>(), few_tile<BITS, DIGITS, 4>(), few_tile<BITS, DIGITS, 5>(),
    few_tile<BITS, DIGITS, 6>(), few_tile<BITS, DIGITS, 7>(), few_tile<BITS, DIGITS, 8>(),
};

template <int BITS, int DIGITS>
void multiply_few(const MatrixJob& job) {
  const int64_t tiles = (job.vectors + kFewTileVectors<DIGITS> - 1) / kFewTileVectors<DIGITS>;
  Prefetcher prefetcher(job.ahead, 0, job.rows, (job.rows + kPanelRows - 1) / kPanelRows);
  for (int64_t row = 0; row < job.rows; row += kPanelRows) {
    prefetcher.next_share();
    for (int64_t t = 0, first = 0, end; t < tiles; ++t, first = end) {  // of about one size
      end = (t + 1) * job.vectors / tiles;
      kFewTiles<BITS, DIGITS>[end - first](job, row, first);
    }
  }
}

}  // namespace
}  // namespace afm
