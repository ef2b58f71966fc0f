// The operations that `isa_common.h` asks for, in AVX-512 VNNI; for units compiled with its flags.
#pragma once

#if defined(__GNUC__) && !defined(__clang__)
// GCC's own intrinsics start from undefined registers, and GCC warns of them (its bug 105593).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>

#include <cstdint>

namespace afm {
namespace {

// sums += codes * digits, unsigned times signed, in fours. The intrinsic says the same; but GCC 12 copies the
// sums of a loop twice per step around it, which takes longer than the products.
inline void multiply_add_bytes(__m512i& sums, __m512i codes, const int8_t* digits) {
  typedef char Line __attribute__((vector_size(64), aligned(1), may_alias));
  asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(codes), "m"(*reinterpret_cast<const Line*>(digits)));
}

// sums += codes * digits; see multiply_add_bytes.
inline void multiply_add_registers(__m512i& sums, __m512i codes, __m512i digits) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(codes), "v"(digits));
}

// 64 codes, a byte each, in the order of Layout: field 0 of all bytes, field 1 of all bytes, ...
template <int BITS>
inline __m512i unpack(const uint8_t* p) {
  if constexpr (BITS == 8) return _mm512_loadu_si512(p);
  if constexpr (BITS == 4) {
    const __m512i v = _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    const __m512i shifts = _mm512_setr_epi64(0, 0, 0, 0, 4, 4, 4, 4);
    return _mm512_and_si512(_mm512_srlv_epi64(v, shifts), _mm512_set1_epi8(15));
  }
  const __m512i v = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  const __m512i shifts = _mm512_setr_epi64(0, 0, 2, 2, 4, 4, 6, 6);
  return _mm512_and_si512(_mm512_srlv_epi64(v, shifts), _mm512_set1_epi8(3));
}

// Field p of 64 bytes of codes, a byte each.
template <int BITS>
inline __m512i field(__m512i bytes, int p) {
  if constexpr (BITS == 8) return bytes;
  return _mm512_and_si512(_mm512_srli_epi16(bytes, BITS * p), _mm512_set1_epi8((1 << BITS) - 1));
}

struct Isa {
  static constexpr int kBytes = 64;
  static constexpr int kLanes = 16;
  using Bytes = __m512i;
  using Lanes = __m512;
  using Integers = __m512i;

