// Metal's common, integer and math functions. They are overloads for the language's types, not templates, so
// that a call that Metal finds ambiguous (`max(x, 0.0f)` with a half) is ambiguous here.
#pragma once

#include "msl_types.h"

extern "C" {
float expm1f(float), erff(float), ldexpf(float, int), frexpf(float, int*), nextafterf(float, float);
}

namespace metal {

// Element by element, for vectors of what has a scalar overload.
#define MSL_VECTOR_1(name) \
  template <typename T, int N> \
  inline vec<T, N> name(T __attribute__((ext_vector_type(N))) a) { \
    vec<T, N> r; \
    for (int i = 0; i < N; ++i) r[i] = name(T(a[i])); \
    return r; \
  }
#define MSL_VECTOR_2(name) \
  template <typename T, int N> \
  inline vec<T, N> name(T __attribute__((ext_vector_type(N))) a, \
                        T __attribute__((ext_vector_type(N))) b) { \
    vec<T, N> r; \
    for (int i = 0; i < N; ++i) r[i] = name(T(a[i]), T(b[i])); \
    return r; \
  }
#define MSL_VECTOR_3(name) \
  template <typename T, int N> \
  inline vec<T, N> name(T __attribute__((ext_vector_type(N))) a, \
                        T __attribute__((ext_vector_type(N))) b, \
                        T __attribute__((ext_vector_type(N))) c) { \
    vec<T, N> r; \
    for (int i = 0; i < N; ++i) r[i] = name(T(a[i]), T(b[i]), T(c[i])); \
    return r; \
  }

// bfloat has its overloads from MLX's own headers, which every kernel of MLX is compiled behind.
#define MSL_FLOAT_1(name, expression) \
  inline float name(float x) { return expression; } \
  inline half name(half h) { float x = h; return half(expression); } \
  inline bfloat name(bfloat h) { float x = h; return bfloat(expression); } \
  MSL_VECTOR_1(name)
#define MSL_FLOAT_2(name, expression) \
  inline float name(float x, float y) { return expression; } \
  inline half name(half a, half b) { float x = a, y = b; return half(expression); } \
  inline bfloat name(bfloat a, bfloat b) { float x = a, y = b; return bfloat(expression); } \
  MSL_VECTOR_2(name)
#define MSL_FLOAT_3(name, expression) \
  inline float name(float x, float y, float z) { return expression; } \
  inline half name(half a, half b, half c) { float x = a, y = b, z = c; return half(expression); } \
  inline bfloat name(bfloat a, bfloat b, bfloat c) { float x = a, y = b, z = c; return bfloat(expression); } \
  MSL_VECTOR_3(name)

// Functions that are exact or correctly rounded, whatever the variant.
#define MSL_EXACT \
  MSL_FLOAT_1(ceil, __builtin_ceilf(x)) \
  MSL_FLOAT_1(floor, __builtin_floorf(x)) \
  MSL_FLOAT_1(rint, __builtin_rintf(x)) \
  MSL_FLOAT_1(round, __builtin_roundf(x)) \
  MSL_FLOAT_1(trunc, __builtin_truncf(x)) \
  MSL_FLOAT_1(fract, x - __builtin_floorf(x)) \
  MSL_FLOAT_1(fabs, __builtin_fabsf(x)) \
  MSL_FLOAT_2(fmin, __builtin_fminf(x, y)) \
  MSL_FLOAT_2(fmax, __builtin_fmaxf(x, y)) \
  inline float abs(float x) { return __builtin_fabsf(x); } \
  inline half abs(half x) { return fabs(x); } \
  inline bfloat abs(bfloat x) { return fabs(x); } \
  inline float min(float x, float y) { return y < x ? y : x; } \
  inline half min(half x, half y) { return y < x ? y : x; } \
  inline bfloat min(bfloat x, bfloat y) { return y < x ? y : x; } \
  inline float max(float x, float y) { return x < y ? y : x; } \
  inline half max(half x, half y) { return x < y ? y : x; } \
  inline bfloat max(bfloat x, bfloat y) { return x < y ? y : x; } \
  inline float clamp(float x, float a, float b) { return min(max(x, a), b); } \
  inline half clamp(half x, half a, half b) { return min(max(x, a), b); } \
  inline bfloat clamp(bfloat x, bfloat a, bfloat b) { return min(max(x, a), b); }

// Functions whose accuracy differs: the emulator knows by how much they may be off.
using emulator::Function;
using emulator::Site;

#ifdef MSL_OPAQUE
#define MSL_FUNCTION(NAME, is_fast, x, y, site) emulator::emulator_named(#NAME, is_fast, x, y)
#define MSL_HALF_FUNCTION(NAME, x, y) emulator::emulator_named(#NAME, true, x, y)
#else
#define MSL_FUNCTION(NAME, is_fast, x, y, site) \
  emulator::emulator_function(Function::NAME, is_fast, x, y, site)
#define MSL_HALF_FUNCTION(NAME, x, y) emulator::emulator_half_function(Function::NAME, x, y)
#endif

#define MSL_INEXACT_1(name, NAME, is_fast) \
  inline float name(float x, Site site = Site::here()) { \
    return MSL_FUNCTION(NAME, is_fast, x, 0.0f, site); \
  } \
  inline half name(half x) { return half(MSL_HALF_FUNCTION(NAME, x, 0)); } \
  inline bfloat name(bfloat x, Site site = Site::here()) { return bfloat(name(float(x), site)); } \
  MSL_VECTOR_1(name)
#define MSL_INEXACT_2(name, NAME, is_fast) \
  inline float name(float x, float y, Site site = Site::here()) { \
    return MSL_FUNCTION(NAME, is_fast, x, y, site); \
  } \
  inline half name(half x, half y) { return half(MSL_HALF_FUNCTION(NAME, x, y)); } \
  inline bfloat name(bfloat x, bfloat y, Site site = Site::here()) { \
    return bfloat(name(float(x), float(y), site)); \
  } \
  MSL_VECTOR_2(name)
#define MSL_INEXACT(is_fast) \
  MSL_INEXACT_1(acos, ACOS, is_fast) \
  MSL_INEXACT_1(acosh, ACOSH, is_fast) \
  MSL_INEXACT_1(asin, ASIN, is_fast) \
  MSL_INEXACT_1(asinh, ASINH, is_fast) \
  MSL_INEXACT_1(atan, ATAN, is_fast) \
  MSL_INEXACT_1(atanh, ATANH, is_fast) \
  MSL_INEXACT_1(cos, COS, is_fast) \
  MSL_INEXACT_1(cosh, COSH, is_fast) \
  MSL_INEXACT_1(cospi, COSPI, is_fast) \
  MSL_INEXACT_1(exp, EXP, is_fast) \
  MSL_INEXACT_1(exp2, EXP2, is_fast) \
  MSL_INEXACT_1(exp10, EXP10, is_fast) \
  MSL_INEXACT_1(log, LOG, is_fast) \
  MSL_INEXACT_1(log2, LOG2, is_fast) \
  MSL_INEXACT_1(log10, LOG10, is_fast) \
  MSL_INEXACT_1(rsqrt, RSQRT, is_fast) \
  MSL_INEXACT_1(sin, SIN, is_fast) \
  MSL_INEXACT_1(sinh, SINH, is_fast) \
  MSL_INEXACT_1(sinpi, SINPI, is_fast) \
  MSL_INEXACT_1(sqrt, SQRT, is_fast) \
  MSL_INEXACT_1(tan, TAN, is_fast) \
  MSL_INEXACT_1(tanh, TANH, is_fast) \
  MSL_INEXACT_1(tanpi, TANPI, is_fast) \
  MSL_INEXACT_2(atan2, ATAN2, is_fast) \
  MSL_INEXACT_2(divide, DIVIDE, is_fast) \
  MSL_INEXACT_2(fmod, FMOD, is_fast) \
  MSL_INEXACT_2(pow, POW, is_fast) \
  MSL_INEXACT_2(powr, POW, is_fast) \
  inline float sincos(float x, thread float& c, Site site = Site::here()) { \
    c = cos(x, site); \
    return sin(x, site); \
  }

// Without a namespace, from macOS 15 on, the compiler may take the fast ones.
MSL_EXACT
MSL_INEXACT(true)
namespace fast {
MSL_EXACT
MSL_INEXACT(true)
}
namespace precise {
MSL_EXACT
MSL_INEXACT(false)
}
#undef MSL_EXACT
#undef MSL_INEXACT
#undef MSL_INEXACT_1
#undef MSL_INEXACT_2
#undef MSL_FUNCTION
#undef MSL_HALF_FUNCTION

#define MSL_INTEGER(type) \
  inline type min(type x, type y) { return y < x ? y : x; } \
  inline type max(type x, type y) { return x < y ? y : x; } \
  inline type clamp(type x, type a, type b) { return min(max(x, a), b); } \
  inline type popcount(type x) { return __builtin_popcountg(make_unsigned_t<type>(x)); } \
  inline type clz(type x) { return __builtin_clzg(make_unsigned_t<type>(x), int(8 * sizeof(type))); } \
  inline type ctz(type x) { return __builtin_ctzg(make_unsigned_t<type>(x), int(8 * sizeof(type))); } \
  inline type rotate(type x, type n) { \
    typedef make_unsigned_t<type> U; \
    uint w = 8 * sizeof(type), s = uint(n) % w; \
    return s ? type(U(U(x) << s) | U(U(x) >> (w - s))) : x; \
  } \
  inline type extract_bits(type x, uint offset, uint bits) { \
    uint w = 8 * sizeof(type); \
    if (bits == 0) return 0; \
    type high = type(make_unsigned_t<type>(x) << (w - offset - bits)); \
    return high >> (w - bits); \
  } \
  inline type insert_bits(type base, type x, uint offset, uint bits) { \
    typedef make_unsigned_t<type> U; \
    U mask = U((bits == 8 * sizeof(type) ? U(0) : U(U(1) << bits)) - 1) << offset; \
    return type((U(base) & ~mask) | (U(U(x) << offset) & mask)); \
  } \
  inline type mulhi(type x, type y) { \
    typedef conditional_t<is_signed_v<type>, __int128, unsigned __int128> Wide; \
    return type((Wide(x) * Wide(y)) >> (8 * sizeof(type))); \
  }
MSL_INTEGER(char)
MSL_INTEGER(int8_t)
MSL_INTEGER(uchar)
MSL_INTEGER(short)
MSL_INTEGER(ushort)
MSL_INTEGER(int)
MSL_INTEGER(uint)
MSL_INTEGER(long)
MSL_INTEGER(ulong)
#undef MSL_INTEGER
inline int8_t abs(int8_t x) { return x < 0 ? -x : x; }
inline char abs(char x) { return x < 0 ? -x : x; }
inline short abs(short x) { return x < 0 ? -x : x; }
inline int abs(int x) { return x < 0 ? -x : x; }
inline long abs(long x) { return x < 0 ? -x : x; }

MSL_VECTOR_1(abs)
MSL_VECTOR_1(popcount)
MSL_VECTOR_1(clz)
MSL_VECTOR_1(ctz)
MSL_VECTOR_2(min)
MSL_VECTOR_2(max)
MSL_VECTOR_3(clamp)
template <typename T, int N>
inline vec<T, N> clamp(T __attribute__((ext_vector_type(N))) x, T a, T b) {
  return clamp(x, vec<T, N>(a), vec<T, N>(b));
}
namespace fast {
MSL_VECTOR_2(min)
MSL_VECTOR_2(max)
}

MSL_FLOAT_3(fma, __builtin_fmaf(x, y, z))
MSL_FLOAT_3(mix, x + (y - x) * z)
MSL_FLOAT_2(copysign, __builtin_copysignf(x, y))
MSL_FLOAT_2(step, y < x ? 0.0f : 1.0f)
MSL_FLOAT_1(sign, x != x ? 0.0f : x > 0.0f ? 1.0f : x < 0.0f ? -1.0f : x)
MSL_FLOAT_1(saturate, __builtin_fminf(__builtin_fmaxf(x, 0.0f), 1.0f))
MSL_FLOAT_1(expm1, ::expm1f(x))
MSL_FLOAT_1(erf, ::erff(x))
inline float max3(float a, float b, float c) { return max(a, max(b, c)); }
inline float min3(float a, float b, float c) { return min(a, min(b, c)); }
inline float ldexp(float x, int k) { return ::ldexpf(x, k); }
inline half ldexp(half x, int k) { return half(::ldexpf(x, k)); }
inline float frexp(float x, int& k) { return ::frexpf(x, &k); }
inline float nextafter(float x, float y) { return ::nextafterf(x, y); }
inline int mad24(int a, int b, int c) { return a * b + c; }
inline uint mad24(uint a, uint b, uint c) { return a * b + c; }

#define MSL_CLASSIFY(type) \
  inline bool isnan(type x) { return x != x; } \
  inline bool isinf(type x) { return __builtin_isinf(float(x)); } \
  inline bool isfinite(type x) { return __builtin_isfinite(float(x)); } \
  inline bool isnormal(type x) { return __builtin_isnormal(float(x)); } \
  inline bool signbit(type x) { return __builtin_signbit(float(x)); }
MSL_CLASSIFY(float)
MSL_CLASSIFY(half)
MSL_CLASSIFY(bfloat)
#undef MSL_CLASSIFY

template <typename T>
inline T select(T a, T b, bool c) {
  return c ? b : a;
}
template <typename T, typename C, int N>
inline vec<T, N> select(T __attribute__((ext_vector_type(N))) a, T __attribute__((ext_vector_type(N))) b,
                        C __attribute__((ext_vector_type(N))) c) {
  vec<T, N> r;
  for (int i = 0; i < N; ++i) r[i] = c[i] ? b[i] : a[i];
  return r;
}

// A comparison of vectors is a vector of 0 and -1 in clang.
template <typename T, int N>
inline bool any(T __attribute__((ext_vector_type(N))) a) {
  bool r = false;
  for (int i = 0; i < N; ++i) r |= a[i] != 0;
  return r;
}
template <typename T, int N>
inline bool all(T __attribute__((ext_vector_type(N))) a) {
  bool r = true;
  for (int i = 0; i < N; ++i) r &= a[i] != 0;
  return r;
}

template <typename T, int N>
inline T dot(T __attribute__((ext_vector_type(N))) a, T __attribute__((ext_vector_type(N))) b) {
  T r = a[0] * b[0];
  for (int i = 1; i < N; ++i) r += a[i] * b[i];
  return r;
}
template <typename T, int N>
inline T length_squared(T __attribute__((ext_vector_type(N))) a) {
  return dot(a, a);
}
template <typename T, int N>
inline T length(T __attribute__((ext_vector_type(N))) a) {
  return sqrt(dot(a, a));
}

#undef MSL_FLOAT_1
#undef MSL_FLOAT_2
#undef MSL_FLOAT_3
#undef MSL_VECTOR_1
#undef MSL_VECTOR_2
#undef MSL_VECTOR_3

}  // namespace metal
