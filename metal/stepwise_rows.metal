// Kernels for the "rows": the arrays that the launches of a pass write, one row per launch. During the pass, some rows
// are copied into larger arrays. After the last step all rows are copied into sequences in the order of time. The
// kernels need no barriers, because each thread reads and writes only its own numbers.

// Metal limits the arrays of one launch, so the last launch of a pass cannot read one row from each step. Therefore
// some launches copy the rows of several earlier steps into one array, `joined`, in addition to their own work.
//
//   pieces  arrays of one or more rows
//   starts  the element of `joined` at which each array begins, and the element at which the last one ends
//   first   three numbers: the index along x of the first threadgroup that joins; how many threads one threadgroup has;
//           how many threads all threadgroups that join have together
template <int COUNT, class X>
struct Pieces {
  const device X* rows[COUNT];
};

// Join COUNT pieces. Thread number `own` copies the elements own, own + (the number of all joining threads), ... of
// each.
template <int COUNT, class X, class Arrays>
void stepwise_join(thread const Pieces<COUNT, X>& pieces, thread const Arrays& a, uint3 group, uint thread_index) {
  if (group.y + group.z > 0) return;
  const uint own = (group.x - a.first[0]) * a.first[1] + thread_index;
  for (int n = 0; n < COUNT; ++n)
    for (long k = a.starts[n] + own; k < a.starts[n + 1]; k += a.first[2])
      a.joined[k] = pieces.rows[n][k - a.starts[n]];
}

// --- The launch after all steps ---
//
// It copies the rows (the arrays that the launches of the steps wrote) into sequences. Thread (k, n, d) copies the
// numbers of unit k % width of batch item k / width, from the row of step n, in direction d. width: the number of
// units.
//
//   rows    the arrays that contain the rows, in the order of the launches: up to 20 arrays of one or more rows
//   starts  the index of the first row of each array, and the index at which the last array ends
//   kind    three numbers: the elements of a row, the number of units (width), and the index of the first row. With a
//           projection there are two kinds of rows: first the rows of the cells, then the rows with h or dh
template <class X>
struct Rows {
  const device X* pieces[20];
};

// Return a pointer to row number m of one kind (rows of the cells, or of the projection). A row is what one launch
// wrote. `rows.pieces` are up to 20 arrays (what a launch can bind besides its other arrays), each of one or more rows;
// row starts[n] of all rows is the first one of piece n. kind: three numbers, [0] the elements of a row and [2] the
// index of the first row of this kind. The loop has no exit, so that it can be unrolled: pieces stay in registers.
template <class X>
const device X* row_of(thread const Rows<X>& rows, const device int* starts, const constant int* kind, int m) {
  const device X* piece = rows.pieces[0];
  int first = 0;
  m += kind[2];
#pragma clang loop unroll(full)
  for (int n = 1; n < 20; ++n) {
    const int start = starts[n];
    if (start <= m) {
      piece = rows.pieces[n];
      first = start;
    }
  }
  return piece + (m - first) * Index(kind[0]);
}

// Copy the outputs of a forward pass from its rows (the arrays that the launches wrote) into sequences. hT and cT are
// the states after an item's last step, or h0 and c0 if it has no step. An output may be absent; it is then not copied.
// Template parameters: GATES is the number of saved blocks (gates) in a row, CARRIES the number of float states (c);
// both are 0 if the rows have none, such as the rows that a projection wrote. S: the dtype of the sequences. X: the
// type of a row's elements. ends: whether this is the step after which the item's states are hT and cT.
template <int GATES, int CARRIES, class S, class X, class Arrays>
void stepwise_outputs(
    thread const Rows<X>& rows, const constant int* kind, thread const Arrays& a, uint3 thread_index) {
  const Step s = step_of(int(thread_index.y), a.sizes, thread_index.z);
  const int width = kind[1], b = int(thread_index.x) / width, j = int(thread_index.x) % width;
  if (b >= s.B) return;
  const Index units = Index(s.B) * s.D * width, at = place(s, 0, b, width) + j, now = place(s, s.t, b, width) + j;
  const int steps = value_at(a.lengths, b, s.T);
  const bool ends = steps == 0 ? s.n == 0 : s.t == (s.reverse ? 0 : steps - 1);
  const device X* row = row_of(rows, a.starts, kind, s.n);
  const device S* arrays = (const device S*)row + carried<S>(CARRIES * units);
  for (int k = 0; k < CARRIES; ++k) {
    const Index block = k * width + j, c_at = place(s, 0, b, CARRIES * width) + block;
    const float carry = carry_at(row, c_at);
    store(a.c, place(s, s.t, b, CARRIES * width) + block, carry);
    if (ends) store(a.cT, c_at, steps == 0 ? value_at(a.c0, c_at, 0.0f) : carry);
  }
  const float output = float(arrays[at]);
  store(a.h, now, output);
  if (ends) store(a.hT, at, steps == 0 ? value_at(a.h0, at, 0.0f) : output);
  for (int gate = 0; gate < GATES; ++gate)
    store(a.gates, place(s, s.t, b, GATES * width) + gate * width + j,
        float(arrays[units + place(s, 0, b, GATES * width) + gate * width + j]));
}

