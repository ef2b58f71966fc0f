// Activations to integers in AVX-512, for units compiled with its flags; after `isa_common.h`, whose `quantize` it does
// in a tenth of the instructions.

namespace afm {
namespace {

// 16-bit integers of 32 columns, of which `count` are there; zeros behind.
inline __m512i round_columns(const float* x, int64_t count, __m512 inverse) {
  __m256i half[2];
  for (int i = 0; i < 2; ++i) {
    const int64_t here = count - 16 * i;
    const __mmask16 present = here >= 16 ? 0xffff : static_cast<__mmask16>(here > 0 ? (1 << here) - 1 : 0);
    // Adding 1.5 * 2^23 leaves the integer, rounded half to even, in the low bits.
    const __m512 rounded = _mm512_fmadd_ps(_mm512_maskz_loadu_ps(present, x + 16 * i), inverse,
                                           _mm512_set1_ps(12582912.0f));
    half[i] = _mm512_cvtepi32_epi16(_mm512_castps_si512(rounded));
  }
  return _mm512_inserti64x4(_mm512_castsi256_si512(half[0]), half[1], 1);
}

// The low bytes of 64 integers, those that meet the first field of a byte of codes first, then the second field's, ...
template <int BITS>
inline __m512i low_bytes(__m512i first, __m512i second) {
  const __m512i bytes = _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi16_epi8(first)),
                                           _mm512_cvtepi16_epi8(second), 1);
  if constexpr (BITS == 8) return bytes;
  // Within 16 bytes, then among them.
  if constexpr (BITS == 4) {
    const __m128i order = _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
    const __m512i sorted = _mm512_shuffle_epi8(bytes, _mm512_broadcast_i32x4(order));
    return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), sorted);
  }
  const __m128i order = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const __m512i sorted = _mm512_shuffle_epi8(bytes, _mm512_broadcast_i32x4(order));
  return _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), sorted);
}

// Puts the bytes of columns [64 * part, 64 * part + 64) of a block where they belong.
template <int BITS>
inline void place_bytes(__m512i bytes, int part, const Layout& layout, int8_t* out) {
  constexpr int kFields = 8 / BITS, kBytes = 64 / kFields;
  if (layout.bytes == kBytes) return _mm512_storeu_si512(out, bytes);
  alignas(64) int8_t own[64];
  _mm512_store_si512(own, bytes);
  for (int p = 0; p < kFields; ++p) std::memcpy(out + p * layout.bytes + part * kBytes, own + p * kBytes, kBytes);
}

// Returns the integers' sum.
template <int BITS>
double quantize_columns(const float* x, int64_t cols, const Layout& layout, float inverse, int8_t* out) {
  const int64_t step = block_cols(layout);
  const __m512 factor = _mm512_set1_ps(inverse);
  const __m512i ones = _mm512_set1_epi16(1), carry = _mm512_set1_epi16(128);
  double total = 0;
  for (int64_t k = 0; k < cols; k += step, out += step * layout.digits) {
    __m512i sum = _mm512_setzero_si512();
    for (int part = 0; part * 64 < step; ++part) {
      const int64_t at = k + part * 64;
      const __m512i first = round_columns(x + at, cols - at, factor);
      const __m512i second = round_columns(x + at + 32, cols - at - 32, factor);
      sum = _mm512_dpwssd_epi32(_mm512_dpwssd_epi32(sum, first, ones), second, ones);
      int8_t* low = out;
      if (layout.digits == 2) {
        // The low digit is the low byte unchanged; its offset from [0, 255] is carried into the high digit.
        const __m512i high = low_bytes<BITS>(_mm512_srli_epi16(_mm512_add_epi16(first, carry), 8),
                                             _mm512_srli_epi16(_mm512_add_epi16(second, carry), 8));
        place_bytes<BITS>(high, part, layout, out);
        low += step;
      }
      place_bytes<BITS>(low_bytes<BITS>(first, second), part, layout, low);
    }
    total += _mm512_reduce_add_epi32(sum);
  }
  return total;
}

void quantize_avx512(const float* x, int64_t cols, Layout layout, int64_t groups, int8_t* out, float* scale,
                     float* sums, float* rest) {
  const float top = largest(x, cols);
  const bool usable = top >= kNegligible && __builtin_isfinite(top);
  if (groups != 1 || rest != nullptr || !usable) return quantize(x, cols, layout, groups, out, scale, sums, rest);
  const float limit = layout.digits == 2 ? kLargest16 : kLargest8, inverse = limit / top;
  const double sum = layout.bits == 2   ? quantize_columns<2>(x, cols, layout, inverse, out)
                     : layout.bits == 4 ? quantize_columns<4>(x, cols, layout, inverse, out)
                                        : quantize_columns<8>(x, cols, layout, inverse, out);
  *scale = top / limit;
  *sums = *scale * static_cast<float>(sum);
}

}  // namespace
}  // namespace afm
