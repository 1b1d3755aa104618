// Functions __metal_... that are built into Apple's compiler, and Metal's class os_log for messages. Only those are
// defined that MLX's preamble uses: bf16_math.h, logging.h and utils.h, which MLX puts before each kernel.
#pragma once
#define __METAL_FAST_MATH__ true
#define __METAL_PRECISE_MATH__ false
#define __METAL_MAYBE_FAST_MATH__ false
#define EMU_BUILTIN1(name) EMU_INLINE float __metal_##name(float x, bool = false) { return metal::name(x); }
EMU_BUILTIN1(acos) EMU_BUILTIN1(acosh) EMU_BUILTIN1(asin) EMU_BUILTIN1(asinh) EMU_BUILTIN1(atan) EMU_BUILTIN1(atanh)
EMU_BUILTIN1(ceil) EMU_BUILTIN1(cos) EMU_BUILTIN1(cosh) EMU_BUILTIN1(cospi) EMU_BUILTIN1(exp) EMU_BUILTIN1(exp10)
EMU_BUILTIN1(exp2) EMU_BUILTIN1(fabs) EMU_BUILTIN1(floor) EMU_BUILTIN1(fract) EMU_BUILTIN1(log) EMU_BUILTIN1(log10)
EMU_BUILTIN1(log2) EMU_BUILTIN1(rint) EMU_BUILTIN1(round) EMU_BUILTIN1(rsqrt) EMU_BUILTIN1(sin) EMU_BUILTIN1(sinh)
EMU_BUILTIN1(sinpi) EMU_BUILTIN1(sqrt) EMU_BUILTIN1(tan) EMU_BUILTIN1(tanh) EMU_BUILTIN1(tanpi) EMU_BUILTIN1(trunc)
#define EMU_BUILTIN2(name) \
  EMU_INLINE float __metal_##name(float x, float y, bool = false) { return metal::name(x, y); }
EMU_BUILTIN2(atan2) EMU_BUILTIN2(divide) EMU_BUILTIN2(fmax) EMU_BUILTIN2(fmin) EMU_BUILTIN2(fmod) EMU_BUILTIN2(pow)
EMU_BUILTIN2(powr) EMU_BUILTIN2(nextafter)
EMU_INLINE float __metal_fma(float x, float y, float z) { return metal::fma(x, y, z); }
EMU_INLINE float __metal_fmax3(float x, float y, float z, bool) { return metal::fmax(x, metal::fmax(y, z)); }
EMU_INLINE float __metal_fmin3(float x, float y, float z, bool) { return metal::fmin(x, metal::fmin(y, z)); }
EMU_INLINE float __metal_fmedian3(float x, float y, float z, bool) {
  return metal::fmax(metal::fmin(x, y), metal::fmin(metal::fmax(x, y), z));
}
EMU_INLINE float __metal_ldexp(float x, int e, bool = false) { return metal::ldexp(x, e); }
EMU_INLINE float __metal_frexp(float x, thread int *e) { return metal::frexp(x, *e); }
EMU_INLINE ushort __metal_get_simdgroup_size(ushort) { return 32; }
// A function of simd.h takes the line of its call as last argument, and the runtime reports lanes that wait at
// different lines. Here the default value __builtin_LINE() would be a line of this file and not of the kernel. Pass 0
// instead: the runtime then only checks that all lanes call the same function.
#define EMU_BUILTIN_SIMD1(name) \
  template <typename T> EMU_INLINE T __metal_##name(T x) { return metal::name(x, 0); }
EMU_BUILTIN_SIMD1(simd_max) EMU_BUILTIN_SIMD1(simd_min) EMU_BUILTIN_SIMD1(simd_sum) EMU_BUILTIN_SIMD1(simd_product)
EMU_BUILTIN_SIMD1(simd_prefix_exclusive_product) EMU_BUILTIN_SIMD1(simd_prefix_exclusive_sum)
EMU_BUILTIN_SIMD1(simd_prefix_inclusive_product) EMU_BUILTIN_SIMD1(simd_prefix_inclusive_sum)
EMU_INLINE float __metal_simd_xor(float x) { return as_type<float>(metal::simd_xor(as_type<uint>(x), 0)); }
#define EMU_BUILTIN_SIMD2(name) \
  template <typename T> EMU_INLINE T __metal_##name(T x, ushort y) { return metal::name(x, y, 0); }
EMU_BUILTIN_SIMD2(simd_broadcast) EMU_BUILTIN_SIMD2(simd_shuffle) EMU_BUILTIN_SIMD2(simd_shuffle_down)
EMU_BUILTIN_SIMD2(simd_shuffle_up) EMU_BUILTIN_SIMD2(simd_shuffle_rotate_down)
EMU_BUILTIN_SIMD2(simd_shuffle_rotate_up) EMU_BUILTIN_SIMD2(simd_shuffle_xor)
template <typename T> EMU_INLINE T __metal_simd_shuffle_and_fill_down(T x, T fill, ushort delta, ushort modulo) {
  return metal::simd_shuffle_and_fill_down(x, fill, delta, modulo, 0);
}
template <typename T> EMU_INLINE T __metal_simd_shuffle_and_fill_up(T x, T fill, ushort delta, ushort modulo) {
  return metal::simd_shuffle_and_fill_up(x, fill, delta, modulo, 0);
}
namespace metal {
struct os_log {
  constexpr os_log(const constant char *, const constant char *) constant {}
  template <typename... A> void log_debug(const constant char *, A...) const constant {}
  template <typename... A> void log_debug(const constant char *, A...) const {}
};
}
