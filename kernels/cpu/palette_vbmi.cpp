// Palettes of 8 bits with AVX512-VBMI: `vpermb` looks up 64 codes at once in a quarter of a table.
#include "palette_vbmi.h"

#if defined(__AVX512VBMI__) && defined(__AVX512BW__)
#include "isa_avx512.h"

namespace afm {
namespace {

// The bytes of one plane: bytes of the upper quarters replace the first look-up's.
inline __m512i look_up(const __m512i (&quarters)[4], __m512i codes, const __mmask64 (&lie_in)[4]) {
  __m512i found = _mm512_permutexvar_epi8(codes, quarters[0]);
#pragma GCC unroll 4
  for (int q = 1; q < 4; ++q) found = _mm512_mask_permutexvar_epi8(found, lie_in[q], codes, quarters[q]);
  return found;
}

void expand_bytes(const uint8_t* codes, int64_t count, const uint8_t* table, uint8_t* high, uint8_t* low) {
  __m512i of_high[4], of_low[4];
  for (int q = 0; q < 4; ++q) {
    of_high[q] = _mm512_loadu_si512(table + 64 * q);
    of_low[q] = _mm512_loadu_si512(table + 256 + 64 * q);
  }
  for (int64_t i = 0; i < count; i += 64) {
    const __m512i v = count - i >= 64 ? Isa::load(codes + i) : Isa::load_part(codes + i, count - i);
    Isa::prefetch(codes + i + 1024);
    const __mmask64 upper_half = _mm512_movepi8_mask(v), odd = _mm512_movepi8_mask(_mm512_add_epi8(v, v));
    const __mmask64 lie_in[4] = {0, odd & ~upper_half, upper_half & ~odd, upper_half & odd};
    _mm512_store_si512(high + i, look_up(of_high, v, lie_in));
    _mm512_store_si512(low + i, look_up(of_low, v, lie_in));
  }
}

}  // namespace

ExpandBytes vbmi_expand_bytes() { return expand_bytes; }

}  // namespace afm
#else
namespace afm {
ExpandBytes vbmi_expand_bytes() { return nullptr; }
}  // namespace afm
#endif
