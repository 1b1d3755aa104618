// Code that the kernels share that run one time step per launch: the description of a step, positions in arrays, the
// operands of a product, the array that a launch writes.
//
// First the threads of a threadgroup compute a product together. After a barrier each thread computes some pairs of one
// unit and one batch item; `cell` is the number of such a pair. The other files stepwise*.metal use the names of this
// list, too:
//   row       the array that a launch writes, a.after. In MLX several launches cannot write to one array, so each step
//             writes a new row; a.before is the row of the launch before. A row begins with the "carried" numbers,
//             which are stored as float at every step (c; in the backward pass gradients). Arrays of dtype S follow,
//             such as h and the gates. A row has at least 8 elements, because MLX would pass a shorter array to the
//             next kernel in another address space (`constant` instead of `device`)
//   S, X      the dtype of the call's arrays; the type of a row's elements: float, or ushort if S has 16 bits. A float
//             then takes two elements
//   T B H D   time steps, batch items, units, directions
//   K         the number of terms in each sum of a product: forward the width of h, backward the width of dz
//   width     how many numbers an array has per item and direction
//   sizes     seven integers: T; B; H; K; D; 1 if the only direction is the reverse one; 1 if each step has its own
//             mask
//   a         the struct of a launch's arrays (arrays.metal). An array that the call does not have has the type Absent
//             and the value absent; value_at(array, n, v) is array[n], or v if the array is absent; store(array, n, v)
//             writes array[n] = v, or nothing
//   s         the step: its number n in the order of processing, its time index t, the direction d, and the sizes
//   b, j      the batch item and the unit
//   length, live   the number of the item's steps; whether the item has not ended at time t
//   group     the threadgroup's number: along units, batch items, directions. b0, j0: its first item and unit
//   units     how many numbers a block of H numbers per item has in a row, B D H
//   start     where the numbers of dtype S begin in a row, behind the floats
//   Cell      a cell's struct with its equations (cell.metal); Gates: a Cell, or OneBlock
//   Product   the struct that computes a product: ByLanes, ByTiles, QuantizedByLanes or NoProduct. A threadgroup of
//             THREADS threads computes ROWS batch items and COLUMNS columns: units of one or more gates.
//             product<Gates, FIRST, UNITS, SEGMENTS>(x, weights, B, H, K, own) multiplies x by the rows of weights of
//             all gates from FIRST on, UNITS columns per gate, and writes own.sums [ROWS][COLUMNS]
//   own       the threadgroup's part of the product, a Block
//   x         the operand of a product, a row of numbers per batch item, which the product multiplies with rows of
//             weights. There are several kinds: a stored array (Items), mask * h (Previous, forward), dz (Following,
//             backward). For each there is a row type X::Row and three functions: find_row(x, b, segment, row) lets
//             `row` point to the numbers of item b in one segment (equal part) of K; operands_at<N>(row, k, values)
//             reads N numbers from number k on; move(row, n) goes n numbers further
//   Index     the integer type that counts elements: int, or long if an array may have 2^31 of them. The generated
//             source declares it before these files

// One step of one direction. n: its number in the order of processing. t: its time index. H: columns of the result. d:
// the direction, 0 or 1. own_mask: 1 if each step has its own mask, else 0. reverse: whether the direction runs from
// the last time index to the first.
struct Step {
  int n, t, T, B, H, K, D, d, own_mask;
  bool reverse;
};

// Return the description of step number n of one direction, 0 or 1. Direction 1 always runs in reverse.
inline Step step_of(int n, const constant int* sizes, uint direction) {
  const bool reverse = direction == 1 || sizes[5] != 0;
  const int t = reverse ? sizes[0] - 1 - n : n;
  return {n, t, sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], int(direction), sizes[6], reverse};
}

// Return where the numbers of batch item b at time index t begin in an array [T, B, D width], in the direction of step
// s. For an array [B, D width] t is 0.
inline Index place(thread const Step& s, int t, int b, int width) {
  return ((Index(t) * s.B + b) * s.D + s.d) * width;
}

// Return where the numbers of batch item b at step s begin in an array [D, T, B, width].
inline Index place_by_direction(thread const Step& s, int b, int width) {
  return ((Index(s.d) * s.T + s.t) * s.B + b) * width;
}

// Return whether the states before step s of a batch item are h0 and c0. This is so at step n = 0, the first in the
// order of processing. In reverse, an item shorter than T begins at a later step, at its last time index, length - 1;
// what the launches compute for this item before is not used.
inline bool is_first(thread const Step& s, int length) { return s.n == 0 || (s.reverse && s.t + 1 == length); }

// A threadgroup's part of a product. simdgroup, lane: the number of this thread's simdgroup (32 threads that run
// together), and of the thread in it. sums: threadgroup memory that gets the product, [ROWS, COLUMNS]; the struct
// ByTiles stores its operands there before.
struct Block {
  int b0, j0, simdgroup, lane;
  threadgroup float* sums;
};

// Replace the gate order of a cell (the template argument Gates) in a product with weights that have no gates, such as
// Wp or the transposed Wh. Gates::block(gate) tells which block of H rows holds the weights of a gate. Weights without
// gates are one block, number 0.
struct OneBlock {
  static constexpr int block(int) { return 0; }
};

// The vector type `four` for four neighbouring elements of type S at any address. (Metal's vector types without
// "packed" require aligned addresses.) Metal has the type bfloat from version 3.1 on.
template <class S> struct Neighbours {};
template <> struct Neighbours<float> { using four = packed_float4; };
template <> struct Neighbours<half> { using four = packed_half4; };
#if __METAL_VERSION__ >= 310
template <> struct Neighbours<bfloat> { using four = packed_bfloat4; };
#endif

