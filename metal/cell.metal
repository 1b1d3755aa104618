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

inline bool is_present(Absent) { return false; }
template <class A> bool is_present(A) { return true; }

// array[index], or `otherwise` where there is no array.
template <class V> V value_at(Absent, long, V otherwise) { return otherwise; }
template <class A, class V> V value_at(A array, long index, V) { return V(array[index]); }

// The slope of a hard sigmoid.
inline float rise(int name) { return name == HARD_SIGMOID ? 0.2f : 1.0f / 6.0f; }

// x between two bounds. Metal's own clamp and max drop NaN.
inline float within(float least, float x, float most) { return x < least ? least : x > most ? most : x; }

// The logistic function of x, or tanh x, so that lanes may differ in it: one exp2 and one reciprocal. Near 0, where
// 2 y - 1 has lost digits, tanh is a polynomial fitted to it: both are right to about 3 units in the last place.
inline float squash(bool is_tanh, float x) {
  const float power = x * (is_tanh ? -2.88539008f : -1.44269504f);
  // Above 2^126 a reciprocal need not be right. NaN stays NaN.
  const float y = fast::divide(1.0f, 1.0f + exp2(power > 126.0f ? 126.0f : power));
  const float z = x * x;
  const float near = x + x * z * (-0.333329466f + z * (0.13320725f + z * (-0.0526718108f + z * 0.0164375759f)));
  const float far = is_tanh ? 2.0f * y - 1.0f : y;
  return is_tanh && z < 0.3f ? near : far;
}

inline float activate(int name, float x) {
  switch (name) {
    case IDENTITY: return x;
    case RELU: return x < 0.0f ? 0.0f : x;
    case TANH: return squash(true, x);
    case SIGMOID: return squash(false, x);
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
