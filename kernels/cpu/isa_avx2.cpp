// AVX2: `vpmaddubsw` multiplies 32 codes with 32 digits and adds them up in twos, in int16; `vpmaddwd`
// does the same with 16 of each that are int16 already, in int32. A byte's fields are taken apart for half as many
// instructions as a word's, which several vectors share: one vector has digits, several have words where there are two.
#include "isa.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>

namespace afm {
namespace {

struct Isa {
  static constexpr int kBytes = 32;
  static constexpr int kLanes = 8;
  using Bytes = __m256i;
  using Lanes = __m256;
  using Integers = __m256i;

  static Bytes load(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
  static Bytes load_part(const uint8_t* p, int64_t count) {
    alignas(32) uint8_t bytes[kBytes] = {};
    __builtin_memcpy(bytes, p, count);
    return load(bytes);
  }
  static void prefetch(const uint8_t* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0); }

  // Field p of every byte.
  template <int WIDTH>
  static __m256i field(Bytes codes, int p) {
    return _mm256_and_si256(_mm256_srli_epi16(codes, WIDTH * p), _mm256_set1_epi8((1 << WIDTH) - 1));
  }
  template <int DIGITS>
  static Lanes total(__m256i high, __m256i low) {
    const __m256 of_low = _mm256_cvtepi32_ps(low);
    return DIGITS == 1 ? of_low : _mm256_fmadd_ps(_mm256_cvtepi32_ps(high), _mm256_set1_ps(256), of_low);
  }

  // int16 holds what comes together in it: four fields of 2 bits make at most 4 * 2 * 3 * 128 = 3,072, two
  // of 4 bits 2 * 2 * 15 * 128 = 7,680. Codes of 8 bits are taken apart into halves of 4 bits, and the upper
  // one gets its factor of 16 on the way to int32: sums grow by 4 * 255 * 128 per step at most.
  template <int BITS, int DIGITS>
  struct Sums {
    static constexpr int kFields = 8 / BITS;
    __m256i sums[DIGITS];

    void clear() {
      for (auto& digit : sums) digit = _mm256_setzero_si256();
    }
    void add(Bytes codes, const int8_t* x) {
      if constexpr (BITS == 8) {
        const __m256i low = field<4>(codes, 0), high = field<4>(codes, 1);
        for (int d = 0; d < DIGITS; ++d, x += kBytes) {
          add_pairs(d, products_of(low, x), 1);
          add_pairs(d, products_of(high, x), 16);
        }
      } else {
#pragma GCC unroll 2
        for (int d = 0; d < DIGITS; ++d, x += kBytes * kFields) add_pairs(d, pairs(codes, x), 1);
      }
    }
    Lanes total() const { return Isa::total<DIGITS>(sums[0], sums[DIGITS - 1]); }
    // Both digits in one int32: 8 * 255 * 32639 at most.
    static Lanes products(Bytes codes, const int8_t* x) {
      if constexpr (BITS == 8) {
        Sums sums;
        sums.clear();
        sums.add(codes, x);
        return sums.total();
      } else {
        const __m256i low = _mm256_madd_epi16(pairs(codes, x + (DIGITS - 1) * kFields * kBytes), _mm256_set1_epi16(1));
        if constexpr (DIGITS == 1) return _mm256_cvtepi32_ps(low);
        const __m256i high = _mm256_madd_epi16(pairs(codes, x), _mm256_set1_epi16(256));
        return _mm256_cvtepi32_ps(_mm256_add_epi32(high, low));
      }
    }

   private:
    static __m256i pairs(Bytes codes, const int8_t* x) {
      __m256i pairs = products_of(field<BITS>(codes, 0), x);
#pragma GCC unroll 4
      for (int p = 1; p < kFields; ++p) {
        pairs = _mm256_add_epi16(pairs, products_of(field<BITS>(codes, p), x + p * kBytes));
      }
      return pairs;
    }
    static __m256i products_of(__m256i codes, const int8_t* x) {
      return _mm256_maddubs_epi16(codes, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
    }
    void add_pairs(int d, __m256i pairs, short factor) {
      sums[d] = _mm256_add_epi32(sums[d], _mm256_madd_epi16(pairs, _mm256_set1_epi16(factor)));
    }
  };

