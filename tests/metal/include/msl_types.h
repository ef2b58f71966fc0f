// Metal's types and address spaces for clang: scalars, vectors with their constructors, bit casts, type traits.
#pragma once

#include "../runtime.h"

#ifdef MSL_OPAQUE  // for a register machine, see register_machine.py
#define MSL_CONSTANT_SPACE 4
#else
#define MSL_CONSTANT_SPACE 2
#endif

#define device __attribute__((address_space(1)))
#define constant const __attribute__((address_space(MSL_CONSTANT_SPACE)))
#define threadgroup __attribute__((address_space(3)))
#define thread
#define kernel
#define METAL_FUNC inline

#define __METAL__ 1
#define __METAL_VERSION__ 310

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long int64_t;
typedef unsigned long uint64_t;
typedef unsigned long size_t;
typedef long ptrdiff_t;
typedef unsigned long uintptr_t;
typedef _Float16 half;
typedef __bf16 bfloat;

#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define HUGE_VALF __builtin_inff()
#define FLT_MAX __FLT_MAX__
#define FLT_MIN __FLT_MIN__
#define FLT_EPSILON __FLT_EPSILON__
#define HALF_MAX half(65504.0f)
#define INT_MAX __INT_MAX__
#define INT_MIN (-__INT_MAX__ - 1)
#define UINT_MAX (2u * __INT_MAX__ + 1u)
#define M_PI_F 3.14159265358979323846264338327950288f
#define M_LOG2E_F 1.44269504088896340735992468100189214f
#define M_LN2_F 0.693147180559945309417232121458176568f
#define M_SQRT1_2_F 0.707106781186547524400844362104849039f

constexpr half operator""h(long double x) { return half(x); }
constexpr bfloat operator""bf(long double x) { return bfloat(x); }

namespace metal {

template <typename T, int N>
using vec = T __attribute__((ext_vector_type(N)));

// ---- type traits --------------------------------------------------------------------------------------------

template <typename T, T V>
struct integral_constant {
  static constexpr const T value = V;
  typedef T value_type;
  constexpr operator T() const { return V; }
};
template <bool V>
using bool_constant = integral_constant<bool, V>;
typedef integral_constant<bool, true> true_type;
typedef integral_constant<bool, false> false_type;

template <bool B, typename T = void>
struct enable_if {};
template <typename T>
struct enable_if<true, T> {
  typedef T type;
};
template <bool B, typename T = void>
using enable_if_t = typename enable_if<B, T>::type;

template <bool B, typename T, typename F>
struct conditional {
  typedef T type;
};
template <typename T, typename F>
struct conditional<false, T, F> {
  typedef F type;
};
template <bool B, typename T, typename F>
using conditional_t = typename conditional<B, T, F>::type;

template <typename T>
using remove_cv_t = __remove_cv(T);
template <typename T>
using remove_reference_t = __remove_reference_t(T);
template <typename T>
using remove_pointer_t = __remove_pointer(T);
template <typename T>
using decay_t = __decay(T);
template <typename T>
using make_unsigned_t = __make_unsigned(T);
template <typename T>
using make_signed_t = __make_signed(T);
template <typename T>
struct remove_cv {
  typedef remove_cv_t<T> type;
};
template <typename T>
struct make_unsigned {
  typedef make_unsigned_t<T> type;
};

template <typename T>
struct remove_addrspace {
  typedef T type;
};
template <typename T>
struct remove_addrspace<__attribute__((address_space(1))) T> {
  typedef T type;
};
template <typename T>
struct remove_addrspace<__attribute__((address_space(MSL_CONSTANT_SPACE))) T> {
  typedef T type;
};
template <typename T>
struct remove_addrspace<__attribute__((address_space(3))) T> {
  typedef T type;
};
template <typename T>
using remove_addrspace_t = typename remove_addrspace<T>::type;

/// A value that is the same in all threads; nothing follows from that here.
template <typename T>
using uniform = T;
template <typename T>
inline constexpr T make_uniform(T x) {
  return x;
}

template <typename A, typename B>
inline constexpr bool is_same_v = __is_same(A, B);
template <typename A, typename B>
struct is_same : integral_constant<bool, __is_same(A, B)> {};
template <typename A, typename B>
inline constexpr bool is_convertible_v = __is_convertible(A, B);
template <typename A, typename B>
struct is_convertible : integral_constant<bool, __is_convertible(A, B)> {};
template <typename T>
inline constexpr bool is_integral_v = __is_integral(T);
template <typename T>
struct is_integral : integral_constant<bool, __is_integral(T)> {};
template <typename T>
inline constexpr bool is_floating_point_v =
    __is_same(__remove_cv(T), float) || __is_same(__remove_cv(T), half) || __is_same(__remove_cv(T), bfloat);
template <typename T>
struct is_floating_point : integral_constant<bool, is_floating_point_v<T>> {};
template <typename T>
inline constexpr bool is_arithmetic_v = is_integral_v<T> || is_floating_point_v<T>;
template <typename T>
struct is_arithmetic : integral_constant<bool, is_arithmetic_v<T>> {};
template <typename T>
inline constexpr bool is_signed_v = __is_signed(T);
template <typename T>
struct is_signed : integral_constant<bool, __is_signed(T)> {};
template <typename T>
inline constexpr bool is_unsigned_v = __is_unsigned(T);
template <typename T>
struct is_unsigned : integral_constant<bool, __is_unsigned(T)> {};
template <typename T>
inline constexpr bool is_pointer_v = __is_pointer(T);
template <typename B, typename D>
inline constexpr bool is_base_of_v = __is_base_of(B, D);

/// The element type and the number of elements of a scalar or vector.
template <typename T>
struct shape_of {
  typedef T element;
  static constexpr const int size = 1;
};
template <typename T, int N>
struct shape_of<T __attribute__((ext_vector_type(N)))> {
  typedef T element;
  static constexpr const int size = N;
};
template <typename T>
inline constexpr bool is_vector_v = (shape_of<__remove_cv(T)>::size > 1);

template <typename To, typename From>
inline constexpr To as_type(From x) {
  static_assert(sizeof(To) == sizeof(From), "as_type: the types differ in size");
  return __builtin_bit_cast(To, x);
}

// ---- constructors of vectors --------------------------------------------------------------------------------

template <typename V>
inline constexpr void fill(V&, int) {}

template <typename V, typename A, typename... Rest>
inline constexpr void fill(V& v, int at, A a, Rest... rest) {
  typedef typename shape_of<V>::element E;
  if constexpr (is_vector_v<A>) {
    for (int i = 0; i < shape_of<A>::size; ++i) v[at + i] = static_cast<E>(a[i]);
  } else {
    v[at] = static_cast<E>(a);
  }
  fill(v, at + shape_of<A>::size, rest...);
}

/// `float4(...)` as Metal reads it: a splat, a conversion, or scalars and vectors one after the other.
template <typename V, typename... Args>
inline constexpr V make(Args... args) {
  constexpr int given = (0 + ... + shape_of<__remove_cv(Args)>::size);
  static_assert(given == 0 || (sizeof...(args) == 1 && given == 1) || given == shape_of<V>::size,
                "constructor of a vector: wrong number of elements");
  V v = V(typename shape_of<V>::element(0));
  if constexpr (sizeof...(args) == 1 && given == 1)
    return V((static_cast<typename shape_of<V>::element>(args), ...));
  else
    fill(v, 0, args...);
  return v;
}

template <typename T, size_t N>
struct array {
  T elements[N];
  constexpr T& operator[](size_t i) { return elements[i]; }
  constexpr const T& operator[](size_t i) const { return elements[i]; }
};

}  // namespace metal

