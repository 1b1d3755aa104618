// Rows of several launches become one array, on the way: a launch in a later step copies them, beside its own work.
//
//   pieces  arrays of one or more rows      starts  the number of `joined` each begins at, and where the last one ends
//   first   the first group along x that joins; threads of a group, and of all groups that join
template <class X>
struct Pieces {
  const device X* rows[8];
};

template <class X>
void stepwise_join(
    thread const Pieces<X>& pieces, const device int64_t* starts, const constant uint* first, device X* joined,
    uint3 group, uint thread_index) {
  if (group.y + group.z > 0) return;
  for (int n = 0; n < 8; ++n)
    for (long k = starts[n] + (group.x - first[0]) * first[1] + thread_index; k < starts[n + 1]; k += first[2])
      joined[k] = pieces.rows[n][k - starts[n]];
}