  template <int BITS, int DIGITS>
  static constexpr int rows() {
    return 2;
  }
  template <int BITS, int DIGITS>
  static constexpr int group_rows() {
    return 2;
  }

  // Eight pending sums, and registers for codes, their fields, and digits.
  template <int BITS, int DIGITS>
  static constexpr int kTileVectors = 4;
  template <int BITS, int DIGITS>
  static constexpr int tile_rows(int) {
    return 2;
  }

  static constexpr int kShrinkVectors = 2, kExpandVectors = 4;

  static Lanes from_floats(const float* p) { return _mm256_loadu_ps(p); }
  static Lanes from_bfloats(const uint16_t* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_halves(p)), 16));
  }
  static Lanes from_halves(const uint16_t* p) { return _mm256_cvtph_ps(load_halves(p)); }
  static void store(float* p, Lanes v) { _mm256_storeu_ps(p, v); }
  static Lanes zero() { return _mm256_setzero_ps(); }
  static Lanes add(Lanes a, Lanes b) { return _mm256_add_ps(a, b); }
  static Lanes set1(float v) { return _mm256_set1_ps(v); }
  static Lanes multiply_add(Lanes a, Lanes b, Lanes c) { return _mm256_fmadd_ps(a, b, c); }
  // Lane i gets scales[i * count / 8].
  static Lanes spread(Lanes scales, int count) {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i index = _mm256_srli_epi32(_mm256_mullo_epi32(lane, _mm256_set1_epi32(count)), 3);
    return _mm256_permutevar8x32_ps(scales, index);
  }
  // out[i] = the sum of the lanes of v[i].
  static void reduce(const Lanes* v, float* out) {
    const __m256 a = _mm256_hadd_ps(_mm256_hadd_ps(v[0], v[1]), _mm256_hadd_ps(v[2], v[3]));
    const __m256 b = _mm256_hadd_ps(_mm256_hadd_ps(v[4], v[5]), _mm256_hadd_ps(v[6], v[7]));
    _mm256_storeu_ps(out, _mm256_permute2f128_ps(a, b, 0x20) + _mm256_permute2f128_ps(a, b, 0x31));
  }

 private:
  static __m128i load_halves(const uint16_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
};

}  // namespace
}  // namespace afm

#include "isa_common.h"

