// Runs the threads of one threadgroup on one CPU thread. Each Metal thread is a fiber with a stack of its own. A fiber
// runs until it reaches a barrier or a simdgroup operation; there it calls `leave`, which stores what it waits for and
// switches back to the stack of the scheduler.
//
// Three loops, one inside the other:
//   run_threadgroup   runs every simdgroup, then lets all threads pass the threadgroup barrier; repeats this until all
//                     threads have returned.
//   run_simdgroup     runs every lane, then completes the simdgroup operation that the lanes wait for; repeats this
//                     until each lane waits at a threadgroup barrier or has returned.
//   next_ready        (fibers.h) returns the next lane of this pass that can run. A fiber that stops switches directly
//                     to this lane; only the last fiber of a pass switches back to run_simdgroup.
// Threads that wait at different places are reported as a divergence: on a GPU they would hang or give wrong results.
//
// The order of the threads is an option (forward, reverse, random). A correct kernel gives the same bits in any order.
#pragma once
#include "simdgroup.h"
#include "memory.h"

static const char* state_name(State state) {
  static const char* names[] = {"running", "a simdgroup operation", "simdgroup_barrier", "threadgroup_barrier", "the end"};
  return names[state];
}

// Called by the shim's threadgroup_barrier and simdgroup_barrier. `flags` are Metal's mem_flags (1: device memory, 2:
// threadgroup memory), `line` is the caller's line: threads wait at the same barrier if kind, flags and line agree.
EXPORT void emu_barrier(u32 threadgroup_wide, u32 flags, u32 line) {
  current->operation = 0;
  current->line = line;
  current->flags = flags;
  leave(threadgroup_wide ? kAtThreadgroupBarrier : kAtSimdgroupBarrier);
}

// Fills `items` with the numbers 0 ... count - 1 in the order that the launch's options request. kRandom shuffles them.
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

// Reports that threads wait at different places. `key` and `other_key` identify the finding: add_finding returns null
// if this finding is already reported.
static void report_divergence(Fiber* fiber, u64 key, u64 other_key, const char* text, u32 other_thread) {
  Finding* finding = add_finding(kDivergence, key, other_key, "%s", text);
  if (!finding) return;
  finding->line = fiber->line;
  finding->thread = fiber->thread;
  finding->other_thread = other_thread;
}

// Reports the first lane of the simdgroup that waits at another place than the lane `waiting`.
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

// Completes the simdgroup operation or barrier that `waiting` waits for, and makes all lanes ready that wait for the
// same one. Metal requires all lanes that have not returned to arrive; a lane that waits elsewhere is reported, and the
// operation is completed without it.
static void release_lanes(Fiber* waiting, u32 first, u32 end) {
  u32 mask = 0, waits = 0, done = 0, elsewhere = 0;
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
    // An epoch counts the barriers that order a memory. To the race check (checks.h) two accesses by different threads
    // are ordered only if their epochs differ. A barrier without a memory's flag therefore leaves its epoch unchanged.
    counters.simdgroup_barriers++;
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
    // One pass: each lane that can run does so, in a new order, up to its next barrier or operation.
    pass.first = first;
    pass.count = end - first;
    pass.next = 0;
    arrange(pass.lane, pass.count);
    current = next_ready();
    if (current) emu_switch(&scheduler_stack, current->stack_pointer);
    current = nullptr;
    if (dispatch.aborted) return;
    // The first lane that waits for its simdgroup decides what is completed next. If there is none, the simdgroup can
    // do no more until the whole threadgroup arrives.
    Fiber* waiting = nullptr;
    for (u32 i = first; i < end && !waiting; i++)
      if (fibers[i].state == kAtSimdOperation || fibers[i].state == kAtSimdgroupBarrier) waiting = &fibers[i];
    if (!waiting) return;
    release_lanes(waiting, first, end);
  }
}

// Makes all threads ready that wait at a threadgroup barrier. Called when every thread has returned or waits at one.
// Returns false if the threadgroup has ended.
static bool pass_threadgroup_barrier() {
  Fiber *waiting = nullptr, *other = nullptr;
  u32 done = 0;
  // `waiting` becomes the first thread at a barrier, `other` the first one at another barrier.
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
  // The remaining threads continue after this report, so that one launch shows all places where threads return too
  // early.
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

// Runs one threadgroup until all its threads have returned. `edge_group` is its size; threadgroups at the edge of the
// grid are smaller than the others.
static void run_threadgroup() {
  dispatch.threads = dispatch.edge_group[0] * dispatch.edge_group[1] * dispatch.edge_group[2];
  dispatch.simdgroups = (dispatch.threads + kLanes - 1) / kLanes;
  counters.threadgroups++;
  counters.threads += dispatch.threads;
  group_serial++;
  group_bytes = 0;
  // Epochs only grow, over all threadgroups. Accesses by an earlier threadgroup have smaller epochs than this one's
  // first epoch, so that the race check can tell them apart.
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
