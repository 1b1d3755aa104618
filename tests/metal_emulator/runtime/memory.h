// The memory that a kernel may access: device buffers (regions of one large address range, the arena), threadgroup
// variables, and constants in the kernel's machine code file.
//
// Memory that the kernel can write is divided into granules: elements of 1, 2 or 4 bytes, or 4 bytes of a larger
// element. Each granule has a cell in separate memory, the shadow. The cell records the last accesses; checks.h
// compares each access with them.
#pragma once
#include "findings.h"

// The last write and the last read of a granule (1, 2 or 4 bytes): by which thread (writer, reader), by which code
// (..._pc), and in which epochs. ..._epoch is the number of threadgroup barriers so far, ..._simd_epoch the number of
// barriers of the thread's simdgroup so far. A barrier lies between two accesses whose epochs differ.
struct Cell {
  u32 write_epoch, write_simd_epoch, write_pc;
  u32 read_epoch, read_simd_epoch, read_pc;
  u16 writer, reader;
  u8 flags;
};
// The flags of a `Cell`, the record of the accesses to one granule (element of memory). The race checks use it.
enum CellFlag {
  kInitialised = 1,      // the granule holds a value
  kWritten = 2,          // this launch wrote the granule
  kRead = 4,             // this launch read the granule
  kAtomicWrite = 8,      // the last write was atomic
  kAtomicRead = 16,      // all reads since the last barrier were atomic
  kManyReaders = 32,     // several threads have read since the last barrier
  kManySimdgroups = 64,  // threads of several simdgroups have read since the last barrier
  kOtherGroupRead = 128  // another threadgroup has read the granule
};

// A device buffer.
struct Region {
  u64 base, size;
  Cell* cells;   // cells of the granules, for a buffer that the kernel may write
  u8* touched;   // for a read-only buffer: one byte per granule, 1 if the kernel has read it
  u32 shift;     // base-2 logarithm of a granule's bytes
  u64 bytes_read, bytes_written;
  char name[64];
};

static const u64 kPage = 65536;           // each buffer starts in a new page of this many bytes; an unused page follows
static const u64 kArenaBytes = 1ull << 36;
static const u64 kShadowBytes = 1ull << 38;
static const u32 kMaxRegions = 256, kMaxBuffers = 128;
static u64 arena, arena_used, arena_open;  // bytes that buffers use; bytes made accessible so far
static u64 shadow, shadow_used, shadow_open;
static u16* page_owner;                    // for each page of the arena: index of its region + 1, or 0
static Region regions[kMaxRegions];
static u32 region_count;
static u64 image_low[2], image_high[2];    // address ranges with constants: the kernel's file, this library

// A threadgroup variable of the kernel. It has the same address in all threadgroups. Each threadgroup that runs fills
// it with NaN bytes before its first use. `group_serial` is the number of the last threadgroup that did so.
struct Variable {
  u32 offset, size, shift, group_serial;
  char name[64];
};
static const u32 kThreadgroupArena = 1 << 20, kRedZone = 2048, kMaxVariables = 128;
static u64 threadgroup_arena;
// The cells (records of the last accesses) of all threadgroup variables. The cells of one variable begin at the index
// `Variable::offset`, one cell per granule. There are as many cells as bytes, enough for granules of one byte.
static Cell* threadgroup_cells;
static u8* variable_owner;                 // for each byte of the threadgroup arena: index of its variable + 1, or 0
static Variable variables[kMaxVariables];
static u32 variable_id[kMaxVariables];
static u32 variable_count, variable_top, group_serial, group_bytes;