namespace afm {
namespace {

// ---- What isa_tile.h asks for

// GCC 12 copies the sums of a loop once per step around their intrinsics, and loads the same numbers once per use.
inline void add_words32(__m256i& sums, __m256i v) { asm("vpaddd %1, %0, %0" : "+x"(sums) : "x"(v)); }
inline void add_words16(__m256i& sums, __m256i v) { asm("vpaddw %1, %0, %0" : "+x"(sums) : "x"(v)); }
inline __m256i load_once(const uint8_t* p) {
  __m256i v = Isa::load(p);
  asm("" : "+x"(v));
  return v;
}
inline __m256i load_digits(const int8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline __m256i widen(const uint8_t* p) {
  return _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline __m256i load_table(const uint8_t* p) {
  return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline void store_words(uint8_t* p, __m256i v) { _mm256_store_si256(reinterpret_cast<__m256i*>(p), v); }

// Codes as int16, times integers of 16 bits in the order of Layout::words: `vpmaddwd` adds up in twos, in int32. What
// 1,024 columns add up to is 128 * 255 * 32639 at most in each of 8 lanes, half of what fits.
template <int BITS>
struct Words {
  static constexpr int kVectors = 2, kNumberBytes = 2, kShift = 0, kByteShift = 0, kUnitCols = BITS == 8 ? 16 : 64;
  static constexpr int64_t kXBytes = 128, kStripBlocks = 16;

  static void unpack(const uint8_t* codes, uint8_t* out) {
    if constexpr (BITS == 8) {
      for (int i = 0; i < 4; ++i) store_words(out + 32 * i, widen(codes + 16 * i));
    } else {
      const __m256i v = BITS == 4 ? Isa::load(codes) : widen(codes);
#pragma GCC unroll 4
      for (int p = 0; p < 4; ++p) {
        store_words(out + 32 * p,
                    _mm256_and_si256(_mm256_srli_epi16(v, BITS * p), _mm256_set1_epi16((1 << BITS) - 1)));
      }
    }
  }
  // Bytes as an index look up what belongs to them; the upper byte of a word has its highest bit set, which makes it 0.
  static void look_up(const uint8_t* codes, const uint8_t* table, uint8_t* out, int64_t gap) {
    const __m256i high = load_table(table), low = load_table(table + table_bytes(BITS) / 2);
    const __m256i v = BITS == 4 ? Isa::load(codes) : widen(codes);
#pragma GCC unroll 4
    for (int p = 0; p < 4; ++p) {
      const __m256i code = _mm256_and_si256(_mm256_srli_epi16(v, BITS * p), _mm256_set1_epi16((1 << BITS) - 1));
      const __m256i index = _mm256_or_si256(code, _mm256_set1_epi16(static_cast<short>(0x8000)));
      store_words(out + 32 * p, _mm256_shuffle_epi8(high, index));
      store_words(out + gap + 32 * p, _mm256_shuffle_epi8(low, index));
    }
  }
  static void multiply(const uint8_t* lines, int64_t line_bytes, int64_t blocks, const int8_t* const* x,
                       Isa::Lanes* lanes) {
    multiply_bytes(lines, line_bytes, 0, blocks * 128, x, lanes);
  }
  static void multiply_unit(const uint8_t* lines, int64_t line_bytes, const int8_t* const* x, int unit,
                            Isa::Lanes* lanes) {
    multiply_bytes(lines, line_bytes, unit * kUnitCols * 2, (unit + 1) * kUnitCols * 2, x, lanes);
  }

 private:
  static void multiply_bytes(const uint8_t* lines, int64_t line_bytes, int64_t begin, int64_t end,
                             const int8_t* const* x, Isa::Lanes* lanes) {
    __m256i sums[kVectors][4];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) sums[i / 4][i % 4] = _mm256_setzero_si256();
    for (int64_t at = begin; at < end; at += 32) {
      const __m256i first = load_digits(x[0] + at), second = load_digits(x[1] + at);
#pragma GCC unroll 4
      for (int r = 0; r < 4; ++r) {
        const __m256i numbers = load_once(lines + r * line_bytes + at);
        add_words32(sums[0][r], _mm256_madd_epi16(numbers, first));
        add_words32(sums[1][r], _mm256_madd_epi16(numbers, second));
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) lanes[i] = _mm256_cvtepi32_ps(sums[i / 4][i % 4]);
  }
};

// A palette's integers less 32,768, so that they are int16, times integers of 16 bits, in the order in which bytes are
// interleaved. Two such products just fit into int32; their sums are float32.
template <int BITS, int DIGITS>
struct PaletteRow {
  static constexpr int kFields = 8 / BITS, kPlane = kFields * Isa::kBytes, kShift = 32768;

  static const int8_t* prepare(const int8_t* x, int64_t bytes, int8_t* words) {
    const __m256i zero = _mm256_setzero_si256();
    int8_t* out = words;
    for (int64_t block = 0; block < bytes; block += DIGITS * kPlane) {
      for (int at = 0; at < kPlane; at += Isa::kBytes, out += 2 * Isa::kBytes) {
        const __m256i low = load_digits(x + block + (DIGITS - 1) * kPlane + at);
        const __m256i above = DIGITS == 2 ? load_digits(x + block + at) : zero;
        const __m256i high = _mm256_add_epi8(above, _mm256_cmpgt_epi8(zero, low));  // a low digit's sign is carried
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm256_unpacklo_epi8(low, high));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + Isa::kBytes), _mm256_unpackhi_epi8(low, high));
      }
    }
    return words;
  }

  static Isa::Lanes multiply(const uint8_t* codes, int64_t row_bytes, const uint8_t* table, const int8_t* x) {
    const __m256i top = _mm256_set1_epi8(static_cast<char>(0x80)), mask = _mm256_set1_epi8((1 << BITS) - 1);
    const __m256i of_high = _mm256_xor_si256(load_table(table), top), of_low = load_table(table + table_bytes(BITS) / 2);
    __m256 sums[2] = {Isa::zero(), Isa::zero()};
    for (int64_t left = row_bytes; left > 0; left -= Isa::kBytes, codes += Isa::kBytes, x += 2 * kPlane) {
      Isa::prefetch(codes + kPrefetch);
      const __m256i v = left >= Isa::kBytes ? Isa::load(codes) : Isa::load_part(codes, left);
#pragma GCC unroll 4
      for (int p = 0; p < kFields; ++p) {
        const __m256i field = _mm256_and_si256(_mm256_srli_epi16(v, BITS * p), mask);
        const __m256i low = _mm256_shuffle_epi8(of_low, field), high = _mm256_shuffle_epi8(of_high, field);
        const __m256i words[2] = {_mm256_unpacklo_epi8(low, high), _mm256_unpackhi_epi8(low, high)};
#pragma GCC unroll 2
        for (int i = 0; i < 2; ++i) {
          const __m256i products = _mm256_madd_epi16(words[i], load_digits(x + (2 * p + i) * Isa::kBytes));
          sums[i] = _mm256_add_ps(sums[i], _mm256_cvtepi32_ps(products));
        }
      }
    }
    return _mm256_add_ps(sums[0], sums[1]);
  }
};

// Operands that codes become for several vectors, see isa_tile.h.
template <int BITS, int DIGITS>
using Tile = Words<BITS>;
template <int BITS, int DIGITS>
using WideTile = Words<BITS>;
template <int BITS, int DIGITS>
using GroupTile = Words<BITS>;

}  // namespace
}  // namespace afm

