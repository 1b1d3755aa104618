// array[index] = value, where there is an array.
inline void store(Absent, long, float) {}
template <class A> void store(device A* array, long index, float value) { array[index] = A(value); }
