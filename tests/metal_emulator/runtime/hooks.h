// The emulator lets clang add function calls to a kernel: at each load and store (-fsanitize=thread), at undefined
// behaviour (-fsanitize=bounds,...), and, to register the counters of executed code, when the kernel is loaded
// (--coverage). clang fixes the names of these functions. Normally clang's own libraries define them. This file defines
// them instead, and they do the emulator's checks (checks.h).
#pragma once
#include "checks.h"

#define MEMORY_HOOKS(PREFIX, SIZE, CHECK)                                                                      \
  EXPORT void __tsan_##PREFIX##read##SIZE(void* p) { CHECK((u64)p, SIZE, false, CALLER_PC); }                  \
  EXPORT void __tsan_##PREFIX##write##SIZE(void* p) { CHECK((u64)p, SIZE, true, CALLER_PC); }                  \
  EXPORT void __tsan_##PREFIX##read_write##SIZE(void* p) {                                                     \
    CHECK((u64)p, SIZE, false, CALLER_PC);                                                                     \
    CHECK((u64)p, SIZE, true, CALLER_PC);                                                                      \
  }
#define MEMORY_HOOKS_OF_SIZE(SIZE)             \
  MEMORY_HOOKS(, SIZE, check_aligned_access)   \
  MEMORY_HOOKS(unaligned_, SIZE, check_access) \
  MEMORY_HOOKS(volatile_, SIZE, check_access)
MEMORY_HOOKS_OF_SIZE(1) MEMORY_HOOKS_OF_SIZE(2) MEMORY_HOOKS_OF_SIZE(4) MEMORY_HOOKS_OF_SIZE(8) MEMORY_HOOKS_OF_SIZE(16)

EXPORT void __tsan_init() {}
EXPORT void* __tsan_memcpy(void* to, const void* from, size_t n) {
  if (n) check_access((u64)from, (u32)n, false, CALLER_PC), check_access((u64)to, (u32)n, true, CALLER_PC);
  return memmove(to, from, n);
}
EXPORT void* __tsan_memmove(void* to, const void* from, size_t n) {
  if (n) check_access((u64)from, (u32)n, false, CALLER_PC), check_access((u64)to, (u32)n, true, CALLER_PC);
  return memmove(to, from, n);
}
EXPORT void* __tsan_memset(void* to, int value, size_t n) {
  if (n) check_access((u64)to, (u32)n, true, CALLER_PC);
  return memset(to, value, n);
}
// Checks the access of an atomic function. ../shim/atomics.h calls it, because clang adds no call to these accesses.
EXPORT void emu_atomic_access(u64 address, u32 size, u32 read, u32 write) {
  if (read) shared_access(address, size, false, true, CALLER_PC);
  if (write) shared_access(address, size, true, true, CALLER_PC);
}

// A position in the kernel's source. `data`, which clang passes to the handlers of undefined behaviour below, points to
// a record that begins with such a position.
struct SourcePlace {
  const char* file;
  u32 line, column;
};
static Finding* undefined(void* data, Kind kind, const char* what, u64 value) {
  const SourcePlace* source = (const SourcePlace*)data;
  Finding* finding = add_finding(kind, (u64)source->line << 32 | source->column, 0, "%s (value %lld)", what, (long long)value);
  if (finding) finding->line = source->line, finding->column = source->column;
  return finding;
}
EXPORT void __ubsan_handle_out_of_bounds(void* data, u64 index) {
  undefined(data, kOutOfBounds, "index outside the declared array", index);
}
EXPORT void __ubsan_handle_local_out_of_bounds() {
  add_finding(kOutOfBounds, CALLER_PC, 0, "access outside a variable of the thread");
}
EXPORT void __ubsan_handle_divrem_overflow(void* data, u64 value, u64) {
  undefined(data, kArithmetic, "integer division by zero or overflow", value);
  abort_dispatch();  // clang calls this handler before the division, which would crash the process
}
EXPORT void __ubsan_handle_add_overflow(void* data, u64 v, u64) { undefined(data, kArithmetic, "signed overflow in +", v); }
EXPORT void __ubsan_handle_sub_overflow(void* data, u64 v, u64) { undefined(data, kArithmetic, "signed overflow in -", v); }
EXPORT void __ubsan_handle_mul_overflow(void* data, u64 v, u64) { undefined(data, kArithmetic, "signed overflow in *", v); }
EXPORT void __ubsan_handle_negate_overflow(void* data, u64 v) { undefined(data, kArithmetic, "signed overflow in unary -", v); }
EXPORT void __ubsan_handle_float_cast_overflow(void* data, u64) {
  undefined(data, kArithmetic, "float value outside the range of the integer type", 0);
}
EXPORT void __ubsan_handle_type_mismatch_v1(void* data, u64 address) {
  Finding* finding = undefined(data, kMisaligned, "address not aligned for its type", address);
  u32 owner = address - arena < kArenaBytes ? page_owner[(address - arena) / kPage] : 0;
  if (owner) place(finding, regions[owner - 1].name, (int64_t)(address - regions[owner - 1].base));
  abort_dispatch();
}
EXPORT void __ubsan_handle_missing_return(void* data) {
  undefined(data, kArithmetic, "end of a function that must return a value", 0);
  abort_dispatch();
}
EXPORT void __ubsan_handle_builtin_unreachable(void* data) {
  undefined(data, kArithmetic, "unreachable code was reached", 0);
  abort_dispatch();
}

// With --coverage clang adds counters of executed code to a kernel. When the kernel is loaded, it passes a function
// (`writeout`) to llvm_gcov_init. emu_coverage_arrays (host.h) calls `writeout` once. `writeout` then calls the
// functions llvm_gcda_... below, which store the place of each function's counters in `coverage`.
static void (*coverage_writeout)();
struct CoverageCounters {
  u64* values;
  u32 count, function;
};
static const u32 kMaxCoverage = 4096;
static CoverageCounters coverage[kMaxCoverage];
static u32 coverage_count, coverage_function;
EXPORT void llvm_gcov_init(void (*writeout)(), void (*)()) { coverage_writeout = writeout; }
EXPORT void llvm_gcda_start_file(const char*, u32, u32) {}
EXPORT void llvm_gcda_emit_function(u32 identity, u32, u32) { coverage_function = identity; }
EXPORT void llvm_gcda_emit_arcs(u32 count, u64* values) {
  if (coverage_count < kMaxCoverage) coverage[coverage_count++] = CoverageCounters{values, count, coverage_function};
}
EXPORT void llvm_gcda_summary_info() {}
EXPORT void llvm_gcda_end_file() {}
