// Metal's standard library for the emulator, which compiles kernels with clang as C++ for OpenCL. It is written from
// the specification of the Metal Shading Language (MSL) and declares only what MSL has. So std::, libc, double or new
// in a kernel are compile errors.
//
// Functions are `nodebug`: clang gives their code the line of the kernel that calls them. Findings and line coverage
// then name lines of the kernel.
#pragma once
#pragma OPENCL EXTENSION cl_khr_fp16 : enable

// clang compiles the kernels as C++ for OpenCL. OpenCL's address spaces have the same rules as Metal's but other names.
// A pointer without an address space is an error in Metal. In OpenCL it is allowed and belongs to the space
// `__generic`, which msl_rules.py reports.
#define device __global
#define constant __constant
#define threadgroup __local
#define thread __private
#define kernel
// These words are keywords in OpenCL but ordinary names in Metal. Rename them, so that kernels can use them.
#define global msl_identifier_global
#define local msl_identifier_local
#define generic msl_identifier_generic
#define pipe msl_identifier_pipe

#define EMU_INLINE inline __attribute__((always_inline, nodebug))
// Marks a function in which clang must not add checks and counters. Such functions access memory of the runtime (values
// that lanes exchange), or memory that has already been checked (atomics.h).
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
