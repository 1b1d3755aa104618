// Runs the threads of one threadgroup: simdgroup by simdgroup until every lane waits at a threadgroup barrier or has
// returned, then the barrier. Lanes that wait for different things are a divergence finding.
#pragma once
#include "simdgroup.h"
#include "memory.h"

static const char* state_name(State state) {
  static const char* names[] = {"running", "a simdgroup operation", "simdgroup_barrier", "threadgroup_barrier", "the end"};
  return names[state];
}

EXPORT void emu_barrier(u32 threadgroup_wide, u32 flags, u32 line) {
  current->operation = 0;
  current->line = line;
  current->flags = flags;
  leave(threadgroup_wide ? kAtThreadgroupBarrier : kAtSimdgroupBarrier);
}

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

static bool waits_for_the_same(const Fiber* a, const Fiber* b) {
  return a->state == b->state && a->line == b->line && a->operation == b->operation && a->flags == b->flags;
}

static void report_divergence(Fiber* fiber, u64 key, u64 other_key, const char* text, u32 other_thread) {
  Finding* finding = add_finding(kDivergence, key, other_key, "%s", text);
  if (!finding) return;
  finding->line = fiber->line;
  finding->thread = fiber->thread;
  finding->other_thread = other_thread;
}

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

// Lets the lanes that wait for the same simdgroup operation or barrier as `waiting` go on.
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
    counters.simdgroup_barriers++;
    if (waiting->flags & 2) dispatch.simd_epoch[kThreadgroupMemory][waiting->simdgroup]++;
    if (waiting->flags & 1) dispatch.simd_epoch[kDeviceMemory][waiting->simdgroup]++;
  }
  for (u32 i = first; i < end; i++) if (mask >> (i - first) & 1) fibers[i].state = kReady;
}

static void run_simdgroup(u32 simdgroup) {
  u32 first = simdgroup * kLanes, end = first + kLanes < dispatch.threads ? first + kLanes : dispatch.threads;
  for (;;) {
    pass.first = first;
    pass.count = end - first;
    pass.next = 0;
    arrange(pass.lane, pass.count);
    current = next_ready();
    if (current) emu_switch(&scheduler_stack, current->stack_pointer);
    current = nullptr;
    if (dispatch.aborted) return;
    Fiber* waiting = nullptr;
    for (u32 i = first; i < end && !waiting; i++)
      if (fibers[i].state == kAtSimdOperation || fibers[i].state == kAtSimdgroupBarrier) waiting = &fibers[i];
    if (!waiting) return;
    release_lanes(waiting, first, end);
  }
}

// Every thread has returned or waits at a threadgroup barrier. Returns false when the group is done.
static bool pass_threadgroup_barrier() {
  Fiber *waiting = nullptr, *other = nullptr;
  u32 done = 0;
  for (u32 i = 0; i < dispatch.threads; i++) {
    Fiber* fiber = &fibers[i];
    if (fiber->state == kFinished) done++;
    else if (!waiting) waiting = fiber;
    else if (!other && !waits_for_the_same(waiting, fiber)) other = fiber;
  }
  if (!waiting) return false;
  char text[176];
  if (other) {
    snprintf(text, sizeof text, "threads wait at different threadgroup barriers (lines %u and %u)", waiting->line, other->line);
    report_divergence(waiting, (u64)waiting->line << 32 | other->line, 4, text, other->thread);
    dispatch.aborted = 1;
    return false;
  }
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

static void run_threadgroup() {
  dispatch.threads = dispatch.edge_group[0] * dispatch.edge_group[1] * dispatch.edge_group[2];
  dispatch.simdgroups = (dispatch.threads + kLanes - 1) / kLanes;
  counters.threadgroups++;
  counters.threads += dispatch.threads;
  group_serial++;
  group_bytes = 0;
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
