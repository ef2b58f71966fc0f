// AMX: `tdpbusd` multiplies a tile of 16 rows x 64 codes with one of 64 digits x 16 vectors, in 16 cycles.
//
// Codes have to be bytes for that: 32 rows are unpacked into the first-level cache, up to 1024 columns at a
// time, and meet all vectors there. One vector would leave most of a tile empty: AVX-512 does that.
#include "isa.h"

#if defined(__AMX_INT8__) && defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && \
    defined(__AVX512VL__) && defined(__AVX512VNNI__)
#include "isa_avx512.h"

#include <cstring>

namespace afm {
namespace {

constexpr int64_t kTile = 1024;     // bytes
constexpr int64_t kVectors = 16;    // of a tile of digits
constexpr int64_t kRows = 32;       // two tiles of codes share every load of digits
constexpr int64_t kStripSteps = 16;  // steps of 64 columns: 32 KB of codes

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// Turns 16 x 16 32-bit numbers around.
inline void transpose(__m512i* v) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    v[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    v[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    v[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    v[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(v[i], v[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(v[i], v[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(v[i + 8], v[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(v[i + 8], v[i + 12], 0xdd);
  }
  for (int i = 0; i < 4; ++i) {
    v[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    v[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
    v[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    v[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
  }
}

inline __mmask16 first(int64_t count) { return static_cast<__mmask16>((1u << count) - 1); }

// Four digits of each of `width` vectors side by side, (row_bytes / 4, width, 4), for `count` vectors and
// zeros.
void arrange(const int8_t* rows, int64_t count, int64_t width, int64_t row_bytes, int8_t* out) {
  for (int64_t at = 0; at < row_bytes; at += 64) {
    __m512i v[16];
    for (int64_t m = 0; m < 16; ++m) {
      v[m] = m < count ? _mm512_loadu_si512(rows + m * row_bytes + at) : _mm512_setzero_si512();
    }
    transpose(v);
    for (const __m512i& quad : v) {
      _mm512_mask_storeu_epi32(out, first(width), quad);
      out += width * 4;
    }
  }
}

// Steps [begin, end) of `rows` rows as tiles: out is (end - begin, 2, 16, 64).
//
// The rows are one stretch of memory that is read column by column, which no hardware prefetcher recognizes. So each
// call prefetches its share of the next 32 rows, in the order of memory, and a little at a time: a core stalls when
// too many lines are on their way at once.
template <int BITS>
inline void unpack_steps(const MatrixJob& job, const uint8_t* codes, int64_t rows, int64_t begin, int64_t end,
                         uint8_t* out) {
  constexpr int64_t kStep = 8 * BITS;
  const int64_t whole = smaller(end, job.row_bytes / kStep);
  const uint8_t* ahead = codes + kRows * (job.row_bytes + begin * kStep);
  const int64_t lines = (end - begin) * kRows * kStep / 64;
  for (int64_t r = 0; r < rows; ++r, out += 64) {
    for (int64_t i = lines * r / kRows; i < lines * (r + 1) / kRows; ++i) {
      _mm_prefetch(reinterpret_cast<const char*>(ahead + 64 * i), _MM_HINT_T1);
    }
    const uint8_t* row = codes + r * job.row_bytes;
    uint8_t* to = out;
    int64_t step = begin;
    for (; step < whole; ++step, to += 2 * kTile) {
      _mm512_store_si512(to, unpack<BITS>(row + step * kStep));
    }
    if (step < end) {
      alignas(64) uint8_t last[64] = {};
      std::memcpy(last, row + step * kStep, job.row_bytes - step * kStep);
      _mm512_store_si512(to, unpack<BITS>(last));
    }
  }
}

// Tiles: sums 0-3 (two of codes, two of digits each), codes 4 and 5, digits 6 and 7.
void configure(int64_t width) {
  struct {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  } config;
  for (int i = 0; i < 8; ++i) {
    config.rows[i] = 16;
    config.row_bytes[i] = static_cast<uint16_t>(i == 4 || i == 5 ? 64 : 4 * width);
  }
  _tile_loadconfig(&config);
}

template <int DIGITS>
inline void zero_sums() {
  _tile_zero(0);
  _tile_zero(2);
  if constexpr (DIGITS == 2) {
    _tile_zero(1);
    _tile_zero(3);
  }
}

template <int DIGITS>
inline void load_sums(const int32_t* sums) {
  _tile_loadd(0, sums, 64);
  _tile_loadd(2, sums + 512, 64);
  if constexpr (DIGITS == 2) {
    _tile_loadd(1, sums + 256, 64);
    _tile_loadd(3, sums + 768, 64);
  }
}

template <int DIGITS>
inline void store_sums(int32_t* sums) {
  _tile_stored(0, sums, 64);
  _tile_stored(2, sums + 512, 64);
  if constexpr (DIGITS == 2) {
    _tile_stored(1, sums + 256, 64);
    _tile_stored(3, sums + 768, 64);
  }
}

// Steps of codes (steps, 2, 16, 64) times digits (steps, DIGITS, 16, width, 4), added to the sums.
template <int DIGITS>
inline void multiply_steps(const uint8_t* codes, const int8_t* x, int64_t width, int64_t steps) {
  for (int64_t s = 0; s < steps; ++s, codes += 2 * kTile, x += DIGITS * 64 * width) {
    _tile_loadd(4, codes, 64);
    _tile_loadd(6, x, 4 * width);
    _tile_dpbusd(0, 4, 6);
    _tile_loadd(5, codes + kTile, 64);
    _tile_dpbusd(2, 5, 6);
    if constexpr (DIGITS == 2) {
      _tile_loadd(7, x + 64 * width, 4 * width);
      _tile_dpbusd(1, 4, 7);
      _tile_dpbusd(3, 5, 7);
    }
  }
}

// Sums (2, 2, 16 rows, 16 vectors), the high digit's first, to out[vector][row].
template <int DIGITS>
inline void write_sums(const int32_t* sums, int64_t rows, int64_t vectors, int64_t out_stride, float* out) {
  for (int64_t half = 0; half < 2 && rows > 0; ++half, sums += 512, rows -= 16, out += 16) {
    __m512i v[16];
    for (int i = 0; i < 16; ++i) {
      __m512 value = _mm512_cvtepi32_ps(_mm512_load_si512(sums + 16 * i));
      if constexpr (DIGITS == 2) {
        const __m512 low = _mm512_cvtepi32_ps(_mm512_load_si512(sums + 256 + 16 * i));
        value = _mm512_fmadd_ps(value, _mm512_set1_ps(256), low);
      }
      v[i] = _mm512_castps_si512(value);
    }
    transpose(v);
    const __mmask16 mask = rows >= 16 ? 0xffff : first(rows);
    for (int64_t m = 0; m < vectors; ++m) {
      _mm512_mask_storeu_ps(out + m * out_stride, mask, _mm512_castsi512_ps(v[m]));
    }
  }
}

// Up to 16 vectors: codes are unpacked four steps ahead of the tiles, and sums stay in their registers.
template <int BITS, int DIGITS>
void multiply_few(const MatrixJob& job, int64_t row, int64_t rows, int64_t steps) {
  constexpr int64_t kAhead = 4;
  const uint8_t* codes = job.codes + row * job.row_bytes;
  Prefetcher prefetcher(job.ahead, row, rows, (steps + kAhead - 1) / kAhead);
  alignas(64) static thread_local uint8_t unpacked[2][kAhead * 2 * kTile];
  alignas(64) int32_t sums[4 * 256];
  if (rows < kRows) std::memset(unpacked, 0, sizeof unpacked);
  zero_sums<DIGITS>();
  unpack_steps<BITS>(job, codes, rows, 0, smaller(kAhead, steps), unpacked[0]);
  const int8_t* x = job.x;
  for (int64_t s = 0; s < steps; s += kAhead, x += kAhead * DIGITS * 64 * job.vectors) {
    const int64_t next = s + kAhead, parity = s / kAhead % 2;
    if (next < steps) {
      unpack_steps<BITS>(job, codes, rows, next, smaller(next + kAhead, steps), unpacked[1 - parity]);
    }
    prefetcher.next_share();
    multiply_steps<DIGITS>(unpacked[parity], x, job.vectors, smaller(kAhead, steps - s));
  }
  store_sums<DIGITS>(sums);
  write_sums<DIGITS>(sums, rows, job.vectors, job.out_stride, job.out + row);
}

constexpr int64_t kMaxBlocks = 64;  // of 16 vectors, whose sums wait in memory for the next strip

template <int BITS, int DIGITS>
void multiply_many(const MatrixJob& job, int64_t row, int64_t rows, int64_t steps) {
  alignas(64) static thread_local uint8_t unpacked[kStripSteps * 2 * kTile];
  alignas(64) static thread_local int32_t sums[kMaxBlocks][4 * 256];
  if (rows < kRows) std::memset(unpacked, 0, sizeof unpacked);
  const uint8_t* codes = job.codes + row * job.row_bytes;
  const int64_t all_blocks = (job.vectors + kVectors - 1) / kVectors;
  for (int64_t base = 0; base < all_blocks; base += kMaxBlocks) {
    const int64_t blocks = smaller(kMaxBlocks, all_blocks - base);
    for (int64_t s = 0; s < steps; s += kStripSteps) {
      const int64_t count = smaller(kStripSteps, steps - s);
      unpack_steps<BITS>(job, codes, rows, s, s + count, unpacked);
      for (int64_t b = 0; b < blocks; ++b) {
        const int64_t m = (base + b) * kVectors;
        const int8_t* x = job.x + m * job.x_row_bytes + s * DIGITS * 64 * kVectors;
        if (s == 0) {
          zero_sums<DIGITS>();
        } else {
          load_sums<DIGITS>(sums[b]);
        }
        multiply_steps<DIGITS>(unpacked, x, kVectors, count);
        store_sums<DIGITS>(sums[b]);
        if (s + count == steps) {
          write_sums<DIGITS>(sums[b], rows, smaller(kVectors, job.vectors - m), job.out_stride,
                             job.out + m * job.out_stride + row);
        }
      }
    }
  }
}

template <int BITS, int DIGITS>
void multiply(const MatrixJob& job) {
  const int64_t steps = job.x_row_bytes / (64 * DIGITS);
  configure(smaller(kVectors, job.vectors));
  for (int64_t row = 0; row < job.rows; row += kRows) {
    const int64_t rows = smaller(kRows, job.rows - row);
    if (job.vectors <= kVectors) {
      multiply_few<BITS, DIGITS>(job, row, rows, steps);
    } else {
      multiply_many<BITS, DIGITS>(job, row, rows, steps);
    }
  }
  // Tiles that are in use make every switch between threads slower.
  _tile_release();
}

void matrix(const MatrixJob& job) {
  const bool two = job.digits == 2;
  if (job.bits == 2) return two ? multiply<2, 2>(job) : multiply<2, 1>(job);
  if (job.bits == 4) return two ? multiply<4, 2>(job) : multiply<4, 1>(job);
  return two ? multiply<8, 2>(job) : multiply<8, 1>(job);
}

}  // namespace

const Kernels* amx_kernels() {
  static const Kernels* const base = avx512_kernels();
  static const Kernels table = [] {
    Kernels k = base != nullptr ? *base : Kernels{};
    k.name = "amx";
    k.matrix = matrix;
    k.matrix_as_vector = 0;
    k.matrix_vectors = kVectors;
    k.arrange = arrange;
    return k;
  }();
  return base != nullptr ? &table : nullptr;
}

}  // namespace afm
#else
namespace afm {
const Kernels* amx_kernels() { return nullptr; }
}  // namespace afm
#endif
