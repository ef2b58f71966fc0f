// Complex numbers under MLX's name and path: its own type has members qualified by address space, which C++ lacks.
#pragma once

#include <metal_stdlib>

#include "mlx/backend/metal/kernels/bf16.h"

template <typename T>
struct complex_t {
  using value_type = T;
  T real, imag;

  constexpr complex_t() : real(0), imag(0) {}
  constexpr complex_t(T r, T i) : real(r), imag(i) {}
  template <typename U, typename = metal::enable_if_t<metal::is_arithmetic_v<U>>>
  constexpr complex_t(U r) : real(static_cast<T>(r)), imag(0) {}
};

template <typename T>
static constexpr constant bool is_complex_v = false;
template <typename T>
static constexpr constant bool is_complex_v<complex_t<T>> = true;
template <typename From, typename To>
static constexpr constant bool is_lane_convertible_v = metal::is_arithmetic_v<From> && metal::is_arithmetic_v<To>;

typedef complex_t<float> complex64_t;

template <typename T>
constexpr complex_t<T> operator+(complex_t<T> a, complex_t<T> b) {
  return {a.real + b.real, a.imag + b.imag};
}
template <typename T>
constexpr complex_t<T> operator-(complex_t<T> a, complex_t<T> b) {
  return {a.real - b.real, a.imag - b.imag};
}
template <typename T>
constexpr complex_t<T> operator*(complex_t<T> a, complex_t<T> b) {
  return {a.real * b.real - a.imag * b.imag, a.real * b.imag + a.imag * b.real};
}
template <typename T>
constexpr complex_t<T> operator/(complex_t<T> a, complex_t<T> b) {
  T size = b.real * b.real + b.imag * b.imag;
  return {(a.real * b.real + a.imag * b.imag) / size, (a.imag * b.real - a.real * b.imag) / size};
}
// MLX has one, for the sake of its templates, and never calls it.
template <typename T>
constexpr complex_t<T> operator%(complex_t<T> a, complex_t<T>) {
  return a;
}
template <typename T>
constexpr bool operator<(complex_t<T> a, complex_t<T> b) {
  return a.real < b.real || (a.real == b.real && a.imag < b.imag);
}
template <typename T>
constexpr bool operator>(complex_t<T> a, complex_t<T> b) {
  return b < a;
}
template <typename T>
constexpr bool operator<=(complex_t<T> a, complex_t<T> b) {
  return !(b < a);
}
template <typename T>
constexpr bool operator>=(complex_t<T> a, complex_t<T> b) {
  return !(a < b);
}
template <typename T>
constexpr bool operator==(complex_t<T> a, complex_t<T> b) {
  return a.real == b.real && a.imag == b.imag;
}