// Read N neighbouring elements from array[index] on into `values`, as float; N is 1 or a multiple of 4. If the array is
// absent, set all N values to `otherwise`; this parameter has no name in the overloads for arrays that exist. Vectors
// of four elements are read only from `device` arrays, because an array in the address space `constant` has fewer than
// 8 elements.
template <int N> void take(Absent, int, float otherwise, thread float (&values)[N]) {
  UNROLL for (int e = 0; e < N; ++e) values[e] = otherwise;
}
template <int N, class S> void take(const device S* array, int index, float, thread float (&values)[N]) {
  if constexpr (N % 4 == 0) {
    UNROLL for (int e = 0; e < N; e += 4) {
      const typename Neighbours<S>::four loaded = *(const device typename Neighbours<S>::four*)(array + index + e);
      UNROLL for (int part = 0; part < 4; ++part) values[e + part] = float(loaded[part]);
    }
  } else {
    values[0] = float(array[index]);
  }
}
template <int N, class S> void take(const constant S* array, int index, float, thread float (&values)[N]) {
  UNROLL for (int e = 0; e < N; ++e) values[e] = float(array[index + e]);
}

// Return a pointer to element `index` of the array, or `absent` if the array is absent.
inline Absent from(Absent array, Index) { return array; }
template <class A> A from(A array, Index index) { return array + index; }

// One row of a product's operand, if the numbers are stored in an array as they are. values: points to the number that
// the product reads next. The functions operands_at and move below read the row and go on in it.
template <class A>
struct ItemsRow {
  A values;
};

// Read N numbers of the row as float, from number k on, counted from the row's pointer. (0.0f is for absent arrays;
// this one exists.)
template <int N, class A>
void operands_at(thread const ItemsRow<A>& row, int k, thread float (&values)[N]) {
  take<N>(row.values, k, 0.0f, values);
}

// Move the row's pointer forward by n numbers.
template <class A>
void move(thread ItemsRow<A>& row, int n) { row.values += n; }

// The operand of a product, if its numbers are stored in an array: the row of batch item b begins at first + b * pitch.
template <class S>
struct Items {
  using Row = ItemsRow<const device S*>;
  const device S* first;
  Index pitch;
};

// Let `row` point to the numbers of batch item b. Products with this operand have only one segment.
template <class S>
void find_row(thread const Items<S>& x, int b, int, thread ItemsRow<const device S*>& row) {
  row.values = x.first + b * x.pitch;
}

// Return the operand that is the part of an array [B, D width] that belongs to the direction of step s. Its pitch, the
// distance between batch items, is D width.
template <class S>
Items<S> items_of(thread const Step& s, const device S* values, int width) {
  return {values + place(s, 0, 0, width), Index(s.D) * width};
}

// Return a pointer to row number `row` of the weights. (Quantized weights have another overload.)
template <class W> W rows_from(W weights, Index row, int K) { return weights + row * K; }

// Return the factor of the mask on h[b, j] in the product at time index t; 1 without a mask. If all steps share one
// mask (own_mask is 0), the array of masks has only time index 0. width: the width of h.
template <class M>
float mask_at(thread const Step& s, M mask, int t, int b, int j, int width) {
  return value_at(mask, place(s, s.own_mask * t, b, width) + j, 1.0f);
}

// Return how many elements of type S the `floats` numbers at the beginning of a row take: two each if S has 16 bits.
// States such as c are stored as float at every step, because rounding errors of c would add up.
template <class S> Index carried(Index floats) { return Index(sizeof(float) / sizeof(S)) * floats; }

// carry_at reads float number `index` at the beginning of a row, set_carry writes it. In a row of type ushort a float
// takes two elements, its lower and its upper 16 bits.
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

// take_carries loads COUNT of the floats at the beginning of a row, from number `at` on, `pitch` floats apart, into
// values[first], values[first + 1], ... set_carries stores them.
template <int COUNT, class X, int SIZE>
void take_carries(const device X* row, Index at, int pitch, thread float (&values)[SIZE], int first) {
  UNROLL for (int k = 0; k < COUNT; ++k) values[first + k] = carry_at(row, at + Index(k) * pitch);
}
template <int COUNT, class X, int SIZE>
void set_carries(device X* row, Index at, int pitch, thread const float (&values)[SIZE], int first) {
  UNROLL for (int k = 0; k < COUNT; ++k) set_carry(row, at + Index(k) * pitch, values[first + k]);
}

// Load COUNT numbers of an array, from element `at` on, `pitch` elements apart, into values[first], values[first + 1],
// ... If the array is absent, set these values to 0.
template <int COUNT, class A, int SIZE>
void take_blocks(A array, Index at, int pitch, thread float (&values)[SIZE], int first) {
  UNROLL for (int k = 0; k < COUNT; ++k) values[first + k] = value_at(array, at + Index(k) * pitch, 0.0f);
}

// The template argument Product of a kernel whose cell has no recurrent product. It only says that a threadgroup of 256
// threads computes ROWS batch items and COLUMNS units.
template <int HEIGHT, int WIDTH>
struct NoProduct {
  enum { ROWS = HEIGHT, COLUMNS = WIDTH, THREADS = 256 };
};

// Fill a row up to 8 elements with zeros, from element `used` on. Only thread 0 of the threadgroup (0, 0, 0) does this.
template <class X>
void pad_row(device X* row, Index used, uint3 group, int thread_index) {
  if (thread_index == 0 && group.x + group.y + group.z == 0)
    for (Index n = used; n < 8; ++n) row[n] = X(0);
}
