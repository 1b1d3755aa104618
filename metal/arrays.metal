// The arrays of a kernel, and arrays that a caller may lack.
//
// A kernel gets its arrays in one struct, `a`. The launch writes the struct's type into the text
// (mlx_lstm/engines/metal/kernel.py): a field per array, with the type of its buffer, or Absent for an array that the
// caller does not have. The functions below take either type, so code for an absent array compiles to nothing.
// MLX binds an array of fewer than 8 elements as `constant`, others as `device`; hence fields of any pointer type.

// The type and the value that stand for an absent array.
enum Absent { absent };

// The type of a field: the type of a kernel's parameter, without the address space that the parameter itself is in,
// which a field may not have. For decltype only.
template <class A> A as_field(A parameter);

inline bool is_present(Absent) { return false; }
template <class A> bool is_present(A) { return true; }

// Return array[index], or `otherwise` if the array is absent.
template <class V> V value_at(Absent, long, V otherwise) { return otherwise; }
template <class A, class V> V value_at(A array, long index, V) { return V(array[index]); }

// Set array[index] to the value, unless the array is absent.
inline void store(Absent, long, float) {}
template <class A> void store(device A* array, long index, float value) { array[index] = A(value); }