#include "isa_few.h"
#include "isa_tile.h"

namespace afm {
namespace {

// ---- What isa_grouped.h asks for

inline void transpose(const __m256i (&rows)[8], __m256i (&out)[8]) {
  __m256i quads[4][2];  // [c][i]: columns c and 4 + c of rows 4 i to 4 i + 3
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    const __m256i a = _mm256_unpacklo_epi32(rows[4 * i], rows[4 * i + 1]);
    const __m256i b = _mm256_unpackhi_epi32(rows[4 * i], rows[4 * i + 1]);
    const __m256i c = _mm256_unpacklo_epi32(rows[4 * i + 2], rows[4 * i + 3]);
    const __m256i d = _mm256_unpackhi_epi32(rows[4 * i + 2], rows[4 * i + 3]);
    quads[0][i] = _mm256_unpacklo_epi64(a, c);
    quads[1][i] = _mm256_unpackhi_epi64(a, c);
    quads[2][i] = _mm256_unpacklo_epi64(b, d);
    quads[3][i] = _mm256_unpackhi_epi64(b, d);
  }
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    out[c] = _mm256_permute2x128_si256(quads[c][0], quads[c][1], 0x20);
    out[4 + c] = _mm256_permute2x128_si256(quads[c][0], quads[c][1], 0x31);
  }
}
template <int BITS>
inline __m256i field(__m256i bytes, int p) {
  return Isa::field<BITS>(bytes, p);
}
inline __m256i spread_four(const int8_t* p) {
  int32_t four;
  std::memcpy(&four, p, sizeof four);
  __m256i v = _mm256_set1_epi32(four);
  asm("" : "+x"(v));  // loaded once for all panels
  return v;
}
inline void add_fours(__m256i& sum, __m256i codes, __m256i digits) {
  add_words16(sum, _mm256_maddubs_epi16(codes, digits));
}
inline __m256i add_integers(__m256i a, __m256i b) { return _mm256_add_epi32(a, b); }
inline __m256 to_floats(__m256i v) { return _mm256_cvtepi32_ps(v); }

// Each adds up to 2 * (2^BITS - 1) * 128 to an int16.
template <int BITS>
constexpr int kPendingFours = BITS == 2 ? 42 : 8;

template <int DIGITS>
inline __m256i total(__m256i high, __m256i low) {
  const __m256i sum = _mm256_madd_epi16(low, _mm256_set1_epi16(1));
  return DIGITS == 1 ? sum : _mm256_add_epi32(_mm256_madd_epi16(high, _mm256_set1_epi16(256)), sum);
}

template <int DIGITS>
constexpr int kGroupedVectors = 6 / DIGITS;  // 12 pending sums, and registers for two panels' codes and four digits

}  // namespace
}  // namespace afm

#include "isa_grouped.h"

