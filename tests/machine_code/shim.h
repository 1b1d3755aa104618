// Replaces Metal's standard library when a kernel is compiled as C++ for OpenCL to count its instructions. The kernel
// never runs, so only the cost of the functions has to be right: they take about as many instructions as on an Apple
// GPU, but some return other values.
#pragma OPENCL EXTENSION cl_khr_fp16 : enable
#define __METAL_VERSION__ 320
#define device __global
#define constant __constant
#define threadgroup __local
#define thread __private
// OpenCL reserves these words, Metal does not: rename them in the kernel.
#define local local_
#define global global_
#define private private_
#define generic generic_
#define INFINITY (__builtin_inff())
#define NAN (__builtin_nanf(""))
#define EMU_INLINE inline __attribute__((always_inline))
#define CONVERGENT __attribute__((convergent))

typedef unsigned char uchar; typedef unsigned short ushort; typedef unsigned int uint; typedef unsigned long ulong;
typedef short int16_t; typedef int int32_t; typedef long int64_t;
typedef ushort uint16_t; typedef uint uint32_t;
typedef uchar uint8_t; typedef ulong uint64_t; typedef __SIZE_TYPE__ size_t;
#define VECTORS(T)                                    \
  typedef T T##2 __attribute__((ext_vector_type(2))); \
  typedef T T##3 __attribute__((ext_vector_type(3))); \
  typedef T T##4 __attribute__((ext_vector_type(4)));
VECTORS(char) VECTORS(uchar) VECTORS(short) VECTORS(ushort) VECTORS(int) VECTORS(uint) VECTORS(long) VECTORS(ulong)
VECTORS(half) VECTORS(float)
typedef half float16_t;
// The M1's GPU does not support bfloat. Replace it by a 16-bit integer. A conversion then takes one instruction.
typedef short bfloat; typedef short bfloat16_t; typedef short2 bfloat2; typedef short4 bfloat4;
typedef uint packed_uint2 __attribute__((ext_vector_type(2), aligned(4)));
typedef uint packed_uint4 __attribute__((ext_vector_type(4), aligned(4)));
typedef float packed_float4 __attribute__((ext_vector_type(4), aligned(4)));
typedef half packed_half4 __attribute__((ext_vector_type(4), aligned(2)));
typedef bfloat packed_bfloat4 __attribute__((ext_vector_type(4), aligned(2)));

size_t get_global_id(uint); size_t get_global_size(uint); size_t get_local_id(uint); size_t get_group_id(uint);
size_t get_local_size(uint); size_t get_num_groups(uint);
CONVERGENT void barrier(uint);
float native_exp2(float); float native_log2(float); float native_recip(float); float native_rsqrt(float); float sqrt(float);
#define SHUFFLES(T)                                                                                      \
  CONVERGENT T sub_group_shuffle(T, uint); CONVERGENT T sub_group_shuffle_xor(T, uint);                   \
  CONVERGENT T sub_group_shuffle_down(T, uint); CONVERGENT T sub_group_shuffle_up(T, uint);               \
  CONVERGENT T sub_group_reduce_add(T); CONVERGENT T sub_group_reduce_max(T); CONVERGENT T sub_group_reduce_min(T);
SHUFFLES(float) SHUFFLES(half) SHUFFLES(int) SHUFFLES(uint)

template <typename T, typename U> EMU_INLINE constexpr T as_type(U x) { return __builtin_bit_cast(T, x); }

#include "../metal_emulator/shim/vectors.h"

