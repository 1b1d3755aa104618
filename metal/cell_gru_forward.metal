// The GRU cell on scalars: one hidden unit of one batch item. All arithmetic is float, whatever the arrays store.
//
//   r = s_r(a_r)   z = s_z(a_z)
//   n = s_n(a_n + r q)   q: the candidate's recurrent product and its bias
//   n = s_n(a_n + q)     q: the candidate's product with r h, where the reset comes before it
//   h = z h + (1 - z) n,  or with flip_z  (1 - z) h + z n

template <int CELL>
float gru_reset(float a) {
  return activate(activation_of(CELL, GATE_R), a);
}

template <int CELL>
float gru_candidate(float a, float r, float q) {
  return activate(activation_of(CELL, GATE_N), a + (RESETS_BEFORE<CELL> ? q : r * q));
}

template <int CELL>
float gru_state(float z, float n, float h) {
  return FLIPS_Z<CELL> ? h + z * (n - h) : n + z * (h - n);
}
