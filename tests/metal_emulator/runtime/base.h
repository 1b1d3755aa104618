// Names that every part of the runtime uses: integer types, limits, the export macro and the state of the dispatch.
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

static const u32 kMaxThreads = 1024;  // per threadgroup, Apple's limit
static const u32 kLanes = 32;         // threads per simdgroup
static const u32 kMaxSimdgroups = kMaxThreads / kLanes;
static const u32 kSlotBytes = 64;     // bytes that a lane can exchange in one simdgroup operation

enum Order { kForward, kReverse, kRandom };
// The two memories a barrier can order. The flag bits are MSL's: mem_device = 1, mem_threadgroup = 2.
enum Memory { kThreadgroupMemory, kDeviceMemory, kMemories };

struct Dispatch {
  void (*entry)();
  u64 image_base;                // load address of the kernel image, subtracted from the pcs kept in shadow cells
  u32 grid[3], group[3];         // threads in the grid; threads per group as requested (clamped to the grid)
  u32 edge_group[3];             // threads in this group: smaller at the edges of the grid
  u32 groups[3], group_id[3];    // number of groups; position of the running one
  u32 group_index;               // linear index of the running group
  u32 threads, simdgroups;       // in the running group
  u32 order, random_state, strict_exit, threadgroup_limit, noise;
  u32 aborted;                   // set by a finding after which the dispatch cannot continue
  u32 epoch[kMemories];          // advances at each threadgroup barrier that names the memory
  u32 group_epoch[kMemories];    // epoch at which the running group started
  u32 simd_epoch[kMemories][kMaxSimdgroups];  // the same for simdgroup barriers
};
static Dispatch dispatch;

// Must match `Counters` in ../runtime.py.
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
