// The list of findings of a launch. A finding is a defect of the kernel that a check found. If the same defect occurs
// again at the same places of the code, it is not listed again.
#pragma once
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "fibers.h"

// The kinds of findings. `KINDS` in ../runtime.py lists their names in the same order, because Python translates the
// numbers to names.
enum Kind {
  kOutOfBounds = 1, kUninitialised, kRace, kWildPointer, kDivergence, kTooMuchMemory, kArithmetic, kReadOnly,
  kSimdgroup, kStack, kMisaligned
};

// One finding: a defect of the kernel that a check found. pc, other_pc: addresses in the kernel's machine code, from
// which Python finds the source lines if `line` is 0. ctypes reads this structure as `CFinding` in ../runtime.py: both
// must have the same fields in the same order.
struct Finding {
  u32 kind, thread, other_thread, group, line, column;
  u64 pc, other_pc;
  int64_t offset;
  char name[64];
  char text[176];
};

static const u32 kMaxFindings = 128;
static Finding findings[kMaxFindings];
static u32 finding_count;
static const u32 kNobody = ~0u;

// Adds a finding to the list and returns it, so that the caller can fill in the other fields. Returns null if the same
// finding (kind, pc and other_pc) is already in the list, or if the list is full.
__attribute__((format(printf, 4, 5)))
static Finding* add_finding(Kind kind, u64 pc, u64 other_pc, const char* format, ...) {
  for (u32 i = 0; i < finding_count; i++)
    if (findings[i].kind == kind && findings[i].pc == pc && findings[i].other_pc == other_pc) return nullptr;
  if (finding_count == kMaxFindings) return nullptr;
  Finding* finding = &findings[finding_count++];
  memset(finding, 0, sizeof *finding);
  finding->kind = kind;
  finding->pc = pc;
  finding->other_pc = other_pc;
  finding->thread = current ? current->thread : kNobody;
  finding->other_thread = kNobody;
  finding->group = dispatch.group_index;
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(finding->text, sizeof finding->text, format, arguments);
  va_end(arguments);
  return finding;
}

// Stores in a finding the name of a buffer or variable, and the offset in bytes at which the defect occurred.
static void place(Finding* finding, const char* name, int64_t offset) {
  if (!finding) return;
  snprintf(finding->name, sizeof finding->name, "%s", name);
  finding->offset = offset;
}

// Ends the launch, after a defect with which the kernel cannot continue. The running fiber (the thread that called this
// function) never continues.
static void abort_dispatch() {
  dispatch.aborted = 1;
  if (current) leave(kFinished);
}
