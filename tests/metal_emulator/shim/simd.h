// Functions in which the lanes (threads) of a simdgroup exchange values (Metal's header <metal_simdgroup>). In each
// function a lane publishes its value (copies it to where all lanes can read it), waits for the other lanes, and then
// combines the values that it needs.
//
// The first argument of emu_publish is the function's number. The runtime compares the numbers to check that all lanes
// call the same function. They are below 100; matrix operations have numbers from 100 on (matrix.h).
#pragma once
namespace metal {
template <typename T>
struct emu_lanes {
  thread char *slots;
  uint active;
};
template <typename T>
EMU_INLINE emu_lanes<T> emu_publish(uint operation, T value, uint line) {
  static_assert(sizeof(T) <= 64, "a slot holds 64 bytes");
  emu_lanes<T> lanes;
  lanes.slots = (thread char *)emu_exchange(operation, &value, sizeof(T), line, &lanes.active);
  return lanes;
}
template <typename T>
EMU_UNCHECKED T emu_value(emu_lanes<T> lanes, uint lane) {
  T r;
  __builtin_memcpy(&r, lanes.slots + lane * 64, sizeof(T));
  return r;
}
template <typename T>
EMU_INLINE T emu_nan_pattern() {
  T r;
  __builtin_memset(&r, 0xFF, sizeof(T));
  return r;
}
template <typename T>
EMU_INLINE T emu_value_of(emu_lanes<T> lanes, uint lane, uint line) {
  if (lane < 32 && (lanes.active >> lane & 1)) return emu_value(lanes, lane);
  emu_bad_lane(lane, line);
  return emu_nan_pattern<T>();
}
EMU_INLINE uint emu_lane() { return emu_attribute(8, 0); }

template <typename T>
constexpr constant bool emu_simd_type = sizeof(emu_scalar<T>) <= 4 && is_arithmetic_v<emu_scalar<T>> &&
                                        !is_same_v<emu_scalar<T>, bfloat> && !is_same_v<emu_scalar<T>, bool>;
#define EMU_SIMD template <typename T> EMU_INLINE enable_if_t<emu_simd_type<T>, T>

// Defines a function that combines the values `x` of the lanes `first` to `last` - 1, one after the other, into the
// result `r`. Each lane has stored its value in `lanes.slots` before (emu_publish). `expression` computes the new r
// from r and x.
#define EMU_REDUCTION(name, number, expression)                                                       \
  template <typename T>                                                                               \
  EMU_UNCHECKED T emu_##name(emu_lanes<T> lanes, T r, uint first, uint last) {                        \
    for (uint lane = first; lane < last; lane++) {                                                    \
      if (!(lanes.active >> lane & 1)) continue;                                                      \
      T x;                                                                                            \
      __builtin_memcpy(&x, lanes.slots + lane * 64, sizeof(T));                                       \
      r = expression;                                                                                 \
    }                                                                                                 \
    return r;                                                                                         \
  }
#define EMU_WHOLE(name, number, start)                                                                \
  EMU_SIMD simd_##name(T v, uint line = __builtin_LINE()) {                                           \
    return emu_##name(emu_publish(number, v, line), T(start), 0, 32);                                 \
  }                                                                                                   \
  EMU_SIMD quad_##name(T v, uint line = __builtin_LINE()) {                                           \
    uint first = emu_lane() & ~3u;                                                                    \
    return emu_##name(emu_publish(number + 20, v, line), T(start), first, first + 4);                 \
  }
EMU_REDUCTION(sum, 1, r + x) EMU_WHOLE(sum, 1, 0)
EMU_REDUCTION(product, 2, r * x) EMU_WHOLE(product, 2, 1)
EMU_REDUCTION(max, 3, max(r, x)) EMU_WHOLE(max, 3, v)
EMU_REDUCTION(min, 4, min(r, x)) EMU_WHOLE(min, 4, v)
EMU_REDUCTION(and, 5, r & x) EMU_WHOLE(and, 5, -1)
EMU_REDUCTION(or, 6, r | x) EMU_WHOLE(or, 6, 0)
EMU_REDUCTION(xor, 7, r ^ x) EMU_WHOLE(xor, 7, 0)
#define EMU_PREFIX(name, number, start)                                                               \
  EMU_SIMD simd_prefix_inclusive_##name(T v, uint line = __builtin_LINE()) {                          \
    return emu_##name(emu_publish(number, v, line), T(start), 0, emu_lane() + 1);                     \
  }                                                                                                   \
  EMU_SIMD simd_prefix_exclusive_##name(T v, uint line = __builtin_LINE()) {                          \
    return emu_##name(emu_publish(number + 2, v, line), T(start), 0, emu_lane());                     \
  }
EMU_PREFIX(sum, 8, 0) EMU_PREFIX(product, 9, 1)

