// Checks each load and store of a kernel: is the address inside a buffer or variable, was the value written before, and
// is there a race? To find races, each granule of memory (an element of 1, 2 or 4 bytes, or 4 bytes of a larger one)
// has a cell (memory.h). The cell stores the last write and the last read: by which thread, and in which epoch. An
// epoch is the number of barriers so far that order this memory.
//
// Two accesses to the same granule by different threads, at least one of them a write, are a race unless
//   - a threadgroup_barrier that names this memory lies between them, so that their epochs differ, or
//   - both threads are in one simdgroup, and a simdgroup_barrier that names this memory lies between them, or
//   - both accesses are atomic.
// No barrier orders accesses of two threadgroups to device memory. The checks compare numbers of barriers and not
// values. So they find a race in any order of the threads and with any values.
#pragma once
#include "memory.h"

static void report_race(const char* what, bool other_group, u64 pc, u64 other_pc, u32 other, const char* name, u64 offset) {
  const char* between = other_group ? " by another threadgroup" : " without a barrier in between";
  Finding* finding = add_finding(kRace, pc, other_pc, "%s%s", what, between);
  place(finding, name, (int64_t)offset);
  if (finding) finding->other_thread = other;
}

// A load or store that a thread is about to execute. pc: address of the code. name: the buffer or variable.
struct Access {
  u64 pc;
  bool write, atomic;
  Memory memory;
  const char* name;
};

// Reports a race if another thread was the last to write this granule (element of memory) and no barrier lies between
// its write and this access. `cell` records the last write.
static inline void check_against_write(const Cell* cell, const Access& a, u64 offset) {
  if (a.atomic && (cell->flags & kAtomicWrite)) return;
  bool other_group = a.memory == kDeviceMemory && cell->write_epoch < dispatch.group_epoch[kDeviceMemory];
  if (!other_group) {
    if (cell->write_epoch != dispatch.epoch[a.memory] || cell->writer == current->thread) return;
    u32 simdgroup = current->simdgroup;
    if (cell->writer / kLanes == simdgroup && cell->write_simd_epoch < dispatch.simd_epoch[a.memory][simdgroup]) return;
  }
  report_race(a.write ? "write over a value written" : "read of a value written", other_group, a.pc,
              dispatch.image_base + cell->write_pc, cell->writer, a.name, offset);
}

// Reports a race if other threads have read this granule (element of memory) and no barrier lies between their reads
// and this write. `cell` records the reads.
static inline void check_against_reads(const Cell* cell, const Access& a, u64 offset) {
  if (a.atomic && (cell->flags & kAtomicRead)) return;
  bool other_group = a.memory == kDeviceMemory &&
                     ((cell->flags & kOtherGroupRead) || cell->read_epoch < dispatch.group_epoch[kDeviceMemory]);
  if (!other_group) {
    if (cell->read_epoch != dispatch.epoch[a.memory]) return;
    if (cell->reader == current->thread && !(cell->flags & kManyReaders)) return;
    u32 simdgroup = current->simdgroup;
    bool same_simdgroup = !(cell->flags & kManySimdgroups) && cell->reader / kLanes == simdgroup;
    if (same_simdgroup && cell->read_simd_epoch < dispatch.simd_epoch[a.memory][simdgroup]) return;
  }
  report_race("write over a value read", other_group, a.pc, dispatch.image_base + cell->read_pc, cell->reader, a.name, offset);
}

// Records a write in `cell`, which describes the last accesses to one granule (element of memory).
static inline void note_write(Cell* cell, const Access& a) {
  cell->write_epoch = dispatch.epoch[a.memory];
  cell->write_simd_epoch = dispatch.simd_epoch[a.memory][current->simdgroup];
  cell->write_pc = (u32)(a.pc - dispatch.image_base);
  cell->writer = (u16)current->thread;
  cell->flags = (cell->flags & ~kAtomicWrite) | kInitialised | kWritten | (a.atomic ? kAtomicWrite : 0);
}

