// Matrices with scales of groups times several vectors, in AVX-512 VNNI; part of `isa_avx512.cpp`, where
// `isa_common.h` comes before.
//
// A lane of a sum belongs to a row: `vpdpbusd` multiplies four codes each of 16 rows with the same four digits, so a
// group's sums of 16 rows become floats and meet their scales with one instruction each, where sums along a row would
// take 16. Codes are brought into that order once for all vectors.
#pragma once

#include "isa.h"
#include "isa_avx512.h"

namespace afm {
namespace {

constexpr int kPanel = 16;        // rows of a register
constexpr int kStripBlocks = 8;   // blocks of 64 codes whose rows stay in the first-level cache
constexpr int kSumBlocks = 4;     // of at most 255 * 32639 * 64 each: no int32 overflows
constexpr int kMaxStripGroups = kStripBlocks * 16;

// out[i] = number i of every row: a transposition of 16 x 16.
inline void transpose(const __m512i (&rows)[16], __m512i (&out)[16]) {
  __m512i quads[4][4];  // [c][i]: columns c, 4 + c, 8 + c, 12 + c of rows 4 i to 4 i + 3
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512i a = _mm512_unpacklo_epi32(rows[4 * i], rows[4 * i + 1]);
    const __m512i b = _mm512_unpackhi_epi32(rows[4 * i], rows[4 * i + 1]);
    const __m512i c = _mm512_unpacklo_epi32(rows[4 * i + 2], rows[4 * i + 3]);
    const __m512i d = _mm512_unpackhi_epi32(rows[4 * i + 2], rows[4 * i + 3]);
    quads[0][i] = _mm512_unpacklo_epi64(a, c);
    quads[1][i] = _mm512_unpackhi_epi64(a, c);
    quads[2][i] = _mm512_unpacklo_epi64(b, d);
    quads[3][i] = _mm512_unpackhi_epi64(b, d);
  }
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    const __m512i a = _mm512_shuffle_i32x4(quads[c][0], quads[c][1], 0x44);
    const __m512i b = _mm512_shuffle_i32x4(quads[c][2], quads[c][3], 0x44);
    const __m512i d = _mm512_shuffle_i32x4(quads[c][0], quads[c][1], 0xee);
    const __m512i e = _mm512_shuffle_i32x4(quads[c][2], quads[c][3], 0xee);
    out[c] = _mm512_shuffle_i32x4(a, b, 0x88);
    out[4 + c] = _mm512_shuffle_i32x4(a, b, 0xdd);
    out[8 + c] = _mm512_shuffle_i32x4(d, e, 0x88);
    out[12 + c] = _mm512_shuffle_i32x4(d, e, 0xdd);
  }
}