namespace afm {
namespace {

void grouped_matrix_avx2(const GroupedJob& job) {
  const bool two = job.job.digits == 2;
  if (job.job.bits == 2) return two ? multiply_panels<2, 2>(job) : multiply_panels<2, 1>(job);
  if (job.job.bits == 4) return two ? multiply_panels<4, 2>(job) : multiply_panels<4, 1>(job);
  grouped_matrix(job);
}

// ---- Codes of 2 or 4 bits with one scale per row

// Codes as int16 times integers of 16 bits, see Layout::words. A step adds 2 * 15 * 32639 to a sum at most, which holds
// 2,190 of them.
template <int BITS, int ROWS, int VECTORS>
inline void add_words_rows(const MatrixJob& job, const FewStrip& strip, const uint8_t* codes, const int8_t* x,
                           int64_t ahead, int64_t row, FewSums<2, VECTORS>& all) {
  constexpr int kFields = 16 / BITS;
  const __m256i mask = _mm256_set1_epi16((1 << BITS) - 1);
  __m256i sums[VECTORS][ROWS];
#pragma GCC unroll 8
  for (int v = 0; v < VECTORS; ++v) {
#pragma GCC unroll 2
    for (int r = 0; r < ROWS; ++r) sums[v][r] = strip.first ? _mm256_setzero_si256() : all.integers[v][0][row + r];
  }
  FewPrefetcher<ROWS> prefetcher(job, strip, codes, ahead);
  for (int64_t left = strip.bytes; left > 0; left -= Isa::kBytes, codes += Isa::kBytes, x += 32 * kFields) {
    prefetcher.next();
    __m256i bytes[ROWS];
#pragma GCC unroll 2
    for (int r = 0; r < ROWS; ++r) {
      const uint8_t* from = codes + r * job.row_bytes;
      bytes[r] = left >= Isa::kBytes ? Isa::load(from) : Isa::load_part(from, left);
    }
#pragma GCC unroll 8
    for (int p = 0; p < kFields; ++p) {
      __m256i field[ROWS];
#pragma GCC unroll 2
      for (int r = 0; r < ROWS; ++r) field[r] = _mm256_and_si256(_mm256_srli_epi16(bytes[r], BITS * p), mask);
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; ++v) {
        const __m256i words = load_digits(x + v * job.x_row_bytes + 32 * p);
#pragma GCC unroll 2
        for (int r = 0; r < ROWS; ++r) add_words32(sums[v][r], _mm256_madd_epi16(field[r], words));
      }
    }
  }
#pragma GCC unroll 8
  for (int v = 0; v < VECTORS; ++v) {
#pragma GCC unroll 2
    for (int r = 0; r < ROWS; ++r) {
      all.lanes[v * kPanelRows + row + r] = _mm256_cvtepi32_ps(sums[v][r]);
      all.integers[v][0][row + r] = sums[v][r];
    }
  }
}

// `vpmaddubsw` adds up in twos, in int16: ten steps of four fields fit at 2 bits (10 * 4 * 2 * 3 * 128), four of two at 4
// bits (4 * 2 * 2 * 15 * 128). Then those sums go to int32, which grows by 4 * 255 * 128 a step at most.
template <int BITS, int DIGITS, int ROWS, int VECTORS>
inline void add_few_rows(const MatrixJob& job, const FewStrip& strip, const uint8_t* codes, const int8_t* x,
                         int64_t ahead, int64_t row, FewSums<DIGITS, VECTORS>& all) {
  if constexpr (DIGITS == 2 && VECTORS > 1) {
    return add_words_rows<BITS, ROWS, VECTORS>(job, strip, codes, x, ahead, row, all);
  }
  constexpr int kFields = 8 / BITS, kBlock = Isa::kBytes * kFields * DIGITS;
  constexpr int64_t kSteps = (BITS == 2 ? 10 : 4) * Isa::kBytes;
  __m256i sums[VECTORS][DIGITS][ROWS];
  for (int v = 0; v < VECTORS; ++v) {
    for (int d = 0; d < DIGITS; ++d) {
      for (int r = 0; r < ROWS; ++r) sums[v][d][r] = strip.first ? _mm256_setzero_si256() : all.integers[v][d][row + r];
    }
  }
  FewPrefetcher<ROWS> prefetcher(job, strip, codes, ahead);
  for (int64_t left = strip.bytes; left > 0;) {
    __m256i pairs[VECTORS][DIGITS][ROWS];
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v) {
#pragma GCC unroll 2
      for (int d = 0; d < DIGITS; ++d) {
#pragma GCC unroll 2
        for (int r = 0; r < ROWS; ++r) pairs[v][d][r] = _mm256_setzero_si256();
      }
    }
    for (const int64_t end = left > kSteps ? left - kSteps : 0; left > end;
         left -= Isa::kBytes, codes += Isa::kBytes, x += kBlock) {
      prefetcher.next();
      __m256i bytes[ROWS];
#pragma GCC unroll 2
      for (int r = 0; r < ROWS; ++r) {
        const uint8_t* from = codes + r * job.row_bytes;
        bytes[r] = left >= Isa::kBytes ? Isa::load(from) : Isa::load_part(from, left);
      }
#pragma GCC unroll 4
      for (int p = 0; p < kFields; ++p) {
        __m256i field[ROWS];
#pragma GCC unroll 2
        for (int r = 0; r < ROWS; ++r) field[r] = Isa::field<BITS>(bytes[r], p);
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) {
#pragma GCC unroll 2
          for (int d = 0; d < DIGITS; ++d) {
            const __m256i digits = load_digits(x + v * job.x_row_bytes + (d * kFields + p) * Isa::kBytes);
#pragma GCC unroll 2
            for (int r = 0; r < ROWS; ++r) add_words16(pairs[v][d][r], _mm256_maddubs_epi16(field[r], digits));
          }
        }
      }
    }
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v) {
#pragma GCC unroll 2
      for (int d = 0; d < DIGITS; ++d) {
#pragma GCC unroll 2
        for (int r = 0; r < ROWS; ++r) {
          sums[v][d][r] =
              _mm256_add_epi32(sums[v][d][r], _mm256_madd_epi16(pairs[v][d][r], _mm256_set1_epi16(1)));
        }
      }
    }
  }
