// Wh [D, G H, H] in the order in which the lanes of the fused kernels read it, with zeros as padding: packed
// [D, simdgroups, COUNT, 32 lanes, 4]. So a lane's vectors lie at fixed distances, those of neighbours side by side,
// and reading them takes neither guards nor addresses. One thread per vector, in the order of `packed`.

// Weight k of what a unit's product sums: forward of row `unit` of H-block `block` of Wh, backward of column `unit` of
// the rows that `block` names: an H-block, all rows, or all but the candidate's. 0 for padding.
constant constexpr int ALL = -1, BUT_CANDIDATE = -2;
template <int CELL, int H, bool BACK, class W>
float weight_of(W Wh, int unit, int block, int k) {
  const int candidate = product_block(CELL, PRODUCTS - 1) * H;
  const int length = !BACK || block >= 0 ? H : block == ALL ? GATES * H : (GATES - 1) * H;
  if (unit >= H || k >= length) return 0.0f;
  if (!BACK) return float(Wh[(block * H + unit) * H + k]);
  const int row = block >= 0 ? block * H + k : block == BUT_CANDIDATE && k >= candidate ? k + H : k;
  return float(Wh[row * H + unit]);
}

// In lanes a vector is a run of a row, the rows of a run one after the other: those of the lane's own unit and then of
// others, the numbers of a slot and of the lane combined by exclusive or. Of two products backward the candidate's is
// the first.
template <int CELL, int H, int UNITS, bool BACK>
void place_in_lanes(int index, int vector, thread int& unit, thread int& block, thread int& k) {
  constexpr int GROUP = LANES * UNITS, PER = BACK ? 1 : PRODUCTS, FIRST = RUNS_OF<H, GROUP>;
  const int s = index % GROUP, slot = vector % (UNITS * PER), run = vector / (UNITS * PER);
  unit = index / GROUP * UNITS + ((slot / PER) ^ (s / LANES));
  block = BACK ? int(ALL) : slot_block(CELL, slot % PER, s % LANES);
  k = 4 * (s + GROUP * run);
  if constexpr (BACK && TWO_PRODUCTS<CELL>) {
    block = run < FIRST ? product_block(CELL, PRODUCTS - 1) : int(BUT_CANDIDATE);
    k -= run < FIRST ? 0 : 4 * GROUP * FIRST;
  }
}

// In matrices a vector is the lane's two numbers of a matrix and the two of the next one.
template <int CELL, bool BACK>
void place_in_matrices(int index, int vector, thread int& unit, thread int& block, thread int& k) {
  constexpr int PER = BACK ? 1 : PRODUCTS;
  unit = index / 32 * 8 + row_of(index % 32);
  block = BACK ? int(ALL) : product_block(CELL, vector % PER);
  k = 16 * (vector / PER) + column_of(index % 32);
}

template <int CELL, int H, int UNITS, int COUNT, bool BACK, bool MATRICES, class S, class W>
void fused_pack(W Wh, device S* packed, uint2 place, uint threads) {
  const int index = int(place.x) / (32 * COUNT) * 32 + int(place.x) % 32, vector = int(place.x) / 32 % COUNT;
  int unit, block, k;
  if (MATRICES) place_in_matrices<CELL, BACK>(index, vector, unit, block, k);
  else place_in_lanes<CELL, H, UNITS, BACK>(index, vector, unit, block, k);
  for (int n = 0; n < 4; ++n) {
    const int at = k + (MATRICES && n > 1 ? n + 6 : n);
    packed[4 * (long(place.y) * (COUNT * threads) + place.x) + n] =
        S(weight_of<CELL, H, BACK>(Wh + long(place.y) * (GATES * H * H), unit, block, at));
  }
}
