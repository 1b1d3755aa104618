// Matrices of 8 x 8 elements that the 32 lanes of a simdgroup hold together (Metal's header <metal_simdgroup_matrix>).
// Each lane holds two elements: row matrix_row(), columns matrix_column() and matrix_column() + 1.
//
// The factors and the result of a product may have different element types, e.g. half x half -> float. Products
// accumulate in float.
#pragma once
namespace metal {
EMU_INLINE uint matrix_row() { uint l = emu_lane(); return (l >> 2 & 4) + (l >> 1 & 3); }
EMU_INLINE uint matrix_column() { uint l = emu_lane(); return (l >> 2 & 2) * 2 + (l & 1) * 2; }

template <typename T, int Cols, int Rows>
struct simdgroup_matrix {
  static_assert(Cols == 8 && Rows == 8, "simdgroup_matrix: only 8x8 exists");
  static_assert(is_floating_point_v<T>, "simdgroup_matrix: floating point elements only");
  vec<T, 2> elements;
  EMU_INLINE thread vec<T, 2> &thread_elements() { return *(thread vec<T, 2> *)&elements; }
  EMU_INLINE simdgroup_matrix() { elements = emu_nan_pattern<vec<T, 2>>(); }
  EMU_INLINE explicit simdgroup_matrix(T diagonal) {
    uint row = matrix_row(), column = matrix_column();
    elements[0] = row == column ? diagonal : T(0);
    elements[1] = row == column + 1 ? diagonal : T(0);
  }
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;

template <typename T, int C = 8, int R = 8>
EMU_INLINE simdgroup_matrix<T, C, R> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, C, R> m;
  m.elements[0] = value;
  m.elements[1] = value;
  return m;
}

// Metal requires that all lanes load or store a matrix with the same arguments. Each lane publishes its arguments
// (emu_publish copies them to memory of the runtime), and the runtime compares them (complete_operation in
// ../runtime/simdgroup.h).
EMU_INLINE void emu_same_in_all_lanes(uint operation, ulong pointer, ulong stride, ulong2 origin, bool transpose, uint line) {
  struct Arguments { ulong v[4]; } a = {{pointer, stride, origin.x << 32 | origin.y, transpose}};
  emu_publish(operation, a, line);
}
// clang accepts the index one past the end of an array of matrices. Therefore ../lowering.py replaces each index i of
// an array `a` of matrices by emu_index<EMU_EXTENT(a)>(name, line, i), which reports an index that is too large.
// EMU_EXTENT(a) is the length of the array `a`; if `a` is a pointer, it is the largest number, so that each index
// passes.
#define EMU_EXTENT(a) (__is_array(__remove_reference_t(decltype(a))) ? sizeof(a) / sizeof(a[0]) : ~0ul)
template <ulong EXTENT>
EMU_INLINE ulong emu_index(const constant char *name, uint line, ulong index) {
  if (index < EXTENT) return index;
  emu_bad_index(name, index, EXTENT, line);
  return 0;
}

#define EMU_MATRIX_MEMORY(SPACE)                                                                                      \
  template <typename T, int C, int R>                                                                                 \
  EMU_INLINE void simdgroup_load(thread simdgroup_matrix<T, C, R> &m, const SPACE T *p, ulong stride = C,             \
                                 ulong2 origin = ulong2{0, 0}, bool transpose = false, uint line = __builtin_LINE()) { \
    emu_same_in_all_lanes(100, (ulong)p, stride, origin, transpose, line);                                            \
    uint row = matrix_row(), column = matrix_column();                                                                \
    const SPACE T *q = p + (transpose ? origin.x * stride + origin.y : origin.y * stride + origin.x);                 \
    m.elements[0] = transpose ? q[column * stride + row] : q[row * stride + column];                                  \
    m.elements[1] = transpose ? q[(column + 1) * stride + row] : q[row * stride + column + 1];                        \
  }                                                                                                                   \
  template <typename T, int C, int R>                                                                                 \
  EMU_INLINE void simdgroup_store(simdgroup_matrix<T, C, R> m, SPACE T *p, ulong stride = C,                          \
                                  ulong2 origin = ulong2{0, 0}, bool transpose = false, uint line = __builtin_LINE()) { \
    emu_same_in_all_lanes(101, (ulong)p, stride, origin, transpose, line);                                            \
    uint row = matrix_row(), column = matrix_column();                                                                \
    SPACE T *q = p + (transpose ? origin.x * stride + origin.y : origin.y * stride + origin.x);                       \
    q[transpose ? column * stride + row : row * stride + column] = m.elements[0];                                     \
    q[transpose ? (column + 1) * stride + row : row * stride + column + 1] = m.elements[1];                           \
  }
EMU_MATRIX_MEMORY(device) EMU_MATRIX_MEMORY(threadgroup)

struct emu_fragment { float a[2], b[2], c[2], result[2]; };
template <typename D, typename A, typename B, typename CC, int K, int R, int C>
EMU_INLINE void simdgroup_multiply_accumulate(thread simdgroup_matrix<D, C, R> &d, simdgroup_matrix<A, K, R> a,
                                              simdgroup_matrix<B, C, K> b, simdgroup_matrix<CC, C, R> c,
                                              uint line = __builtin_LINE()) {
  emu_fragment f = {{(float)a.elements[0], (float)a.elements[1]}, {(float)b.elements[0], (float)b.elements[1]},
                    {(float)c.elements[0], (float)c.elements[1]}, {0, 0}};
  f = emu_value(emu_publish(102, f, line), emu_lane());
  d.elements[0] = (D)f.result[0];
  d.elements[1] = (D)f.result[1];
}
template <typename D, typename A, typename B, int K, int R, int C>
EMU_INLINE void simdgroup_multiply(thread simdgroup_matrix<D, C, R> &d, simdgroup_matrix<A, K, R> a,
                                   simdgroup_matrix<B, C, K> b, uint line = __builtin_LINE()) {
  simdgroup_multiply_accumulate(d, a, b, make_filled_simdgroup_matrix<D, C, R>(D(0)), line);
}
template <typename T, int K, int R, int C>
EMU_INLINE simdgroup_matrix<T, C, R> operator*(simdgroup_matrix<T, K, R> a, simdgroup_matrix<T, C, K> b) {
  simdgroup_matrix<T, C, R> d;
  simdgroup_multiply(d, a, b, 0);
  return d;
}
}
