// The outputs of a sweep forward, out of its rows; stepwise_forward.metal has the arrays. hT, cT are those of an item's
// last step, h0 and c0 where it has none. Any output may be absent. A projection's h is in rows of their own, with
// neither GATES nor a carry. Thread (k, n, d) has unit k % width of item k / width, in the row of step n.
template <int GATES, bool CARRIES, class S, class X, class H0, class C0, class L, class C, class CT, class A, class AT,
    class G>
void stepwise_outputs(
    thread const Rows<X>& rows, const device int* starts, const constant int* kind, H0 h0, C0 c0, L lengths,
    const constant int* sizes, C c, CT cT, A h, AT hT, G gates, uint3 thread_index) {
  const Step s = step_of(int(thread_index.y), sizes, thread_index.z);
  const int width = kind[1], b = int(thread_index.x) / width, j = int(thread_index.x) % width;
  if (b >= s.B) return;
  const Index units = Index(s.B) * s.D * width, at = place(s, 0, b, width) + j, now = place(s, s.t, b, width) + j;
  const int steps = value_at(lengths, b, s.T);
  const bool ends = steps == 0 ? s.n == 0 : s.t == (s.reverse ? 0 : steps - 1);
  const device X* row = row_of(rows, starts, kind, s.n);
  const device S* arrays = (const device S*)row + carried<S, CARRIES>(units);
  if constexpr (CARRIES) {
    const float carry = carry_at(row, at);
    store(c, now, carry);
    if (ends) store(cT, at, steps == 0 ? value_at(c0, at, 0.0f) : carry);
  }
  const float output = float(arrays[at]);
  store(h, now, output);
  if (ends) store(hT, at, steps == 0 ? value_at(h0, at, 0.0f) : output);
  for (int gate = 0; gate < GATES; ++gate)
    store(gates, place(s, s.t, b, GATES * width) + gate * width + j,
        float(arrays[units + place(s, 0, b, GATES * width) + gate * width + j]));
}
