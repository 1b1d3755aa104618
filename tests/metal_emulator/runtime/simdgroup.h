// Simdgroup operations: the lanes (the 32 threads of a simdgroup) exchange values, for example in simd_sum. Each lane
// copies its value, up to 64 bytes, to its slot and waits for the others. When all have arrived, the scheduler calls
// complete_operation. Then every lane reads the slots that it needs (../shim/simd.h).
//
// Each lane has two slots, used in turn: it may write its next value while another lane still reads the current one.
#pragma once
#include "findings.h"

// The numbers of the matrix operations. complete_operation uses them, and ../shim/matrix.h passes the same numbers to
// emu_exchange. Numbers below 100 are other simdgroup operations (../shim/simd.h), for which the runtime has nothing to
// compute.
enum Operation { kFirstMatrixOperation = 100, kMatrixLoad = 100, kMatrixStore = 101, kMatrixMultiply = 102 };

static u8 slots[kMaxSimdgroups][2][kLanes][kSlotBytes] __attribute__((aligned(64)));
static u32 active_lanes[kMaxSimdgroups][2];

// Copies the lane's value to its slot in `slots`, waits until all lanes have done so, and returns the slots of all
// lanes. Bit n of *active says whether lane n took part. `operation` and `line` say which function is called, and
// where.
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

// A lane holds two elements of an 8x8 matrix, in neighbouring columns. Return their row, and the column of the first
// one. MLX's own matrix kernels rely on the same layout.
static inline u32 matrix_row(u32 lane) { return (lane >> 2 & 4) + (lane >> 1 & 3); }
static inline u32 matrix_column(u32 lane) { return (lane >> 2 & 2) * 2 + (lane & 1) * 2; }

// Computes C + A B for 8x8 matrices. The slot of a lane holds six floats: its two elements of A, of B and of C. The
// lane's two elements of the result are stored behind them, as elements 6 and 7 of the slot.
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

// Completes a simdgroup operation after the lanes in `mask` (bit n: lane n) have written their values to their slots.
// `fiber` is any lane that takes part. Matrix products are computed here. Loads and stores of matrices are only
// checked: all 32 lanes must take part, with the same arguments.
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
