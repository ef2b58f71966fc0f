#if defined(__AVX2__)  // nothing on other processors
#include <immintrin.h>

#include "attention_floats.h"
#include "attention_kernel.h"

namespace afm {
namespace {

inline __m256i load_codes(const int8_t* p) {
  return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

inline int32_t load_pair(const int16_t* p) {
  int32_t pair;
  __builtin_memcpy(&pair, p, sizeof pair);
  return pair;
}

// Adds products of neighbours: their sums stay below 2**31 by far. Around the intrinsic, GCC 12 copies the sums of a loop
// in every step.
inline void multiply_add(__m256i& sum, __m256i x, __m256i y) {
  asm("vpaddd %1, %0, %0" : "+x"(sum) : "x"(_mm256_madd_epi16(x, y)));
}

void score(const int16_t* q, int64_t rows, const int8_t* keys, int64_t stride, int64_t count, int64_t dim,
           CodesAhead ahead, int32_t* scores) {
  for (int64_t first = 0; first < count; first += 4) {
    prefetch_four(ahead, first, stride, dim);
    const int8_t* key[4];
    // A block's tail repeats its last key: kBlock is a multiple of four, and nobody reads those scores.
    for (int64_t i = 0; i < 4; ++i) key[i] = keys + (first + i < count ? first + i : count - 1) * stride;
    for (int64_t r = 0; r < rows; r += 2) {
      const int16_t* query = q + r * dim;
      const int16_t* next = r + 1 < rows ? query + dim : query;
      __m256i sum[2][4];
      for (int i = 0; i < 4; ++i) sum[0][i] = sum[1][i] = _mm256_setzero_si256();
      for (int64_t d = 0; d < dim; d += 16) {
        __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(query + d));
        __m256i y = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(next + d));
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
          __m256i codes = load_codes(key[i] + d);
          multiply_add(sum[0][i], x, codes);
          multiply_add(sum[1][i], y, codes);
        }
      }
      for (int64_t j = 0; j < 2 && r + j < rows; ++j) {
        __m256i pairs = _mm256_hadd_epi32(_mm256_hadd_epi32(sum[j][0], sum[j][1]),
                                          _mm256_hadd_epi32(sum[j][2], sum[j][3]));
        __m128i all = _mm_add_epi32(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(scores + (r + j) * kBlock + first), all);
      }
    }
  }
}

// 16 dimensions of kRows rows. Two tokens' codes lie side by side, as their weights do.
template <int kRows>
inline void add_rows(const int16_t* weights, const int8_t* values, int64_t stride, int64_t count, int64_t dim,
                     const float* decay, float* sums) {
  __m256i low[kRows], high[kRows];
  for (int r = 0; r < kRows; ++r) low[r] = high[r] = _mm256_setzero_si256();
  for (int64_t k = 0; k < count; k += 2) {
    const int8_t* token = values + k * stride;
    __m128i a = _mm_loadu_si128(reinterpret_cast<const __m128i*>(token));
    // The weight beyond the last token is zero, whatever is multiplied by it.
    __m128i b = _mm_loadu_si128(reinterpret_cast<const __m128i*>(k + 1 < count ? token + stride : token));
    __m256i first = _mm256_cvtepi8_epi16(_mm_unpacklo_epi8(a, b));
    __m256i second = _mm256_cvtepi8_epi16(_mm_unpackhi_epi8(a, b));
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      __m256i pair = _mm256_set1_epi32(load_pair(weights + r * kBlock + k));
      multiply_add(low[r], first, pair);
      multiply_add(high[r], second, pair);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    float* out = sums + r * dim;
    __m256 fall = _mm256_set1_ps(decay[r]);
    _mm256_storeu_ps(out, _mm256_fmadd_ps(_mm256_loadu_ps(out), fall, _mm256_cvtepi32_ps(low[r])));
    _mm256_storeu_ps(out + 8, _mm256_fmadd_ps(_mm256_loadu_ps(out + 8), fall, _mm256_cvtepi32_ps(high[r])));
  }
}

void add(const int16_t* weights, int64_t rows, const int8_t* values, int64_t stride, int64_t count, int64_t dim,
         const float* decay, float* sums) {
  for (int64_t d = 0; d < dim; d += 16) {
    int64_t r = 0;
    for (; r + 4 <= rows; r += 4) {
      add_rows<4>(weights + r * kBlock, values + d, stride, count, dim, decay + r, sums + r * dim + d);
    }
    for (; r < rows; ++r) {
      add_rows<1>(weights + r * kBlock, values + d, stride, count, dim, decay + r, sums + r * dim + d);
    }
  }
}

struct Floats {
  static constexpr int kLanes = 8;
  typedef __m256 V;
  static V load(const float* p) { return _mm256_loadu_ps(p); }
  static void store(float* p, V x) { _mm256_storeu_ps(p, x); }
  static V fill(float x) { return _mm256_set1_ps(x); }
  static V multiply_add(V a, V b, V c) { return _mm256_fmadd_ps(b, c, a); }
  static void sum_each(V a, V b, V c, V d, float* out) {
    V pairs = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1)));
  }
};

}  // namespace

const AttentionKernels kAttentionAvx2 = {turn,  to_int16,             to_int8,      score,             weigh, add,
                                         widen, score_floats<Floats>, weigh_floats, add_floats<Floats>};

}  // namespace afm
#endif