#pragma GCC unroll 4
  for (int v = 0; v < VECTORS; ++v) {
#pragma GCC unroll 2
    for (int r = 0; r < ROWS; ++r) {
      all.lanes[v * kPanelRows + row + r] = Isa::total<DIGITS>(sums[v][0][r], sums[v][DIGITS - 1][r]);
#pragma GCC unroll 2
      for (int d = 0; d < DIGITS; ++d) all.integers[v][d][row + r] = sums[v][d][r];
    }
  }
}

template <int BITS>
void multiply_few(const MatrixJob& job) {
  return job.digits == 2 ? multiply_few<BITS, 2>(job) : multiply_few<BITS, 1>(job);
}

void vector_avx2(const VectorJob& job) {
  if (job.scales || job.bits == 8) return vector(job);
  const int64_t x_bytes = digit_bytes({job.bits, Isa::kBytes, job.digits}, job.row_bytes * 8 / job.bits);
  const MatrixJob alone = {job.codes, job.rows, job.row_bytes, job.x, 1, x_bytes, job.digits, job.bits, job.out, 0,
                           nullptr, {}};
  job.bits == 2 ? multiply_few<2>(alone) : multiply_few<4>(alone);
}

void matrix_avx2(const MatrixJob& job) {
  if (job.bits == 8) return job.digits == 2 ? multiply_matrix<8, 2>(job) : multiply_matrix<8, 1>(job);
  job.bits == 2 ? multiply_few<2>(job) : multiply_few<4>(job);
}

}  // namespace

const Kernels* avx2_kernels() {
  static const Kernels table = [] {
    Kernels k = common_kernels("avx2");
    k.words = true;
    k.vector = vector_avx2;
    k.matrix = matrix_avx2;
    k.matrix_as_vector = 4;
    k.grouped_matrix = grouped_matrix_avx2;
    k.grouped_as_digits = 4;
    k.palette_bits = 4;
    k.palette_vector = palette_vector;
    k.palette_matrix = palette_matrix;
    return k;
  }();
  return &table;
}

}  // namespace afm
#else
namespace afm {
const Kernels* avx2_kernels() { return nullptr; }
}  // namespace afm
#endif
