// Packed weights in the stepwise kernels: those from a row on.
template <int BITS, int GROUP, class A, class B>
Packed<BITS, GROUP, A, B> rows_from(Packed<BITS, GROUP, A, B> weights, Index row, int K) {
  const Index groups = row * (K / GROUP);
  return {weights.words + row * (K * BITS / 32), weights.scales + groups, from(weights.biases, groups)};
}
