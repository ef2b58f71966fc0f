// AVX-512 with VNNI: `vpdpbusd` multiplies 64 codes with 64 digits and adds them up in fours.
#include "isa.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__) && \
    defined(__AVX512VNNI__)
#include "isa_avx512.h"
#include "isa_common.h"

#include "isa_few.h"
#include "isa_avx512_quantize.h"
#include "palette_vbmi.h"

namespace afm {
namespace {

// ---- What isa_grouped.h asks for

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

inline __m512i spread_four(const int8_t* p) {
  int32_t four;
  std::memcpy(&four, p, sizeof four);
  return _mm512_set1_epi32(four);
}
inline void add_fours(__m512i& sum, __m512i codes, __m512i digits) { multiply_add_registers(sum, codes, digits); }
inline __m512i add_integers(__m512i a, __m512i b) { return _mm512_add_epi32(a, b); }
inline __m512 to_floats(__m512i v) { return _mm512_cvtepi32_ps(v); }

template <int BITS>
constexpr int kPendingFours = 64;

template <int DIGITS>
inline __m512i total(__m512i high, __m512i low) {
  return DIGITS == 1 ? low : _mm512_add_epi32(_mm512_slli_epi32(high, 8), low);
}

// 16 or 12 pending sums hide the latency of vpdpbusd, and leave registers for as many totals.
template <int DIGITS>
constexpr int kGroupedVectors = DIGITS == 2 ? 4 : 6;

}  // namespace
}  // namespace afm

#include "isa_grouped.h"

namespace afm {
namespace {

void grouped_matrix(const GroupedJob& job) {
  const bool two = job.job.digits == 2;
  if (job.job.bits == 2) return two ? multiply_panels<2, 2>(job) : multiply_panels<2, 1>(job);
  if (job.job.bits == 4) return two ? multiply_panels<4, 2>(job) : multiply_panels<4, 1>(job);
  return two ? multiply_panels<8, 2>(job) : multiply_panels<8, 1>(job);
}

constexpr int64_t kFewVectors = 16;
constexpr int kRows = 4;  // times four digits of vectors: 16 pending sums, and loads at half their limit

// A row of codes as bytes, 64 columns at a time, the last ones filled up with zeros.
template <int BITS>
inline void unpack_row(const uint8_t* row, int64_t row_bytes, uint8_t* out) {
  constexpr int64_t kStep = 8 * BITS;
  for (; row_bytes >= kStep; row_bytes -= kStep, row += kStep, out += 64) {
    _mm512_store_si512(out, unpack<BITS>(row));
  }
  if (row_bytes > 0) {
    alignas(64) uint8_t last[64] = {};
    std::memcpy(last, row, row_bytes);
    _mm512_store_si512(out, unpack<BITS>(last));
  }
}

// The same in the order of blocks as one vector's: the first fields of 64 bytes, then the second ones, ...
template <int BITS>
inline void unpack_blocks(const uint8_t* row, int64_t row_bytes, uint8_t* out) {
  for (; row_bytes > 0; row_bytes -= 64, row += 64) {
    const __m512i bytes = row_bytes >= 64 ? Isa::load(row) : Isa::load_part(row, row_bytes);
#pragma GCC unroll 4
    for (int p = 0; p < 8 / BITS; ++p, out += 64) _mm512_store_si512(out, field<BITS>(bytes, p));
  }
}

// Lanes of the products of four rows with 4 / DIGITS vectors, one after the other. A step has 64 codes of each row, and
// the digits of FIELDS steps lie together.
template <int DIGITS, int FIELDS>
inline void multiply_tile(const uint8_t* codes, int64_t steps, const int8_t* const* x, Isa::Lanes* lanes) {
  constexpr int kVectors = 4 / DIGITS;
  __m512i sums[kVectors][DIGITS][kRows];
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) {
#pragma GCC unroll 2
    for (int d = 0; d < DIGITS; ++d) {
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) sums[v][d][r] = _mm512_setzero_si512();
    }
  }
  for (int64_t s = 0; s < steps; s += FIELDS) {
#pragma GCC unroll 4
    for (int p = 0; p < FIELDS; ++p) {
      __m512i row[kRows];
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) row[r] = _mm512_load_si512(codes + (r * steps + s + p) * 64);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
#pragma GCC unroll 2
        for (int d = 0; d < DIGITS; ++d) {
          const __m512i digits = _mm512_load_si512(x[v] + (s * DIGITS + d * FIELDS + p) * 64);
#pragma GCC unroll 4
          for (int r = 0; r < kRows; ++r) multiply_add_registers(sums[v][d][r], row[r], digits);
        }
      }
    }
  }
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) {
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      __m512 total = _mm512_cvtepi32_ps(sums[v][0][r]);
      if constexpr (DIGITS == 2) {
        total = _mm512_fmadd_ps(total, _mm512_set1_ps(256), _mm512_cvtepi32_ps(sums[v][1][r]));
      }
      lanes[v * kRows + r] = total;
    }
  }
}

