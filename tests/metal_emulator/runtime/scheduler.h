// Runs the threads of one threadgroup on one CPU thread. Each Metal thread is a fiber: a thread with its own stack that
// the program itself switches (fibers.h). A fiber runs until it has to wait: at a barrier, or at a simdgroup operation,
// in which the lanes (threads) of a simdgroup exchange values. There it calls `leave`, which notes where the fiber
// waits and switches to another fiber or to the scheduler.
//
// The scheduler consists of three loops, one inside the other:
//   run_threadgroup   runs every simdgroup, then lets all threads pass the threadgroup barrier at which they wait.
//                     Repeats this until all threads have returned.
//   run_simdgroup     runs every lane, then completes the simdgroup operation or barrier at which the lanes wait.
//                     Repeats this until each lane waits at a threadgroup barrier or has returned.
//   next_ready        (fibers.h) returns the next lane that can run. A fiber that has to wait switches directly to this
//                     lane; if no lane can run, it switches back to run_simdgroup.
// Threads that wait at different places are reported as a divergence: on a GPU they would hang or give wrong results.
//
// The launch's option `order` sets the order of the threads: forward, reverse or random. A correct kernel gives the
// same results, bit for bit, in any order.
#pragma once
#include "simdgroup.h"
#include "memory.h"

static const char* state_name(State state) {
  static const char* names[] = {"running", "a simdgroup operation", "simdgroup_barrier", "threadgroup_barrier", "the end"};
  return names[state];
}

// Lets the running thread wait at a barrier. threadgroup_barrier and simdgroup_barrier (../shim/barriers.h) call this
// function. `flags` says which memory the barrier orders, as Metal's mem_flags (1: device memory, 2: threadgroup
// memory). `line` is the line of the call in the kernel. Two threads wait at the same barrier if its type, flags and
// line are equal.
EXPORT void emu_barrier(u32 threadgroup_wide, u32 flags, u32 line) {
  current->operation = 0;
  current->line = line;
  current->flags = flags;
  leave(threadgroup_wide ? kAtThreadgroupBarrier : kAtSimdgroupBarrier);
}

// Fills `items` with the numbers 0 ... count - 1 (of lanes or simdgroups) in the order in which they shall run,
// according to the launch's option `order`. kRandom shuffles them.
template <typename T>
static void arrange(T* items, u32 count) {
  for (u32 i = 0; i < count; i++) items[i] = (T)(dispatch.order == kReverse ? count - 1 - i : i);
  if (dispatch.order != kRandom) return;
  for (u32 i = count; i > 1; i--) {
    u32 j = next_random() % i;
    T swap = items[i - 1];
    items[i - 1] = items[j];
    items[j] = swap;
  }
}

// Returns whether two fibers wait at the same barrier or simdgroup operation.
static bool waits_for_the_same(const Fiber* a, const Fiber* b) {
  return a->state == b->state && a->line == b->line && a->operation == b->operation && a->flags == b->flags;
}

// Reports that threads wait at different places. `key` and `other_key` identify the finding. If a finding with the same
// keys is already listed, add_finding returns null and nothing is reported.
static void report_divergence(Fiber* fiber, u64 key, u64 other_key, const char* text, u32 other_thread) {
  Finding* finding = add_finding(kDivergence, key, other_key, "%s", text);
  if (!finding) return;
  finding->line = fiber->line;
  finding->thread = fiber->thread;
  finding->other_thread = other_thread;
}

// Reports the first lane of the simdgroup that waits at a different place from the lane `waiting`. The simdgroup
// consists of the threads `first` to `end` - 1.
static void report_divergent_lanes(Fiber* waiting, u32 first, u32 end) {
  for (u32 i = first; i < end; i++) {
    Fiber* other = &fibers[i];
    if (other->state == kFinished || waits_for_the_same(waiting, other)) continue;
    char text[176];
    snprintf(text, sizeof text, "lane %u waits at %s (line %u), lane %u of the same simdgroup at %s (line %u)", waiting->lane,
             state_name(waiting->state), waiting->line, other->lane, state_name(other->state), other->line);
    return report_divergence(waiting, (u64)waiting->line << 32 | other->line, 1, text, other->thread);
  }
}

// Completes one simdgroup operation or barrier: the one at which the lane `waiting` waits. Lets all lanes that wait at
// it continue. The simdgroup consists of the threads `first` to `end` - 1. Metal requires that every lane that has not
// returned takes part. A lane that waits at another operation or barrier is reported and takes no part.
static void release_lanes(Fiber* waiting, u32 first, u32 end) {
  u32 mask = 0, waits = 0, done = 0, elsewhere = 0;  // bit n of mask: lane n waits where `waiting` does
  for (u32 i = first; i < end; i++) {
    if (fibers[i].state == kFinished) done++;
    else if (fibers[i].state == kAtThreadgroupBarrier) elsewhere++;
    else if (waits_for_the_same(waiting, &fibers[i])) mask |= 1u << fibers[i].lane, waits++;
    else elsewhere++;
  }
  if (elsewhere) {
    report_divergent_lanes(waiting, first, end);
  } else if (done && dispatch.strict_exit) {
    char text[176];
    snprintf(text, sizeof text, "%u lanes have returned before %s", done, state_name(waiting->state));
    report_divergence(waiting, waiting->line, 2, text, kNobody);
  }
  if (waiting->state == kAtSimdOperation) {
    complete_operation(waiting, mask);
  } else {
    counters.simdgroup_barriers++;
    // Advance the epoch of each memory that the barrier's flags name (2: threadgroup, 1: device memory). An epoch is
    // the number of barriers so far that order the memory. To the race check (checks.h) two accesses of different
    // threads are ordered only if their epochs differ.
    if (waiting->flags & 2) dispatch.simd_epoch[kThreadgroupMemory][waiting->simdgroup]++;
    if (waiting->flags & 1) dispatch.simd_epoch[kDeviceMemory][waiting->simdgroup]++;
  }
  for (u32 i = first; i < end; i++) if (mask >> (i - first) & 1) fibers[i].state = kReady;
}

