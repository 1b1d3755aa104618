// Kernels that copy rows (stepwise.metal explains this word and other names). After the last step one more launch
// copies all rows into sequences, in the order of time. Metal binds at most 31 arrays to a launch, so this launch
// cannot read each row as a separate array. Therefore some launches of the pass also copy the rows of earlier steps
// into one larger array (stepwise_join). Each thread reads and writes only its own numbers, so no kernel in this file
// needs a barrier.
//
//   piece     an array of one or more rows; the pieces are in the order of the launches
//   starts    the index at which each piece begins, and at which the last one ends: counted in elements for
//             stepwise_join, in rows for the launch after all steps
//   kind      three numbers: [0] the elements of a row; [1] width, the number of units; [2] the index of the first row
//             of this kind. With a projection there are two kinds: rows of the cells, then rows with h or dh
//   carry     in a backward pass the gradient of a state, without the part that goes through the recurrent product
//   carried<S>(n), carry_at(row, n)   how many elements of type S n floats take; float number n of a row
//
// In the launch after all steps, thread (k, n, d) copies the numbers of unit k % width of batch item k / width at step
// n in direction d. A forward pass wrote step n in row n; a backward pass, which runs from the last step to the first,
// in row T - 1 - n.

// The arrays that one launch copies into one larger array: COUNT arrays, each with one or more rows. X: the type of the
// elements.
template <int COUNT, class X>
struct Pieces {
  const device X* rows[COUNT];
};

// Copy COUNT arrays ("pieces") one after the other into a.joined. The launch of a later step does this: its grid has
// additional threadgroups for the copy.
//   a.first    [0] the index along x of the first threadgroup that joins; [1] the threads of a threadgroup; [2] the
//              threads of all threadgroups that join
//   own        the number of this thread among all threads that copy; it copies the elements own, own + a.first[2], ...
// The additional threadgroups exist for every index of the grid along y and z, but only those with y = z = 0 copy.
template <int COUNT, class X, class Arrays>
void stepwise_join(thread const Pieces<COUNT, X>& pieces, thread const Arrays& a, uint3 group, uint thread_index) {
  if (group.y + group.z > 0) return;
  const uint own = (group.x - a.first[0]) * a.first[1] + thread_index;
  for (int n = 0; n < COUNT; ++n)
    for (long k = a.starts[n] + own; k < a.starts[n + 1]; k += a.first[2])
      a.joined[k] = pieces.rows[n][k - a.starts[n]];
}

// --- The launch after all steps ---

// All rows of a pass (a row is the array that one step wrote), for the launch after all steps. Launches before it join
// the rows into at most 20 arrays, the pieces, because Metal binds at most 31 arrays to a launch, and this launch reads
// others, too. The struct always has 20 pointers: if there are fewer pieces, the last pointers are equal.
template <class X>
struct Rows {
  const device X* pieces[20];
};

// Return a pointer to row number m of one kind of rows. starts[n]: the number of the first row in piece n, counted over
// the rows of all kinds. The loop finds the last piece that begins at this row or before. Repeated pieces begin behind
// the last row, so the loop finds none of them. It has no early exit, so that the compiler can unroll it and keep the
// pointers in registers.
template <class X>
const device X* row_of(thread const Rows<X>& rows, const device int* starts, const constant int* kind, int m) {
  const device X* piece = rows.pieces[0];
  int first = 0;
  m += kind[2];
  UNROLL for (int n = 1; n < 20; ++n) {
    const int start = starts[n];
    if (start <= m) {
      piece = rows.pieces[n];
      first = start;
    }
  }
  return piece + (m - first) * Index(kind[0]);
}

// Copy the outputs of a forward pass from its rows into sequences: h, c and the gates of each step, and the last states
// hT and cT. The last states are those after an item's last step, or h0 and c0 if the item has no steps. Outputs that
// the call does not want are absent.
//   GATES     how many numbers of a unit a row has behind h (the gates); 0 if none shall be copied
//   CARRIES   how many floats a unit has in a row (c); 0 for the rows with h that a projection wrote
//   ends      whether this thread writes hT and cT: its step is the item's last one, or step 0 if the item has no steps
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