namespace emulator {

/// A struct from device memory to a variable, which C++ has no assignment for.
template <typename T>
inline void load(T& to, const device T* from, Site site = Site::here()) {
  if (uptr(from) % alignof(T)) emulator_fail("misaligned read of a struct", site);
  const device uchar* f = (const device uchar*)from;
  for (unsigned i = 0; i < sizeof to; ++i) ((uchar*)&to)[i] = f[i];
}

/// The same from one address space to another.
template <typename To, typename From>
inline void copy(To to, From from) {
  threadgroup uchar* t = (threadgroup uchar*)to;
  const device uchar* f = (const device uchar*)from;
  for (unsigned i = 0; i < sizeof *to; ++i) t[i] = f[i];
}

}  // namespace emulator

#define MSL_VECTORS(type) \
  typedef type type##2 __attribute__((ext_vector_type(2))); \
  typedef type type##3 __attribute__((ext_vector_type(3))); \
  typedef type type##4 __attribute__((ext_vector_type(4))); \
  typedef type packed_##type##2 __attribute__((ext_vector_type(2), aligned(__alignof__(type)))); \
  typedef type packed_##type##4 __attribute__((ext_vector_type(4), aligned(__alignof__(type))));
MSL_VECTORS(char)
MSL_VECTORS(uchar)
MSL_VECTORS(short)
MSL_VECTORS(ushort)
MSL_VECTORS(int)
MSL_VECTORS(uint)
MSL_VECTORS(long)
MSL_VECTORS(ulong)
MSL_VECTORS(half)
MSL_VECTORS(bfloat)
MSL_VECTORS(float)
#undef MSL_VECTORS

namespace metal {
using ::char2, ::char3, ::char4;
using ::uchar2, ::uchar3, ::uchar4;
using ::short2, ::short3, ::short4;
using ::ushort2, ::ushort3, ::ushort4;
using ::int2, ::int3, ::int4;
using ::uint2, ::uint3, ::uint4;
using ::long2, ::long3, ::long4;
using ::ulong2, ::ulong3, ::ulong4;
using ::half2, ::half3, ::half4;
using ::bfloat2, ::bfloat3, ::bfloat4;
using ::float2, ::float3, ::float4;
}  // namespace metal