// Runs the lanes of a simdgroup until each waits at a threadgroup barrier or has returned.
static void run_simdgroup(u32 simdgroup) {
  // The last simdgroup may have fewer than 32 lanes.
  u32 first = simdgroup * kLanes, end = first + kLanes < dispatch.threads ? first + kLanes : dispatch.threads;
  for (;;) {
    // Let each lane that can run continue up to its next barrier or simdgroup operation. `arrange` decides in which
    // order the lanes run (with kRandom: a new order each time). emu_switch starts the first lane; it returns when the
    // last lane has stopped.
    pass.first = first;
    pass.count = end - first;
    pass.next = 0;
    arrange(pass.lane, pass.count);
    current = next_ready();
    if (current) emu_switch(&scheduler_stack, current->stack_pointer);
    current = nullptr;
    if (dispatch.aborted) return;
    // Find the first lane that waits for other lanes of the simdgroup. The operation or barrier at which it waits is
    // completed next. If there is no such lane, each lane waits for the whole threadgroup or has returned, so the
    // scheduler leaves this simdgroup.
    Fiber* waiting = nullptr;
    for (u32 i = first; i < end && !waiting; i++)
      if (fibers[i].state == kAtSimdOperation || fibers[i].state == kAtSimdgroupBarrier) waiting = &fibers[i];
    if (!waiting) return;
    release_lanes(waiting, first, end);
  }
}

// Lets all threads that wait at a threadgroup barrier continue. Called when each thread of the threadgroup waits at
// such a barrier or has returned. Returns false if the threadgroup has ended: all its threads have returned, or they
// wait at different barriers, which ends the launch.
static bool pass_threadgroup_barrier() {
  Fiber *waiting = nullptr, *other = nullptr;
  u32 done = 0;
  // Find the first thread that waits (`waiting`), and the first thread that waits at a different barrier (`other`).
  for (u32 i = 0; i < dispatch.threads; i++) {
    Fiber* fiber = &fibers[i];
    if (fiber->state == kFinished) done++;
    else if (!waiting) waiting = fiber;
    else if (!other && !waits_for_the_same(waiting, fiber)) other = fiber;
  }
  if (!waiting) return false;
  char text[176];
  if (other) {
    snprintf(text, sizeof text, "threads wait at different threadgroup barriers (line %u and line %u)", waiting->line, other->line);
    report_divergence(waiting, (u64)waiting->line << 32 | other->line, 4, text, other->thread);
    dispatch.aborted = 1;  // the emulator cannot know which barrier comes first
    return false;
  }
  // Some threads have returned although others wait here. Report this, but let the waiting threads continue, so that
  // one launch shows all places where threads return too early.
  if (done) {
    snprintf(text, sizeof text, "%u of %u threads have returned before threadgroup_barrier", done, dispatch.threads);
    report_divergence(waiting, waiting->line, 3, text, kNobody);
  }
  counters.threadgroup_barriers++;
  if (waiting->flags & 2) dispatch.epoch[kThreadgroupMemory]++;
  if (waiting->flags & 1) dispatch.epoch[kDeviceMemory]++;
  for (u32 i = 0; i < dispatch.threads; i++) if (fibers[i].state == kAtThreadgroupBarrier) fibers[i].state = kReady;
  return true;
}

// Runs one threadgroup until all its threads have returned. `dispatch.edge_group` is its size in each dimension;
// threadgroups at the edges of the grid can be smaller than the others.
static void run_threadgroup() {
  dispatch.threads = dispatch.edge_group[0] * dispatch.edge_group[1] * dispatch.edge_group[2];
  dispatch.simdgroups = (dispatch.threads + kLanes - 1) / kLanes;
  counters.threadgroups++;
  counters.threads += dispatch.threads;
  group_serial++;
  group_bytes = 0;
  // Start a new epoch of each memory (epochs count barriers and never decrease). Accesses by earlier threadgroups then
  // have smaller epochs than `group_epoch`, so that the race check (checks.h) recognises them.
  for (int memory = 0; memory < kMemories; memory++) dispatch.group_epoch[memory] = ++dispatch.epoch[memory];
  for (u32 i = 0; i < dispatch.threads; i++) start_fiber(i);
  do {
    u32 order[kMaxSimdgroups];
    arrange(order, dispatch.simdgroups);
    for (u32 i = 0; i < dispatch.simdgroups; i++) {
      run_simdgroup(order[i]);
      if (dispatch.aborted) return;
    }
  } while (pass_threadgroup_barrier());
}
