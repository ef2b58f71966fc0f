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
    static Lanes products(Bytes codes, const int8_t* x) {
      Sums sums;
      sums.clear();
      sums.add(codes, x);
      return sums.total();
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
  template <int BITS, int DIGITS>
  static constexpr int group_rows() {
    return 2;
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
  static Lanes spread(Lanes scales, int count) {
    return count == 4 ? scales : vzip1q_f32(scales, scales);
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
namespace {

// ---- What isa_tile.h asks for

// Field p of the codes, or a byte of them less 128.
template <int BITS>
inline uint8x16_t field_of(uint8x16_t codes, int p) {
  if constexpr (BITS == 8) return veorq_u8(codes, vdupq_n_u8(128));
  return vandq_u8(vshlq_u8(codes, vdupq_n_s8(static_cast<int8_t>(-BITS * p))), vdupq_n_u8((1 << BITS) - 1));
}

inline uint8x16_t signed_table(const uint8_t* p) { return veorq_u8(vld1q_u8(p), vdupq_n_u8(128)); }

// Codes as signed bytes, times digits. What 8 bits lack is added by whoever asks for it, or, where a row has GROUPS,
// here.
template <int BITS, int DIGITS, bool GROUPS>
struct Bytes {
  static constexpr int kVectors = 4 / DIGITS, kNumberBytes = 1, kShift = BITS == 8 ? 128 : 0, kByteShift = 128;
  static constexpr int64_t kXBytes = 64 * DIGITS, kStripBlocks = 32;
  static constexpr int kFields = 8 / BITS, kParts = 4 / kFields;  // registers of codes in a block
  static constexpr int kUnitCols = 16 * kFields;

  static void unpack(const uint8_t* codes, uint8_t* out) {
    for (int i = 0; i < kParts; ++i) {
      const uint8x16_t v = vld1q_u8(codes + 16 * i);
      for (int p = 0; p < kFields; ++p) vst1q_u8(out + 16 * (p * kParts + i), field_of<BITS>(v, p));
    }
  }
  static void look_up(const uint8_t* codes, const uint8_t* table, uint8_t* out, int64_t gap) {
    const uint8x16_t high = signed_table(table), low = signed_table(table + table_bytes(BITS) / 2);
    for (int i = 0; i < kParts; ++i) {
      const uint8x16_t v = vld1q_u8(codes + 16 * i);
      for (int p = 0; p < kFields; ++p) {
        const uint8x16_t field = field_of<BITS>(v, p);
        vst1q_u8(out + 16 * (p * kParts + i), vqtbl1q_u8(high, field));
        vst1q_u8(out + gap + 16 * (p * kParts + i), vqtbl1q_u8(low, field));
      }
    }
  }
  static void multiply(const uint8_t* lines, int64_t line_bytes, int64_t blocks, const int8_t* const* x,
                       Isa::Lanes* lanes) {
    multiply_registers<1>(lines, line_bytes, blocks, x, 0, lanes);
  }
  static void multiply_unit(const uint8_t* lines, int64_t line_bytes, const int8_t* const* x, int unit,
                            Isa::Lanes* lanes) {
    multiply_registers<kParts>(lines, line_bytes, 1, x, 16 * unit, lanes);
  }

 private:
  // Every STEP-th register of the blocks, from byte `first` on.
  template <int STEP>
  static void multiply_registers(const uint8_t* lines, int64_t line_bytes, int64_t blocks, const int8_t* const* x,
                                 int first, Isa::Lanes* lanes) {
    int32x4_t sums[4][4], lacking[4];  // of a digit of a vector, and a line
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) sums[i / 4][i % 4] = lacking[i / 4] = vdupq_n_s32(0);
    for (int64_t b = 0; b < blocks; ++b) {
#pragma GCC unroll 4
      for (int q = first; q < 64; q += 16 * STEP) {
        int8x16_t numbers[4];
#pragma GCC unroll 4
        for (int r = 0; r < 4; ++r) numbers[r] = vreinterpretq_s8_u8(vld1q_u8(lines + r * line_bytes + 64 * b + q));
#pragma GCC unroll 4
        for (int d = 0; d < 4; ++d) {
          const int8x16_t digits = vld1q_s8(x[d / DIGITS] + (b * DIGITS + d % DIGITS) * 64 + q);
          if constexpr (BITS == 8 && GROUPS) lacking[d] = vdotq_s32(lacking[d], digits, vdupq_n_s8(-128));
#pragma GCC unroll 4
          for (int r = 0; r < 4; ++r) sums[d][r] = vdotq_s32(sums[d][r], numbers[r], digits);
        }
      }
    }
#pragma GCC unroll 16
    for (int i = 0; i < kVectors * 4; ++i) {
      const int high = i / 4 * DIGITS, low = high + DIGITS - 1;
      lanes[i] = vcvtq_f32_s32(vsubq_s32(sums[low][i % 4], lacking[low]));
      if constexpr (DIGITS == 2) {
        lanes[i] = vfmaq_n_f32(lanes[i], vcvtq_f32_s32(vsubq_s32(sums[high][i % 4], lacking[high])), 256);
      }
    }
  }
};
template <int BITS, int DIGITS>
using Tile = Bytes<BITS, DIGITS, false>;
template <int BITS, int DIGITS>
using GroupTile = Bytes<BITS, DIGITS, true>;
template <int BITS, int DIGITS>
using WideTile = Bytes<BITS, DIGITS, false>;

// The high and low bytes of a palette's integers as signed bytes, times digits.
template <int BITS, int DIGITS>
struct PaletteRow {
  static constexpr int kFields = 8 / BITS, kPlane = kFields * Isa::kBytes, kShift = 257 * 128;

  static const int8_t* prepare(const int8_t* x, int64_t, int8_t*) { return x; }

  static Isa::Lanes multiply(const uint8_t* codes, int64_t row_bytes, const uint8_t* table, const int8_t* x) {
    const uint8x16_t of_high = signed_table(table), of_low = signed_table(table + table_bytes(BITS) / 2);
    int32x4_t sums[DIGITS + 1] = {};  // what counts 1, 256 and 65,536
    for (int64_t left = row_bytes; left > 0; left -= Isa::kBytes, codes += Isa::kBytes, x += DIGITS * kPlane) {
      Isa::prefetch(codes + kPrefetch);
      const uint8x16_t v = left >= Isa::kBytes ? Isa::load(codes) : Isa::load_part(codes, left);
#pragma GCC unroll 4
      for (int p = 0; p < kFields; ++p) {
        const uint8x16_t field = field_of<BITS>(v, p);
        const int8x16_t high = vreinterpretq_s8_u8(vqtbl1q_u8(of_high, field));
        const int8x16_t low = vreinterpretq_s8_u8(vqtbl1q_u8(of_low, field));
#pragma GCC unroll 2
        for (int d = 0; d < DIGITS; ++d) {
          const int8x16_t digits = vld1q_s8(x + (DIGITS - 1 - d) * kPlane + p * Isa::kBytes);
          sums[d] = vdotq_s32(sums[d], low, digits);
          sums[d + 1] = vdotq_s32(sums[d + 1], high, digits);
        }
      }
    }
    Isa::Lanes total = vcvtq_f32_s32(sums[DIGITS]);
    for (int d = DIGITS - 1; d >= 0; --d) total = vfmaq_n_f32(vcvtq_f32_s32(sums[d]), total, 256);
    return total;
  }
};

}  // namespace
}  // namespace afm

#include "isa_tile.h"

namespace afm {

const Kernels* neon_kernels() {
  static const Kernels table = [] {
    Kernels k = common_kernels("neon");
    k.matrix = matrix;
    k.grouped_matrix = grouped_matrix;
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
const Kernels* neon_kernels() { return nullptr; }
}  // namespace afm
#endif
