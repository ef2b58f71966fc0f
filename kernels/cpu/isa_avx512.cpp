// AVX-512 with VNNI: `vpdpbusd` multiplies 64 codes with 64 digits and adds them up in fours.
#include "isa.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__) && \
    defined(__AVX512VNNI__)
#include "isa_avx512.h"
#include "isa_common.h"

namespace afm {
namespace {

constexpr int kRows = 4;  // times four digits of vectors: 16 sums in flight, and loads at half their limit

// sums += codes * digits; see multiply_add_bytes.
inline void multiply_add_registers(__m512i& sums, __m512i codes, __m512i digits) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(codes), "v"(digits));
}

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

// Lanes of the products of four rows with 4 / DIGITS vectors, one after the other.
template <int DIGITS>
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
  for (int64_t s = 0; s < steps; ++s) {
    __m512i row[kRows];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) row[r] = _mm512_load_si512(codes + (r * steps + s) * 64);
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
#pragma GCC unroll 2
      for (int d = 0; d < DIGITS; ++d) {
        const __m512i digits = _mm512_load_si512(x[v] + (s * DIGITS + d) * 64);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) multiply_add_registers(sums[v][d][r], row[r], digits);
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

// Rows become bytes once, four at a time, and meet all vectors while they are in the first-level cache.
template <int BITS, int DIGITS>
void multiply_matrix(const MatrixJob& job) {
  constexpr int kTile = 4 / DIGITS, kVectors = 4;
  const int64_t steps = job.x_row_bytes / (64 * DIGITS);
  uint8_t* codes = job.scratch;
  alignas(64) float out[kVectors * kRows];
  Prefetcher beside(job.ahead, 0, job.rows, (job.rows + kRows - 1) / kRows);
  for (int64_t row = 0; row < job.rows; row += kRows) {
    beside.next_share();
    const int64_t rows = smaller(kRows, job.rows - row);
    for (int64_t r = 0; r < kRows; ++r) {  // rows past the last repeat it
      const uint8_t* from = job.codes + (row + smaller(r, rows - 1)) * job.row_bytes;
      unpack_row<BITS>(from, job.row_bytes, codes + r * steps * 64);
    }
    for (int64_t m = 0; m < job.vectors; m += kVectors) {
      const int64_t vectors = smaller(kVectors, job.vectors - m);
      Isa::Lanes lanes[kVectors * kRows];
      if (vectors < kVectors) std::memset(lanes, 0, sizeof lanes);
      for (int64_t v = 0; v < vectors; v += kTile) {
        const int8_t* x[kTile];
        for (int i = 0; i < kTile; ++i) x[i] = job.x + (m + smaller(v + i, vectors - 1)) * job.x_row_bytes;
        multiply_tile<DIGITS>(codes, steps, x, lanes + v * kRows);
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
    k.look_up = look_up_in_register;
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
