// The plain cell on scalars, forward and backward: h = s(a). Its one "gate" is a itself.

template <int CELL>
float rnn_cell(float a) {
  return activate(activation_of(CELL, 0), a);
}

// The gradient of a. dh: that of h. da: that a has from outside.
template <int CELL>
float rnn_cell_backward(float h, float dh, float da) {
  return dh * slope(activation_of(CELL, 0), h) + da;
}