// Copy the results of a backward pass from its rows, the arrays that its launches wrote. stepwise_backward.metal
// describes a row. The template parameters are as in a cell's struct (cell.metal): CARRIED counts the states besides h,
// INPUTS the inputs of a step (U), SUMMED the parameters (V); PASSES_H says whether h is read besides in the product.
// The carries are the gradients of the states that bypass the product. A backward pass wrote the row of step n as
// number T - 1 - n.
//    dz      [T, B, D M width]: the gradients of the preactivations, M = GRADIENTS; 0 past an item's end
//    du      [T, B, D U width]: those of the inputs
//    d_out   the gradient of a GRU's recurrent products: dz, with the candidate's block multiplied by the gate r
//    carry   [T, B, D N width] float: the carries before their multiplication by keep; 0 past an item's end
//    dc0     [B, D C width], dw [B, D V width]: from the row of the launch that ran last, the gradients of the first
//            states and of the parameters
// All but dz may be absent. CANDIDATE and RESET are the positions of the blocks of n and r on the gate axis. dh of a
// projection lies in separate rows; a second call copies it as if it were the dz of a cell with one gate.
template <int GRADIENTS, int CANDIDATE, int RESET, int INPUTS, int CARRIED, int PASSES_H, int SUMMED, class S, class X,
    class Arrays>
void stepwise_gradients(
    thread const Rows<X>& rows, const constant int* kind, thread const Arrays& a, uint3 thread_index) {
  constexpr int N = CARRIED + PASSES_H;
  const Step s = step_of(int(thread_index.y), a.sizes, thread_index.z);
  const int width = kind[1], b = int(thread_index.x) / width, j = int(thread_index.x) % width;
  if (b >= s.B) return;
  const Index units = Index(s.B) * s.D * width, of_params = (is_present(a.carry) ? 2 : 1) * N * units;
  const Index ds_at = place(s, 0, b, N * width) + j, dz_at = place(s, 0, b, GRADIENTS * width) + j;
  const device X* row = row_of(rows, a.starts, kind, s.T - 1 - s.n);
  const device S* dz = (const device S*)row + carried<S>(of_params + SUMMED * units);
  const bool live = s.t < value_at(a.lengths, b, s.T);
  for (int k = 0; k < GRADIENTS; ++k) {
    const Index now = place(s, s.t, b, GRADIENTS * width) + j;
    const S d = live ? dz[dz_at + k * width] : S(0.0f);
    const float r = live && k == CANDIDATE ? value_at(a.gates, now + RESET * width, 1.0f) : 1.0f;
    a.dz[now + k * width] = d;
    store(a.d_out, now + k * width, r * float(d));
  }
  for (int k = 0; k < INPUTS; ++k) {
    const Index block = k * width + j, at = units * GRADIENTS + place(s, 0, b, INPUTS * width) + block;
    store(a.du, place(s, s.t, b, INPUTS * width) + block, live ? float(dz[at]) : 0.0f);
  }
  for (int k = 0; is_present(a.carry) && k < N; ++k)
    store(a.carry, place(s, s.t, b, N * width) + k * width + j,
        live ? carry_at(row, N * units + ds_at + k * width) : 0.0f);
  if (s.n != 0) return;
  for (int k = 0; k < CARRIED; ++k)
    store(a.dc0, place(s, 0, b, CARRIED * width) + k * width + j, carry_at(row, ds_at + (k + PASSES_H) * width));
  for (int k = 0; k < SUMMED; ++k) {
    const Index at = place(s, 0, b, SUMMED * width) + k * width + j;
    store(a.dw, at, carry_at(row, of_params + at));
  }
}

// Compute m = o * s_output(c) [D, T, B, H], the input of the projection, at every step; it is 0 past an item's end.
// The kernel reads the gates [T, B, D 4H] and c [T, B, D H].
template <class Cell, class S, class Arrays>
void stepwise_projected(thread const Arrays& a, uint3 thread_index) {
  const Step s = step_of(int(thread_index.y), a.sizes, thread_index.z);
  const int b = int(thread_index.x) / s.H, j = int(thread_index.x) % s.H;
  if (b >= s.B) return;
  const float o = float(a.gates[place(s, s.t, b, 4 * s.H) + Cell::block(Cell::GATE_O) * s.H + j]);
  const float output = activate(Cell::activation(Cell::OUTPUT), a.c[place(s, s.t, b, s.H) + j]);
  a.m[place_by_direction(s, b, s.H) + j] = S(s.t < value_at(a.lengths, b, s.T) ? o * output : 0.0f);
}
