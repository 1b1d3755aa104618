// What the kernels that run one time step per launch share: the step, its place in sequences, operands of the product.
//
// A launch writes one row: an array of its own, as MLX has no output that several launches write. A row holds what a
// unit carries to the next step in float [B, D H] (c, or its gradient), if the cell carries something, and behind it
// arrays of S in the layout of one step, [B, D width]. It is an array of X: float, or ushort if S has 16 bits, of which
// a float takes two. A row has at least 8 numbers, as Metal would bind a shorter one as `constant`.
//
//   sizes  T, B, H, K (the length of the product), D, whether the only direction is the reverse one, whether every step
//          has a mask of its own
//
// Index, the integer that counts the elements of an array, is declared before these files: int, or long where an array
// may have 2^31 elements.

// A step of one direction: step n of the sweep, at time index t. d: the direction, 0 or 1.
struct Step {
  int n, t, T, B, H, K, D, d, own_mask;
  bool reverse;
};

inline Step step_of(int n, const constant int* sizes, uint direction) {
  const bool reverse = direction == 1 || sizes[5] != 0;
  const int t = reverse ? sizes[0] - 1 - n : n;
  return {n, t, sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], int(direction), sizes[6], reverse};
}

// Return where item b of time index t begins in [T, B, D width].
inline Index place(thread const Step& s, int t, int b, int width) {
  return ((Index(t) * s.B + b) * s.D + s.d) * width;
}

// Return whether an item starts from h0 and c0. At n = 0 all do, also those that end before T and run in reverse: they
// have no other state yet.
inline bool is_first(thread const Step& s, int length) { return s.n == 0 || (s.reverse && s.t + 1 == length); }

// --- The part of a step that a threadgroup computes ---

// The batch rows from b0 on, the units from j0 on; `sums` and `tiles` are threadgroup memory: the results of the
// product, [Product::ROWS, Product::COLUMNS], and what the product needs besides.
struct Block {
  int b0, j0, simdgroup, lane;
  threadgroup float* sums;
  threadgroup float* tiles;
};

// A gate axis of one block, for products of weights that are not Wh as it lies.
struct OneBlock {
  static constexpr int block(int) { return 0; }
};

// --- Reading several neighbours at a time ---

// The type of four neighbours of S wherever they lie; other vectors have to be aligned.
template <class S> struct Neighbours {};
template <> struct Neighbours<float> { using four = packed_float4; };
template <> struct Neighbours<half> { using four = packed_half4; };
#if __METAL_VERSION__ >= 310
template <> struct Neighbours<bfloat> { using four = packed_bfloat4; };
#endif

// Read N neighbours, or `otherwise` if the array is absent. An array that Metal binds as `constant` is read one by one.
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

// Return the array from an element on.
inline Absent from(Absent array, Index) { return array; }
template <class A> A from(A array, Index index) { return array + index; }

// --- Operands of a product ---
//
// A product multiplies batch rows x with rows of weights. Both are read through row types: find_row and find_column set
// a row up, move() advances it along K, operands_at() reads N numbers of it. So one product serves for x that is stored
// as it is, for mask * h, and for r * dz; and for weights that are quantized.

// A row that lies in an array.
template <class A>
struct ItemsRow {
  A values;
};

template <int N, class A>
void operands_at(thread const ItemsRow<A>& row, int k, thread float (&values)[N]) {
  take<N>(row.values, k, 0.0f, values);
}

template <class A>
void move(thread ItemsRow<A>& row, int n) { row.values += n; }

// Batch rows that lie in an array: row b at b * pitch.
template <class S>
struct Items {
  using Row = ItemsRow<const device S*>;
  const device S* first;
  Index pitch;
};

template <class S>
void find_row(thread const Items<S>& x, int b, int, thread ItemsRow<const device S*>& row) {
  row.values = x.first + b * x.pitch;
}

template <class S>
Items<S> items_of(thread const Step& s, const device S* values, int width) {
  return {values + place(s, 0, 0, width), Index(s.D) * width};
}

// How a product reads weights of type W, [., K]: AT_ONCE numbers per lane.
template <class W> struct Columns {
  using Row = ItemsRow<W>;
  enum { AT_ONCE = 4 };
};

// Return the weights from a row on.
template <class W> W rows_from(W weights, Index row, int K) { return weights + row * K; }

// Set a column of the product up: a row of weights, from number `first` on, and `own` further in this lane.
template <class W>
void find_column(W weights, Index row, int K, int first, int own, int, thread ItemsRow<W>& column) {
  column.values = weights + row * K + first + own;
}

// Return the factor on h[b, j], of `width`, as it enters the product of the step at t.
template <class M>
float mask_at(thread const Step& s, M mask, int t, int b, int j, int width) {
  return value_at(mask, place(s, s.own_mask * t, b, width) + j, 1.0f);
}

// --- Rows ---

// Return how many numbers of a row the floats of so many units take.
template <class S, bool CARRIES>
Index carried(Index units) { return CARRIES ? Index(sizeof(float) / sizeof(S)) * units : 0; }

// Read and write a float that is carried: two numbers of a row of ushort.
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

// Fill a row of fewer than 8 numbers up.
template <class X>
void pad_row(device X* row, Index used, uint3 group, int thread_index) {
  if (thread_index == 0 && group.x + group.y + group.z == 0)
    for (Index n = used; n < 8; ++n) row[n] = X(0);
}
