#if defined(__AVX512VNNI__)  // nothing on other processors
#include <immintrin.h>

#include "attention_floats.h"
#include "attention_kernel.h"

namespace afm {
namespace {

inline __m512i load_codes(const int8_t* p) {
  return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

inline int32_t load_pair(const int16_t* p) {
  int32_t pair;
  __builtin_memcpy(&pair, p, sizeof pair);
  return pair;
}

// The sums of four vectors' 16 numbers.
inline __m128i sum_each(__m512i a, __m512i b, __m512i c, __m512i d) {
  __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
  __m512i cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
  __m512i abcd = _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
  __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(abcd), _mm512_extracti64x4_epi64(abcd, 1));
  return _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
}

// Scores of four keys; `steps` times 32 dimensions, a constant where it is 4 or less.
template <int kSteps>
inline void score_four(const int16_t* q, int64_t rows, const int8_t* const keys[4], int64_t steps, int32_t* scores) {
  __m512i k[4][kSteps > 0 ? kSteps : 1];
  if constexpr (kSteps > 0) {
    for (int i = 0; i < 4; ++i) {
      for (int s = 0; s < kSteps; ++s) k[i][s] = load_codes(keys[i] + s * 32);
    }
  }
  for (int64_t r = 0; r < rows; ++r) {
    const int16_t* query = q + r * steps * 32;
    __m512i sum[4] = {_mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512()};
    if constexpr (kSteps > 0) {
#pragma GCC unroll 4
      for (int s = 0; s < kSteps; ++s) {
        __m512i x = _mm512_loadu_si512(query + s * 32);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) sum[i] = _mm512_dpwssd_epi32(sum[i], x, k[i][s]);
      }
    } else {
      for (int64_t s = 0; s < steps; ++s) {
        __m512i x = _mm512_loadu_si512(query + s * 32);
        for (int i = 0; i < 4; ++i) sum[i] = _mm512_dpwssd_epi32(sum[i], x, load_codes(keys[i] + s * 32));
      }
    }
    _mm_storeu_si128(reinterpret_cast<__m128i*>(scores + r * kBlock), sum_each(sum[0], sum[1], sum[2], sum[3]));
  }
}

void score(const int16_t* q, int64_t rows, const int8_t* keys, int64_t stride, int64_t count, int64_t dim,
           CodesAhead ahead, int32_t* scores) {
  for (int64_t first = 0; first < count; first += 4) {
    prefetch_four(ahead, first, stride, dim);
    const int8_t* four[4];
    // A block's tail repeats its last key: kBlock is a multiple of four, and nobody reads those scores.
    for (int64_t i = 0; i < 4; ++i) four[i] = keys + (first + i < count ? first + i : count - 1) * stride;
    int64_t steps = dim / 32;
    if (steps == 4) {
      score_four<4>(q, rows, four, 4, scores + first);
    } else if (steps == 2) {
      score_four<2>(q, rows, four, 2, scores + first);
    } else {
      score_four<0>(q, rows, four, steps, scores + first);
    }
  }
}

// 32 dimensions of kRows rows. Two tokens' codes lie side by side, as their weights do.
template <int kRows>
inline void add_rows(const int16_t* weights, const int8_t* values, int64_t stride, int64_t count, int64_t dim,
                     const float* decay, float* sums) {
  __m512i low[kRows], high[kRows];
  for (int r = 0; r < kRows; ++r) low[r] = high[r] = _mm512_setzero_si512();
  for (int64_t k = 0; k < count; k += 2) {
    const int8_t* token = values + k * stride;
    __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(token));
    // The weight beyond the last token is zero, whatever is multiplied by it.
    __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(k + 1 < count ? token + stride : token));
    __m512i first = _mm512_cvtepi8_epi16(_mm256_unpacklo_epi8(a, b));
    __m512i second = _mm512_cvtepi8_epi16(_mm256_unpackhi_epi8(a, b));
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      __m512i pair = _mm512_set1_epi32(load_pair(weights + r * kBlock + k));
      low[r] = _mm512_dpwssd_epi32(low[r], first, pair);
      high[r] = _mm512_dpwssd_epi32(high[r], second, pair);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    // Unpacking took dimensions 0-7 and 16-23 into one vector, and 8-15 and 24-31 into the other.
    __m512i front = _mm512_inserti64x4(low[r], _mm512_castsi512_si256(high[r]), 1);
    __m512i back = _mm512_shuffle_i64x2(low[r], high[r], 0xee);
    float* out = sums + r * dim;
    __m512 fall = _mm512_set1_ps(decay[r]);
    _mm512_storeu_ps(out, _mm512_fmadd_ps(_mm512_loadu_ps(out), fall, _mm512_cvtepi32_ps(front)));
    _mm512_storeu_ps(out + 16, _mm512_fmadd_ps(_mm512_loadu_ps(out + 16), fall, _mm512_cvtepi32_ps(back)));
  }
}

void add(const int16_t* weights, int64_t rows, const int8_t* values, int64_t stride, int64_t count, int64_t dim,
         const float* decay, float* sums) {
  for (int64_t d = 0; d < dim; d += 32) {
    int64_t r = 0;
    for (; r + 8 <= rows; r += 8) {
      add_rows<8>(weights + r * kBlock, values + d, stride, count, dim, decay + r, sums + r * dim + d);
    }
    for (; r + 2 <= rows; r += 2) {
      add_rows<2>(weights + r * kBlock, values + d, stride, count, dim, decay + r, sums + r * dim + d);
    }
    if (r < rows) add_rows<1>(weights + r * kBlock, values + d, stride, count, dim, decay + r, sums + r * dim + d);
  }
}

struct Floats {
  static constexpr int kLanes = 16;
  typedef __m512 V;
  static V load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, V x) { _mm512_storeu_ps(p, x); }
  static V fill(float x) { return _mm512_set1_ps(x); }
  static V multiply_add(V a, V b, V c) { return _mm512_fmadd_ps(b, c, a); }
  static void sum_each(V a, V b, V c, V d, float* out) {
    V ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    V cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    V low = _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd)));
    V high = _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd)));
    V abcd = _mm512_add_ps(low, high);
    __m256 half = _mm256_add_ps(_mm512_castps512_ps256(abcd), _mm512_extractf32x8_ps(abcd, 1));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
  }
};

}  // namespace

const AttentionKernels kAttentionAvx512 = {turn,  to_int16,             to_int8,      score,             weigh, add,
                                         widen, score_floats<Floats>, weigh_floats, add_floats<Floats>};

}  // namespace afm
#endif
