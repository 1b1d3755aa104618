// Helpers for the arrays of a kernel. The caller may not have all of these arrays.
//
// A kernel gets its arrays in one struct, `a`. The launcher (mlx_lstm/engines/metal/kernel.py) generates this struct:
// it has one field per array, with the type of the array's buffer, or Absent for an array that the caller does not
// have. The functions below are overloaded for both types, so code for an absent array compiles to nothing. Fields may
// be `constant` or `device` pointers, because MLX binds an array of fewer than 8 elements as `constant` and others as
// `device`.

// The type that a kernel gets in place of an array that the caller does not have, and its only value.
enum Absent { absent };

// Used only in decltype, so it has no body: decltype(as_field(z)) is the type of the struct's field for the array z. It
// is the type of the kernel's parameter z without the address space of the parameter itself, which the field of a
// struct must not have.
template <class A> A as_field(A parameter);

// Return whether the caller has this array. The compiler knows it from the type.
inline bool is_present(Absent) { return false; }
template <class A> bool is_present(A) { return true; }

// Return array[index], or `otherwise` if the array is absent.
template <class V> V value_at(Absent, long, V otherwise) { return otherwise; }
template <class A, class V> V value_at(A array, long index, V) { return V(array[index]); }

// Store the value in array[index]. Do nothing if the array is absent.
inline void store(Absent, long, float) {}
template <class A> void store(device A* array, long index, float value) { array[index] = A(value); }
