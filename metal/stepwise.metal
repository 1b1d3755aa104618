// What the stepwise kernels share: one step of one direction, and the row of numbers that a launch writes.
//
// A row holds what a unit carries from step to step in float [B, D H] (c, or its gradient), where the cell carries
// something, and then arrays of S in the layout of a step, [B, D width]. It is an array of X: float, or ushort where S
// has 16 bits and a float is two of them. Rows are never fewer than 8 numbers, which Metal would bind as `constant`.
//
//   sizes  T, B, H, K (the length of the product), D, whether the only direction is the reverse one, and whether every
//          step has a mask of its own

struct Step {
  int n, t, T, B, H, K, D, d, own_mask;
  bool reverse;
};

inline Step step_of(int n, const constant int* sizes, uint direction) {
  const bool reverse = direction == 1 || sizes[5] != 0;
  const int t = reverse ? sizes[0] - 1 - n : n;
  return {n, t, sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], int(direction), sizes[6], reverse};
}

// Where item b of time index t begins in [T, B, D width].
inline Index place(thread const Step& s, int t, int b, int width) {
  return ((Index(t) * s.B + b) * s.D + s.d) * width;
}

// Whether an item starts from h0 and c0; at n = 0 those that end before T do so too, for want of another state.
inline bool is_first(thread const Step& s, int length) { return s.n == 0 || (s.reverse && s.t + 1 == length); }

// Four neighbours of S wherever they lie; vectors that are not packed have to be aligned.
template <class S> struct Neighbours {};
template <> struct Neighbours<float> { using four = packed_float4; };
template <> struct Neighbours<half> { using four = packed_half4; };
#if __METAL_VERSION__ >= 310
template <> struct Neighbours<bfloat> { using four = packed_bfloat4; };
#endif

// N neighbours in an array, or `otherwise` where there is none; the array from an element on.
template <int N> void take(Absent, int, float otherwise, thread float (&values)[N]) {
#pragma clang loop unroll(full)
  for (int e = 0; e < N; ++e) values[e] = otherwise;
}
template <int N, class S> void take(const device S* array, int index, float, thread float (&values)[N]) {
  if constexpr (N % 4 == 0) {
#pragma clang loop unroll(full)
    for (int e = 0; e < N; e += 4) {
      const typename Neighbours<S>::four found = *(const device typename Neighbours<S>::four*)(array + index + e);
#pragma clang loop unroll(full)
      for (int part = 0; part < 4; ++part) values[e + part] = float(found[part]);
    }
  } else {
    values[0] = float(array[index]);
  }
}
template <int N, class S> void take(const constant S* array, int index, float, thread float (&values)[N]) {
#pragma clang loop unroll(full)
  for (int e = 0; e < N; ++e) values[e] = float(array[index + e]);
}
inline Absent from(Absent array, Index) { return array; }
template <class A> A from(A array, Index index) { return array + index; }

// A row of a product as it lies in an array, from where one is on.
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

// Batch rows like that: row b at b * pitch.
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

// Weights, [., K]: which row of them a column of the product is, from number `first` on and `own` further in this lane.
// A lane takes AT_ONCE of them at a time.
template <class W> struct Columns {
  using Row = ItemsRow<W>;
  enum { AT_ONCE = 4 };
};

// The weights from a row on.
template <class W> W rows_from(W weights, Index row, int K) { return weights + row * K; }

template <class W>
void find_column(W weights, Index row, int K, int first, int own, int, thread ItemsRow<W>& column) {
  column.values = weights + row * K + first + own;
}

// The factor on h[b, j], of `width`, as it enters the product of the step at t.
template <class M>
float mask_at(thread const Step& s, M mask, int t, int b, int j, int width) {
  return value_at(mask, place(s, s.own_mask * t, b, width) + j, 1.0f);
}

// Numbers of a row that the floats of this many units take up.
template <class S, bool CARRIES>
Index carried(Index units) { return CARRIES ? Index(sizeof(float) / sizeof(S)) * units : 0; }

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

// Fills a short row up.
template <class X>
void pad_row(device X* row, Index used, uint3 group, int thread_index) {
  if (thread_index == 0 && group.x + group.y + group.z == 0)
    for (Index n = used; n < 8; ++n) row[n] = X(0);
}
