// What attention does to a block of keys and values, for one instruction set: included by a source file that
// is compiled for it. No inline function of the standard library may be used here (see CMakeLists.txt).
#pragma once

#include <cstdint>

namespace afm {

constexpr int64_t kBlock = 128;  // keys: scores, weights and what they are made of stay in the first cache
constexpr int64_t kBlockFloats = 64;  // the same for floats, which are four times as wide
constexpr int64_t kDimStep = 32;  // kernels work on head dimensions that are multiples of this
constexpr float kWeightOne = 32767.0f;

// Codes of the next tokens, as many and as far apart as the current ones; null for none.
struct CodesAhead {
  const int8_t* values;
  const int8_t* keys;
};

struct AttentionKernels {
  // out = rms_norm(rope(x)) * weight; `turns` holds dim / 2 cosines, then as many sines.
  void (*turn)(const float* x, const float* turns, const float* weight, float eps, int64_t dim, float* out);
  // out = round(x * 32767 / max|x|); returns max|x| / 32767.
  float (*to_int16)(const float* x, int64_t count, int16_t* out);
  // out = clamp(round(x / scale), -128, 127), halves to even.
  void (*to_int8)(const float* x, float scale, int64_t count, int8_t* out);
  // scores[r * kBlock + k] = sum_d q[r * dim + d] * keys[k * stride + d]; asks memory for what is `ahead` meanwhile.
  void (*score)(const int16_t* q, int64_t rows, const int8_t* keys, int64_t stride, int64_t count, int64_t dim,
                CodesAhead ahead, int32_t* scores);
  // weights[k] = round(32767 * 2 ** (scale * scores[k] - top)) for k < count, 0 up to kBlock, with `top` the
  // largest exponent so far. Returns the weights' sum; `top` and the factor for older sums are updated.
  int64_t (*weigh)(const int32_t* scores, int64_t count, float scale, float* top, float* decay, int16_t* weights);
  // sums[r * dim + d] = decay[r] * sums[r * dim + d] + sum_k weights[r * kBlock + k] * values[k * stride + d]
  void (*add)(const int16_t* weights, int64_t rows, const int8_t* values, int64_t stride, int64_t count,
              int64_t dim, const float* decay, float* sums);
  // Of float keys and values: `score` and `add` with kBlockFloats for kBlock, and
  // out = x as float32, of bfloat16 or float16 numbers that lie side by side.
  void (*widen)(const uint16_t* x, bool is_bfloat16, int64_t count, float* out);
  void (*score_floats)(const float* q, int64_t rows, const float* keys, int64_t stride, int64_t count, int64_t dim,
                       float* scores);
  // As `weigh`, with weights up to 1 in place of the scores; a NaN among the scores is one of the weights.
  float (*weigh_floats)(float* scores, int64_t count, float scale, float* top, float* decay);
  void (*add_floats)(const float* weights, int64_t rows, const float* values, int64_t stride, int64_t count,
                     int64_t dim, const float* decay, float* sums);
};

// Those in use.
const AttentionKernels& attention_kernels();

extern const AttentionKernels kAttentionPortable;
extern const AttentionKernels kAttentionAvx2;
extern const AttentionKernels kAttentionAvx512;

// Every source file has its own copy of what follows, and its compiler makes vectors of the loops: they are
// written for that, with sums in an order that it may use.
namespace {

// Asks for four tokens' codes from the `first` on.
inline void prefetch_four(CodesAhead ahead, int64_t first, int64_t stride, int64_t dim) {
  for (int64_t k = first; k < first + 4; ++k) {
    for (int64_t d = 0; d < dim; d += 64) {
      if (ahead.values != nullptr) __builtin_prefetch(ahead.values + k * stride + d, 0, 2);
      if (ahead.keys != nullptr) __builtin_prefetch(ahead.keys + k * stride + d, 0, 2);
    }
  }
}

// Adding 1.5 * 2**23 rounds a float below 2**22 to an integer, halves to even, and leaves it in the lowest bits.
constexpr float kRound = 12582912.0f;

inline void turn(const float* __restrict x, const float* __restrict turns, const float* __restrict weight, float eps,
                 int64_t dim, float* __restrict out) {
  const float *cosines = turns, *sines = turns + dim / 2;
  for (int64_t i = 0; i < dim / 2; ++i) {
    float even = x[2 * i], odd = x[2 * i + 1];
    out[2 * i] = even * cosines[i] - odd * sines[i];
    out[2 * i + 1] = even * sines[i] + odd * cosines[i];
  }
  constexpr int kSums = 16;
  float sums[kSums] = {};
  int64_t i = 0;
  for (; i + kSums <= dim; i += kSums) {
    for (int j = 0; j < kSums; ++j) sums[j] += out[i + j] * out[i + j];
  }
  for (; i < dim; ++i) sums[0] += out[i] * out[i];
  for (int width = kSums / 2; width > 0; width /= 2) {
    for (int j = 0; j < width; ++j) sums[j] += sums[j + width];
  }
  // Where the squares overflow, the root would make zeros of all numbers; NaN is seen in the logits.
  float factor =
      __builtin_isinf(sums[0]) ? __builtin_nanf("") : 1.0f / __builtin_sqrtf(sums[0] / static_cast<float>(dim) + eps);
  for (i = 0; i < dim; ++i) out[i] *= factor * weight[i];
}

inline float to_int16(const float* __restrict x, int64_t count, int16_t* __restrict out) {
  // Positive floats are in the order of their bits.
  int32_t largest_bits = 0;
  for (int64_t i = 0; i < count; ++i) {
    int32_t bits = __builtin_bit_cast(int32_t, x[i]) & 0x7fffffff;
    largest_bits = bits > largest_bits ? bits : largest_bits;
  }
  float largest = __builtin_bit_cast(float, largest_bits);
  float factor = largest > 0 ? 32767.0f / largest : 0.0f;
  for (int64_t i = 0; i < count; ++i) {
    int32_t rounded = __builtin_bit_cast(int32_t, x[i] * factor + kRound) - __builtin_bit_cast(int32_t, kRound);
    out[i] = static_cast<int16_t>(rounded);
  }
  return largest / 32767.0f;
}

inline void to_int8(const float* __restrict x, float scale, int64_t count, int8_t* __restrict out) {
  for (int64_t i = 0; i < count; ++i) {
    float code = x[i] / scale;
    code = code < 127.0f ? code : 127.0f;
    code = code > -128.0f ? code : -128.0f;
    out[i] = static_cast<int8_t>(__builtin_bit_cast(int32_t, code + kRound) - __builtin_bit_cast(int32_t, kRound));
  }
}

// 2 ** x for x in [-126, 0], to 3e-7 of its value.
inline float exp2_fast(float x) {
  float shifted = x + kRound;
  float rest = x - (shifted - kRound);
  // Taylor's series of 2 ** rest, |rest| <= 1/2.
  float sum = 1.5403530e-4f;
  sum = sum * rest + 1.3333558e-3f;
  sum = sum * rest + 9.6181291e-3f;
  sum = sum * rest + 5.5504109e-2f;
  sum = sum * rest + 2.4022651e-1f;
  sum = sum * rest + 6.9314718e-1f;
  sum = sum * rest + 1.0f;
  int32_t exponent = __builtin_bit_cast(int32_t, shifted) - __builtin_bit_cast(int32_t, kRound);
  return sum * __builtin_bit_cast(float, (exponent + 127) << 23);
}

inline int64_t weigh(const int32_t* __restrict scores, int64_t count, float scale, float* top, float* decay,
                     int16_t* __restrict weights) {
  int32_t largest = scores[0];
  for (int64_t k = 1; k < count; ++k) largest = scores[k] > largest ? scores[k] : largest;
  float here = static_cast<float>(largest) * scale;
  float new_top = *top > here ? *top : here;  // `here` also if *top is NaN
  float fall = *top - new_top;
  *decay = fall > -126.0f ? exp2_fast(fall) : 0.0f;
  *top = new_top;
  for (int64_t k = 0; k < count; ++k) {
    float exponent = static_cast<float>(scores[k]) * scale - new_top;
    exponent = exponent > -126.0f ? exponent : -126.0f;
    exponent = exponent < 0.0f ? exponent : 0.0f;  // rounding may leave a little more than 0
    weights[k] = static_cast<int16_t>(static_cast<int32_t>(exp2_fast(exponent) * kWeightOne + 0.5f));
  }
  // A loop of its own: compilers make no vectors of both.
  int32_t sum = 0;
  for (int64_t k = 0; k < count; ++k) sum += weights[k];
  for (int64_t k = count; k < kBlock; ++k) weights[k] = 0;
  return sum;
}

inline float float16_to_float32(uint16_t x) {
  uint32_t sign = static_cast<uint32_t>(x & 0x8000) << 16, rest = static_cast<uint32_t>(x & 0x7fff) << 13;
  // Exponents differ in their bias by 112; the product is right for subnormal numbers as well.
  uint32_t finite = __builtin_bit_cast(uint32_t, __builtin_bit_cast(float, rest) * 0x1p112f);
  return __builtin_bit_cast(float, sign | (rest >= 0x0f800000 ? rest | 0x7f800000 : finite));
}

inline void widen(const uint16_t* __restrict x, bool is_bfloat16, int64_t count, float* __restrict out) {
  if (is_bfloat16) {
    for (int64_t i = 0; i < count; ++i) out[i] = __builtin_bit_cast(float, static_cast<uint32_t>(x[i]) << 16);
  } else {
    for (int64_t i = 0; i < count; ++i) out[i] = float16_to_float32(x[i]);
  }
}

inline float weigh_floats(float* __restrict scores, int64_t count, float scale, float* top, float* decay) {
  constexpr int kSums = 16;
  static_assert(kBlockFloats % kSums == 0);
  int64_t padded = (count + kSums - 1) / kSums * kSums;
  for (int64_t k = count; k < padded; ++k) scores[k] = scores[0];
  float largest[kSums], sums[kSums] = {};
  for (int j = 0; j < kSums; ++j) largest[j] = scores[j];
  for (int64_t k = 0; k < padded; k += kSums) {
    for (int j = 0; j < kSums; ++j) largest[j] = scores[k + j] > largest[j] ? scores[k + j] : largest[j];
  }
  for (int j = 1; j < kSums; ++j) largest[0] = largest[j] > largest[0] ? largest[j] : largest[0];
  float here = largest[0] * scale;
  float new_top = *top > here ? *top : here;
  float fall = *top - new_top;
  *decay = fall > -126.0f ? exp2_fast(fall) : 0.0f;
  *top = new_top;
  for (int64_t k = 0; k < padded; ++k) {
    float exponent = scores[k] * scale - new_top;
    exponent = exponent < -126.0f ? -126.0f : exponent;  // a NaN stays one
    exponent = exponent > 0.0f ? 0.0f : exponent;        // rounding may leave a little more than 0
    scores[k] = exp2_fast(exponent);
  }
  for (int64_t k = count; k < kBlockFloats; ++k) scores[k] = 0.0f;
  for (int64_t k = 0; k < kBlockFloats; k += kSums) {
    for (int j = 0; j < kSums; ++j) sums[j] += scores[k + j];
  }
  for (int width = kSums / 2; width > 0; width /= 2) {
    for (int j = 0; j < width; ++j) sums[j] += sums[j + width];
  }
  return sums[0];
}

}  // namespace
}  // namespace afm
