// The GRU cell's options. In CELL: bit 23 whether the reset comes before the candidate's product, 24 whether z is the
// weight of n.

enum Gate { GATE_R, GATE_Z, GATE_N };

template <int CELL> constant constexpr bool RESETS_BEFORE = (CELL >> 23) & 1;
template <int CELL> constant constexpr bool FLIPS_Z = (CELL >> 24) & 1;
