// NEON with dot products (ARMv8.2): `sdot` multiplies 16 codes with 16 digits and adds them up in fours.
#include "isa.h"

#if defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>

namespace afm {
namespace {

struct Isa {
  static constexpr int kBytes = 16;
  static constexpr int kLanes = 4;
  using Bytes = uint8x16_t;
  using Lanes = float32x4_t;

  static Bytes load(const uint8_t* p) { return vld1q_u8(p); }
  static Bytes load_part(const uint8_t* p, int64_t count) {
    uint8_t bytes[kBytes] = {};
    __builtin_memcpy(bytes, p, count);
    return vld1q_u8(bytes);
  }
  static void prefetch(const uint8_t* p) { __builtin_prefetch(p); }

  // `sdot` takes signed bytes, which fields of 2 and 4 bits are as well; codes of 8 bits are taken apart
  // into halves of 4 bits, with sums of their own.
  template <int BITS, int DIGITS>
  struct Sums {
    static constexpr int kWidth = BITS == 8 ? 4 : BITS;
    static constexpr int kFields = 8 / kWidth;
    static constexpr int kHalves = BITS == 8 ? 2 : 1;
    int32x4_t sums[DIGITS][kHalves];

    void clear() {
      for (auto& digit : sums) {
        for (auto& half : digit) half = vdupq_n_s32(0);
      }
    }
    void add(Bytes codes, const int8_t* x) {
      int8x16_t fields[kFields];
#pragma GCC unroll 4
      for (int p = 0; p < kFields; ++p) fields[p] = field(codes, p);
#pragma GCC unroll 2
      for (int d = 0; d < DIGITS; ++d) {
#pragma GCC unroll 4
        for (int p = 0; p < kFields; ++p) {
          const int place = BITS == 8 ? d : d * kFields + p;  // both halves meet the same digits
          int32x4_t& sum = sums[d][BITS == 8 ? p : 0];
          sum = vdotq_s32(sum, fields[p], vld1q_s8(x + place * kBytes));
        }
      }
    }
    Lanes total() const {
      float32x4_t total = vcvtq_f32_s32(digit_total(0));
      if constexpr (DIGITS == 2) {
        total = vfmaq_n_f32(vcvtq_f32_s32(digit_total(1)), total, 256);
      }
      return total;
    }

   private:
    static int8x16_t field(Bytes codes, int p) {
      const uint8x16_t shifted = vshlq_u8(codes, vdupq_n_s8(static_cast<int8_t>(-kWidth * p)));
      return vreinterpretq_s8_u8(vandq_u8(shifted, vdupq_n_u8((1 << kWidth) - 1)));
    }
    int32x4_t digit_total(int d) const {
      if constexpr (BITS == 8) {
        return vaddq_s32(sums[d][0], vshlq_n_s32(sums[d][1], 4));
      } else {
        return sums[d][0];
      }
    }
  };

  template <int BITS, int DIGITS>
  static constexpr int rows() {
    return 4;
  }

  static constexpr int kShrinkVectors = 4, kExpandVectors = 4;

  static Lanes from_floats(const float* p) { return vld1q_f32(p); }
  static Lanes from_bfloats(const uint16_t* p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16)); }
  static Lanes from_halves(const uint16_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
  static void store(float* p, Lanes v) { vst1q_f32(p, v); }
  static Lanes zero() { return vdupq_n_f32(0); }
  static Lanes add(Lanes a, Lanes b) { return vaddq_f32(a, b); }
  static Lanes set1(float v) { return vdupq_n_f32(v); }
  static Lanes multiply_add(Lanes a, Lanes b, Lanes c) { return vfmaq_f32(c, a, b); }
  // Lane i gets scales[i * count / 4], for 2 or 4 of them.
  static Lanes spread(const float* scales, int count) {
    const float32x4_t v = vld1q_f32(scales);
    return count == 4 ? v : vzip1q_f32(v, v);
  }
  // out[i] = the sum of the lanes of v[i].
  static void reduce(const Lanes* v, float* out) {
    vst1q_f32(out, vpaddq_f32(vpaddq_f32(v[0], v[1]), vpaddq_f32(v[2], v[3])));
  }
};

}  // namespace
}  // namespace afm

#include "isa_common.h"

namespace afm {

const Kernels* neon_kernels() {
  static const Kernels table = common_kernels("neon");
  return &table;
}

}  // namespace afm
#else
namespace afm {
const Kernels* neon_kernels() { return nullptr; }
}  // namespace afm
#endif