// clang reads `float4(a, b, c, d)` as a cast of one value; a macro sees it first.
#define char2(...) metal::make<char2>(__VA_ARGS__)
#define char3(...) metal::make<char3>(__VA_ARGS__)
#define char4(...) metal::make<char4>(__VA_ARGS__)
#define uchar2(...) metal::make<uchar2>(__VA_ARGS__)
#define uchar3(...) metal::make<uchar3>(__VA_ARGS__)
#define uchar4(...) metal::make<uchar4>(__VA_ARGS__)
#define short2(...) metal::make<short2>(__VA_ARGS__)
#define short3(...) metal::make<short3>(__VA_ARGS__)
#define short4(...) metal::make<short4>(__VA_ARGS__)
#define ushort2(...) metal::make<ushort2>(__VA_ARGS__)
#define ushort3(...) metal::make<ushort3>(__VA_ARGS__)
#define ushort4(...) metal::make<ushort4>(__VA_ARGS__)
#define int2(...) metal::make<int2>(__VA_ARGS__)
#define int3(...) metal::make<int3>(__VA_ARGS__)
#define int4(...) metal::make<int4>(__VA_ARGS__)
#define uint2(...) metal::make<uint2>(__VA_ARGS__)
#define uint3(...) metal::make<uint3>(__VA_ARGS__)
#define uint4(...) metal::make<uint4>(__VA_ARGS__)
#define long2(...) metal::make<long2>(__VA_ARGS__)
#define long3(...) metal::make<long3>(__VA_ARGS__)
#define long4(...) metal::make<long4>(__VA_ARGS__)
#define ulong2(...) metal::make<ulong2>(__VA_ARGS__)
#define ulong3(...) metal::make<ulong3>(__VA_ARGS__)
#define ulong4(...) metal::make<ulong4>(__VA_ARGS__)
#define half2(...) metal::make<half2>(__VA_ARGS__)
#define half3(...) metal::make<half3>(__VA_ARGS__)
#define half4(...) metal::make<half4>(__VA_ARGS__)
#define bfloat2(...) metal::make<bfloat2>(__VA_ARGS__)
#define bfloat3(...) metal::make<bfloat3>(__VA_ARGS__)
#define bfloat4(...) metal::make<bfloat4>(__VA_ARGS__)
#define float2(...) metal::make<float2>(__VA_ARGS__)
#define float3(...) metal::make<float3>(__VA_ARGS__)
#define float4(...) metal::make<float4>(__VA_ARGS__)

namespace metal {

template <typename T>
struct numeric_limits;

#define MSL_INTEGER_LIMITS(type, low, high) \
  template <> \
  struct numeric_limits<type> { \
    static constexpr const bool is_specialized = true; \
    static constexpr type min() { return low; } \
    static constexpr type lowest() { return low; } \
    static constexpr type max() { return high; } \
    static constexpr const int digits = 8 * sizeof(type) - is_signed_v<type>; \
  };
MSL_INTEGER_LIMITS(bool, false, true)
MSL_INTEGER_LIMITS(char, char(-128), 127)
MSL_INTEGER_LIMITS(int8_t, int8_t(-128), 127)
MSL_INTEGER_LIMITS(uchar, 0, 255)
MSL_INTEGER_LIMITS(short, short(-32768), 32767)
MSL_INTEGER_LIMITS(ushort, 0, 65535)
MSL_INTEGER_LIMITS(int, INT_MIN, INT_MAX)
MSL_INTEGER_LIMITS(uint, 0, UINT_MAX)
MSL_INTEGER_LIMITS(long, -__LONG_MAX__ - 1, __LONG_MAX__)
MSL_INTEGER_LIMITS(ulong, 0, 2ul * __LONG_MAX__ + 1)
#undef MSL_INTEGER_LIMITS

#define MSL_FLOAT_LIMITS(type, bits, smallest, largest, step, n_digits) \
  template <> \
  struct numeric_limits<type> { \
    static constexpr const bool is_specialized = true; \
    static constexpr const int digits = n_digits; \
    static constexpr type from(bits b) { return __builtin_bit_cast(type, b); } \
    static constexpr type min() { return from(smallest); } \
    static constexpr type max() { return from(largest); } \
    static constexpr type lowest() { return -from(largest); } \
    static constexpr type epsilon() { return from(step); } \
    static constexpr type infinity() { return from(largest + 1); } \
    static constexpr type quiet_NaN() { return from((largest + 1) | (bits(1) << (n_digits - 2))); } \
  };
MSL_FLOAT_LIMITS(float, uint, 0x00800000, 0x7f7fffff, 0x34000000, 24)
MSL_FLOAT_LIMITS(half, ushort, 0x0400, 0x7bff, 0x1400, 11)
MSL_FLOAT_LIMITS(bfloat, ushort, 0x0080, 0x7f7f, 0x3c00, 8)
#undef MSL_FLOAT_LIMITS

}  // namespace metal
