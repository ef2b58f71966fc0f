// AVX2: `vpmaddubsw` multiplies 32 codes with 32 digits and adds them up in twos, in int16.
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

  static Bytes load(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
  static Bytes load_part(const uint8_t* p, int64_t count) {
    alignas(32) uint8_t bytes[kBytes] = {};
    __builtin_memcpy(bytes, p, count);
    return load(bytes);
  }
  static void prefetch(const uint8_t* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0); }

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
          add_pairs(d, products(low, x), 1);
          add_pairs(d, products(high, x), 16);
        }
      } else {
        __m256i fields[kFields];
#pragma GCC unroll 4
        for (int p = 0; p < kFields; ++p) fields[p] = field<BITS>(codes, p);
#pragma GCC unroll 2
        for (int d = 0; d < DIGITS; ++d, x += kBytes * kFields) {
          __m256i pairs = products(fields[0], x);
#pragma GCC unroll 4
          for (int p = 1; p < kFields; ++p) {
            pairs = _mm256_add_epi16(pairs, products(fields[p], x + p * kBytes));
          }
          add_pairs(d, pairs, 1);
        }
      }
    }
    Lanes total() const {
      __m256 total = _mm256_cvtepi32_ps(sums[0]);
      if constexpr (DIGITS == 2) {
        total = _mm256_fmadd_ps(total, _mm256_set1_ps(256), _mm256_cvtepi32_ps(sums[1]));
      }
      return total;
    }

   private:
    template <int WIDTH>
    static __m256i field(Bytes codes, int p) {
      return _mm256_and_si256(_mm256_srli_epi16(codes, WIDTH * p), _mm256_set1_epi8((1 << WIDTH) - 1));
    }
    static __m256i products(__m256i codes, const int8_t* x) {
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
  static Lanes spread(const float* scales, int count) {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i index = _mm256_srli_epi32(_mm256_mullo_epi32(lane, _mm256_set1_epi32(count)), 3);
    return _mm256_permutevar8x32_ps(_mm256_loadu_ps(scales), index);
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

const Kernels* avx2_kernels() {
  static const Kernels table = common_kernels("avx2");
  return &table;
}

}  // namespace afm
#else
namespace afm {
const Kernels* avx2_kernels() { return nullptr; }
}  // namespace afm
#endif