// ---- A few vectors

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
  FewPrefetcher<ROWS> prefetcher(job, strip, codes, ahead);
  for (int64_t left = strip.bytes; left > 0; left -= 64, codes += 64, x += 64 * kFields * DIGITS) {
    prefetcher.next();
    __m512i bytes[ROWS];
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r) {
      const uint8_t* from = codes + r * job.row_bytes;
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

// ---- Many vectors

// Rows become bytes once, four at a time, and meet all vectors while they are in the first-level cache.
template <int BITS, int DIGITS>
void multiply_matrix(const MatrixJob& job) {
  if (job.vectors <= kFewVectors) return multiply_few<BITS, DIGITS>(job);
  constexpr int kTile = 4 / DIGITS, kVectors = 4;
  const int64_t steps = job.x_row_bytes / (64 * DIGITS);
  uint8_t* codes = job.scratch;
  alignas(64) float out[kVectors * kRows];
  Prefetcher prefetcher(job.ahead, 0, job.rows, (job.rows + kRows - 1) / kRows);
  for (int64_t row = 0; row < job.rows; row += kRows) {
    prefetcher.next_share();
    const int64_t rows = smaller(kRows, job.rows - row);
    for (int64_t r = 0; r < kRows; ++r) {  // rows past the last repeat it
      const uint8_t* from = job.codes + (row + smaller(r, rows - 1)) * job.row_bytes;
      unpack_blocks<BITS>(from, job.row_bytes, codes + r * steps * 64);
    }
    for (int64_t m = 0; m < job.vectors; m += kVectors) {
      const int64_t vectors = smaller(kVectors, job.vectors - m);
      Isa::Lanes lanes[kVectors * kRows];
      if (vectors < kVectors) std::memset(lanes, 0, sizeof lanes);
      for (int64_t v = 0; v < vectors; v += kTile) {
        const int8_t* x[kTile];
        for (int i = 0; i < kTile; ++i) x[i] = job.x + (m + smaller(v + i, vectors - 1)) * job.x_row_bytes;
        multiply_tile<DIGITS, 8 / BITS>(codes, steps, x, lanes + v * kRows);
      }
      Isa::reduce(lanes, out);
      for (int64_t v = 0; v < vectors; ++v) {
        const __mmask8 present = static_cast<__mmask8>((1 << rows) - 1);
        _mm_mask_storeu_ps(job.out + (m + v) * job.out_stride + row, present, _mm_load_ps(out + v * kRows));
      }
    }
  }
}

void matrix(const MatrixJob& job) {
  const bool two = job.digits == 2;
  if (job.bits == 2) return two ? multiply_matrix<2, 2>(job) : multiply_matrix<2, 1>(job);
  if (job.bits == 4) return two ? multiply_matrix<4, 2>(job) : multiply_matrix<4, 1>(job);
  return two ? multiply_matrix<8, 2>(job) : multiply_matrix<8, 1>(job);
}

// ---- Palettes: a byte permutation looks up 64 codes' high bytes, another one their low bytes; at 8 bits four do

inline __m512i load_table(const uint8_t* p) {
  return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

// Two rows at once: their sums, each field's apart, hide the latency of vpdpbusd.
template <int BITS, int DIGITS>
inline void multiply_palette_rows(const PaletteJob& palette, const int64_t (&rows)[2], Isa::Lanes* lanes) {
  constexpr int kFields = 8 / BITS, kApart = kFields * DIGITS > 4 ? 1 : kFields;
  const MatrixJob& job = palette.job;
  __m512i sums[2][2][DIGITS][kApart] = {}, tables[2][2];
  const uint8_t* codes[2];
  for (int r = 0; r < 2; ++r) {
    codes[r] = job.codes + rows[r] * job.row_bytes;
    for (int plane = 0; plane < 2; ++plane) tables[r][plane] = load_table(table_of(palette, rows[r]) + 16 * plane);
  }
  const __m512i mask = _mm512_set1_epi8((1 << BITS) - 1);
  const int8_t* x = job.x;
  for (int64_t left = job.row_bytes; left > 0; left -= 64, x += 64 * kFields * DIGITS) {
#pragma GCC unroll 2
    for (int r = 0; r < 2; ++r, codes[r - 1] += 64) {
      Isa::prefetch(codes[r] + kPrefetch);
      const __m512i v = left >= 64 ? Isa::load(codes[r]) : Isa::load_part(codes[r], left);
#pragma GCC unroll 4
      for (int p = 0; p < kFields; ++p) {
        const __m512i field = _mm512_and_si512(_mm512_srli_epi16(v, BITS * p), mask);
#pragma GCC unroll 2
        for (int plane = 0; plane < 2; ++plane) {
          const __m512i numbers = _mm512_shuffle_epi8(tables[r][plane], field);
#pragma GCC unroll 2
          for (int d = 0; d < DIGITS; ++d) {
            multiply_add_bytes(sums[r][plane][d][p % kApart], numbers, x + (d * kFields + p) * 64);
          }
        }
      }
    }
  }
  for (int r = 0; r < 2; ++r) {
    __m512 planes[2];
    for (int plane = 0; plane < 2; ++plane) {
      __m512 digits[DIGITS];
      for (int d = 0; d < DIGITS; ++d) {
        __m512i sum = sums[r][plane][d][0];
        for (int p = 1; p < kApart; ++p) sum = _mm512_add_epi32(sum, sums[r][plane][d][p]);
        digits[d] = _mm512_cvtepi32_ps(sum);
      }
      planes[plane] = digits[0];
      if constexpr (DIGITS == 2) planes[plane] = _mm512_fmadd_ps(digits[0], _mm512_set1_ps(256), digits[1]);
    }
    lanes[r] = _mm512_fmadd_ps(planes[0], _mm512_set1_ps(256), planes[1]);
  }
}

template <int BITS, int DIGITS>
void multiply_palette_vector(const PaletteJob& palette) {
  const MatrixJob& job = palette.job;
  alignas(64) float out[Isa::kLanes];
  for (int64_t row = 0; row < job.rows; row += Isa::kLanes) {
    Isa::Lanes lanes[Isa::kLanes] = {};
    const int64_t count = smaller(Isa::kLanes, job.rows - row);
    for (int64_t r = 0; r < count; r += 2) {
      multiply_palette_rows<BITS, DIGITS>(palette, {row + r, row + smaller(r + 1, count - 1)}, lanes + r);
    }
    Isa::reduce(lanes, out);
    std::memcpy(job.out + row, out, count * sizeof(float));
  }
}

// What one vector and several have in common at 8 bits: looking up takes longer than multiplying.
void palette_matrix(const PaletteJob& palette);

void palette_vector(const PaletteJob& palette) {
  if (palette.job.bits == 8) return palette_matrix(palette);
  const bool two = palette.job.digits == 2, short_codes = palette.job.bits == 2;
  if (short_codes) return two ? multiply_palette_vector<2, 2>(palette) : multiply_palette_vector<2, 1>(palette);
  return two ? multiply_palette_vector<4, 2>(palette) : multiply_palette_vector<4, 1>(palette);
}

// The high and the low bytes, `size` each, that a row of codes stands for.
template <int BITS>
inline void expand_row_bytes(const uint8_t* codes, int64_t row_bytes, const uint8_t* table, int64_t size, uint8_t* high,
                             uint8_t* low) {
  if constexpr (BITS == 8) {
    static const ExpandBytes expand = vbmi_expand_bytes();
    return expand(codes, row_bytes, table, high, low);
  }
  unpack_row<BITS>(codes, row_bytes, high);
  const __m512i of_high = load_table(table), of_low = load_table(table + 16);
  for (int64_t i = 0; i < size; i += 64) {
    const __m512i unpacked = _mm512_load_si512(high + i);
    _mm512_store_si512(high + i, _mm512_shuffle_epi8(of_high, unpacked));
    _mm512_store_si512(low + i, _mm512_shuffle_epi8(of_low, unpacked));
  }
}

// The bytes that rows of codes stand for go where `multiply_matrix` has four rows of codes: the high ones and the low
// ones of two.
template <int BITS, int DIGITS>
void multiply_palette_matrix(const PaletteJob& palette) {
  constexpr int kTile = 4 / DIGITS, kVectors = 4;
  const MatrixJob& job = palette.job;
  const int64_t steps = job.x_row_bytes / (64 * DIGITS);
  uint8_t* bytes = job.scratch;
  alignas(64) float out[kVectors * kRows];
  Prefetcher prefetcher(job.ahead, 0, job.rows, (job.rows + 1) / 2);
  for (int64_t row = 0; row < job.rows; row += 2) {
    prefetcher.next_share();
    const int64_t rows = smaller(2, job.rows - row);
    for (int64_t r = 0; r < rows; ++r) {
      uint8_t* high = bytes + 2 * r * steps * 64;
      uint8_t* low = high + steps * 64;
      expand_row_bytes<BITS>(job.codes + (row + r) * job.row_bytes, job.row_bytes, table_of(palette, row + r), steps * 64,
                             high, low);
    }
    if (rows < 2) std::memset(bytes + 2 * steps * 64, 0, 2 * steps * 64);
    for (int64_t m = 0; m < job.vectors; m += kVectors) {
      const int64_t vectors = smaller(kVectors, job.vectors - m);
      Isa::Lanes lanes[kVectors * kRows] = {};
      for (int64_t v = 0; v < vectors; v += kTile) {
        const int8_t* x[kTile];
        for (int i = 0; i < kTile; ++i) x[i] = job.x + (m + smaller(v + i, vectors - 1)) * job.x_row_bytes;
        multiply_tile<DIGITS, 1>(bytes, steps, x, lanes + v * kRows);
      }
      Isa::reduce(lanes, out);
      for (int64_t v = 0; v < vectors; ++v) {
        for (int64_t r = 0; r < rows; ++r) {
          const float* planes = out + v * kRows + 2 * r;
          job.out[(m + v) * job.out_stride + row + r] = 256 * planes[0] + planes[1];
        }
      }
    }
  }
}

void palette_matrix(const PaletteJob& palette) {
  const bool two = palette.job.digits == 2, short_codes = palette.job.bits == 2;
  if (short_codes) return two ? multiply_palette_matrix<2, 2>(palette) : multiply_palette_matrix<2, 1>(palette);
  if (palette.job.bits == 8) return two ? multiply_palette_matrix<8, 2>(palette) : multiply_palette_matrix<8, 1>(palette);
  return two ? multiply_palette_matrix<4, 2>(palette) : multiply_palette_matrix<4, 1>(palette);
}

// Tables of up to 16 numbers fit into a register, and a permutation looks 16 of them up.
void look_up_in_register(const uint8_t* codes, int bits, const float* table, int64_t count, float* out) {
  if (bits == 8) return look_up(codes, bits, table, count, out);
  const __m512 values = _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << (1 << bits)) - 1), table);
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i shifts = _mm512_mullo_epi32(_mm512_and_si512(lane, _mm512_set1_epi32(32 / bits - 1)),
                                            _mm512_set1_epi32(bits));
  const __m512i mask = _mm512_set1_epi32((1 << bits) - 1);
  int64_t i = 0;
  for (; i + 16 <= count; i += 16, codes += 2 * bits) {
    int64_t word = 0;
    std::memcpy(&word, codes, 2 * bits);
    // 16 codes of 2 bits are in one word; of 4 bits, the upper lanes' are in the next.
    const __m256i low = _mm256_set1_epi32(static_cast<int32_t>(word));
    const __m256i high = _mm256_set1_epi32(static_cast<int32_t>(bits == 4 ? word >> 32 : word));
    const __m512i words = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
    const __m512i index = _mm512_and_si512(_mm512_srlv_epi32(words, shifts), mask);
    _mm512_storeu_ps(out + i, _mm512_permutexvar_ps(index, values));
  }
  look_up(codes, bits, table, count - i, out + i);
}

}  // namespace

const Kernels* avx512_kernels() {
  static const Kernels table = [] {
    Kernels k = common_kernels("avx512");
    k.matrix = matrix;
    k.matrix_as_vector = 8;
    k.grouped_matrix = grouped_matrix;
    k.quantize = quantize_avx512;
    k.look_up = look_up_in_register;
    k.palette_bits = has_vbmi() && vbmi_expand_bytes() != nullptr ? 8 : 4;
    k.palette_vector = palette_vector;
    k.palette_matrix = palette_matrix;
    return k;
  }();
  return &table;
}

}  // namespace afm
#else
namespace afm {
const Kernels* avx512_kernels() { return nullptr; }
}  // namespace afm
#endif