// Up to 16 rows of floats, (rows, stride), `count` of each: out[g * out_stride + r].
inline void transpose_floats(const float* from, int64_t stride, int64_t rows, int64_t count, float* out,
                             int64_t out_stride) {
  for (int64_t g = 0; g < count; g += 16) {
    const __mmask16 present = static_cast<__mmask16>(count - g >= 16 ? 0xffff : (1 << (count - g)) - 1);
    __m512i in[16], turned[16];
#pragma GCC unroll 16
    for (int r = 0; r < 16; ++r) in[r] = _mm512_maskz_loadu_epi32(present, from + smaller(r, rows - 1) * stride + g);
    transpose(in, turned);
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      if (g + i < count) _mm512_store_si512(out + (g + i) * out_stride, turned[i]);
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
  constexpr int kOfFour = 64, kOfBlock = 16 * kOfFour, kDigits = 64 * DIGITS, kBytes = 8 * BITS;
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

// Codes of a strip of up to 16 rows, a byte each: four codes of every row, then the next four, `stride` bytes apart.
template <int BITS>
inline void arrange_codes(const MatrixJob& job, int64_t row, int64_t rows, const Strip& strip, int64_t stride,
                          uint8_t* out) {
  constexpr int kFields = 8 / BITS, kFours = 2 * BITS;  // of a block's field
  const int64_t begin = strip.block * 8 * BITS, end = smaller(begin + strip.blocks * 8 * BITS, job.row_bytes);
  const __m512i mask = _mm512_set1_epi8((1 << BITS) - 1);
  for (int64_t at = begin; at < end; at += 64, out += kFields * 16 * stride) {
    const uint8_t* codes = job.codes + row * job.row_bytes + at;
    __m512i in[16], turned[16];
#pragma GCC unroll 16
    for (int r = 0; r < 16; ++r) {
      const uint8_t* p = codes + smaller(r, rows - 1) * job.row_bytes;
      _mm_prefetch(reinterpret_cast<const char*>(p + 2 * kPanel * job.row_bytes), _MM_HINT_T1);
      in[r] = end - at >= 64 ? Isa::load(p) : Isa::load_part(p, end - at);
    }
    transpose(in, turned);
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
#pragma GCC unroll 4
      for (int p = 0; p < kFields; ++p) {
        const __m512i field = BITS == 8 ? turned[i] : _mm512_and_si512(_mm512_srli_epi16(turned[i], BITS * p), mask);
        _mm512_store_si512(out + (i / kFours * 16 + p * kFours + i % kFours) * stride, field);
      }
    }
  }
}

// Products of a strip of 16 * PANELS rows with some vectors, on top of what is in `out` unless it is the first strip.
template <int DIGITS, int PANELS, int VECTORS>
inline void multiply_grouped_tile(const Strip& strip, const uint8_t* codes, const float* scales, const int8_t* x,
                                  int64_t x_stride, const __mmask16* present, float* out, int64_t out_stride) {
  __m512 totals[VECTORS][PANELS];
#pragma GCC unroll 6
  for (int v = 0; v < VECTORS; ++v) {
#pragma GCC unroll 2
    for (int h = 0; h < PANELS; ++h) {
      const float* before = out + v * out_stride + h * kPanel;
      totals[v][h] = strip.block > 0 ? _mm512_maskz_loadu_ps(present[h], before) : _mm512_setzero_ps();
    }
  }
  for (const Segment* s = strip.list; s < strip.list + strip.segments; ++s) {
    __m512i sums[VECTORS][DIGITS][PANELS] = {};
    const uint8_t* from = codes + s->codes * PANELS;
    const int8_t* digits = x + s->x;
    for (int piece = s->pieces; piece > 0; --piece, from += s->codes_step * PANELS, digits += s->x_step) {
      for (int i = 0; i < s->length; ++i) {
        __m512i fours[PANELS];
#pragma GCC unroll 2
        for (int h = 0; h < PANELS; ++h) fours[h] = _mm512_load_si512(from + (i * PANELS + h) * 64);
#pragma GCC unroll 6
        for (int v = 0; v < VECTORS; ++v) {
#pragma GCC unroll 2
          for (int d = 0; d < DIGITS; ++d) {
            int32_t four;
            std::memcpy(&four, digits + v * x_stride + d * 64 + 4 * i, sizeof four);
            const __m512i same = _mm512_set1_epi32(four);
#pragma GCC unroll 2
            for (int h = 0; h < PANELS; ++h) multiply_add_registers(sums[v][d][h], fours[h], same);
          }
        }
      }
    }
#pragma GCC unroll 6
    for (int v = 0; v < VECTORS; ++v) {
#pragma GCC unroll 2
      for (int h = 0; h < PANELS; ++h) {
        __m512i sum = sums[v][0][h];
        if constexpr (DIGITS == 2) sum = _mm512_add_epi32(_mm512_slli_epi32(sum, 8), sums[v][1][h]);
        const __m512 scale = _mm512_load_ps(scales + (s->group * PANELS + h) * kPanel);
        totals[v][h] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), scale, totals[v][h]);
      }
    }
  }
