// What the LSTM cell's forward and backward share: its options, its activations, and arrays that may be absent.
//
// CELL packs the options of a cell into one template number; `mlx_lstm.kernels.cell_number` writes it:
//   bits 0-7 the place of i, f, g, o among the four H-blocks of a 4H axis, 8-22 the activations of i, f, g, o and of
//   the output, 23-24 the peephole, 25 whether c is clipped.

enum Gate { GATE_I, GATE_F, GATE_G, GATE_O, OUTPUT };
enum Activation { IDENTITY, RELU, TANH, SIGMOID, HARD_SIGMOID, HARD_SIGMOID_SIXTH };
enum Peephole { NO_PEEPHOLE, O_SEES_CURRENT, O_SEES_PREVIOUS };

constexpr int place_of(int cell, int gate) { return (cell >> (2 * gate)) & 3; }
constexpr int activation_of(int cell, int gate) { return (cell >> (8 + 3 * gate)) & 7; }
template <int CELL> constant constexpr int PEEPHOLE = (CELL >> 23) & 3;
template <int CELL> constant constexpr bool CLIPS = (CELL >> 25) & 1;

// What stands for an array the caller does not have.
enum Absent { absent };

// array[index], or `otherwise` where there is no array.
template <class V> V value_at(Absent, long, V otherwise) { return otherwise; }
template <class A, class V> V value_at(A array, long index, V) { return V(array[index]); }

inline float activate(int name, float x) {
  switch (name) {
    case RELU: return max(x, 0.0f);
    case TANH: return precise::tanh(x);
    case SIGMOID: return 1.0f / (1.0f + exp(-x));
    case HARD_SIGMOID: return clamp(0.2f * x + 0.5f, 0.0f, 1.0f);
    case HARD_SIGMOID_SIXTH: return clamp(1.0f / 6.0f * x + 0.5f, 0.0f, 1.0f);
    default: return x;
  }
}

// An activation's derivative, written in its output y.
inline float slope(int name, float y) {
  switch (name) {
    case RELU: return y > 0.0f ? 1.0f : 0.0f;
    case TANH: return 1.0f - y * y;
    case SIGMOID: return y * (1.0f - y);
    case HARD_SIGMOID: return y > 0.0f && y < 1.0f ? 0.2f : 0.0f;
    case HARD_SIGMOID_SIXTH: return y > 0.0f && y < 1.0f ? 1.0f / 6.0f : 0.0f;
    default: return 1.0f;
  }
}