  static Bytes load(const uint8_t* p) { return _mm512_loadu_si512(p); }
  static Bytes load_part(const uint8_t* p, int64_t count) {
    return _mm512_maskz_loadu_epi8(_cvtu64_mask64((uint64_t{1} << count) - 1), p);
  }
  static void prefetch(const uint8_t* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0); }

  // Fields are masked where they stand, never shifted: field p counts for 2^(BITS p) times its code, so
  // every field has sums of its own, and those are shifted back (exactly) at the end. A sum grows by at
  // most 4 * 255 * 128 per step, so 16,000 steps fit: K = 10^6 at 8 bits, more at fewer.
  template <int BITS, int DIGITS>
  struct Sums {
    static constexpr int kFields = 8 / BITS;
    __m512i sums[DIGITS][kFields];

    void clear() {
      for (auto& digit : sums) {
        for (auto& field : digit) field = _mm512_setzero_si512();
      }
    }
    void add(Bytes codes, const int8_t* x) {
#pragma GCC unroll 4
      for (int p = 0; p < kFields; ++p) {
        const __m512i mask = _mm512_set1_epi8(static_cast<char>(((1 << BITS) - 1) << (BITS * p)));
        const __m512i field = BITS == 8 ? codes : _mm512_and_si512(codes, mask);
#pragma GCC unroll 2
        for (int d = 0; d < DIGITS; ++d) {
          multiply_add_bytes(sums[d][p], field, x + (d * kFields + p) * kBytes);
        }
      }
    }
    Lanes total() const {
      __m512 total = _mm512_cvtepi32_ps(digit_total(0));
      if constexpr (DIGITS == 2) {
        total = _mm512_fmadd_ps(total, _mm512_set1_ps(256), _mm512_cvtepi32_ps(digit_total(1)));
      }
      return total;
    }
    // Both digits in one int32: 8 * 4 * 255 * 32639 at most.
    static Lanes products(Bytes codes, const int8_t* x) {
      __m512i sum = _mm512_setzero_si512();
#pragma GCC unroll 2
      for (int d = 0; d < DIGITS; ++d) {
        if (d > 0) sum = _mm512_slli_epi32(sum, 8);
#pragma GCC unroll 4
        for (int p = 0; p < kFields; ++p, x += kBytes) {
          multiply_add_registers(sum, field<BITS>(codes, p), _mm512_loadu_si512(x));
        }
      }
      return _mm512_cvtepi32_ps(sum);
    }

   private:
    __m512i digit_total(int d) const {
      __m512i total = sums[d][0];
#pragma GCC unroll 4
      for (int p = 1; p < kFields; ++p) {
        total = _mm512_add_epi32(total, _mm512_srai_epi32(sums[d][p], BITS * p));
      }
      return total;
    }
  };

  // Up to 16 pending sums hide the latency of vpdpbusd (5 cycles, two a cycle) and leave 16 registers. Codes of more than
  // four rows side by side come from memory a fifth slower.
  template <int BITS, int DIGITS>
  static constexpr int rows() {
    return BITS * 2 / DIGITS > 4 ? 4 : BITS * 2 / DIGITS;
  }
  template <int BITS, int DIGITS>
  static constexpr int group_rows() {
    return 4;
  }

  // Pending sums hide the latency of vpdpbusd (5 cycles, two a cycle): 16 or 12 of them, and two rows of codes.
  template <int BITS, int DIGITS>
  static constexpr int kTileVectors = 8 / DIGITS;
  template <int BITS, int DIGITS>
  static constexpr int tile_rows(int vectors) {
    return vectors * DIGITS <= 4 ? 4 : 2;
  }

  static constexpr int kShrinkVectors = 4, kExpandVectors = 8;

  static Lanes from_floats(const float* p) { return _mm512_loadu_ps(p); }
  static Lanes from_bfloats(const uint16_t* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_halves(p)), 16));
  }
  static Lanes from_halves(const uint16_t* p) { return _mm512_cvtph_ps(load_halves(p)); }
  static void store(float* p, Lanes v) { _mm512_storeu_ps(p, v); }
  static Lanes zero() { return _mm512_setzero_ps(); }
  static Lanes add(Lanes a, Lanes b) { return _mm512_add_ps(a, b); }
  static Lanes set1(float v) { return _mm512_set1_ps(v); }
  static Lanes multiply_add(Lanes a, Lanes b, Lanes c) { return _mm512_fmadd_ps(a, b, c); }
  // Lane i gets scales[i * count / 16].
  static Lanes spread(Lanes scales, int count) {
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i index = _mm512_srli_epi32(_mm512_mullo_epi32(lane, _mm512_set1_epi32(count)), 4);
    return _mm512_permutexvar_ps(index, scales);
  }

  // out[i] = the sum of the lanes of v[i].
  static void reduce(const Lanes* v, float* out) {
    __m512 quads[4];
    for (int i = 0; i < 4; ++i) {
      const __m512 a = pairs(v[4 * i], v[4 * i + 1]), b = pairs(v[4 * i + 2], v[4 * i + 3]);
      quads[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(b))) +
                 _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
    }
    const __m512 low = _mm512_shuffle_f32x4(quads[0], quads[1], 0x44) +
                       _mm512_shuffle_f32x4(quads[0], quads[1], 0xee);
    const __m512 high = _mm512_shuffle_f32x4(quads[2], quads[3], 0x44) +
                        _mm512_shuffle_f32x4(quads[2], quads[3], 0xee);
    _mm512_storeu_ps(out, _mm512_shuffle_f32x4(low, high, 0x88) + _mm512_shuffle_f32x4(low, high, 0xdd));
  }

 private:
  static __m256i load_halves(const uint16_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
  static __m512 pairs(__m512 a, __m512 b) {
    return _mm512_unpacklo_ps(a, b) + _mm512_unpackhi_ps(a, b);
  }
};

}  // namespace
}  // namespace afm
