// Definitions that all parts of the emulator's runtime use: integer types, limits, macros, and the state of the launch
// that runs (`dispatch`).
#pragma once
#include <stddef.h>
#include <stdint.h>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;

#define EXPORT extern "C" __attribute__((visibility("default")))
#define LIKELY(x) __builtin_expect(!!(x), 1)
#define UNLIKELY(x) __builtin_expect(!!(x), 0)
#define CALLER_PC ((u64)__builtin_return_address(0))

static const u32 kMaxThreads = 1024;  // threads per threadgroup; Apple's limit
static const u32 kLanes = 32;         // threads per simdgroup
static const u32 kMaxSimdgroups = kMaxThreads / kLanes;
static const u32 kSlotBytes = 64;  // bytes that one lane (thread of a simdgroup) can pass to the other lanes at once

enum Order { kForward, kReverse, kRandom };
// The two kinds of memory whose accesses a barrier can order. Their values are the indices of arrays such as `epoch`
// below; kMemories is their number.
enum Memory { kThreadgroupMemory, kDeviceMemory, kMemories };

// The launch that runs now: its kernel, its grid, its options, and the threadgroup that runs.
struct Dispatch {
  void (*entry)();
  u64 image_base;                // address at which the kernel's machine code is loaded
  u32 grid[3], group[3];         // threads of the grid; threads of a threadgroup, at most those of the grid
  u32 edge_group[3];             // threads of the running threadgroup: fewer than `group` at the edges of the grid
  u32 groups[3], group_id[3];    // number of threadgroups; position of the running threadgroup
  u32 group_index;               // position of the running threadgroup as one number
  u32 threads, simdgroups;       // numbers of threads and simdgroups in the running threadgroup
  u32 order, random_state, strict_exit, threadgroup_limit, noise;  // the launch's options (emu_options in host.h)
  u32 aborted;                   // 1 after a defect of the kernel with which the launch cannot continue
  // For each kind of memory (threadgroup, device): number of threadgroup barriers so far that order accesses to it. The
  // start of a threadgroup counts as a barrier, too.
  u32 epoch[kMemories];
  u32 group_epoch[kMemories];    // value of `epoch` when the running threadgroup started
  u32 simd_epoch[kMemories][kMaxSimdgroups];  // number of simdgroup barriers so far that order the memory
};
static Dispatch dispatch;

// Counts of what a launch did, summed over its threadgroups. Only threadgroup_bytes is a maximum: the most threadgroup
// memory that one threadgroup used. ctypes reads this structure as `Counters` in ../runtime.py: both must have the same
// fields in the same order.
struct Counters {
  u64 accesses, switches, threadgroups, threads;
  u64 threadgroup_barriers, simdgroup_barriers, simd_operations, matrix_operations;
  u64 threadgroup_bytes, threadgroup_bytes_read, threadgroup_bytes_written;
};
static Counters counters;

static u32 next_random() {
  dispatch.random_state = dispatch.random_state * 1664525u + 1013904223u;
  return dispatch.random_state >> 8;
}