EMU_SIMD simd_shuffle(T v, ushort lane, uint line = __builtin_LINE()) {
  return emu_value_of(emu_publish(12, v, line), lane, line);
}
EMU_SIMD simd_broadcast(T v, ushort lane, uint line = __builtin_LINE()) {
  return emu_value_of(emu_publish(13, v, line), lane, line);
}
EMU_SIMD simd_broadcast_first(T v, uint line = __builtin_LINE()) {
  emu_lanes<T> lanes = emu_publish(14, v, line);
  return emu_value(lanes, __builtin_ctz(lanes.active));
}
EMU_SIMD simd_shuffle_xor(T v, ushort mask, uint line = __builtin_LINE()) {
  return emu_value_of(emu_publish(15, v, line), emu_lane() ^ mask, line);
}
// simd_shuffle_down returns the value of the lane whose number is larger by `delta`, simd_shuffle_up that of the lane
// whose number is smaller by `delta`. If no lane has this number, the caller gets its own value back. The value of a
// lane that has not called the function is undefined in Metal; return NaN for it.
EMU_SIMD simd_shuffle_down(T v, ushort delta, uint line = __builtin_LINE()) {
  emu_lanes<T> lanes = emu_publish(16, v, line);
  uint lane = emu_lane() + delta;
  return lane >= 32 ? v : lanes.active >> lane & 1 ? emu_value(lanes, lane) : emu_nan_pattern<T>();
}
EMU_SIMD simd_shuffle_up(T v, ushort delta, uint line = __builtin_LINE()) {
  emu_lanes<T> lanes = emu_publish(17, v, line);
  uint lane = emu_lane() - delta;
  return lane >= 32 ? v : lanes.active >> lane & 1 ? emu_value(lanes, lane) : emu_nan_pattern<T>();
}
EMU_SIMD simd_shuffle_rotate_down(T v, ushort delta, uint line = __builtin_LINE()) {
  return emu_value_of(emu_publish(18, v, line), (emu_lane() + delta) & 31, line);
}
EMU_SIMD simd_shuffle_rotate_up(T v, ushort delta, uint line = __builtin_LINE()) {
  return emu_value_of(emu_publish(19, v, line), (emu_lane() - delta) & 31, line);
}
EMU_SIMD simd_shuffle_and_fill_down(T v, T fill, ushort delta, ushort modulo = 32, uint line = __builtin_LINE()) {
  emu_lanes<T> values = emu_publish(50, v, line), fills = emu_publish(51, fill, line);
  uint first = emu_lane() & ~(modulo - 1u), i = (emu_lane() & (modulo - 1u)) + delta;
  return i < modulo ? emu_value_of(values, first + i, line) : emu_value_of(fills, first + i - modulo, line);
}
EMU_SIMD simd_shuffle_and_fill_up(T v, T fill, ushort delta, ushort modulo = 32, uint line = __builtin_LINE()) {
  emu_lanes<T> values = emu_publish(52, v, line), fills = emu_publish(53, fill, line);
  uint first = emu_lane() & ~(modulo - 1u), i = emu_lane() & (modulo - 1u);
  return i >= delta ? emu_value_of(values, first + i - delta, line)
                    : emu_value_of(fills, first + i - delta + modulo, line);
}

struct simd_vote {
  typedef ulong vote_t;
  ulong bits;
  constexpr simd_vote(ulong b) : bits(b) {}
  constexpr explicit operator ulong() const { return bits; }
};
EMU_INLINE simd_vote simd_ballot(bool p, uint line = __builtin_LINE()) {
  return ulong(emu_or(emu_publish<uint>(54, p ? 1u << emu_lane() : 0u, line), 0u, 0, 32));
}
EMU_INLINE bool simd_any(bool p, uint line = __builtin_LINE()) { return ulong(simd_ballot(p, line)) != 0; }
EMU_INLINE bool simd_all(bool p, uint line = __builtin_LINE()) { return ulong(simd_ballot(!p, line)) == 0; }
EMU_INLINE bool simd_is_first(uint line = __builtin_LINE()) {
  return __builtin_ctz(emu_publish<uint>(55, 0, line).active) == emu_lane();
}

EMU_SIMD quad_broadcast(T v, ushort lane, uint line = __builtin_LINE()) {
  return emu_value_of(emu_publish(56, v, line), lane < 4 ? (emu_lane() & ~3u) + lane : 32 + lane, line);
}
EMU_SIMD quad_shuffle(T v, ushort lane, uint line = __builtin_LINE()) {
  return emu_value_of(emu_publish(57, v, line), lane < 4 ? (emu_lane() & ~3u) + lane : 32 + lane, line);
}
EMU_SIMD quad_shuffle_xor(T v, ushort mask, uint line = __builtin_LINE()) {
  return emu_value_of(emu_publish(58, v, line), mask < 4 ? emu_lane() ^ mask : 32 + mask, line);
}
EMU_SIMD quad_shuffle_down(T v, ushort delta, uint line = __builtin_LINE()) {
  emu_lanes<T> lanes = emu_publish(59, v, line);
  return (emu_lane() & 3) + delta < 4 ? emu_value_of(lanes, emu_lane() + delta, line) : v;
}
EMU_SIMD quad_shuffle_up(T v, ushort delta, uint line = __builtin_LINE()) {
  emu_lanes<T> lanes = emu_publish(60, v, line);
  return (emu_lane() & 3) >= delta ? emu_value_of(lanes, emu_lane() - delta, line) : v;
}
}