namespace metal {
using ::float2; using ::float3; using ::float4; using ::half2; using ::half3; using ::half4;
using ::ushort2; using ::uint2; using ::uint3; using ::uint4; using ::int2; using ::int4; using ::ulong2;

enum class mem_flags : uint { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };
EMU_INLINE void threadgroup_barrier(mem_flags) { barrier(1); }
EMU_INLINE void simdgroup_barrier(mem_flags) {}  // empty: OpenCL has only threadgroup barriers, which cost more

template <typename T> EMU_INLINE T simd_shuffle(T v, ushort lane) { return sub_group_shuffle(v, lane); }
template <typename T> EMU_INLINE T simd_shuffle_xor(T v, ushort mask) { return sub_group_shuffle_xor(v, mask); }
template <typename T> EMU_INLINE T simd_shuffle_down(T v, ushort n) { return sub_group_shuffle_down(v, n); }
template <typename T> EMU_INLINE T simd_shuffle_up(T v, ushort n) { return sub_group_shuffle_up(v, n); }
template <typename T> EMU_INLINE T simd_broadcast(T v, ushort lane) { return sub_group_shuffle(v, lane); }
template <typename T> EMU_INLINE T simd_sum(T v) { return sub_group_reduce_add(v); }
template <typename T> EMU_INLINE T simd_max(T v) { return sub_group_reduce_max(v); }
template <typename T> EMU_INLINE T simd_min(T v) { return sub_group_reduce_min(v); }
template <typename T> EMU_INLINE T quad_broadcast(T v, ushort lane) { return sub_group_shuffle(v, (get_local_id(0) & 28) + lane); }
template <typename T> EMU_INLINE T quad_shuffle(T v, ushort lane) { return quad_broadcast(v, lane); }
template <typename T> EMU_INLINE T quad_shuffle_xor(T v, ushort mask) { return sub_group_shuffle_xor(v, mask); }
template <typename T> EMU_INLINE T quad_sum(T v) { v += quad_shuffle_xor(v, 1); return v + quad_shuffle_xor(v, 2); }

template <typename T> EMU_INLINE constexpr T min(T a, T b) { return b < a ? b : a; }
template <typename T> EMU_INLINE constexpr T max(T a, T b) { return a < b ? b : a; }
template <typename T> EMU_INLINE constexpr T clamp(T x, T least, T most) { return min(max(x, least), most); }
template <typename T> EMU_INLINE T fma(T a, T b, T c) { return a * b + c; }
template <typename T> EMU_INLINE T select(T a, T b, bool second) { return second ? b : a; }
EMU_INLINE int abs(int x) { return x < 0 ? -x : x; }
EMU_INLINE float fabs(float x) { return x < 0 ? -x : x; }
EMU_INLINE float abs(float x) { return fabs(x); }
EMU_INLINE bool isnan(float x) { return x != x; }
EMU_INLINE bool isfinite(float x) { return fabs(x) < INFINITY; }
EMU_INLINE float copysign(float x, float sign) { return as_type<float>((as_type<uint>(x) & 0x7fffffffu) | (as_type<uint>(sign) & 0x80000000u)); }
template <typename V> EMU_INLINE float dot(V a, V b) {
  float sum = a[0] * b[0];
#pragma clang loop unroll(full)
  for (int n = 1; n < emu_shape<V>::size; ++n) sum += a[n] * b[n];
  return sum;
}
// Compute exp, log and tanh from exp2, log2 and a division, as Metal's fast mathematics does.
EMU_INLINE float exp2(float x) { return native_exp2(x); }
EMU_INLINE float exp(float x) { return native_exp2(1.44269504f * x); }
EMU_INLINE float log2(float x) { return native_log2(x); }
EMU_INLINE float log(float x) { return 0.693147180f * native_log2(x); }
EMU_INLINE float rsqrt(float x) { return native_rsqrt(x); }
EMU_INLINE float sqrt(float x) { return ::sqrt(x); }
EMU_INLINE float tanh(float x) {
  float e = exp2(-2.88539008f * fabs(x)), t = (1.0f - e) / (1.0f + e);
  return x < 0 ? -t : t;
}
EMU_INLINE float divide(float x, float y) { return x * native_recip(y); }
namespace precise { using metal::exp; using metal::exp2; using metal::tanh; using metal::sqrt; using metal::log; using metal::divide; }
namespace fast { using metal::exp; using metal::exp2; using metal::tanh; using metal::sqrt; using metal::log; using metal::divide; }

// Metal's matrices of 8 x 8 elements, which Mesa's compiler does not support. Each lane (thread of a SIMD-group) holds
// two elements. Loads and stores access the same memory as Metal's. The product of two matrices has 512 multiply-adds,
// so each of the 32 lanes executes 16 multiply-adds instead. They take 16 cycles per SIMD-group. That is close to the
// 17 to 20 cycles that are published for Metal's matrix product on the M1.
template <typename T, int C, int R>
struct simdgroup_matrix {
  vec<T, 2> elements;
  EMU_INLINE thread vec<T, 2> &thread_elements() { return *(thread vec<T, 2> *)&elements; }
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
template <typename T, int C = 8, int R = 8>
EMU_INLINE simdgroup_matrix<T, C, R> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, C, R> m;
  m.elements[0] = value, m.elements[1] = value;
  return m;
}
EMU_INLINE uint matrix_row() { uint l = get_local_id(0); return (l >> 2 & 4) + (l >> 1 & 3); }
EMU_INLINE uint matrix_column() { uint l = get_local_id(0); return (l >> 2 & 2) * 2 + (l & 1) * 2; }
#define MATRIX_MEMORY(SPACE)                                                                                             \
  template <typename T, int C, int R>                                                                                    \
  EMU_INLINE void simdgroup_load(thread simdgroup_matrix<T, C, R> &m, const SPACE T *p, ulong stride = C,                  \
                                 ulong2 = ulong2{0, 0}, bool transpose = false) {                                        \
    uint r = matrix_row(), c = matrix_column(), s = (uint)stride;                                                        \
    m.elements[0] = transpose ? p[c * s + r] : p[r * s + c];                                                             \
    m.elements[1] = transpose ? p[(c + 1) * s + r] : p[r * s + c + 1];                                                   \
  }                                                                                                                      \
  template <typename T, int C, int R>                                                                                    \
  EMU_INLINE void simdgroup_store(simdgroup_matrix<T, C, R> m, SPACE T *p, ulong stride = C, ulong2 = ulong2{0, 0},       \
                                  bool transpose = false) {                                                              \
    uint r = matrix_row(), c = matrix_column(), s = (uint)stride;                                                        \
    p[transpose ? c * s + r : r * s + c] = m.elements[0];                                                                \
    p[transpose ? (c + 1) * s + r : r * s + c + 1] = m.elements[1];                                                      \
  }
MATRIX_MEMORY(device) MATRIX_MEMORY(threadgroup)
template <typename D, typename A, typename B, typename E, int K, int R, int C>
EMU_INLINE void simdgroup_multiply_accumulate(
    thread simdgroup_matrix<D, C, R> &d, simdgroup_matrix<A, K, R> a, simdgroup_matrix<B, C, K> b,
    simdgroup_matrix<E, C, R> e) {
  float x = e.elements[0], y = e.elements[1];
#pragma clang loop unroll(full)
  for (int k = 0; k < 4; ++k) {
    x = a.elements[0] * b.elements[0] + x, y = a.elements[1] * b.elements[1] + y;
    x = a.elements[1] * b.elements[1] + x, y = a.elements[0] * b.elements[0] + y;
  }
  d.elements[0] = x, d.elements[1] = y;
}
template <typename D, typename A, typename B, int K, int R, int C>
EMU_INLINE void simdgroup_multiply(
    thread simdgroup_matrix<D, C, R> &d, simdgroup_matrix<A, K, R> a, simdgroup_matrix<B, C, K> b) {
  simdgroup_multiply_accumulate(d, a, b, make_filled_simdgroup_matrix<D, C, R>(D(0)));
}
}
using namespace metal;
#include "../metal_emulator/shim/vector_constructors.h"
