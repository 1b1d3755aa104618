// The LSTM cell: one hidden unit of one batch item, forward and backward.
//
//   i = s_i(a_i + p_i c_prev)   f = s_f(a_f + forget_bias + p_f c_prev)   g = s_g(a_g + p_g c_prev)
//   c = f c_prev + i g, clipped to +-limit
//   o = s_o(a_o + p_o c)  or  s_o(a_o + p_o c_prev)
//   m = o s_output(c)
//
//   a_k     the preactivation of gate k: the input's part plus the recurrent product
//   p_k     the peephole weight of gate k      s_k, s_output   the activation functions of gate k and of c in m
//   m       h or, with a projection, the vector that it multiplies
//   y       the gates i, f, g, o        c_prev, h_prev   the states before the step
//   d...    a gradient: dc of c, dm of m, dy of the gates, dz of the preactivations
//   cotangent   the gradient that the caller gives for an output of the call, such as the gates
//
// metal/README.md has the backward equations. In them the derivative of the clip is 1, unless STOPS is set: then it
// is 0 where the clip changed c.
//
// cell.metal explains the members of the struct, which all cells have, and the bits of its template parameter OPTIONS.
// Parameters without a name are for other cells. The LSTM has four more bits:
//   bits 23-24   0 without peepholes; 1 if o reads the new c, 2 if o reads c_prev
//   bit 25       1 if c is clipped
//   bit 26       1 if the clip stops gradients
// The constants p of a unit, which are the same at all steps, are its peephole weights in the order i, f, g, o, then
// the forget bias and the limit of c.
template <int OPTIONS>
struct LSTMCell {
  // GATE_I ... GATE_O number the gates. OUTPUT: the number of c's activation, which follows those of the gates in
  // OPTIONS. FORGET_BIAS and LIMIT are positions in p, behind the four peephole weights; CONSTANTS is the size of p.
  // The one CARRIED state is c, which the backward step reads before and after the step (READS_..., bit 1). CLIPS: c is
  // clipped to a limit. STOPS: the gradient of c is 0 where the clip changes c.
  enum { GATE_I, GATE_F, GATE_G, GATE_O, OUTPUT, FORGET_BIAS = 4, LIMIT, CONSTANTS };
  enum { GATES = 4, PRODUCTS = 4, KEPT = 4, GRADIENTS = 4, SEGMENTS = 1, CARRIED = 1, PASSES_H = 0 };
  enum { READS_BEFORE = 2, READS_AFTER = 2, INPUTS = 0, SUMMED = 0 };
  enum { NO_PEEPHOLE, O_SEES_CURRENT, O_SEES_PREVIOUS, PEEPHOLE = (OPTIONS >> 23) & 3 };
  enum { CLIPS = (OPTIONS >> 25) & 1, STOPS = (OPTIONS >> 26) & 1 };

  // activation: the number of the activation function of a gate, or of c (gate = OUTPUT).
  static constexpr int block(int gate) { return block_of(OPTIONS, gate); }
  static constexpr int activation(int gate) { return activation_of(OPTIONS, gate); }

  // Read the constants of one unit into p: four peephole weights from a.peephole [D, 4H], then the forget bias and the
  // limit of c from a.numbers. If the call does not have an array, its numbers are 0.
  template <class Index, class Arrays>
  static void constants(thread const Arrays& a, int direction, int H, int unit, thread float* p) {
    for (int gate = 0; gate < 4; ++gate)
      p[gate] = value_at(a.peephole, (Index(4) * direction + block(gate)) * H + unit, 0.0f);
    p[FORGET_BIAS] = value_at(a.numbers, 0, 0.0f);
    p[LIMIT] = value_at(a.numbers, 1, 0.0f);
  }

  // Return the whole preactivation of a gate: a, plus the peephole term p c, plus the forget bias for gate f. a: the
  // input's part plus the recurrent product. p: the gate's peephole weight. c: the cell state that the peephole reads.
  static float preactivation(int gate, float a, float p, float c, float forget_bias) {
    a += gate == GATE_F ? forget_bias : 0.0f;
    return a + (PEEPHOLE == NO_PEEPHOLE ? 0.0f : p * c);
  }

  // Return a gate after its activation. The parameters are those of `preactivation`.
  static float gate(int gate, float a, float p, float c, float forget_bias) {
    return activate(activation(gate), preactivation(gate, a, p, c, forget_bias));
  }

  // Return the new c, computed from the gates i, f, g and from c before the step. If CLIPS, the new c is limited to the
  // range from -limit to limit.
  static float state(float i, float f, float g, float c_prev, float limit) {
    const float c = f * c_prev + i * g;
    return CLIPS ? within(-limit, c, limit) : c;
  }

