// What Metal's functions of float may return: the true value, off by as much as the specification allows, to a
// random side.
//
// Metal Shading Language Specification 4.1, section 8.4: table 8.1 for `metal::precise`, table 8.2 for `metal::fast`,
// table 8.3 for half. A function without a namespace may be either (section 1.6.5), and is taken for the fast one.
// Operators are correctly rounded: MLX compiles in the math mode "safe", under which table 8.1 holds for them.
#pragma once

#include <math.h>

#include "runtime.h"

namespace emulator {

constexpr double PI = 3.14159265358979323846;

/// The distance of neighbouring floats around a number that isn't one of them.
inline double ulp_of(double y) {
  int exponent;
  frexp(y, &exponent);
  return ldexp(1.0, (exponent < -125 ? -125 : exponent) - 24);
}

/// The float that is farthest from `y` within `error`, on a random side; of a function that is never negative, no
/// negative one. What is zero or infinite is exact.
inline float off_by(double y, double error, bool is_negative_allowed = true) {
  bool is_above = emulator_draw() % 2;
  if (error == 0 || y == 0 || !isfinite(float(y))) return float(y);
  double target = is_above ? y + error : y - error;
  if (!is_negative_allowed && target < 0) return 0.0f;
  float z = float(target);
  if (fabs(z - y) > error) z = nextafterf(z, is_above ? -INFINITY : INFINITY);
  return z;
}

inline float off_by_ulps(double y, double ulps, bool is_negative_allowed = true) {
  return off_by(y, ulps * ulp_of(y), is_negative_allowed);
}

inline double exact(Function f, double x, double y) {
  switch (f) {
    case Function::ACOS: return acos(x);
    case Function::ACOSH: return acosh(x);
    case Function::ASIN: return asin(x);
    case Function::ASINH: return asinh(x);
    case Function::ATAN: return atan(x);
    case Function::ATAN2: return atan2(x, y);
    case Function::ATANH: return atanh(x);
    case Function::COS: return cos(x);
    case Function::COSH: return cosh(x);
    case Function::COSPI: return cos(PI * fmod(x, 2.0));
    case Function::DIVIDE: return x / y;
    case Function::EXP: return exp(x);
    case Function::EXP2: return exp2(x);
    case Function::EXP10: return pow(10.0, x);
    case Function::FMOD: return fmod(x, y);
    case Function::LOG: return log(x);
    case Function::LOG2: return log2(x);
    case Function::LOG10: return log10(x);
    case Function::POW: return pow(x, y);
    case Function::RSQRT: return 1.0 / sqrt(x);
    case Function::SIN: return sin(x);
    case Function::SINH: return sinh(x);
    case Function::SINPI: return sin(PI * fmod(x, 2.0));
    case Function::SQRT: return sqrt(x);
    case Function::TAN: return tan(x);
    case Function::TANH: return tanh(x);
    case Function::TANPI: return tan(PI * fmod(x, 1.0));
  }
  return NAN;
}

/// Functions that are never negative.
inline bool is_positive(Function f) {
  return f == Function::EXP || f == Function::EXP2 || f == Function::EXP10 || f == Function::RSQRT ||
         f == Function::SQRT || f == Function::COSH || f == Function::ACOS;
}

/// Table 8.1.
inline float precise(Function f, float x, float y) {
  double ulps = 4;
  switch (f) {
    case Function::DIVIDE:
    case Function::FMOD:
    case Function::RSQRT:
    case Function::SQRT: ulps = 0; break;
    case Function::ATAN:
    case Function::ATANH:
    case Function::TANH: ulps = 5; break;
    case Function::ATAN2:
    case Function::TAN:
    case Function::TANPI: ulps = 6; break;
    case Function::POW: ulps = 16; break;
    default: break;
  }
  return off_by_ulps(exact(f, x, y), ulps, !is_positive(f));
}

[[noreturn]] inline void undefined(const char* what, float x, Site site) {
  char text[160];
  snprintf(text, sizeof text, "%s of %g, for which the fast function promises nothing: call metal::precise", what, x);
  emulator_fail(text, site);
}

/// Table 8.2.
inline float fast(Function f, float x, float y, Site site) {
  auto call = [&](Function of, float a, float b = 0.0f) { return fast(of, a, b, site); };
  auto precisely = [&](double ulps) { return off_by_ulps(exact(f, x, y), ulps, !is_positive(f)); };
  auto within = [&](double error) { return off_by(exact(f, x, y), error); };
  switch (f) {
    case Function::ACOS:
    case Function::ASIN:
    case Function::ATAN: return precisely(5);
    case Function::ACOSH: return call(Function::LOG, x + call(Function::SQRT, x * x - 1.0f));
    case Function::ASINH: return call(Function::LOG, x + call(Function::SQRT, x * x + 1.0f));
    case Function::ATANH: return 0.5f * call(Function::LOG, call(Function::DIVIDE, 1.0f + x, 1.0f - x));
    case Function::ATAN2: {  // of y / x, called with (y, x)
      if (x == 0 || y == 0) undefined("atan2", x, site);
      float angle = call(Function::ATAN, call(Function::DIVIDE, x, y));
      return y > 0 ? angle : x > 0 ? angle + float(PI) : angle - float(PI);
    }
    case Function::COS:
    case Function::SIN:
      if (!(fabsf(x) <= float(PI))) undefined(f == Function::COS ? "cos" : "sin", x, site);
      return within(0x1p-13);
    case Function::COSPI:
    case Function::SINPI:
      if (!(fabsf(x) <= 1.0f)) undefined(f == Function::COSPI ? "cospi" : "sinpi", x, site);
      return within(0x1p-13);
    case Function::COSH: return 0.5f * (call(Function::EXP, x) + call(Function::EXP, -x));
    case Function::SINH: return 0.5f * (call(Function::EXP, x) - call(Function::EXP, -x));
    case Function::DIVIDE: return precisely(2.5);
    case Function::EXP:
    case Function::EXP2: return precisely(3 + floor(fabs(2.0 * x)));
    case Function::EXP10: return call(Function::EXP2, x * float(log2(10.0)));
    case Function::FMOD: undefined("fmod", x, site);
    case Function::LOG: return x >= 0.5f && x <= 2.0f ? within(0x1p-21) : x > 0 ? precisely(3) : NAN;
    case Function::LOG2: return x >= 0.5f && x <= 2.0f ? within(0x1p-22) : x > 0 ? precisely(2) : NAN;
    case Function::LOG10: return call(Function::LOG2, x) * float(log10(2.0));
    case Function::POW: return x == 0 && y == 0 ? NAN : call(Function::EXP2, y * call(Function::LOG2, x));
    case Function::RSQRT: return precisely(2);
    case Function::SQRT: return x == 0 || isinf(x) ? x : x * call(Function::RSQRT, x);
    case Function::TAN: return call(Function::SIN, x) * (1.0f / call(Function::COS, x));
    case Function::TANPI: return call(Function::TAN, x * float(PI));
    case Function::TANH: {
      float t = call(Function::EXP, 2.0f * x);
      return call(Function::DIVIDE, t - 1.0f, t + 1.0f);
    }
  }
  return NAN;
}

}  // namespace emulator

extern "C" {

float emulator_function(emulator::Function f, int is_fast, float x, float y, emulator::Site site) {
  return is_fast ? emulator::fast(f, x, y, site) : emulator::precise(f, x, y);
}

/// Table 8.3: a half within one ulp, which is one of the two around the true value.
float emulator_half_function(emulator::Function f, float x, float y) {
  double value = emulator::exact(f, x, y);
  int exponent;
  frexp(value, &exponent);
  double ulp = ldexp(1.0, (exponent < -13 ? -13 : exponent) - 11);
  bool is_above = emulator::emulator_draw() % 2;
  if (!isfinite(value) || fabs(value) > 65504.0) return float(value);
  return float((is_above ? ceil(value / ulp) : floor(value / ulp)) * ulp);
}
}
