// Layer normalisation of a cell written by the user, in the kernels that run all time steps in one launch and divide
// the product among lanes. fused_norm.metal has the functions that exchange sums between simdgroups, and explains
// EVERY, part and Peers; fused.metal explains the other names.
//
//   LANES        how many lanes share a unit: 4. They divide the GATES gates of the unit among themselves
//   COUNT        how many gates a lane has at most: number j of a lane belongs to gate LANES j + lane
//   counts       0 for a number of a lane that has no such gate or no unit, else 1
//   x            the numbers to normalise
//   sums         the recurrent products. With Lanes<Cell>::SCATTERS a lane has the product of its own gate only, in
//                sums[r][0]; otherwise all lanes have the products of all gates

// Normalise the recurrent products of all gates or, if IS_SUM, the sums of these products and the input's parts
// numbers[r].z. On return `sums` has the results; if they contain z, z becomes 0. Without SCATTERS a lane has the
// products of all gates: it normalises those of its own gates, and of_lane sends the results to all lanes of the unit.
// The loops over k compare the lane's number with constants, so that the compiler knows every register index.
template <class Cell, int H, int ROWS, class Numbers, int SIZE, int COUNT>
void normalise_gates(
    thread const NormLane<COUNT>& norm, int lane, thread Numbers (&numbers)[ROWS],
    thread float (&sums)[ROWS][SIZE]) {
  constexpr int LANES = Lanes<Cell>::LANES, GATES = Cell::GATES;
  float x[ROWS][COUNT];
  UNROLL for (int r = 0; r < ROWS; ++r)
    UNROLL for (int j = 0; j < COUNT; ++j) {
      float product = sums[r][Lanes<Cell>::SCATTERS ? 0 : LANES * j];
      UNROLL for (int k = 1; k < LANES && !Lanes<Cell>::SCATTERS; ++k)
        product = lane == k ? sums[r][min(LANES * j + k, GATES - 1)] : product;
      x[r][j] = norm.counts[j] == 0.0f ? 0.0f : Norm<Cell>::IS_SUM ? product + numbers[r].z[j] : product;
    }
  using M = NormMemory<Cell, H, ROWS>;
  standardise<H, LANES, M::EVERY, M::EVERY == 1 ? GATES : 1>(
      x, norm.counts, norm.part, norm.eps, norm.index, norm.memory);
  UNROLL for (int r = 0; r < ROWS; ++r)
    UNROLL for (int j = 0; j < COUNT; ++j) {
      const float result = x[r][j] * norm.scale[j] + norm.shift[j];
      if (Norm<Cell>::IS_SUM) numbers[r].z[j] = 0.0f;
      if (Lanes<Cell>::SCATTERS) sums[r][0] = result;
      UNROLL for (int k = 0; k < LANES && LANES * j + k < GATES && !Lanes<Cell>::SCATTERS; ++k)
        sums[r][LANES * j + k] = of_lane<LANES>(result, k);
    }
}

// --- Backward ---
//
// The backward kernel reads two arrays that MLX has computed for all steps, and writes one:
//   norm_y  [T, B, D G H]: the normalised numbers, without scale and shift
//   norm_r  [T, B, D] or, for a norm of each gate, [T, B, D G]: 1 / sqrt(variance + eps)
//   d_product [., B, D G H]: the gradient of the recurrent product, for the steps of the launch

// Read the normalised numbers y and the factors r of step n, for ROWS batch items. now: the offset of the step's first
// element in an array [T, B, D H]. item[r]: the offset of the unit's element of batch item r in an array [B, D H]. at:
// the position of this step and item in an array [T, B, D].
template <class Cell, int H, int ROWS, int COUNT, class Index, class Arrays>
void read_gates(
    thread const Arrays& a, thread const Sweep& sweep, int n, Index now, thread const Index (&item)[ROWS], uint group,
    int lane, int unit, thread NormNumbers<ROWS, COUNT>& numbers) {
  constexpr int LANES = Lanes<Cell>::LANES, GATES = Cell::GATES;
  UNROLL for (int r = 0; r < ROWS; ++r) {
    const int b = min(int(group) * ROWS + r, sweep.B - 1);
    const Index at = (Index(time_of(sweep, n)) * sweep.B + b) * sweep.D + sweep.direction;
    load_blocks<GATES, LANES, H>(a.norm_y, now + item[r], lane, unit, numbers.y[r]);
    UNROLL for (int j = 0; j < COUNT; ++j)
      numbers.r[r][j] = a.norm_r[Norm<Cell>::IS_EACH ? at * GATES + min(LANES * j + lane, GATES - 1) : at];
  }
}

// Copy the gradients d of batch item number r to `numbers`, from which own_products_backward computes the gradients of
// the products. d holds the gradients of preactivations. A preactivation is the norm's result, plus the input's part if
// only the product is normalised. So the first ones, one per gate of the lane, are also the gradients of the norm's
// results; only these are copied. If the item has ended (not `live`), they become 0.
template <int ROWS, int COUNT, int SIZE>
void keep_gradients(bool live, int r, thread const float (&d)[SIZE], thread NormNumbers<ROWS, COUNT>& numbers) {
  UNROLL for (int j = 0; j < COUNT; ++j) numbers.d[r][j] = live ? d[j] : 0.0f;
}

// Compute the gradients of the recurrent products from the gradients of the norms' results in numbers.d. Write them to
// a.d_product, and to `operands` in threadgroup memory, where the product with Wh reads them. `operands` has one row
// per batch item, of ROW vectors of 4 floats. now, item: as in read_gates. The output d_product begins at the launch's
// first time index, so `earlier` is subtracted.
template <class Cell, int H, int ROW, class S, int ROWS, int COUNT, class Index, class Arrays>
void own_products_backward(
    thread const NormLane<COUNT>& norm, thread NormNumbers<ROWS, COUNT>& numbers, thread const Arrays& a,
    Index now, Index earlier, thread const Index (&item)[ROWS], int lane, int unit, threadgroup float4* operands) {
  constexpr int LANES = Lanes<Cell>::LANES;
  UNROLL for (int r = 0; r < ROWS; ++r)
    UNROLL for (int j = 0; j < COUNT; ++j)
      numbers.d[r][j] = norm.counts[j] == 0.0f ? 0.0f : numbers.d[r][j] * norm.scale[j];
  using M = NormMemory<Cell, H, ROWS>;
  standardise_backward<H, LANES, M::EVERY, (M::EVERY == 1 ? int(Cell::GATES) : 1) * H>(
      numbers.d, numbers.y, numbers.r, norm.index, norm.memory);
  UNROLL for (int r = 0; r < ROWS; ++r)
    UNROLL for (int j = 0; j < COUNT; ++j) {
      if (norm.counts[j] == 0.0f) continue;
      const S result = S(numbers.d[r][j]);
      a.d_product[place_of<Cell::GATES, H>(now + (item[r] - earlier), LANES * j + lane, unit)] = result;
      number_at(operands, r * ROW, (LANES * j + lane) * H + unit) = float(result);
    }
}