  // Compute one step. p: the constants. sums: the recurrent products of the gates. s: the states. s[1] is c: on entry
  // before the step, on return the new c. On return s[0] is m, which is h unless there is a projection. y: on entry the
  // input's parts of the preactivations, on return the gates. Gate o is computed last, because its peephole may read
  // the new c. seen: the c that this peephole reads.
  static void forward(
      thread const float* p, thread const float*, thread const float* sums, thread float* s, thread float* y) {
    const float c_prev = s[1];
    for (int k = 0; k < 4; ++k) y[k] += sums[k];
    for (int k = GATE_I; k < GATE_O; ++k) y[k] = gate(k, y[k], p[k], c_prev, p[FORGET_BIAS]);
    s[1] = state(y[GATE_I], y[GATE_F], y[GATE_G], c_prev, p[LIMIT]);
    const float seen = PEEPHOLE == O_SEES_CURRENT ? s[1] : c_prev;
    y[GATE_O] = gate(GATE_O, y[GATE_O], p[GATE_O], seen, p[FORGET_BIAS]);
    s[0] = y[GATE_O] * activate(activation(OUTPUT), s[1]);
  }

  // Return the gradient of the new c, without the peephole terms. It has two parts: dc, which comes from later steps
  // and from the output c, and a part that goes through m = o s, where s = s_output(c). dm: the gradient of m. o: the
  // gate.
  static float state_backward(float dc, float dm, float o, float s) {
    return dc + dm * o * slope(activation(OUTPUT), s);
  }

  // Return the gradient of c before the clip: 0 if the clip changed c, else dc. If |c| < limit, the clip did not change
  // c. If |c| is the limit, f c_prev + i g is computed again: only if it is exactly the limit, too, the clip did not
  // change it.
  static float clip_backward(float dc, float i, float f, float g, float c_prev, float c, float limit) {
    return fabs(c) < limit || fabs(f * c_prev + i * g) == limit ? dc : 0.0f;
  }

  // Return the gradient of a gate's preactivation. In the forward step the gate is multiplied by one factor; for
  // example, i is multiplied by g in c = f c_prev + i g.
  //   dy      the cotangent of the gate: the gradient that the caller gives for it
  //   d       the gradient of c or, for gate o, of m = o s_output(c)
  //   other   the factor                     slope   the derivative of the gate's activation
  static float gate_backward(float dy, float d, float other, float slope) { return (dy + d * other) * slope; }

  // Compute one step in reverse. p: the constants. y: the gates. before, after: the states before and after the step, h
  // first, then c. ds: on entry the gradients of m = o s_output(c) and of the new c; on return ds[1] is the gradient of
  // c_prev, and ds[0] is 0, because only the recurrent product reads h_prev. dz: on entry the cotangents of the gates
  // (the gradients that the caller gives for them), on return the gradients of their preactivations.
  static void backward(
      thread const float* p, thread const float*, thread const float* y, thread const float* before,
      thread const float* after, thread float* ds, thread float* dz, thread float*, thread float*) {
    const float c_prev = before[1], s = activate(activation(OUTPUT), after[1]), dm = ds[0];
    dz[GATE_O] = gate_backward(dz[GATE_O], dm, s, slope(activation(GATE_O), y[GATE_O]));
    float dc = state_backward(ds[1], dm, y[GATE_O], s);
    if (PEEPHOLE == O_SEES_CURRENT) dc += dz[GATE_O] * p[GATE_O];
    if (STOPS) dc = clip_backward(dc, y[GATE_I], y[GATE_F], y[GATE_G], c_prev, after[1], p[LIMIT]);
    dz[GATE_I] = gate_backward(dz[GATE_I], dc, y[GATE_G], slope(activation(GATE_I), y[GATE_I]));
    dz[GATE_F] = gate_backward(dz[GATE_F], dc, c_prev, slope(activation(GATE_F), y[GATE_F]));
    dz[GATE_G] = gate_backward(dz[GATE_G], dc, y[GATE_I], slope(activation(GATE_G), y[GATE_G]));
    dc *= y[GATE_F];
    if (PEEPHOLE != NO_PEEPHOLE) dc += dz[GATE_I] * p[GATE_I] + dz[GATE_F] * p[GATE_F] + dz[GATE_G] * p[GATE_G];
    if (PEEPHOLE == O_SEES_PREVIOUS) dc += dz[GATE_O] * p[GATE_O];
    ds[0] = 0.0f;
    ds[1] = dc;
  }

  // Return the gradient of a gate's recurrent product. It equals dz[gate], the gradient of the preactivation, because
  // the preactivation is the product plus other terms.
  static float product_gradient(int gate, thread const float*, thread const float* dz) { return dz[gate]; }
};
