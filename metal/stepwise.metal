// What the kernels that run one time step per launch share: the description of a step, positions in arrays, and reading
// the operands of a product. S is the dtype of the call's arrays, D the number of directions.
//
// A launch writes one "row": a new array, because in MLX several launches cannot write to the same output. A row begins
// with the numbers that stay in float (c, or gradients in the backward pass), [B, D H] each, if the cell has any.
// Behind them are arrays of dtype S, such as h and the gates of this step. The elements of a row have the type X:
// float, or ushort if S has 16 bits; a float then takes two elements. A row has at least 8 elements, because Metal
// would bind a shorter array as `constant`.
//
//   sizes  seven integers: T; B; H; K, the number of terms of each sum of the product; D; 1 if the only direction is
//          the reverse one; 1 if each step has its own mask
//
// Other letters: T steps, B batch items, H units, G gates. Cell: the struct of a cell (cell.metal). Product: the struct
// that computes the product, ByLanes, ByTiles, QuantizedByLanes or NoProduct, for ROWS batch items and COLUMNS columns
// (units and gates) per threadgroup of THREADS threads.
//
// Index is the integer type that counts the elements of an array: int, or long if an array may have 2^31 elements. The
// generated source declares it before the definitions of these files.

// One step of one direction: step n in the order of processing, at time index t. d: the direction, 0 or 1.
struct Step {
  int n, t, T, B, H, K, D, d, own_mask;
  bool reverse;
};

// Describe step n of one direction. sizes: see the head of this file. Direction 1 always runs in reverse.
inline Step step_of(int n, const constant int* sizes, uint direction) {
  const bool reverse = direction == 1 || sizes[5] != 0;
  const int t = reverse ? sizes[0] - 1 - n : n;
  return {n, t, sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], int(direction), sizes[6], reverse};
}

// Return the position of batch item b at time index t in an array [T, B, D width], which has `width` numbers per
// direction.
inline Index place(thread const Step& s, int t, int b, int width) {
  return ((Index(t) * s.B + b) * s.D + s.d) * width;
}

// Return the position of batch item b of this step in an array [D, T, B, width].
inline Index place_by_direction(thread const Step& s, int b, int width) {
  return ((Index(s.d) * s.T + s.t) * s.B + b) * width;
}

// Return whether the states before this step of an item are h0 and c0. length: the item's number of steps. This is so
// at step n = 0, which is the first in the order of processing. In reverse, an item that is shorter than T begins at a
// later n, at its own last time index length - 1; there it is so, too. (Before it, the item's numbers are not used.)
inline bool is_first(thread const Step& s, int length) { return s.n == 0 || (s.reverse && s.t + 1 == length); }

// A threadgroup's part of the output: the batch items from b0 on and the units from j0 on. `sums` is threadgroup memory
// that gets the result of the product, [Product::ROWS, Product::COLUMNS]. A product of matrices first keeps its
// operands there.
struct Block {
  int b0, j0, simdgroup, lane;
  threadgroup float* sums;
};

// The products find a gate's weights by the position of its H rows in the matrix, Gates::block(gate). Weights that are
// not divided by gates, such as Wp or the transposed Wh, use OneBlock as Gates: the only block has position 0.
struct OneBlock {
  static constexpr int block(int) { return 0; }
};

// The vector type for four neighbouring elements of type S at any address. Other vector types require aligned
// addresses.
template <class S> struct Neighbours {};
template <> struct Neighbours<float> { using four = packed_float4; };
template <> struct Neighbours<half> { using four = packed_half4; };
#if __METAL_VERSION__ >= 310
template <> struct Neighbours<bfloat> { using four = packed_bfloat4; };
#endif

// Read N neighbouring elements from array[index] on into `values`, as float. If the array is absent, set all N values
// to `otherwise`. Vectors of four elements are read from `device` arrays only, not from `constant` arrays.
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

