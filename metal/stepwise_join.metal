// Joins rows of several launches into one array, on the way: a launch in a later step copies them, beside its own work.
//
//   pieces  arrays of one or more rows
//   starts  the number of `joined` at which each begins, and where the last one ends
//   first   the first threadgroup along x that joins; threads of a threadgroup, and of all threadgroups that join
template <class X>
struct Pieces {
  const device X* rows[8];
};

template <class X, class Arrays>
void stepwise_join(thread const Pieces<X>& pieces, thread const Arrays& a, uint3 group, uint thread_index) {
  if (group.y + group.z > 0) return;
  for (int n = 0; n < 8; ++n)
    for (long k = a.starts[n] + (group.x - a.first[0]) * a.first[1] + thread_index; k < a.starts[n + 1]; k += a.first[2])
      a.joined[k] = pieces.rows[n][k - a.starts[n]];
}
