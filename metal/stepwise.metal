// What the kernels that run one time step per launch share: the description of a step, positions in arrays, the
// operands of a product, the array that a launch writes.
//
//   row       the array that a launch writes. In MLX several launches cannot write to one array, so each step has its
//             own. It begins with the numbers that stay floats from step to step (c; in the backward pass gradients),
//             "carried" numbers; behind them are arrays of dtype S, such as h and the gates. It has at least 8
//             elements, because Metal would bind a shorter array in another address space (`constant` instead of
//             `device`)
//   S, X      the dtype of the call's arrays; the type of a row's elements: float, or ushort if S has 16 bits. A float
//             then takes two elements
//   T B H D   time steps, batch items, units, directions
//   K         the terms of each sum of a product: the width of h, or backward of dz
//   width     how many numbers an array has per item and direction
//   sizes     seven integers: T; B; H; K; D; 1 if the only direction is the reverse one; 1 if each step has its own
//             mask
//   a         the struct of a launch's arrays (arrays.metal). One that the call lacks has the type Absent and the value
//             absent; value_at(array, n, v) is array[n], or v if the array is absent
//   Cell      a cell's struct with its equations (cell.metal); Gates: a Cell, or OneBlock
//   Product   the struct that computes a product: ByLanes, ByTiles, QuantizedByLanes or NoProduct. A threadgroup of
//             THREADS threads computes ROWS batch items and COLUMNS columns: units of one or more gates
//   x         the operand of a product, a row of numbers per batch item, which the product multiplies with rows of
//             weights. There are several kinds: a stored array (Items), mask * h (Previous, forward), dz (Following,
//             backward). For each there is a row type X::Row and three functions: find_row(x, b, segment, row) lets
//             `row` point to the numbers of item b in one segment (equal part) of K; operands_at<N>(row, k, values)
//             reads N numbers from number k on; move(row, n) goes n numbers further
//   Index     the integer type that counts elements: int, or long if an array may have 2^31 of them. The generated
//             source declares it before these files

// One step of one direction: step n in the order of processing, at time index t. d: the direction, 0 or 1. own_mask: 1
// if each step has its own mask. reverse: whether the direction runs from the last time to the first.
struct Step {
  int n, t, T, B, H, K, D, d, own_mask;
  bool reverse;
};

// Describe step n of one direction. sizes: see the head of this file. The second direction, number 1, always runs in
// reverse; direction 0 does if sizes[5] says so.
inline Step step_of(int n, const constant int* sizes, uint direction) {
  const bool reverse = direction == 1 || sizes[5] != 0;
  const int t = reverse ? sizes[0] - 1 - n : n;
  return {n, t, sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], int(direction), sizes[6], reverse};
}

// Return the position of batch item b at time index t in an array [T, B, D width].
inline Index place(thread const Step& s, int t, int b, int width) {
  return ((Index(t) * s.B + b) * s.D + s.d) * width;
}

// Return the position of batch item b of this step in an array [D, T, B, width].
inline Index place_by_direction(thread const Step& s, int b, int width) {
  return ((Index(s.d) * s.T + s.t) * s.B + b) * width;
}

// Return whether the states before this step of an item are h0 and c0. length: the item's number of steps. They are at
// step n = 0, the first in the order of processing. In reverse, an item shorter than T begins at a later n, at its own
// last time, length - 1. (What the launches compute for it before that is not used.)
inline bool is_first(thread const Step& s, int length) { return s.n == 0 || (s.reverse && s.t + 1 == length); }

// A threadgroup's part of the output: the batch items from b0 on and the units (columns) from j0 on; and the number of
// this thread's simdgroup (32 threads that run together) and of its lane in it. sums: threadgroup memory that gets the
// product, [ROWS, COLUMNS]. ByTiles keeps its operands there first.
struct Block {
  int b0, j0, simdgroup, lane;
  threadgroup float* sums;
};

// For a product whose weights are not divided by gates, such as Wp or the transposed Wh. A product finds the H rows of
// a gate's weights by their position, Gates::block(gate), which for a Cell depends on its gate order. Here all rows are
// one block at position 0.
struct OneBlock {
  static constexpr int block(int) { return 0; }
};

// The vector type for four neighbouring elements of type S at any address. Other vector types require aligned
// addresses. Metal has the type bfloat from version 3.1 on.
template <class S> struct Neighbours {};
template <> struct Neighbours<float> { using four = packed_float4; };
template <> struct Neighbours<half> { using four = packed_half4; };
#if __METAL_VERSION__ >= 310
template <> struct Neighbours<bfloat> { using four = packed_bfloat4; };
#endif

// Read N neighbouring elements from array[index] on into `values`, as float; N is 1 or a multiple of 4. If the array is
// absent, set all N values to `otherwise`; that parameter has no name where there is an array. Vectors of four elements
// are read from `device` arrays only: one in `constant` has fewer than 8 elements.
template <int N> void take(Absent, int, float otherwise, thread float (&values)[N]) {
#pragma clang loop unroll(full)
  for (int e = 0; e < N; ++e) values[e] = otherwise;
}
template <int N, class S> void take(const device S* array, int index, float, thread float (&values)[N]) {
  if constexpr (N % 4 == 0) {
#pragma clang loop unroll(full)
    for (int e = 0; e < N; e += 4) {
      const typename Neighbours<S>::four loaded = *(const device typename Neighbours<S>::four*)(array + index + e);
#pragma clang loop unroll(full)
      for (int part = 0; part < 4; ++part) values[e + part] = float(loaded[part]);
    }
  } else {
    values[0] = float(array[index]);
  }
}
template <int N, class S> void take(const constant S* array, int index, float, thread float (&values)[N]) {
#pragma clang loop unroll(full)
  for (int e = 0; e < N; ++e) values[e] = float(array[index + e]);
}

