// What lays a sweep's rows out in time shares: the rows that are left at its end, joined to arrays of several rows.
//
//   pieces  the arrays, in the order of their launches      starts  at which row each begins, and where the last one ends
template <class X>
struct Rows {
  const device X* pieces[20];
};

// Row m, of `length` numbers.
template <class X>
const device X* row_of(thread const Rows<X>& rows, const device int* starts, int m, long length) {
  const device X* row = rows.pieces[0];
  for (int n = 0; n < 20; ++n)
    if (starts[n] <= m && m < starts[n + 1]) row = rows.pieces[n] + (m - starts[n]) * length;
  return row;
}

// array[index] = value, where there is an array.
inline void store(Absent, long, float) {}
template <class A>
void store(device A* array, long index, float value) { array[index] = A(value); }
