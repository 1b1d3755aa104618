// What lstm_stepwise_backward and lstm_stepwise_dh share: the operand of their product, and what follows the product.

template <class A>
float operand(thread const A& a, int b, int K, int k) { return float(a[long(b) * K + k]); }

// dh_t at an index, out of the sum of the product.
template <bool REVERSE, class M, class D, class DT>
float lstm_dh(float sum, int t, int length, long at, M mask, D dh, DT dhT) {
  const bool last = REVERSE ? t == 0 : t + 1 == length;
  return (last ? value_at(dhT, at, 0.0f) : sum * value_at(mask, at, 1.0f)) + value_at(dh, at, 0.0f);
}