// Return a pointer to element `index` of the array, or `absent` if the array is absent.
inline Absent from(Absent array, Index) { return array; }
template <class A> A from(A array, Index index) { return array + index; }

// The simplest row of an operand: its numbers are stored in an array as they are. values: points to the number that the
// product reads next.
template <class A>
struct ItemsRow {
  A values;
};

// Read N numbers of the row, from number k on, as float. (The array is never absent, so take's 0.0f is not used.)
template <int N, class A>
void operands_at(thread const ItemsRow<A>& row, int k, thread float (&values)[N]) {
  take<N>(row.values, k, 0.0f, values);
}

// Advance the row by n numbers.
template <class A>
void move(thread ItemsRow<A>& row, int n) { row.values += n; }

// An operand that is stored in an array: the row of batch item b begins at first + b * pitch.
template <class S>
struct Items {
  using Row = ItemsRow<const device S*>;
  const device S* first;
  Index pitch;
};

// Let `row` point to the numbers of batch item b. The number of a segment, the parameter without a name, is not used: a
// product with this operand has only one.
template <class S>
void find_row(thread const Items<S>& x, int b, int, thread ItemsRow<const device S*>& row) {
  row.values = x.first + b * x.pitch;
}

// Return the operand that consists of step s's direction of an array [B, D width]. pitch: the distance of batch items.
template <class S>
Items<S> items_of(thread const Step& s, const device S* values, int width) {
  return {values + place(s, 0, 0, width), Index(s.D) * width};
}

// Return a pointer to the weights from row number `row` on. K: how many numbers a row has, one for each term of a sum.
// (Quantized weights have another overload.)
template <class W> W rows_from(W weights, Index row, int K) { return weights + row * K; }

// Return the mask's factor on h[b, j] in the product of the step at time index t; 1 without a mask. If all steps share
// one mask (own_mask = 0), its time index is 0. width: the width of h.
template <class M>
float mask_at(thread const Step& s, M mask, int t, int b, int j, int width) {
  return value_at(mask, place(s, s.own_mask * t, b, width) + j, 1.0f);
}

// Return how many elements of type S the first `floats` numbers of a row take: two each if S has 16 bits. States such
// as c stay float from step to step, because rounding errors of c would add up.
template <class S> Index carried(Index floats) { return Index(sizeof(float) / sizeof(S)) * floats; }

// Read or write number `index` of the floats at the beginning of a row. In a row of ushort a float takes two elements,
// its lower and upper 16 bits.
inline float carry_at(const device float* row, Index index) { return row[index]; }
inline float carry_at(const device ushort* row, Index index) {
  return as_type<float>(ushort2(row[2 * index], row[2 * index + 1]));
}
inline void set_carry(device float* row, Index index, float value) { row[index] = value; }
inline void set_carry(device ushort* row, Index index, float value) {
  const ushort2 words = as_type<ushort2>(value);
  row[2 * index] = words.x;
  row[2 * index + 1] = words.y;
}

// Load or store COUNT floats of a row, from number `at` on, `pitch` floats apart: a unit's numbers in neighbouring
// blocks of H. They go to (come from) values[first], values[first + 1], ...
template <int COUNT, class X, int SIZE>
void take_carries(const device X* row, Index at, int pitch, thread float (&values)[SIZE], int first) {
#pragma clang loop unroll(full)
  for (int k = 0; k < COUNT; ++k) values[first + k] = carry_at(row, at + Index(k) * pitch);
}
template <int COUNT, class X, int SIZE>
void set_carries(device X* row, Index at, int pitch, thread const float (&values)[SIZE], int first) {
#pragma clang loop unroll(full)
  for (int k = 0; k < COUNT; ++k) set_carry(row, at + Index(k) * pitch, values[first + k]);
}

// Load COUNT numbers of an array, from element `at` on, `pitch` elements apart, into values[first], values[first + 1],
// ... If the array is absent, load zeros.
template <int COUNT, class A, int SIZE>
void take_blocks(A array, Index at, int pitch, thread float (&values)[SIZE], int first) {
#pragma clang loop unroll(full)
  for (int k = 0; k < COUNT; ++k) values[first + k] = value_at(array, at + Index(k) * pitch, 0.0f);
}

// In place of a product, for a cell without a recurrent product. A threadgroup of 256 threads then only has a part of
// the batch items and units: ROWS and COLUMNS of them.
template <int HEIGHT, int WIDTH>
struct NoProduct {
  enum { ROWS = HEIGHT, COLUMNS = WIDTH, THREADS = 256 };
};

// Fill a row shorter than 8 elements with zeros, from element `used` on: MLX passes shorter arrays to the next kernel
// as `constant`, not `device`. One thread of the whole launch does this: thread 0 of the threadgroup (0, 0, 0). group:
// the threadgroup's number.
template <class X>
void pad_row(device X* row, Index used, uint3 group, int thread_index) {
  if (thread_index == 0 && group.x + group.y + group.z == 0)
    for (Index n = used; n < 8; ++n) row[n] = X(0);
}
