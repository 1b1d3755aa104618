// The float functions of Metal's standard library, computed by libm (C's library of mathematics). With the launch's
// option `noise` each result is moved at random by up to the error that the Metal specification allows, in units in the
// last place. Tests use `noise` to see whether their tolerances suffice.
#pragma once
#include <math.h>
#include <xmmintrin.h>

#include "base.h"

// Returns `value`, with the option `noise` moved at random by at most `bound` units in the last place.
static inline float noisy(float value, u32 bound) {
  if (LIKELY(!dispatch.noise) || !isfinite(value) || value == 0) return value;
  int shift = (int)(next_random() % (2 * bound + 1)) - (int)bound;
  u32 bits;
  memcpy(&bits, &value, 4);
  bits += (u32)shift;
  memcpy(&value, &bits, 4);
  return value;
}

// Defines the two variants of a function of x: emu_precise_<name> and emu_fast_<name>. The bounds are the errors of the
// precise and of the fast variant that the Metal specification allows, in units in the last place.
#define UNARY(name, expression, precise_bound, fast_bound)                                   \
  EXPORT float emu_precise_##name(float x) { return noisy((expression), precise_bound); }     \
  EXPORT float emu_fast_##name(float x) { return noisy((expression), fast_bound); }
static const float kPi = 3.14159265358979f;
UNARY(exp2, exp2f(x), 4, 3 + (u32)fabsf(fminf(2 * x, 300)))
UNARY(exp10, exp10f(x), 4, 3 + (u32)fabsf(fminf(2 * x, 300)))
UNARY(log, logf(x), 4, 5) UNARY(log2, log2f(x), 4, 5) UNARY(log10, log10f(x), 4, 5)
UNARY(sin, sinf(x), 4, 8) UNARY(cos, cosf(x), 4, 8) UNARY(tan, tanf(x), 6, 12)
UNARY(asin, asinf(x), 4, 5) UNARY(acos, acosf(x), 4, 5) UNARY(atan, atanf(x), 5, 5)
UNARY(sinh, sinhf(x), 4, 8) UNARY(cosh, coshf(x), 4, 8)
UNARY(asinh, asinhf(x), 4, 8) UNARY(acosh, acoshf(x), 4, 8) UNARY(atanh, atanhf(x), 5, 8)
UNARY(sinpi, sinf(kPi * x), 4, 8) UNARY(cospi, cosf(kPi * x), 4, 8) UNARY(tanpi, tanf(kPi * x), 6, 12)
UNARY(sqrt, sqrtf(x), 0, 1) UNARY(rsqrt, 1.0f / sqrtf(x), 2, 2)
UNARY(floor, floorf(x), 0, 0) UNARY(ceil, ceilf(x), 0, 0) UNARY(trunc, truncf(x), 0, 0)
UNARY(rint, rintf(x), 0, 0) UNARY(round, roundf(x), 0, 0) UNARY(fabs, fabsf(x), 0, 0)

EXPORT float emu_precise_exp(float x) { return noisy(expf(x), 4); }
EXPORT float emu_precise_tanh(float x) { return noisy(tanhf(x), 5); }
EXPORT float emu_fast_exp(float x) { return noisy(expf(x), 3 + (u32)fabsf(fminf(2 * x, 300))); }
// The Metal specification defines fast::tanh(x) by this quotient. For x above about 44 it is inf / inf = NaN.
EXPORT float emu_fast_tanh(float x) {
  float t = emu_fast_exp(2 * x);
  return (t - 1) / (t + 1);
}

#define BINARY(name, expression, precise_bound, fast_bound)                                           \
  EXPORT float emu_precise_##name(float x, float y) { return noisy((expression), precise_bound); }     \
  EXPORT float emu_fast_##name(float x, float y) { return noisy((expression), fast_bound); }
BINARY(pow, powf(x, y), 16, 32) BINARY(powr, powf(x, y), 16, 32) BINARY(atan2, atan2f(x, y), 6, 6)
BINARY(fmod, fmodf(x, y), 0, 0) BINARY(fmin, fminf(x, y), 0, 0) BINARY(fmax, fmaxf(x, y), 0, 0)
BINARY(fdim, fdimf(x, y), 0, 0) BINARY(nextafter, nextafterf(x, y), 0, 0)
EXPORT float emu_precise_divide(float x, float y) { return noisy(x / y, 0); }
// The Metal specification does not define fast::divide for divisors above 2^126. Return NaN there, so that tests notice
// such a division.
EXPORT float emu_fast_divide(float x, float y) { return fabsf(y) > 0x1p126f ? NAN : noisy(x / y, 2); }

EXPORT float emu_fma(float x, float y, float z) { return fmaf(x, y, z); }
EXPORT float emu_ldexp(float x, int e) { return ldexpf(x, e); }
EXPORT float emu_frexp(float x, int* e) { return frexpf(x, e); }

// Converts a float to bfloat16, rounded to nearest even. clang calls this function for the conversion; its library
// compiler-rt, which normally defines it, is not linked. clang expects the result in the lowest bits of the register
// xmm0.
EXPORT __m128 __truncsfbf2(float x) {
  u32 bits;
  memcpy(&bits, &x, 4);
  bool nan = (bits & 0x7FFFFFFF) > 0x7F800000;
  bits = nan ? bits >> 16 | 64 : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
  float result;
  memcpy(&result, &bits, 4);
  return _mm_set_ss(result);
}
