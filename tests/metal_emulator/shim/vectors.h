// Metal's vector type vec<T, N>, and the construction of vectors from scalars and shorter vectors.
#pragma once
namespace metal {
template <typename T, int N> using vec = T __attribute__((ext_vector_type(N)));

template <typename V>
struct emu_shape {
  static constexpr constant int size = 1;
  typedef V scalar;
};
template <typename T, int N>
struct emu_shape<T __attribute__((ext_vector_type(N)))> {
  static constexpr constant int size = N;
  typedef T scalar;
};
template <typename V> using emu_scalar = typename emu_shape<V>::scalar;
template <typename V> constexpr constant bool emu_is_vector = (emu_shape<V>::size > 1);
// Bytes of memory that the runtime's checks treat as one unit: those of a scalar or vector element, at most 4.
template <typename T> constexpr constant uint emu_granule = sizeof(emu_scalar<T>) > 4 ? 4u : (uint)sizeof(emu_scalar<T>);

// Writes a scalar, or all elements of a vector, to `vector` from index `position` on, and advances `position`.
template <typename S, typename V, typename X>
EMU_INLINE void emu_append(thread V &vector, thread int &position, X x) {
  if constexpr (emu_is_vector<X>) {
    for (int i = 0; i < emu_shape<X>::size; i++) vector[position++] = (S)x[i];
  } else {
    vector[position++] = (S)x;
  }
}

// Constructs a vector of type V, as float4(...) does in Metal: from one scalar, which all elements get, or from scalars
// and vectors that together have as many elements as V. Examples: float4(1.0f), float4(half4_value), float4(a, b,
// float2_value).
template <typename V, typename... A>
EMU_INLINE V emu_construct(A... a) {
  typedef emu_scalar<V> S;
  constexpr int wanted = emu_shape<V>::size, given = (0 + ... + emu_shape<A>::size);
  if constexpr (sizeof...(A) == 1 && given == 1) {
    S value[1] = {(S)a...};
    return (V)(value[0]);
  } else {
    static_assert(given == wanted, "vector constructor: wrong number of components");
    V result;
    int position = 0;
    (emu_append<S>(result, position, a), ...);
    return result;
  }
}
}
