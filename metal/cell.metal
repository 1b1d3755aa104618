// What the cells share: their options as a number, their activations, and arrays that may be absent.
//
// CELL packs the options of a cell into one template number; `engines.metal.launch.cell_number` writes it:
//   bits 0-7 the place of each gate among the H-blocks of a gate axis, 8-22 the activations of the gates and then of
//   the output, from 23 on what the cell's own file says. Gates count as i, f, g, o; or r, z, n; or 0 for the plain
//   cell.

enum Activation { IDENTITY, RELU, TANH, SIGMOID, HARD_SIGMOID, HARD_SIGMOID_SIXTH };

constexpr int place_of(int cell, int gate) { return (cell >> (2 * gate)) & 3; }
constexpr int activation_of(int cell, int gate) { return (cell >> (8 + 3 * gate)) & 7; }

// What stands for an array the caller does not have.
enum Absent { absent };

// array[index], or `otherwise` where there is no array.
template <class V> V value_at(Absent, long, V otherwise) { return otherwise; }
template <class A, class V> V value_at(A array, long index, V) { return V(array[index]); }

// The slope of a hard sigmoid.
inline float rise(int name) { return name == HARD_SIGMOID ? 0.2f : 1.0f / 6.0f; }

// x between two bounds. Metal's own clamp and max drop NaN.
inline float within(float least, float x, float most) { return x < least ? least : x > most ? most : x; }

inline float activate(int name, float x) {
  switch (name) {
    case IDENTITY: return x;
    case RELU: return x < 0.0f ? 0.0f : x;
    case TANH: return precise::tanh(x);
    case SIGMOID: return 1.0f / (1.0f + exp(-x));
    default: return within(0.0f, rise(name) * x + 0.5f, 1.0f);
  }
}

// An activation's derivative, written in its output y.
inline float slope(int name, float y) {
  switch (name) {
    case IDENTITY: return 1.0f;
    case RELU: return y > 0.0f ? 1.0f : 0.0f;
    case TANH: return 1.0f - y * y;
    case SIGMOID: return y * (1.0f - y);
    default: return y > 0.0f && y < 1.0f ? rise(name) : 0.0f;
  }
}
