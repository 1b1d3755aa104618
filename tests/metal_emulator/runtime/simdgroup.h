// Simdgroup operations: lanes exchange values. A lane writes up to 64 bytes to its slot and waits for the others. When
// all have arrived, the scheduler calls complete_operation; then every lane reads the slots it needs (shim/simd.h).
// Slots are double-buffered: a lane may write its next value while another lane still reads the current ones.
#pragma once
#include "findings.h"

// Must match the values in ../shim/simd.h and matrix.h.
enum Operation { kFirstMatrixOperation = 100, kMatrixLoad = 100, kMatrixStore = 101, kMatrixMultiply = 102 };

static u8 slots[kMaxSimdgroups][2][kLanes][kSlotBytes] __attribute__((aligned(64)));
static u32 active_lanes[kMaxSimdgroups][2];

// Writes the lane's value to its slot, waits for the other lanes, and returns the slots of all lanes. Bit n of *active
// says whether lane n took part.
EXPORT void* emu_exchange(u32 operation, const void* data, u32 size, u32 line, u32* active) {
  Fiber* fiber = current;
  u32 parity = fiber->exchanges & 1;
  memcpy(slots[fiber->simdgroup][parity][fiber->lane], data, size);
  fiber->operation = operation;
  fiber->line = line;
  fiber->flags = 0;
  leave(kAtSimdOperation);
  fiber->exchanges++;
  *active = active_lanes[fiber->simdgroup][parity];
  return slots[fiber->simdgroup][parity];
}

EXPORT void emu_bad_lane(u32 lane, u32 line) {
  Finding* finding = add_finding(kSimdgroup, (u64)line << 32, 0, "lane %d does not exist or takes no part", (int)lane);
  if (finding) finding->line = line;
}

EXPORT void emu_bad_index(const char* name, u64 index, u64 extent, u32 line) {
  Finding* finding = add_finding(kOutOfBounds, (u64)line << 32, 0, "index %lld of an array of %llu matrices",
                                 (long long)index, (unsigned long long)extent);
  if (finding) finding->line = line;
  place(finding, name, 0);
}

// Apple's layout of an 8x8 matrix: two neighbouring columns per lane (MLX's own GEMM relies on the same formula).
static inline u32 matrix_row(u32 lane) { return (lane >> 2 & 4) + (lane >> 1 & 3); }
static inline u32 matrix_column(u32 lane) { return (lane >> 2 & 2) * 2 + (lane & 1) * 2; }

// Computes C + A B. The slot of a lane holds its two elements of A, B and C as floats; the lane's two elements of the
// result are stored behind them, as elements 6 and 7.
static void multiply_matrices(u8 (*slot)[kSlotBytes]) {
  float a[8][8], b[8][8], c[8][8];
  for (u32 lane = 0; lane < kLanes; lane++) {
    const float* value = (const float*)slot[lane];
    u32 row = matrix_row(lane), column = matrix_column(lane);
    for (u32 i = 0; i < 2; i++) {
      a[row][column + i] = value[i];
      b[row][column + i] = value[2 + i];
      c[row][column + i] = value[4 + i];
    }
  }
  for (u32 row = 0; row < 8; row++)
    for (u32 k = 0; k < 8; k++)
      for (u32 column = 0; column < 8; column++) c[row][column] += a[row][k] * b[k][column];
  for (u32 lane = 0; lane < kLanes; lane++) {
    float* value = (float*)slot[lane];
    u32 row = matrix_row(lane), column = matrix_column(lane);
    value[6] = c[row][column];
    value[7] = c[row][column + 1];
  }
}

static void matrix_finding(const Fiber* fiber, const char* what, u32 place_code) {
  Finding* finding = add_finding(kSimdgroup, (u64)fiber->line << 32 | place_code, 0, "%s", what);
  if (finding) finding->line = fiber->line, finding->thread = fiber->thread;
}

// Called when all lanes in `mask` have written their slots; `fiber` is one of them. Computes matrix products, and
// checks the arguments of matrix operations.
static void complete_operation(const Fiber* fiber, u32 mask) {
  u32 parity = fiber->exchanges & 1;
  u8 (*slot)[kSlotBytes] = slots[fiber->simdgroup][parity];
  active_lanes[fiber->simdgroup][parity] = mask;
  if (fiber->operation < kFirstMatrixOperation) {
    counters.simd_operations++;
    return;
  }
  counters.matrix_operations++;
  if (mask != ~0u) return matrix_finding(fiber, "simdgroup_matrix operation with fewer than 32 lanes", 1);
  if (fiber->operation == kMatrixMultiply) return multiply_matrices(slot);
  for (u32 lane = 1; lane < kLanes; lane++)
    if (memcmp(slot[0], slot[lane], 32))
      return matrix_finding(fiber, "simdgroup_load/store with arguments that differ between lanes", 2);
}
