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
inline long place(thread const Step& s, int t, int b, int width) {
  return ((long(t) * s.B + b) * s.D + s.d) * width;
}

// Whether an item starts from h0 and c0; at n = 0 those that end before T do so too, for want of another state.
inline bool is_first(thread const Step& s, int length) { return s.n == 0 || (s.reverse && s.t + 1 == length); }

// The factor on h[b, j], of `width`, as it enters the product of the step at t.
template <class M>
float mask_at(thread const Step& s, M mask, int t, int b, int j, int width) {
  return value_at(mask, place(s, s.own_mask * t, b, width) + j, 1.0f);
}

// Numbers of a row that the floats of this many units take up.
template <class S, bool CARRIES>
long carried(long units) { return CARRIES ? long(sizeof(float) / sizeof(S)) * units : 0; }

inline float carry_at(const device float* row, long index) { return row[index]; }
inline float carry_at(const device ushort* row, long index) {
  return as_type<float>(ushort2(row[2 * index], row[2 * index + 1]));
}
inline void set_carry(device float* row, long index, float value) { row[index] = value; }
inline void set_carry(device ushort* row, long index, float value) {
  const ushort2 words = as_type<ushort2>(value);
  row[2 * index] = words.x;
  row[2 * index + 1] = words.y;
}

// Fills a short row up.
template <class X>
void pad_row(device X* row, long used, uint3 group, int thread_index) {
  if (thread_index == 0 && group.x + group.y + group.z == 0)
    for (long n = used; n < 8; ++n) row[n] = X(0);
}
