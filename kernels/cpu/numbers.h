// Activations' number formats, and rows of them as float32; knows nothing of MLX.
#pragma once

#include <cstdint>
#include <cstring>

namespace afm {

enum class Number { float32, bfloat16, float16 };

inline int64_t size_of(Number type) { return type == Number::float32 ? 4 : 2; }

inline float bits_to_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline uint32_t float_to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float bfloat16_to_float(uint16_t x) { return bits_to_float(static_cast<uint32_t>(x) << 16); }

// Rounds half to even; a NaN stays one.
inline uint16_t float_to_bfloat16(float value) {
  uint32_t bits = float_to_bits(value);
  if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>((bits >> 16) | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline float float16_to_float(uint16_t x) {
  uint32_t sign = static_cast<uint32_t>(x & 0x8000) << 16;
  uint32_t rest = static_cast<uint32_t>(x & 0x7fff) << 13;
  if (rest >= 0x0f800000) return bits_to_float(sign | rest | 0x7f800000);  // infinity, NaN
  // Exponents differ in their bias by 112; the product is right for subnormal numbers as well.
  return bits_to_float(sign | float_to_bits(bits_to_float(rest) * 0x1p112f));
}

// Rounds half to even; what is too large becomes infinity.
inline uint16_t float_to_float16(float value) {
  uint32_t bits = float_to_bits(value), sign = (bits >> 16) & 0x8000;
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00);
  if (bits >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7c00);
  if (bits < 0x38800000) {  // subnormal: adding 0.5 leaves a multiple of 2**-24 in the lowest bits
    return static_cast<uint16_t>(sign | (float_to_bits(bits_to_float(bits) + 0.5f) - 0x3f000000));
  }
  return static_cast<uint16_t>(sign | ((bits - 0x38000000 + 0xfff + ((bits >> 13) & 1)) >> 13));
}

inline float load_number(const void* data, int64_t index, Number type) {
  switch (type) {
    case Number::float32:
      return static_cast<const float*>(data)[index];
    case Number::bfloat16:
      return bfloat16_to_float(static_cast<const uint16_t*>(data)[index]);
    default:
      return float16_to_float(static_cast<const uint16_t*>(data)[index]);
  }
}

// `count` numbers from `data[start]` on, `step` apart.
inline void load_numbers(const void* data, int64_t start, int64_t step, Number type, float* out, int64_t count) {
  if (type == Number::float32 && step == 1) {
    std::memcpy(out, static_cast<const float*>(data) + start, static_cast<size_t>(count) * sizeof(float));
  } else if (type == Number::bfloat16) {
    auto from = static_cast<const uint16_t*>(data) + start;
    for (int64_t i = 0; i < count; ++i) out[i] = bfloat16_to_float(from[i * step]);
  } else {
    for (int64_t i = 0; i < count; ++i) out[i] = load_number(data, start + i * step, type);
  }
}

inline void store_numbers(const float* from, int64_t count, void* data, int64_t start, Number type) {
  if (type == Number::float32) {
    std::memcpy(static_cast<float*>(data) + start, from, static_cast<size_t>(count) * sizeof(float));
    return;
  }
  auto out = static_cast<uint16_t*>(data) + start;
  for (int64_t i = 0; i < count; ++i) {
    out[i] = type == Number::bfloat16 ? float_to_bfloat16(from[i]) : float_to_float16(from[i]);
  }
}

}  // namespace afm
