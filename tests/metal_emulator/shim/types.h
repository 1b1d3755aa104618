// Metal's scalar types, vector types and constants, and declarations of the functions that the emulator's runtime
// provides.
#pragma once
#define INFINITY (__builtin_inff())
#define NAN (__builtin_nanf(""))
#define MAXFLOAT 3.402823466e+38f
#define FLT_MAX 3.402823466e+38f
#define FLT_MIN 1.175494351e-38f
#define FLT_EPSILON 1.192092896e-07f
#define HALF_MAX 65504.0h
#define M_PI_F 3.14159265358979f
#define M_E_F 2.71828182845905f
#define M_LN2_F 0.693147180559945f
#define M_SQRT2_F 1.41421356237310f
#define M_LOG2E_F 1.44269504088896f

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
typedef __SIZE_TYPE__ size_t;
typedef __PTRDIFF_TYPE__ ptrdiff_t;
typedef __bf16 bfloat;

#define EMU_VECTORS(T)                                \
  typedef T T##2 __attribute__((ext_vector_type(2))); \
  typedef T T##3 __attribute__((ext_vector_type(3))); \
  typedef T T##4 __attribute__((ext_vector_type(4)));
EMU_VECTORS(char) EMU_VECTORS(uchar) EMU_VECTORS(short) EMU_VECTORS(ushort) EMU_VECTORS(int) EMU_VECTORS(uint)
EMU_VECTORS(long) EMU_VECTORS(ulong) EMU_VECTORS(half) EMU_VECTORS(float) EMU_VECTORS(bfloat)
// In OpenCL a comparison of vectors gives a vector of integers, in Metal a vector of bool. So a bool vector is an
// integer vector here.
typedef int2 bool2;
typedef int3 bool3;
typedef int4 bool4;
// The address of a packed vector only has to be a multiple of the element's size, not of the vector's size.
typedef uint packed_uint2 __attribute__((ext_vector_type(2), aligned(4)));
typedef uint packed_uint4 __attribute__((ext_vector_type(4), aligned(4)));
typedef float packed_float4 __attribute__((ext_vector_type(4), aligned(4)));
typedef half packed_half4 __attribute__((ext_vector_type(4), aligned(2)));
typedef bfloat packed_bfloat4 __attribute__((ext_vector_type(4), aligned(2)));

// Functions of the emulator's runtime, which kernels and the other headers call. ../runtime/ defines them with the same
// parameters, in host.h, hooks.h, memory.h, scheduler.h and simdgroup.h.
extern "C" {
ulong emu_buffer(uint index);
uint emu_attribute(uint which, uint axis);
void emu_barrier(uint threadgroup_wide, uint flags, uint line);
ulong emu_threadgroup_variable(uint id, uint size, uint alignment, uint granule, const constant char *name, uint line);
thread void *emu_exchange(uint operation, const thread void *data, uint size, uint line, thread uint *active);
void emu_bad_lane(uint lane, uint line);
void emu_bad_index(const constant char *name, ulong index, ulong extent, uint line);
void emu_atomic_access(ulong address, uint size, uint read, uint write);
}

template <typename T, typename U>
EMU_INLINE constexpr T as_type(U x) {
  static_assert(sizeof(T) == sizeof(U), "as_type: the sizes differ");
  return __builtin_bit_cast(T, x);
}

namespace metal {
// A macro (vector_constructors.h) turns `metal::float4(...)` into `metal::metal::emu_construct<float4>(...)`. This
// alias makes the doubled name valid.
namespace metal = ::metal;
typedef ::bfloat bfloat_t;
#define EMU_USE(T) using ::T; using ::T##2; using ::T##3; using ::T##4;
EMU_USE(uchar) EMU_USE(ushort) EMU_USE(uint) EMU_USE(ulong) EMU_USE(bfloat)
#define EMU_USE_VECTORS(T) using ::T##2; using ::T##3; using ::T##4;
EMU_USE_VECTORS(char) EMU_USE_VECTORS(short) EMU_USE_VECTORS(int) EMU_USE_VECTORS(long) EMU_USE_VECTORS(half)
EMU_USE_VECTORS(float) EMU_USE_VECTORS(bool)
}
