// The functions of Metal's headers <metal_math>, <metal_integer>, <metal_common>, <metal_relational> and
// <metal_geometric>.
//
// A float function calls libm through ../runtime/math.h. A half function converts its arguments to float, calls the
// float function, and rounds the result once. Functions of bfloat are not defined here, because MLX's preamble adds
// them. As in Metal, exp(int) is ambiguous and therefore a compile error.
#pragma once
namespace metal {
// EMU_MAPn defines, for a function of n scalars, the function that applies it to each element of vectors.
#define EMU_MAP1(name)                                                                              \
  template <typename V>                                                                             \
  EMU_INLINE enable_if_t<emu_is_vector<V> && is_floating_point_v<emu_scalar<V>>, V> name(V x) {     \
    V r;                                                                                            \
    for (int i = 0; i < emu_shape<V>::size; i++) r[i] = name(x[i]);                                 \
    return r;                                                                                       \
  }
#define EMU_MAP2(name)                                                                              \
  template <typename V>                                                                             \
  EMU_INLINE enable_if_t<emu_is_vector<V>, V> name(V x, V y) {                                      \
    V r;                                                                                            \
    for (int i = 0; i < emu_shape<V>::size; i++) r[i] = name(x[i], y[i]);                           \
    return r;                                                                                       \
  }                                                                                                 \
  template <typename V>                                                                             \
  EMU_INLINE enable_if_t<emu_is_vector<V>, V> name(V x, emu_scalar<V> y) {                          \
    V r;                                                                                            \
    for (int i = 0; i < emu_shape<V>::size; i++) r[i] = name(x[i], y);                              \
    return r;                                                                                       \
  }
#define EMU_MAP3(name)                                                                              \
  template <typename V>                                                                             \
  EMU_INLINE enable_if_t<emu_is_vector<V>, V> name(V x, V y, V z) {                                 \
    V r;                                                                                            \
    for (int i = 0; i < emu_shape<V>::size; i++) r[i] = name(x[i], y[i], z[i]);                     \
    return r;                                                                                       \
  }
#define EMU_FLOAT1(family, name)                                                                    \
  extern "C" float emu_##family##_##name(float);                                                    \
  EMU_INLINE float name(float x) { return emu_##family##_##name(x); }                               \
  EMU_INLINE half name(half x) { return (half)emu_##family##_##name((float)x); }                    \
  EMU_MAP1(name)
#define EMU_FLOAT2(family, name)                                                                    \
  extern "C" float emu_##family##_##name(float, float);                                             \
  EMU_INLINE float name(float x, float y) { return emu_##family##_##name(x, y); }                   \
  EMU_INLINE half name(half x, half y) { return (half)emu_##family##_##name((float)x, (float)y); }  \
  EMU_MAP2(name)
#define EMU_FRACT                                                                                   \
  EMU_INLINE float fract(float x) { return x - floor(x); }                                          \
  EMU_INLINE half fract(half x) { return (half)((float)x - floor((float)x)); }                      \
  EMU_MAP1(fract)
#define EMU_FLOAT_FUNCTIONS(F)                                                                      \
  EMU_FLOAT1(F, exp) EMU_FLOAT1(F, exp2) EMU_FLOAT1(F, exp10) EMU_FLOAT1(F, log) EMU_FLOAT1(F, log2) \
  EMU_FLOAT1(F, log10) EMU_FLOAT1(F, sin) EMU_FLOAT1(F, cos) EMU_FLOAT1(F, tan) EMU_FLOAT1(F, asin) \
  EMU_FLOAT1(F, acos) EMU_FLOAT1(F, atan) EMU_FLOAT1(F, sinh) EMU_FLOAT1(F, cosh) EMU_FLOAT1(F, tanh) \
  EMU_FLOAT1(F, asinh) EMU_FLOAT1(F, acosh) EMU_FLOAT1(F, atanh) EMU_FLOAT1(F, sinpi) EMU_FLOAT1(F, cospi) \
  EMU_FLOAT1(F, tanpi) EMU_FLOAT1(F, sqrt) EMU_FLOAT1(F, rsqrt) EMU_FLOAT1(F, floor) EMU_FLOAT1(F, ceil) \
  EMU_FLOAT1(F, trunc) EMU_FLOAT1(F, rint) EMU_FLOAT1(F, round) EMU_FLOAT1(F, fabs)                 \
  EMU_FLOAT2(F, pow) EMU_FLOAT2(F, powr) EMU_FLOAT2(F, atan2) EMU_FLOAT2(F, fmod) EMU_FLOAT2(F, fmin) \
  EMU_FLOAT2(F, fmax) EMU_FLOAT2(F, fdim) EMU_FLOAT2(F, nextafter) EMU_FLOAT2(F, divide) EMU_FRACT
namespace precise { EMU_FLOAT_FUNCTIONS(precise) }
namespace fast { EMU_FLOAT_FUNCTIONS(fast) }
// Functions without `precise::` or `fast::`, such as metal::exp, are the precise ones, because MLX compiles kernels
// with the math mode "safe". EMU_FAST_MATH is defined for kernels whose `compile_options` choose another math mode.
#ifdef EMU_FAST_MATH
EMU_FLOAT_FUNCTIONS(fast)
#else
EMU_FLOAT_FUNCTIONS(precise)
#endif

extern "C" float emu_fma(float, float, float);
extern "C" float emu_ldexp(float, int);
extern "C" float emu_frexp(float, thread int *);
EMU_INLINE float fma(float x, float y, float z) { return emu_fma(x, y, z); }
EMU_INLINE half fma(half x, half y, half z) { return (half)emu_fma((float)x, (float)y, (float)z); }
EMU_MAP3(fma)
EMU_INLINE float ldexp(float x, int e) { return emu_ldexp(x, e); }
EMU_INLINE float frexp(float x, thread int &e) { return emu_frexp(x, &e); }

#define EMU_INTEGER(T)                                                                   \
  EMU_INLINE constexpr T min(T a, T b) { return b < a ? b : a; }                         \
  EMU_INLINE constexpr T max(T a, T b) { return a < b ? b : a; }                         \
  EMU_INLINE constexpr T clamp(T x, T low, T high) { return min(max(x, low), high); }
EMU_INTEGER(char) EMU_INTEGER(uchar) EMU_INTEGER(short) EMU_INTEGER(ushort)
EMU_INTEGER(int) EMU_INTEGER(uint) EMU_INTEGER(long) EMU_INTEGER(ulong)
EMU_INLINE int abs(int x) { return x < 0 ? -x : x; }
EMU_INLINE short abs(short x) { return x < 0 ? -x : x; }
EMU_INLINE long abs(long x) { return x < 0 ? -x : x; }
EMU_INLINE uint popcount(uint x) { return __builtin_popcount(x); }
EMU_INLINE uint clz(uint x) { return x ? __builtin_clz(x) : 32; }
EMU_INLINE uint ctz(uint x) { return x ? __builtin_ctz(x) : 32; }
EMU_INLINE uint mulhi(uint a, uint b) { return (uint)(((ulong)a * b) >> 32); }
EMU_INLINE uint rotate(uint a, uint b) { return a << (b & 31) | a >> (-b & 31); }

#define EMU_REAL(T)                                                                            \
  EMU_INLINE T min(T a, T b) { return fmin(a, b); }                                            \
  EMU_INLINE T max(T a, T b) { return fmax(a, b); }                                            \
  EMU_INLINE T clamp(T x, T low, T high) { return fmin(fmax(x, low), high); }                  \
  EMU_INLINE T abs(T x) { return fabs(x); }                                                    \
  EMU_INLINE T sign(T x) { return x > T(0) ? T(1) : x < T(0) ? T(-1) : T(0); }                 \
  EMU_INLINE T saturate(T x) { return fmin(fmax(x, T(0)), T(1)); }                             \
  EMU_INLINE T mix(T a, T b, T t) { return a + (b - a) * t; }                                  \
  EMU_INLINE T step(T edge, T x) { return x < edge ? T(0) : T(1); }                            \
  EMU_INLINE bool signbit(T x) { return as_type<uint>((float)x) >> 31; }                       \
  EMU_INLINE T copysign(T x, T y) { return signbit(x) == signbit(y) ? x : -x; }
EMU_REAL(float) EMU_REAL(half)
#define EMU_CLASSIFY(T)                                                                        \
  EMU_INLINE bool isnan(T x) { return x != x; }                                                \
  EMU_INLINE bool isinf(T x) { return fabs((float)x) == numeric_limits<float>::infinity(); }   \
  EMU_INLINE bool isfinite(T x) { return !isnan(x) && !isinf(x); }
EMU_CLASSIFY(float) EMU_CLASSIFY(half) EMU_CLASSIFY(bfloat)
EMU_MAP2(min) EMU_MAP2(max) EMU_MAP3(clamp) EMU_MAP1(abs) EMU_MAP1(sign) EMU_MAP1(saturate) EMU_MAP3(mix)

#define EMU_SELECT(T) EMU_INLINE T select(T a, T b, bool c) { return c ? b : a; }
EMU_SELECT(float) EMU_SELECT(half) EMU_SELECT(bfloat) EMU_SELECT(int) EMU_SELECT(uint) EMU_SELECT(short)
EMU_SELECT(ushort) EMU_SELECT(long) EMU_SELECT(ulong) EMU_SELECT(bool)
template <typename V, typename M>
EMU_INLINE enable_if_t<emu_is_vector<V> && emu_is_vector<M>, V> select(V a, V b, M c) {
  V r;
  for (int i = 0; i < emu_shape<V>::size; i++) r[i] = c[i] ? b[i] : a[i];
  return r;
}
template <typename V>
EMU_INLINE enable_if_t<emu_is_vector<V>, bool> any(V v) {
  bool r = false;
  for (int i = 0; i < emu_shape<V>::size; i++) r |= v[i] != 0;
  return r;
}
template <typename V>
EMU_INLINE enable_if_t<emu_is_vector<V>, bool> all(V v) {
  bool r = true;
  for (int i = 0; i < emu_shape<V>::size; i++) r &= v[i] != 0;
  return r;
}
EMU_INLINE bool any(bool v) { return v; }
EMU_INLINE bool all(bool v) { return v; }
template <typename V>
EMU_INLINE enable_if_t<emu_is_vector<V>, emu_scalar<V>> dot(V x, V y) {
  emu_scalar<V> r = 0;
  for (int i = 0; i < emu_shape<V>::size; i++) r += x[i] * y[i];
  return r;
}
template <typename V>
EMU_INLINE enable_if_t<emu_is_vector<V>, emu_scalar<V>> length(V x) { return sqrt(dot(x, x)); }
}