// Records a read in `cell`, which describes the last accesses to one granule (element of memory). A cell stores only
// one reader; its flags say whether other threads have read since the last barrier (in the same epoch).
static inline void note_read(Cell* cell, const Access& a) {
  u32 epoch = dispatch.epoch[a.memory], simd_epoch = dispatch.simd_epoch[a.memory][current->simdgroup];
  u8 flags = cell->flags;
  bool fresh = !(flags & kRead) || cell->read_epoch != epoch;
  if (!fresh && cell->reader == current->thread && cell->read_simd_epoch == simd_epoch) {
    if (!a.atomic) cell->flags = flags & ~kAtomicRead;
    return;
  }
  if (fresh && a.memory == kDeviceMemory && (flags & kRead) && cell->read_epoch < dispatch.group_epoch[kDeviceMemory])
    flags |= kOtherGroupRead;
  bool one_simdgroup = !(flags & kManySimdgroups) && cell->reader / kLanes == current->simdgroup;
  // Forget earlier reads and record only this read in two cases: no thread has read since the last threadgroup barrier
  // (`fresh`), or only threads of this simdgroup have read, all before its last simdgroup barrier. The earlier reads
  // are not needed any more, because a write by another simdgroup that races with one of them also races with this
  // read.
  bool restart = fresh || (one_simdgroup && cell->read_simd_epoch < simd_epoch);
  if (restart) {
    flags &= ~(kManyReaders | kManySimdgroups | kAtomicRead);
    flags |= a.atomic ? kAtomicRead : 0;
    cell->read_epoch = epoch;
    cell->read_simd_epoch = simd_epoch;
    cell->read_pc = (u32)(a.pc - dispatch.image_base);
    cell->reader = (u16)current->thread;
  } else {
    if (cell->reader != current->thread) flags |= one_simdgroup ? kManyReaders : kManyReaders | kManySimdgroups;
    if (!a.atomic) flags &= ~kAtomicRead;
  }
  cell->flags = flags | kRead;
}

// Checks an access to the granules (elements) `first` to `last` of a buffer or variable, and records it in their cells.
// `shift` is the base-2 logarithm of a granule's bytes.
static inline void check_cells(Cell* cell, u64 first, u64 last, u32 shift, const Access& a) {
  for (u64 i = first; i <= last; i++) {
    Cell* c = cell + i;
    u64 offset = i << shift;
    if (c->flags & kWritten) check_against_write(c, a, offset);
    if (a.write) {
      if (c->flags & kRead) check_against_reads(c, a, offset);
      note_write(c, a);
      continue;
    }
    if (UNLIKELY(!(c->flags & kInitialised))) {
      place(add_finding(kUninitialised, a.pc, 0, "read of a value nobody has written"), a.name, (int64_t)offset);
      c->flags |= kInitialised;
    }
    note_read(c, a);
  }
}

static void outside_region(const Region* region, u64 address, bool write, u64 pc) {
  int64_t offset = (int64_t)(address - region->base);
  place(add_finding(kOutOfBounds, pc, 0, "%s outside the buffer of %llu bytes", write ? "write" : "read",
                    (unsigned long long)region->size), region->name, offset);
  // Unused memory surrounds each buffer, so an access just outside does no harm and the launch continues. An access
  // more than half a page outside could crash the process, so the launch ends before it.
  int64_t far = (int64_t)kPage / 2;
  if (offset < -far || offset > (int64_t)region->size + far) abort_dispatch();
}