// A product multiplies rows of x, one per batch item, with rows of weights. It reads x through a row type with three
// functions: find_row initializes a row, move() advances it along K, and operands_at() reads N of its numbers. So one
// product serves for a stored x, for mask * h (forward) and for the dz of a GRU's candidate times its gate r
// (backward).

// The simplest way to read a row of x: all its numbers are stored in an array. `values` points to the next number that
// the product will read.
template <class A>
struct ItemsRow {
  A values;
};

// Read N numbers of the row, from number k on.
template <int N, class A>
void operands_at(thread const ItemsRow<A>& row, int k, thread float (&values)[N]) {
  take<N>(row.values, k, 0.0f, values);
}

// Advance the row by n numbers.
template <class A>
void move(thread ItemsRow<A>& row, int n) { row.values += n; }

// Operands that are stored in an array: the row of batch item b begins at b * pitch.
template <class S>
struct Items {
  using Row = ItemsRow<const device S*>;
  const device S* first;
  Index pitch;
};

// Let `row` point to the numbers of batch item b. The number of a segment is not used: they lie in one piece.
template <class S>
void find_row(thread const Items<S>& x, int b, int, thread ItemsRow<const device S*>& row) {
  row.values = x.first + b * x.pitch;
}

// Return the operands of step s's direction in an array [B, D width], whose rows have `width` numbers per direction.
template <class S>
Items<S> items_of(thread const Step& s, const device S* values, int width) {
  return {values + place(s, 0, 0, width), Index(s.D) * width};
}

// Return a pointer to the weights from row `row` on. K: the number of columns, which is the length of each sum of the
// product.
template <class W> W rows_from(W weights, Index row, int K) { return weights + row * K; }

// Return the mask's factor on h[b, j] in the product of the step at time index t. width: the width of h.
template <class M>
float mask_at(thread const Step& s, M mask, int t, int b, int j, int width) {
  return value_at(mask, place(s, s.own_mask * t, b, width) + j, 1.0f);
}

// Return how many elements of type S the first `floats` numbers of a row take. (A row is the array that the launch of
// one step writes. States such as c stay float from step to step even if S has 16 bits, because rounding errors of c
// would add up. They lie at the beginning of the row. With a 16-bit S each of them takes two elements.)
template <class S> Index carried(Index floats) { return Index(sizeof(float) / sizeof(S)) * floats; }

// Read or write one of the floats that a row (the array that one launch writes) carries to the next step. In a row of
// ushort a float takes two elements.
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

// Load or store COUNT floats of a row that the next step reads, `pitch` floats apart: values[first], values[first + 1],
// ...
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

// Load COUNT numbers of an array, `pitch` elements apart, into values[first], values[first + 1], ... If the array is
// absent, load zeros.
template <int COUNT, class A, int SIZE>
void take_blocks(A array, Index at, int pitch, thread float (&values)[SIZE], int first) {
#pragma clang loop unroll(full)
  for (int k = 0; k < COUNT; ++k) values[first + k] = value_at(array, at + Index(k) * pitch, 0.0f);
}

// A product that computes nothing, for a cell without a recurrent product. A threadgroup then only has a part of the
// batch items (ROWS) and units (COLUMNS), which its THREADS threads compute.
template <int HEIGHT, int WIDTH>
struct NoProduct {
  enum { ROWS = HEIGHT, COLUMNS = WIDTH, THREADS = 256 };
};

// Fill a row (the array that one launch writes) with zeros from element `used` on, if it is shorter than 8 elements. A
// row has at least 8 elements, because MLX passes shorter arrays to the next kernel as `constant`, not `device`. One
// thread of the whole launch does this: the first one of the threadgroup (0, 0, 0).
template <class X>
void pad_row(device X* row, Index used, uint3 group, int thread_index) {
  if (thread_index == 0 && group.x + group.y + group.z == 0)
    for (Index n = used; n < 8; ++n) row[n] = X(0);
}
