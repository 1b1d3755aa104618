// The functions through which Python runs a launch (../runtime.py declares them), and the functions emu_buffer and
// emu_attribute, which the entry point of a kernel calls (../lowering.py generates the entry point).
#pragma once
#include <signal.h>

#include "hooks.h"
#include "math.h"
#include "scheduler.h"

static u64 buffers[kMaxBuffers];
static Region* buffer_region[kMaxBuffers];

EXPORT u64 emu_buffer(u32 index) { return buffers[index]; }

// Returns the value of a thread attribute of Metal, such as thread_position_in_grid, for the running thread. `which` is
// the number of the attribute: ATTRIBUTES in ../lowering.py must list the same numbers. `axis`: 0, 1 or 2 for x, y or
// z.
EXPORT u32 emu_attribute(u32 which, u32 axis) {
  const Dispatch& d = dispatch;
  switch (which) {
    case 0: return d.group_id[axis] * d.group[axis] + current->position[axis];  // thread_position_in_grid
    case 1: return current->position[axis];                                     // thread_position_in_threadgroup
    case 2: return d.group_id[axis];                                            // threadgroup_position_in_grid
    case 3: return d.grid[axis];                                                // threads_per_grid
    case 4: return d.edge_group[axis];                                          // threads_per_threadgroup
    case 5: return d.group[axis];                                               // dispatch_threads_per_threadgroup
    case 6: return d.groups[axis];                                              // threadgroups_per_grid
    case 7: return current->thread;                                             // thread_index_in_threadgroup
    case 8: return current->lane;                                               // thread_index_in_simdgroup
    case 9: return current->simdgroup;                                          // simdgroup_index_in_threadgroup
    case 10: return d.simdgroups;                                               // simdgroups_per_threadgroup
    case 11: return (d.group[0] * d.group[1] * d.group[2] + kLanes - 1) / kLanes;  // dispatch_simdgroups_per_...
    case 12: return kLanes;                                                     // threads_per_simdgroup
    case 13: return current->lane & 3;                                          // thread_index_in_quadgroup
    case 14: return current->thread >> 2;                                       // quadgroup_index_in_threadgroup
    case 15: return (d.threads + 3) / 4;                                        // quadgroups_per_threadgroup
    default: return 0;                                                          // grid_origin
  }
}

// A kernel that crashes raises a signal. The handler `on_signal` turns the signal into a finding, and switches to the
// scheduler instead of returning. It has its own stack, because the thread's stack may be full.
static const int kSignals[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE};
static struct sigaction previous_action[4];
static u8 signal_stack[65536];
static stack_t previous_stack;
static void on_signal(int number, siginfo_t* info, void*) {
  if (!current) {
    signal(number, SIG_DFL);
    raise(number);
    return;
  }
  u64 address = (u64)info->si_addr;
  if (address - current->stack_low < kStackGuard)
    add_finding(kStack, 0, 0, "the thread's variables need more than %llu KB", (unsigned long long)kStackBytes >> 10);
  else
    add_finding(kWildPointer, (u64)number, 0, "signal %d at address %llx", number, (unsigned long long)address);
  abort_dispatch();
}
static void catch_signals() {
  stack_t stack = {};
  stack.ss_sp = signal_stack;
  stack.ss_size = sizeof signal_stack;
  sigaltstack(&stack, &previous_stack);
  for (int i = 0; i < 4; i++) {
    struct sigaction action = {};
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    sigaction(kSignals[i], &action, &previous_action[i]);
  }
}
static void release_signals() {
  for (int i = 0; i < 4; i++) sigaction(kSignals[i], &previous_action[i], nullptr);
  sigaltstack(&previous_stack, nullptr);
}

