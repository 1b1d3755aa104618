// What a projection multiplied at every step, m = o * s_output(c) [D, T, B, H]; 0 past an item's end. gates [T, B, D 4H],
// c [T, B, D H]. Thread (k, n, d) has unit k % H of item k / H at time index n.
template <int CELL, class S, class G, class C, class L>
void stepwise_projected(G gates, C c, L lengths, const constant int* sizes, device S* m, uint3 thread_index) {
  const Step s = step_of(int(thread_index.y), sizes, thread_index.z);
  const int b = int(thread_index.x) / s.H, j = int(thread_index.x) % s.H;
  if (b >= s.B) return;
  const float o = float(gates[place(s, s.t, b, 4 * s.H) + place_of(CELL, GATE_O) * s.H + j]);
  const float output = activate(activation_of(CELL, OUTPUT), c[place(s, s.t, b, s.H) + j]);
  m[((Index(s.d) * s.T + s.t) * s.B + b) * s.H + j] = S(s.t < value_at(lengths, b, s.T) ? o * output : 0.0f);
}
