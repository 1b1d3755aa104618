// Helpers for the arrays of a kernel, some of which may be missing in a call.
//
// A kernel gets its arrays in one struct, `a`. The launcher (mlx_lstm/engines/metal/kernel.py) generates this struct:
// it has one field per array, with the type of the array's buffer, or Absent for an array that the caller does not
// have. The functions below are overloaded for both types, so code for an absent array compiles to nothing. Fields may
// be `constant` or `device` pointers, because MLX binds an array of fewer than 8 elements as `constant` and others as
// `device`.

// A kernel gets the value `absent`, of type Absent, in place of an array that the caller does not have.
enum Absent { absent };

// Declare the type of a struct's field for the array `parameter`: the parameter's type without the address space of the
// parameter itself, which a field must not have. For example, a pointer `device float*` that lies in the address space
// `constant` becomes a plain `device float*`. The function has no body, because it is used only as
// decltype(as_field(z)).
template <class A> A as_field(A parameter);

// Return whether the caller has this array. The argument's type decides, so the compiler knows the result.
inline bool is_present(Absent) { return false; }
template <class A> bool is_present(A) { return true; }

// Return array[index], or `otherwise` if the caller does not have the array.
template <class V> V value_at(Absent, long, V otherwise) { return otherwise; }
template <class A, class V> V value_at(A array, long index, V) { return V(array[index]); }

// Store the value in array[index]. Do nothing if the caller does not have the array.
inline void store(Absent, long, float) {}
template <class A> void store(device A* array, long index, float value) { array[index] = A(value); }

// UNROLL stands before a loop with a constant number of iterations. The compiler then unrolls the loop, so that it knows
// every index of the arrays in registers.
#define UNROLL _Pragma("clang loop unroll(full)")