static u64 reserve(u64 bytes, int protection) {
  void* p = mmap(0, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return p == MAP_FAILED ? 0 : (u64)p;
}

static u32 shift_of(u32 granule) { return granule == 1 ? 0 : granule == 2 ? 1 : 2; }

// Reserves address space, once per process. The system provides memory only when buffers use it, and later launches use
// the same memory again.
static bool reserve_memory() {
  if (arena) return true;
  const int usable = PROT_READ | PROT_WRITE;
  allocate_stacks();
  shadow = reserve(kShadowBytes, PROT_NONE);
  page_owner = (u16*)reserve(kArenaBytes / kPage * sizeof(u16), usable);
  threadgroup_arena = reserve(kThreadgroupArena + kPage, usable);
  threadgroup_cells = (Cell*)reserve((u64)(kThreadgroupArena + 64) * sizeof(Cell), usable);
  variable_owner = (u8*)reserve(kThreadgroupArena + 64, usable);
  arena = reserve(kArenaBytes, PROT_NONE);
  return arena && shadow && page_owner && threadgroup_arena && threadgroup_cells && variable_owner;
}

// Makes the first `used` bytes of a reserved address range accessible. *open: number of bytes that are accessible so
// far.
static void open_up_to(u64 base, u64* open, u64 used) {
  if (used <= *open) return;
  u64 target = (used + (1 << 22)) & ~((u64)(1 << 22) - 1);
  mprotect((void*)(base + *open), target - *open, PROT_READ | PROT_WRITE);
  *open = target;
}

// Returns `bytes` zeroed bytes of the shadow, the memory that records a kernel's accesses to a buffer.
static void* take_shadow(u64 bytes) {
  void* p = (void*)(shadow + shadow_used);
  shadow_used += (bytes + 63) & ~63ull;
  open_up_to(shadow, &shadow_open, shadow_used);
  return memset(p, 0, bytes);
}

// Removes the buffers and variables of the last launch. If they used more than 256 MB, returns the memory to the
// system.
static void clear_memory() {
  memset(page_owner, 0, (arena_used / kPage + 2) * sizeof(u16));
  for (u32 i = 0; i < variable_count; i++) memset(variable_owner + variables[i].offset, 0, variables[i].size);
  const u64 keep = 256 << 20;
  if (arena_used > keep) madvise((void*)arena, arena_open, MADV_DONTNEED);
  if (shadow_used > keep) madvise((void*)shadow, shadow_open, MADV_DONTNEED);
  region_count = variable_count = variable_top = 0;
  arena_used = shadow_used = 0;
}

static void copy_name(char* to, const char* from) { snprintf(to, 64, "%s", from); }

// Adds a device buffer to the launch, filled with NaN bytes. `skew`: bytes by which its start is moved from a 16-byte
// boundary, because views of MLX arrays may begin at any element. Returns null if there is no room.
static Region* add_region(const char* name, u64 size, u32 granule, bool read_only, bool initialised, u32 skew) {
  u64 pages = (size + skew + kPage - 1) / kPage + 1;
  u64 start = arena_used + kPage;
  if (region_count == kMaxRegions || start + pages * kPage > kArenaBytes) return nullptr;
  arena_used = start + pages * kPage;
  open_up_to(arena, &arena_open, arena_used + kPage);
  Region* region = &regions[region_count++];
  memset(region, 0, sizeof *region);
  region->base = arena + start + skew;
  region->size = size;
  region->shift = shift_of(granule);
  copy_name(region->name, name);
  u64 cells = (size >> region->shift) + 2;
  if (read_only) region->touched = (u8*)take_shadow(cells);
  else region->cells = (Cell*)take_shadow(cells * sizeof(Cell));
  if (!read_only && initialised) for (u64 i = 0; i < cells; i++) region->cells[i].flags = kInitialised;
  for (u64 page = start / kPage - 1; page < arena_used / kPage; page++) page_owner[page] = (u16)region_count;
  memset((void*)(region->base - 4096), 0xFF, 4096);  // so that an access just outside reads NaN
  memset((void*)region->base, 0xFF, size + 4096);
  return region;
}

static Variable* variable_of(u32 id) {
  for (u32 i = 0; i < variable_count; i++) if (variable_id[i] == id) return &variables[i];
  return nullptr;
}

static Variable* add_variable(u32 id, u32 size, u32 alignment, u32 granule, const char* name) {
  u32 offset = (variable_top + kRedZone + alignment - 1) & ~(alignment - 1);
  if (variable_count == kMaxVariables || (u64)offset + size + kRedZone > kThreadgroupArena) return nullptr;
  variable_id[variable_count] = id;
  Variable* variable = &variables[variable_count++];
  variable->offset = offset;
  variable->size = size;
  variable->shift = shift_of(granule);
  variable->group_serial = 0;
  copy_name(variable->name, name);
  variable_top = offset + size;
  memset(variable_owner + offset, variable_count, size);
  return variable;
}

// Returns the address of a threadgroup variable; all threads of a threadgroup get the same one. ../lowering.py replaces
// the variable's declaration in the kernel by a call of this function. The first thread that calls it fills the
// variable with NaN bytes. `id`: number of the variable in the kernel. `line`: line of its declaration.
EXPORT u64 emu_threadgroup_variable(u32 id, u32 size, u32 alignment, u32 granule, const char* name, u32 line) {
  Variable* variable = variable_of(id);
  if (!variable) variable = add_variable(id, size, alignment < 16 ? 16 : alignment, granule, name);
  if (!variable) {
    add_finding(kTooMuchMemory, line, 0, "more threadgroup memory than the emulator has room for");
    abort_dispatch();
  }
  if (variable->group_serial != group_serial) {
    variable->group_serial = group_serial;
    memset((void*)(threadgroup_arena + variable->offset), 0xFF, variable->size);
    memset(threadgroup_cells + variable->offset, 0, ((variable->size >> variable->shift) + 1) * sizeof(Cell));
    group_bytes += (variable->size + 15) & ~15u;
    if (group_bytes > counters.threadgroup_bytes) counters.threadgroup_bytes = group_bytes;
    if (group_bytes > dispatch.threadgroup_limit) {
      Finding* finding = add_finding(kTooMuchMemory, 0, 0, "%u bytes of threadgroup memory exceed the limit of %u",
                                     group_bytes, dispatch.threadgroup_limit);
      if (finding) finding->line = line;
      place(finding, name, 0);
    }
  }
  return threadgroup_arena + variable->offset;
}
