// Metal's atomic functions (header <metal_atomic>). As in Metal, the memory order is always relaxed. The emulator
// changes from one thread to another only where a thread waits, so an ordinary load and store together are atomic
// already. Each function calls emu_atomic_access, which tells the race check that the access is atomic.
#pragma once
namespace metal {
enum memory_order { memory_order_relaxed };
template <typename T>
struct atomic {
  static_assert(is_same_v<T, int> || is_same_v<T, uint> || is_same_v<T, float> || is_same_v<T, bool> || is_same_v<T, ulong>,
                "atomic<T>: T must be int, uint, bool, float or ulong");
  T value;
};
template <typename T> EMU_UNCHECKED T emu_plain_load(ulong p) { return *(device T *)p; }
template <typename T> EMU_UNCHECKED void emu_plain_store(ulong p, T v) { *(device T *)p = v; }
// A parameter of type emu_not_deduced<T> accepts any value that converts to T: only the pointer decides what T is.
template <typename T> struct emu_same { typedef T type; };
template <typename T> using emu_not_deduced = typename emu_same<T>::type;

#define EMU_FETCH(SPACE, name, expression)                                                                         \
  template <typename T>                                                                                            \
  EMU_INLINE T atomic_##name##_explicit(volatile SPACE atomic<T> *p, emu_not_deduced<T> v, memory_order) {         \
    emu_atomic_access((ulong)p, sizeof(T), 1, 1);                                                                  \
    T old = emu_plain_load<T>((ulong)p);                                                                           \
    emu_plain_store<T>((ulong)p, T(expression));                                                                   \
    return old;                                                                                                    \
  }
#define EMU_ATOMICS(SPACE)                                                                                         \
  template <typename T>                                                                                            \
  EMU_INLINE T atomic_load_explicit(const volatile SPACE atomic<T> *p, memory_order) {                             \
    emu_atomic_access((ulong)p, sizeof(T), 1, 0);                                                                  \
    return emu_plain_load<T>((ulong)p);                                                                            \
  }                                                                                                                \
  template <typename T>                                                                                            \
  EMU_INLINE void atomic_store_explicit(volatile SPACE atomic<T> *p, emu_not_deduced<T> v, memory_order) {         \
    emu_atomic_access((ulong)p, sizeof(T), 0, 1);                                                                  \
    emu_plain_store<T>((ulong)p, v);                                                                               \
  }                                                                                                                \
  template <typename T>                                                                                            \
  EMU_INLINE bool atomic_compare_exchange_weak_explicit(volatile SPACE atomic<T> *p, thread T *expected,           \
                                                        emu_not_deduced<T> v, memory_order, memory_order) {        \
    emu_atomic_access((ulong)p, sizeof(T), 1, 1);                                                                  \
    T old = emu_plain_load<T>((ulong)p);                                                                           \
    bool same = old == *expected;                                                                                  \
    if (same) emu_plain_store<T>((ulong)p, v);                                                                     \
    *expected = old;                                                                                               \
    return same;                                                                                                   \
  }                                                                                                                \
  EMU_FETCH(SPACE, exchange, v) EMU_FETCH(SPACE, fetch_add, old + v) EMU_FETCH(SPACE, fetch_sub, old - v)          \
  EMU_FETCH(SPACE, fetch_min, v < old ? v : old) EMU_FETCH(SPACE, fetch_max, old < v ? v : old)                    \
  EMU_FETCH(SPACE, fetch_and, old & v) EMU_FETCH(SPACE, fetch_or, old | v) EMU_FETCH(SPACE, fetch_xor, old ^ v)
EMU_ATOMICS(device) EMU_ATOMICS(threadgroup)
}
// These names are macros and not types, because OpenCL already has other types with some of these names.
#define atomic_int metal::atomic<int>
#define atomic_uint metal::atomic<uint>
#define atomic_bool metal::atomic<bool>
#define atomic_float metal::atomic<float>
