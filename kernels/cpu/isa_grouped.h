// Matrices with scales of groups times several vectors; part of the units that include it after `isa_common.h`, and
// compiled like them.
//
// A lane of a sum belongs to a row: an instruction multiplies four codes each of as many rows as a register has lanes
// with the same four digits, so a group's sums of these rows become floats and meet their scales with one instruction
// each, where sums along a row would take one for each row. Codes are brought into that order once for all vectors.
//
// The unit defines, before it includes this file:
//   transpose(rows, out)   out[i] = number i of every row, of kLanes registers of 32-bit numbers
//   field<BITS>(bytes, p)  field p of a register of codes, a byte each
//   add_fours(sum, codes, digits)   adds products of four codes and four digits to each lane of a pending sum
//   kPendingFours<BITS>    how many of them it takes in
//   total<DIGITS>(high, low)   the int32 of pending sums of the digits; of one digit, both are its
//   add_integers, to_floats, spread_four   of registers of int32: their sum, as floats, four bytes in all lanes
//   kGroupedVectors<DIGITS>   vectors that meet two panels at once
#pragma once

#include <utility>

#include "isa.h"

namespace afm {
namespace {

constexpr int kPanel = Isa::kLanes;  // rows of a register
constexpr int kStripBlocks = 8;      // blocks of 64 codes whose rows stay in the first-level cache
constexpr int kSumBlocks = 4;        // of at most 255 * 32639 * 64 each: no int32 overflows
constexpr int kMaxStripGroups = kStripBlocks * 16;

inline Isa::Integers load_integers(const void* p) { return Isa::load(static_cast<const uint8_t*>(p)); }

// Up to kPanel rows of floats, (rows, stride), `count` of each: out[g * out_stride + r].
inline void transpose_floats(const float* from, int64_t stride, int64_t rows, int64_t count, float* out,
                             int64_t out_stride) {
  for (int64_t g = 0; g < count; g += kPanel) {
    Isa::Integers in[kPanel], turned[kPanel];
#pragma GCC unroll 16
    for (int r = 0; r < kPanel; ++r) in[r] = load_integers(from + smaller(r, rows - 1) * stride + g);
    transpose(in, turned);
#pragma GCC unroll 16
    for (int i = 0; i < kPanel; ++i) {
      if (g + i < count) std::memcpy(out + (g + i) * out_stride, &turned[i], sizeof turned[i]);
    }
  }
}

// Codes that one sum takes in: `pieces` times `length` fours of them.
struct Segment {
  int32_t codes, x;  // bytes of a panel, and of a vector's digits, that come before
  int32_t pieces, length;
  int32_t codes_step, x_step;  // from one piece to the next
  int32_t group;               // of the strip
};

struct Strip {
  int64_t block, blocks;
  int64_t first_group, groups;
  int segments;
  Segment list[kMaxStripGroups];
};

// Blocks from `block` on.
template <int BITS, int DIGITS>
inline void plan(const GroupedJob& job, int64_t block, int64_t blocks, Strip& strip) {
  constexpr int kOfFour = Isa::kBytes, kOfBlock = 16 * kOfFour, kDigits = 64 * DIGITS, kBytes = 8 * BITS;
  strip.block = block;
  strip.blocks = smaller(kStripBlocks, blocks - block);
  strip.segments = 0;
  if (job.group_bytes < kBytes) {
    const int size = static_cast<int>(job.group_bytes), per_block = kBytes / size;
    strip.first_group = block * per_block;
    strip.groups = smaller(strip.blocks * per_block, job.job.row_bytes / size - strip.first_group);
    for (int g = 0; g < strip.groups; ++g) {
      const int b = g / per_block, at = g % per_block * size;
      strip.list[strip.segments++] = {b * kOfBlock + at / 4 * kOfFour, b * kDigits + at, 8 / BITS, size / 4,
                                      2 * BITS * kOfFour, kBytes, g};
    }
    return;
  }
  const int64_t size = job.group_bytes / kBytes;
  strip.first_group = block / size;
  for (int64_t b = 0, end; b < strip.blocks; b = end) {
    const int64_t group = (block + b) / size;
    end = smaller(smaller(b + kSumBlocks, strip.blocks), (group + 1) * size - block);
    strip.list[strip.segments++] = {static_cast<int32_t>(b * kOfBlock), static_cast<int32_t>(b * kDigits),
                                    static_cast<int32_t>(end - b), 16, kOfBlock, kDigits,
                                    static_cast<int32_t>(group - strip.first_group)};
    strip.groups = group - strip.first_group + 1;
  }
}

// Codes of a strip of up to kPanel rows, a byte each: four codes of every row, then the next four, `stride` bytes
// apart.
template <int BITS>
inline void arrange_codes(const MatrixJob& job, int64_t row, int64_t rows, const Strip& strip, int64_t stride,
                          uint8_t* out) {
  constexpr int kFields = 8 / BITS, kFours = 2 * BITS;  // of a block's field
  const int64_t begin = strip.block * 8 * BITS, end = smaller(begin + strip.blocks * 8 * BITS, job.row_bytes);
  for (int64_t at = begin; at < end; at += Isa::kBytes, out += kFields * kPanel * stride) {
    const uint8_t* codes = job.codes + row * job.row_bytes + at;
    Isa::Integers in[kPanel], turned[kPanel];
#pragma GCC unroll 16
    for (int r = 0; r < kPanel; ++r) {
      const uint8_t* p = codes + smaller(r, rows - 1) * job.row_bytes;
      if (at % 64 == 0) __builtin_prefetch(p + 2 * kPanel * job.row_bytes, 0, 2);
      in[r] = end - at >= Isa::kBytes ? Isa::load(p) : Isa::load_part(p, end - at);
    }
    transpose(in, turned);
#pragma GCC unroll 16
    for (int i = 0; i < kPanel; ++i) {
#pragma GCC unroll 4
      for (int p = 0; p < kFields; ++p) {
        const Isa::Integers codes_of = field<BITS>(turned[i], p);
        std::memcpy(out + (i / kFours * 16 + p * kFours + i % kFours) * stride, &codes_of, Isa::kBytes);
      }
    }
  }
}

// The first `count` floats, and zeros.
inline Isa::Lanes load_some(const float* p, int64_t count) {
  if (count >= kPanel) return Isa::from_floats(p);
  alignas(64) float some[kPanel] = {};
  for (int64_t i = 0; i < count; ++i) some[i] = p[i];
  return Isa::from_floats(some);
}

inline void store_some(float* p, Isa::Lanes v, int64_t count) {
  if (count >= kPanel) return Isa::store(p, v);
  alignas(64) float some[kPanel];
  Isa::store(some, v);
  for (int64_t i = 0; i < count; ++i) p[i] = some[i];
}

// Adds products of `pieces` times `length` fours, or LENGTH if that is not 0, with some vectors to `sums`, or starts
// these.
template <int DIGITS, int LENGTH, int PANELS, int VECTORS>
inline void add_pieces(const Segment& s, int pieces, int length, const uint8_t* codes, const int8_t* x, int64_t x_stride,
                       bool start, Isa::Integers (&sums)[VECTORS][PANELS]) {
  Isa::Integers pending[VECTORS][DIGITS][PANELS] = {};
  for (; pieces > 0; --pieces, codes += s.codes_step * PANELS, x += s.x_step) {
#pragma GCC unroll 8
    for (int i = 0; i < (LENGTH > 0 ? LENGTH : length); ++i) {
      Isa::Integers fours[PANELS];
#pragma GCC unroll 2
      for (int h = 0; h < PANELS; ++h) fours[h] = load_integers(codes + (i * PANELS + h) * Isa::kBytes);
#pragma GCC unroll 6
      for (int v = 0; v < VECTORS; ++v) {
#pragma GCC unroll 2
        for (int d = 0; d < DIGITS; ++d) {
          const Isa::Integers same = spread_four(x + v * x_stride + d * 64 + 4 * i);
#pragma GCC unroll 2
          for (int h = 0; h < PANELS; ++h) add_fours(pending[v][d][h], fours[h], same);
        }
      }
    }
  }
#pragma GCC unroll 6
  for (int v = 0; v < VECTORS; ++v) {
#pragma GCC unroll 2
    for (int h = 0; h < PANELS; ++h) {
      const Isa::Integers sum = total<DIGITS>(pending[v][0][h], pending[v][DIGITS - 1][h]);
      sums[v][h] = start ? sum : add_integers(sums[v][h], sum);
    }
  }
}

// Products of a strip of kPanel * PANELS rows, of which there are `rows`, with some vectors, on top of what is in `out`
// unless it is the first strip.
template <int BITS, int DIGITS, int PANELS, int VECTORS>
inline void multiply_panel_tile(const Strip& strip, const uint8_t* codes, const float* scales, const int8_t* x,
                                int64_t x_stride, int64_t rows, float* out, int64_t out_stride) {
  Isa::Lanes totals[VECTORS][PANELS];
#pragma GCC unroll 6
  for (int v = 0; v < VECTORS; ++v) {
#pragma GCC unroll 2
    for (int h = 0; h < PANELS; ++h) {
      const float* before = out + v * out_stride + h * kPanel;
      totals[v][h] = strip.block > 0 ? load_some(before, rows - h * kPanel) : Isa::zero();
    }
  }
  for (const Segment* s = strip.list; s < strip.list + strip.segments; ++s) {
    const uint8_t* from = codes + s->codes * PANELS;
    const int8_t* digits = x + s->x;
    Isa::Integers sums[VECTORS][PANELS];
    if constexpr (kPendingFours<BITS> >= 16 * kSumBlocks) {
      add_pieces<DIGITS, 0>(*s, s->pieces, s->length, from, digits, x_stride, true, sums);
    } else {
      for (int piece = 0; piece < s->pieces; ++piece, from += s->codes_step * PANELS, digits += s->x_step) {
        for (int i = 0; i < s->length; i += 8) {
          const uint8_t* at = from + i * PANELS * Isa::kBytes;
          if (s->length - i >= 8) {
            add_pieces<DIGITS, 8>(*s, 1, 8, at, digits + 4 * i, x_stride, piece + i == 0, sums);
          } else {
            add_pieces<DIGITS, 0>(*s, 1, s->length - i, at, digits + 4 * i, x_stride, piece + i == 0, sums);
          }
        }
      }
    }
#pragma GCC unroll 6
    for (int v = 0; v < VECTORS; ++v) {
#pragma GCC unroll 2
      for (int h = 0; h < PANELS; ++h) {
        const Isa::Lanes scale = Isa::from_floats(scales + (s->group * PANELS + h) * kPanel);
        totals[v][h] = Isa::multiply_add(to_floats(sums[v][h]), scale, totals[v][h]);
      }
    }
  }
#pragma GCC unroll 6
  for (int v = 0; v < VECTORS; ++v) {
#pragma GCC unroll 2
    for (int h = 0; h < PANELS; ++h) {
      store_some(out + v * out_stride + h * kPanel, totals[v][h], rows - h * kPanel);
    }
  }
}

using PanelTile = void (*)(const Strip&, const uint8_t*, const float*, const int8_t*, int64_t, int64_t, float*,
                             int64_t);

template <int BITS, int DIGITS, int PANELS, int... VECTORS>
PanelTile panel_tile(int64_t vectors, std::integer_sequence<int, VECTORS...>) {
  constexpr PanelTile tiles[] = {multiply_panel_tile<BITS, DIGITS, PANELS, VECTORS + 1>...};
  return tiles[vectors - 1];
}

template <int BITS, int DIGITS, int PANELS>
inline void multiply_panel_strip(const GroupedJob& grouped, int64_t row, int64_t rows, const Strip& strip) {
  const MatrixJob& job = grouped.job;
  alignas(64) uint8_t codes[kStripBlocks * 64 * kPanel * PANELS];
  alignas(64) float scales[kMaxStripGroups * kPanel * PANELS];
  for (int h = 0; h < PANELS; ++h) {
    const int64_t first = row + h * kPanel, count = smaller(kPanel, rows - h * kPanel);
    arrange_codes<BITS>(job, first, count, strip, Isa::kBytes * PANELS, codes + h * Isa::kBytes);
    transpose_floats(grouped.scales + first * grouped.scale_stride + strip.first_group, grouped.scale_stride, count,
                     strip.groups, scales + h * kPanel, kPanel * PANELS);
  }
  const int8_t* x = job.x + strip.block * 64 * DIGITS;
  float* out = job.out + row;
  for (int64_t left = job.vectors; left > 0;) {
    // Two tiles of about one size are faster than a full one and few pending sums.
    constexpr int kMost = kGroupedVectors<DIGITS>;
    const int64_t vectors = left <= kMost ? left : left < 2 * kMost ? (left + 1) / 2 : kMost;
    const PanelTile tile = panel_tile<BITS, DIGITS, PANELS>(vectors, std::make_integer_sequence<int, kMost>());
    tile(strip, codes, scales, x, job.x_row_bytes, rows, out, job.out_stride);
    left -= vectors;
    x += vectors * job.x_row_bytes;
    out += vectors * job.out_stride;
  }
}

template <int BITS, int DIGITS>
void multiply_panels(const GroupedJob& grouped) {
  const MatrixJob& job = grouped.job;
  const int64_t blocks = job.x_row_bytes / (64 * DIGITS);
  Prefetcher prefetcher(job.ahead, 0, job.rows, (job.rows + 2 * kPanel - 1) / (2 * kPanel));
  Strip strip;
  for (int64_t row = 0; row < job.rows; row += 2 * kPanel) {
    const int64_t rows = smaller(2 * kPanel, job.rows - row);
    prefetcher.next_share();
    for (int64_t block = 0; block < blocks; block += kStripBlocks) {
      plan<BITS, DIGITS>(grouped, block, blocks, strip);
      if (rows > kPanel) {
        multiply_panel_strip<BITS, DIGITS, 2>(grouped, row, rows, strip);
      } else {
        multiply_panel_strip<BITS, DIGITS, 1>(grouped, row, rows, strip);
      }
    }
  }
}

}  // namespace
}  // namespace afm
