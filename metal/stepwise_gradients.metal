// array[index] = what a row carries there, where there is an array.
template <class X> void store_carry(Absent, Index, const device X*) {}
template <class A, class X>
void store_carry(device A* array, Index index, const device X* row) { array[index] = A(carry_at(row, index)); }

// What a sweep backward found, out of its rows: dz [T, B, D G width], 0 past an item's end, and dc0 [B, D width], what
// an LSTM carries past an item's first step. d_out is dz as a GRU's recurrent products have it: that of the candidate, the
// gate at CANDIDATE, times r, the one at RESET. carry [T, B, D width] is what stands behind dz. These three may be
// absent. dh of a projection is in rows of their own, as dz of a single gate. Threads as in stepwise_outputs.metal.
template <int GATES, int CANDIDATE, int RESET, bool CARRIES, class S, class X, class A, class L, class C, class O,
    class K>
void stepwise_gradients(
    thread const Rows<X>& rows, const device int* starts, const constant int* kind, A gates, L lengths,
    const constant int* sizes, device S* dz, C dc0, O d_out, K carry, uint3 thread_index) {
  const Step s = step_of(int(thread_index.y), sizes, thread_index.z);
  const int width = kind[1], b = int(thread_index.x) / width, j = int(thread_index.x) % width;
  if (b >= s.B) return;
  const Index units = Index(s.B) * s.D * width, at = place(s, 0, b, width) + j;
  const device X* row = row_of(rows, starts, kind, s.T - 1 - s.n);
  const device S* arrays = (const device S*)row + carried<S, CARRIES>(units);
  const bool live = s.t < value_at(lengths, b, s.T);
  if constexpr (CARRIES)
    if (s.n == 0) store_carry(dc0, at, row);
  if (is_present(carry)) store(carry, place(s, s.t, b, width) + j, live ? float(arrays[GATES * units + at]) : 0.0f);
  for (int gate = 0; gate < GATES; ++gate) {
    const Index block = gate * width + j, now = place(s, s.t, b, GATES * width);
    const S found = live ? arrays[place(s, 0, b, GATES * width) + block] : S(0.0f);
    const float r = live && gate == CANDIDATE ? value_at(gates, now + RESET * width + j, 1.0f) : 1.0f;
    dz[now + block] = found;
    store(d_out, now + block, r * float(found));
  }
}
