// Runs each Metal thread as a fiber. Fibers are threads that the program itself switches; only one runs at a time. Each
// fiber has its own stack; emu_switch leaves one fiber and continues another by changing the stack pointer.
//
// A lane (thread of a simdgroup) that has to wait for other threads switches directly to the next lane of its
// simdgroup. If no lane of the simdgroup can continue, it switches to the scheduler (scheduler.h) instead.
#pragma once
#include <sys/mman.h>

#include "base.h"

// What a fiber does: it can run, waits for other threads at one of three places, or has returned from the kernel.
enum State { kReady, kAtSimdOperation, kAtSimdgroupBarrier, kAtThreadgroupBarrier, kFinished };

struct Fiber {
  void* stack_pointer;
  u64 stack_low;             // lowest usable address of the stack
  u32 thread, simdgroup, lane;
  u32 position[3];           // thread_position_in_threadgroup
  State state;
  u32 operation, line, flags;  // the operation or barrier at which the fiber waits (emu_exchange, emu_barrier)
  u32 exchanges;             // number of simdgroup operations so far; odd or even selects one of two slots
};

static const u64 kStackBytes = 256 << 10;
static const u64 kStackGuard = 4096;
static Fiber fibers[kMaxThreads];
static Fiber* current;
static void* scheduler_stack;
static u64 stacks;

// One pass of the scheduler over the lanes of a simdgroup: each lane that can run does so until it has to wait. lane:
// the lanes in the order of this pass. first: thread number of lane 0. next: index in `lane` of the lane that comes
// next.
struct Pass {
  u8 lane[kLanes];
  u32 first, count, next;
};
static Pass pass;

// Leaves the current fiber and continues another one. Pushes the registers that a C function must preserve onto the
// current stack and stores the stack pointer in *save. Then changes to the stack `to`, pops the registers of the fiber
// that was left there, and returns into that fiber.
EXPORT void emu_switch(void** save, void* to);
#if defined(__x86_64__)
asm(".text\n.globl emu_switch\n.type emu_switch,@function\n"
    "emu_switch:\n"
    "  pushq %rbp\n  pushq %rbx\n  pushq %r12\n  pushq %r13\n  pushq %r14\n  pushq %r15\n"
    "  movq %rsp,(%rdi)\n  movq %rsi,%rsp\n"
    "  popq %r15\n  popq %r14\n  popq %r13\n  popq %r12\n  popq %rbx\n  popq %rbp\n  ret\n");
#else
#error "metal_emulator: fibers are written for x86-64 only"
#endif

// Returns the next lane of the current pass (see Pass) that can run, or null if there is no such lane or if the launch
// was aborted.
static Fiber* next_ready() {
  if (dispatch.aborted) return nullptr;
  while (pass.next < pass.count) {
    Fiber* fiber = &fibers[pass.first + pass.lane[pass.next++]];
    if (fiber->state == kReady) return fiber;
  }
  return nullptr;
}

// The running fiber calls this function when it has to wait or has finished; `state` says what it waits for. Switches
// to the next lane that can run, or to the scheduler. Returns after the scheduler has set the fiber's state to kReady
// and the fiber's turn comes again.
static void leave(State state) {
  Fiber* fiber = current;
  fiber->state = state;
  counters.switches++;
  current = next_ready();
  emu_switch(&fiber->stack_pointer, current ? current->stack_pointer : scheduler_stack);
}

// The first function on every fiber's stack: runs the kernel, then marks the thread as finished. It never returns.
static void fiber_main() {
  dispatch.entry();
  leave(kFinished);
  __builtin_trap();
}

// Reserves the stacks of all fibers. The lowest page of each stack cannot be accessed, so that a stack overflow raises
// a signal (see on_signal in host.h).
static void allocate_stacks() {
  stacks = (u64)mmap(0, kMaxThreads * kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  for (u32 i = 0; i < kMaxThreads; i++) mprotect((void*)(stacks + i * kStackBytes), kStackGuard, PROT_NONE);
}

// Prepares a fiber so that the first switch to it starts fiber_main.
static void start_fiber(u32 thread) {
  Fiber* fiber = &fibers[thread];
  const u32* size = dispatch.edge_group;
  fiber->stack_low = stacks + thread * kStackBytes;
  fiber->thread = thread;
  fiber->simdgroup = thread / kLanes;
  fiber->lane = thread % kLanes;
  fiber->position[0] = thread % size[0];
  fiber->position[1] = thread / size[0] % size[1];
  fiber->position[2] = thread / (size[0] * size[1]);
  fiber->state = kReady;
  fiber->exchanges = 0;
  // Start the stacks at different offsets. Otherwise the same variable of all threads would use the same few places of
  // the CPU's cache.
  u64 top = (fiber->stack_low + kStackBytes - 256 - (thread % 61) * 192) & ~63ull;
  u64* frame = (u64*)top;
  *--frame = 0;  // in place of a return address: at its start a function expects the stack pointer at 16 n + 8
  *--frame = (u64)fiber_main;
  for (int i = 0; i < 6; i++) *--frame = 0;  // the six registers that emu_switch pops
  fiber->stack_pointer = frame;
}