#pragma GCC unroll 6
  for (int v = 0; v < VECTORS; ++v) {
#pragma GCC unroll 2
    for (int h = 0; h < PANELS; ++h) {
      _mm512_mask_storeu_ps(out + v * out_stride + h * kPanel, present[h], totals[v][h]);
    }
  }
}

using GroupedTile = void (*)(const Strip&, const uint8_t*, const float*, const int8_t*, int64_t, const __mmask16*,
                             float*, int64_t);

// Vectors of a tile: 16 or 12 pending sums hide the latency of vpdpbusd, and leave registers for as many totals.
template <int DIGITS>
constexpr int64_t kGroupedVectors = DIGITS == 2 ? 4 : 6;

template <int DIGITS, int PANELS>
constexpr GroupedTile kGroupedTiles[7] = {
    nullptr,
    multiply_grouped_tile<DIGITS, PANELS, 1>,
    multiply_grouped_tile<DIGITS, PANELS, 2>,
    multiply_grouped_tile<DIGITS, PANELS, 3>,
    multiply_grouped_tile<DIGITS, PANELS, 4>,
    DIGITS == 2 ? nullptr : multiply_grouped_tile<DIGITS, PANELS, DIGITS == 2 ? 1 : 5>,
    DIGITS == 2 ? nullptr : multiply_grouped_tile<DIGITS, PANELS, DIGITS == 2 ? 1 : 6>,
};

template <int BITS, int DIGITS, int PANELS>
inline void multiply_strip(const GroupedJob& grouped, int64_t row, int64_t rows, const Strip& strip) {
  const MatrixJob& job = grouped.job;
  alignas(64) uint8_t codes[kStripBlocks * 64 * kPanel * PANELS];
  alignas(64) float scales[kMaxStripGroups * kPanel * PANELS];
  __mmask16 present[PANELS];
  for (int h = 0; h < PANELS; ++h) {
    const int64_t first = row + h * kPanel, count = smaller(kPanel, rows - h * kPanel);
    present[h] = static_cast<__mmask16>((1 << count) - 1);
    arrange_codes<BITS>(job, first, count, strip, 64 * PANELS, codes + h * 64);
    transpose_floats(grouped.scales + first * grouped.scale_stride + strip.first_group, grouped.scale_stride, count,
                     strip.groups, scales + h * kPanel, kPanel * PANELS);
  }
  const int8_t* x = job.x + strip.block * 64 * DIGITS;
  float* out = job.out + row;
  for (int64_t left = job.vectors; left > 0;) {
    // Two tiles of about one size are faster than a full one and few pending sums.
    constexpr int64_t kMost = kGroupedVectors<DIGITS>;
    const int64_t vectors = left <= kMost ? left : left < 2 * kMost ? (left + 1) / 2 : kMost;
    kGroupedTiles<DIGITS, PANELS>[vectors](strip, codes, scales, x, job.x_row_bytes, present, out, job.out_stride);
    left -= vectors;
    x += vectors * job.x_row_bytes;
    out += vectors * job.out_stride;
  }
}

template <int BITS, int DIGITS>
void multiply_grouped_matrix(const GroupedJob& grouped) {
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
        multiply_strip<BITS, DIGITS, 2>(grouped, row, rows, strip);
      } else {
        multiply_strip<BITS, DIGITS, 1>(grouped, row, rows, strip);
      }
    }
  }
}

void grouped_matrix(const GroupedJob& job) {
  const bool two = job.job.digits == 2;
  if (job.job.bits == 2) return two ? multiply_grouped_matrix<2, 2>(job) : multiply_grouped_matrix<2, 1>(job);
  if (job.job.bits == 4) return two ? multiply_grouped_matrix<4, 2>(job) : multiply_grouped_matrix<4, 1>(job);
  return two ? multiply_grouped_matrix<8, 2>(job) : multiply_grouped_matrix<8, 1>(job);
}

}  // namespace
}  // namespace afm
