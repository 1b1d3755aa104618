// What lays a sweep's rows out in time shares: the rows that are left at its end, joined to arrays of several rows.
//
//   pieces  the arrays, in the order of their launches      starts  at which row each begins, and where the last one ends
//   kind    of rows: how many numbers each has, the width of its units, and which row is the first of the kind
template <class X>
struct Rows {
  const device X* pieces[20];
};

// Row m of its kind.
template <class X>
const device X* row_of(thread const Rows<X>& rows, const device int* starts, const constant int* kind, int m) {
  const device X* piece = rows.pieces[0];
  int first = 0;
  m += kind[2];
#pragma clang loop unroll(full)
  for (int n = 1; n < 20; ++n) {
    const int start = starts[n];
    if (start <= m) {
      piece = rows.pieces[n];
      first = start;
    }
  }
  return piece + (m - first) * Index(kind[0]);
}
