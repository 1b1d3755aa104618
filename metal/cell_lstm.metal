// The LSTM cell's options. In CELL: bits 23-24 the peephole, 25 whether c is clipped.

enum Gate { GATE_I, GATE_F, GATE_G, GATE_O, OUTPUT };
enum Peephole { NO_PEEPHOLE, O_SEES_CURRENT, O_SEES_PREVIOUS };

template <int CELL> constant constexpr int PEEPHOLE = (CELL >> 23) & 3;