// Copy the results of a backward pass from its rows into sequences; stepwise_backward.metal describes the order of a
// row's blocks. The template parameters are members of the cell's struct (cell.metal), except for CANDIDATE and RESET,
// which only d_out needs. The letters M, U and N count numbers per unit:
//   dz      [T, B, D M width], M = GRADIENTS: the gradients of the preactivations; 0 past an item's end
//   du      [T, B, D U width], U = INPUTS: the gradients of a user's cell's inputs; 0 past an item's end
//   d_out   the gradient of a GRU's recurrent products: dz, but the candidate's block (number CANDIDATE on the gate
//           axis) times the gate r (block number RESET)
//   carry   [T, B, D N width] float: the N carries before their multiplication by keep; N = CARRIED + PASSES_H: states
//           besides h, and 1 if the cell reads h outside its product
//   dc0     [B, D CARRIED width]: the gradients of the first states besides h
//   dw      [B, D SUMMED width]: the gradients of a user's cell's parameters. dc0 and dw are in the row of the last
//           launch, which runs step n = 0
// All arrays but dz may be absent. With a projection dh lies in separate rows; a second call of this function copies
// them as if they were the dz of a cell with one gate. params_at: where the gradients of the parameters begin in a row.
// The carries lie before them, twice if the call has the array carry.
template <int GRADIENTS, int CANDIDATE, int RESET, int INPUTS, int CARRIED, int PASSES_H, int SUMMED, class S, class X,
    class Arrays>
void stepwise_gradients(
    thread const Rows<X>& rows, const constant int* kind, thread const Arrays& a, uint3 thread_index) {
  constexpr int N = CARRIED + PASSES_H;
  const Step s = step_of(int(thread_index.y), a.sizes, thread_index.z);
  const int width = kind[1], b = int(thread_index.x) / width, j = int(thread_index.x) % width;
  if (b >= s.B) return;
  const Index units = Index(s.B) * s.D * width, params_at = (is_present(a.carry) ? 2 : 1) * N * units;
  const Index ds_at = place(s, 0, b, N * width) + j, dz_at = place(s, 0, b, GRADIENTS * width) + j;
  const device X* row = row_of(rows, a.starts, kind, s.T - 1 - s.n);
  const device S* dz = (const device S*)row + carried<S>(params_at + SUMMED * units);
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
    store(a.dw, at, carry_at(row, params_at + at));
  }
}

// After the last step, copy COUNT blocks of H numbers from the rows of a backward pass into `sequence` [T, B, D COUNT
// width]; write 0 past an item's end. These are the blocks that only a cell with norms has; stepwise_gradients copies
// the other blocks.
//   FLOATS, FIRST   how many floats of a unit, then how many numbers of dtype S, lie before the blocks
template <int COUNT, int FIRST, int FLOATS, class S, class X, class Arrays, class A>
void stepwise_norm_gradients(
    thread const Rows<X>& rows, const constant int* kind, thread const Arrays& a, A sequence, uint3 thread_index) {
  const Step s = step_of(int(thread_index.y), a.sizes, thread_index.z);
  const int width = kind[1], b = int(thread_index.x) / width, j = int(thread_index.x) % width;
  if (b >= s.B) return;
  const Index units = Index(s.B) * s.D * width;
  const device S* arrays =
      (const device S*)row_of(rows, a.starts, kind, s.T - 1 - s.n) + carried<S>(FLOATS * units) + FIRST * units;
  const bool live = s.t < value_at(a.lengths, b, s.T);
  for (int n = 0; n < COUNT; ++n)
    sequence[place(s, s.t, b, COUNT * width) + n * width + j] =
        live ? arrays[place(s, 0, b, COUNT * width) + n * width + j] : S(0.0f);
}

// Compute m = o s_output(c) [D, T, B, H] at every step, the vector that a projection multiplies by Wp. The gradient of
// Wp needs m. The forward pass does not save it, so it is computed again from the gates [T, B, D 4H] and c [T, B, D H];
// it is 0 past an item's end. Cell: the LSTM's struct (cell_lstm.metal), whose OUTPUT is the activation s_output.
template <class Cell, class S, class Arrays>
void stepwise_projected(thread const Arrays& a, uint3 thread_index) {
  const Step s = step_of(int(thread_index.y), a.sizes, thread_index.z);
  const int b = int(thread_index.x) / s.H, j = int(thread_index.x) % s.H;
  if (b >= s.B) return;
  const float o = float(a.gates[place(s, s.t, b, 4 * s.H) + Cell::block(Cell::GATE_O) * s.H + j]);
  const float output = activate(Cell::activation(Cell::OUTPUT), a.c[place(s, s.t, b, s.H) + j]);
  a.m[place_by_direction(s, b, s.H) + j] = S(s.t < value_at(a.lengths, b, s.T) ? o * output : 0.0f);
}