// ---- Python calls the functions below for each launch, in this order: emu_reset, emu_options, emu_add_buffer for each
// buffer, emu_run, then the functions that return results.
//
// Forgets the last launch. low0 to high1: address ranges of the kernel's machine code file and of this library, whose
// constants the kernel may read. Returns 0, or -1 if the address space cannot be reserved.
EXPORT int emu_reset(u64 low0, u64 high0, u64 low1, u64 high1) {
  if (!reserve_memory()) return -1;
  clear_memory();
  memset(&counters, 0, sizeof counters);
  memset(buffer_region, 0, sizeof buffer_region);
  finding_count = 0;
  image_low[0] = low0, image_high[0] = high0, image_low[1] = low1, image_high[1] = high1;
  return 0;
}
EXPORT void emu_options(u32 order, u32 seed, u32 noise, u32 strict_exit, u32 threadgroup_limit) {
  dispatch.order = order;
  dispatch.random_state = seed;
  dispatch.noise = noise;
  dispatch.strict_exit = strict_exit;
  dispatch.threadgroup_limit = threadgroup_limit;
}
// Selects the damage with which a kernel runs, by its number (../mutations.py). Sets the number if `number` is not
// negative, and returns the number that is set.
EXPORT int chosen_damage(int number) {
  static int chosen;
  if (number >= 0) chosen = number;
  return chosen;
}
// Adds the buffer with number `index` to the launch. Returns its address, or 0 if there is not enough memory. granule:
// bytes of an element, at most 4. initialised: whether the buffer has values before the kernel writes any. skew: bytes
// by which the buffer's start is moved from a 16-byte boundary.
EXPORT u64 emu_add_buffer(u32 index, const char* name, u64 size, u32 granule, u32 read_only, u32 initialised, u32 skew) {
  Region* region = index < kMaxBuffers ? add_region(name, size, granule, read_only, initialised, skew) : nullptr;
  if (!region) return 0;
  buffer_region[index] = region;
  return buffers[index] = region->base;
}
// Runs the kernel for all threads of the grid, one threadgroup after the other. Returns 1 if a defect of the kernel
// ended the launch early, else 0.
EXPORT int emu_run(void (*entry)(), u64 image_base, const u32* grid, const u32* group) {
  dispatch.entry = entry;
  dispatch.image_base = image_base;
  dispatch.aborted = 0;
  memset(dispatch.epoch, 0, sizeof dispatch.epoch);
  memset(dispatch.simd_epoch, 0, sizeof dispatch.simd_epoch);
  u32 total = 1;
  for (int axis = 0; axis < 3; axis++) {
    dispatch.grid[axis] = grid[axis];
    dispatch.group[axis] = group[axis] < grid[axis] ? group[axis] : grid[axis];  // as MLX does
    dispatch.groups[axis] = (grid[axis] + dispatch.group[axis] - 1) / dispatch.group[axis];
    total *= dispatch.groups[axis];
  }
  catch_signals();
  for (u32 i = 0; i < total && !dispatch.aborted; i++) {
    u32 index = dispatch.order == kReverse ? total - 1 - i : i;
    dispatch.group_index = index;
    dispatch.group_id[0] = index % dispatch.groups[0];
    dispatch.group_id[1] = index / dispatch.groups[0] % dispatch.groups[1];
    dispatch.group_id[2] = index / (dispatch.groups[0] * dispatch.groups[1]);
    for (int axis = 0; axis < 3; axis++) {
      u32 rest = grid[axis] - dispatch.group_id[axis] * dispatch.group[axis];
      dispatch.edge_group[axis] = rest < dispatch.group[axis] ? rest : dispatch.group[axis];
    }
    run_threadgroup();
  }
  current = nullptr;
  release_signals();
  return (int)dispatch.aborted;
}
EXPORT u32 emu_finding_count() { return finding_count; }
EXPORT const Finding* emu_finding(u32 index) { return &findings[index]; }
EXPORT const Counters* emu_counters() { return &counters; }

// The bytes that a launch read and wrote in one buffer. The fields distinct_... count each byte once. unwritten: number
// of granules (elements of at most 4 bytes) that were never written; first_unwritten: index of the first one. ctypes
// reads this structure as `CTraffic` in ../runtime.py: both must have the same fields in the same order.
struct Traffic {
  u64 bytes_read, bytes_written, distinct_read, distinct_written, unwritten, first_unwritten;
};
EXPORT void emu_traffic(u32 index, Traffic* result) {
  const Region* region = buffer_region[index];
  memset(result, 0, sizeof *result);
  result->bytes_read = region->bytes_read;
  result->bytes_written = region->bytes_written;
  u64 granules = region->size >> region->shift;
  for (u64 i = 0; i < granules; i++) {
    u8 flags = region->touched ? (region->touched[i] ? kRead : 0) : region->cells[i].flags;
    if (flags & kRead) result->distinct_read += 1ull << region->shift;
    if (flags & kWritten) result->distinct_written += 1ull << region->shift;
    else if (!result->unwritten++) result->first_unwritten = i;
  }
}
// Returns the address of the code that last wrote the byte at `offset` of an output buffer, and stores the number of
// the thread that wrote it in *thread.
EXPORT u64 emu_last_writer(u32 index, u64 offset, u32* thread) {
  const Region* region = buffer_region[index];
  const Cell* cell = &region->cells[offset >> region->shift];
  *thread = cell->writer;
  return dispatch.image_base + cell->write_pc;
}
// Stores in *list where the kernel that was loaded last has its counters of executed code (--coverage), with one entry
// per function, and returns the number of entries. The counters' addresses are valid while the kernel is loaded.
EXPORT u32 emu_coverage_arrays(const CoverageCounters** list) {
  coverage_count = 0;
  if (coverage_writeout) coverage_writeout();
  coverage_writeout = nullptr;
  *list = coverage;
  return coverage_count;
}
