// The Metal standard library for clang's C++ for OpenCL mode, written from the Metal Shading Language specification.
// Only what MSL offers is declared: std::, libc, double, new, ... stay compile errors.
// Functions are `nodebug`: their code counts as the line of the kernel that calls them.
#pragma once
#pragma OPENCL EXTENSION cl_khr_fp16 : enable

// OpenCL's address spaces have MSL's rules; an unqualified pointer is __generic and rejected by msl_rules.py.
#define device __global
#define constant __constant
#define threadgroup __local
#define thread __private
#define kernel
// OpenCL keywords that are plain identifiers in MSL.
#define global msl_identifier_global
#define local msl_identifier_local
#define generic msl_identifier_generic
#define pipe msl_identifier_pipe

#define EMU_INLINE inline __attribute__((always_inline, nodebug))
// Code that reads what lanes published: the runtime's own memory, so it is kept out of the instrumentation.
#define EMU_UNCHECKED __attribute__((noinline, nodebug, no_sanitize("thread"), no_profile_instrument_function))
#define METAL_FUNC inline __attribute__((always_inline))
#define METAL_CONST constant

#include "types.h"
#include "traits.h"
#include "vectors.h"
#include "math.h"
#include "barriers.h"
#include "simd.h"
#include "matrix.h"
#include "atomics.h"
#include "mlx_builtins.h"
#include "vector_constructors.h"