static void device_access(u64 address, u32 size, bool write, bool atomic, u64 pc) {
  u32 owner = page_owner[(address - arena) / kPage];
  if (UNLIKELY(!owner)) {
    add_finding(kOutOfBounds, pc, 0, "%s far outside every buffer", write ? "write" : "read");
    abort_dispatch();
  }
  Region* region = &regions[owner - 1];
  u64 offset = address - region->base;
  if (UNLIKELY(offset >= region->size || offset + size > region->size)) return outside_region(region, address, write, pc);
  u64 first = offset >> region->shift, last = (offset + size - 1) >> region->shift;
  if (region->touched) {
    if (UNLIKELY(write)) {
      place(add_finding(kReadOnly, pc, 0, "write to an input"), region->name, (int64_t)offset);
      abort_dispatch();
    }
    region->bytes_read += size;
    for (u64 i = first; i <= last; i++) region->touched[i] = 1;
    return;
  }
  (write ? region->bytes_written : region->bytes_read) += size;
  check_cells(region->cells, first, last, region->shift, Access{pc, write, atomic, kDeviceMemory, region->name});
}

static void outside_variable(u32 offset, bool write, u64 pc) {
  const Variable* nearest = nullptr;
  u32 distance = ~0u;
  for (u32 i = 0; i < variable_count; i++) {
    const Variable* v = &variables[i];
    u32 d = offset < v->offset ? v->offset - offset : offset - v->offset - v->size;
    if (d < distance) distance = d, nearest = v;
  }
  place(add_finding(kOutOfBounds, pc, 0, "%s outside the threadgroup array of %u bytes", write ? "write" : "read",
                    nearest ? nearest->size : 0),
        nearest ? nearest->name : "", nearest ? (int64_t)offset - nearest->offset : 0);
}

static void threadgroup_access(u64 address, u32 size, bool write, bool atomic, u64 pc) {
  u32 offset = (u32)(address - threadgroup_arena);
  u32 owner = variable_owner[offset];
  if (UNLIKELY(!owner || owner != variable_owner[offset + size - 1])) return outside_variable(offset, write, pc);
  Variable* v = &variables[owner - 1];
  (write ? counters.threadgroup_bytes_written : counters.threadgroup_bytes_read) += size;
  u32 first = (offset - v->offset) >> v->shift, last = (offset - v->offset + size - 1) >> v->shift;
  check_cells(threadgroup_cells + v->offset, first, last, v->shift, Access{pc, write, atomic, kThreadgroupMemory, v->name});
}

static void shared_access(u64 address, u32 size, bool write, bool atomic, u64 pc) {
  counters.accesses++;
  if (LIKELY(address - arena < kArenaBytes)) return device_access(address, size, write, atomic, pc);
  if (LIKELY(address - threadgroup_arena < kThreadgroupArena)) return threadgroup_access(address, size, write, atomic, pc);
  counters.accesses--;
  // The address is not in a buffer or a threadgroup variable. Allow addresses in the kernel's machine code file and in
  // this library. They hold constant tables, values that lanes exchange, and coverage counters, but no variables of a
  // kernel.
  for (int i = 0; i < 2; i++) if (address - image_low[i] < image_high[i] - image_low[i]) return;
  add_finding(kWildPointer, pc, 0, "%s at %llx, which is no memory of this thread", write ? "write" : "read",
              (unsigned long long)address);
  abort_dispatch();
}

static inline void check_access(u64 address, u32 size, bool write, u64 pc) {
  if (LIKELY(!current || address - current->stack_low < kStackBytes)) return;  // an address on the thread's stack
  shared_access(address, size, write, false, pc);
}

// Checks an access that the compiler assumes to be aligned. A misaligned vector access would crash the process, so the
// launch is aborted before the access.
static inline void check_aligned_access(u64 address, u32 size, bool write, u64 pc) {
  check_access(address, size, write, pc);
  if (LIKELY(!(address & (size - 1))) || !current) return;
  Finding* finding = add_finding(kMisaligned, pc, 0, "%s of %u bytes at an address that is no multiple of it",
                                 write ? "write" : "read", size);
  u32 owner = address - arena < kArenaBytes ? page_owner[(address - arena) / kPage] : 0;
  if (owner) place(finding, regions[owner - 1].name, (int64_t)(address - regions[owner - 1].base));
  abort_dispatch();
}
