// Type traits and limits of number types (Metal's headers <metal_type_traits> and <metal_limits>).
#pragma once
namespace metal {
template <typename T, T v>
struct integral_constant {
  static constexpr constant T value = v;
  typedef T value_type;
  typedef integral_constant type;
  constexpr operator T() const { return v; }
  constexpr T operator()() const { return v; }
};
template <bool B> using bool_constant = integral_constant<bool, B>;
typedef bool_constant<true> true_type;
typedef bool_constant<false> false_type;
template <bool B, typename T = void> struct enable_if {};
template <typename T> struct enable_if<true, T> { typedef T type; };
template <bool B, typename T = void> using enable_if_t = typename enable_if<B, T>::type;
template <bool B, typename T, typename U> struct conditional { typedef T type; };
template <typename T, typename U> struct conditional<false, T, U> { typedef U type; };
template <bool B, typename T, typename U> using conditional_t = typename conditional<B, T, U>::type;
template <typename T> using remove_cv_t = __remove_cv(T);
template <typename T> struct remove_cv { typedef __remove_cv(T) type; };
template <typename T> using remove_reference_t = __remove_reference_t(T);
template <typename T> struct remove_reference { typedef __remove_reference_t(T) type; };
template <typename T> using make_unsigned_t = __make_unsigned(T);
template <typename T> struct make_unsigned { typedef __make_unsigned(T) type; };
template <typename T> using make_signed_t = __make_signed(T);
template <typename T> struct make_signed { typedef __make_signed(T) type; };

#define EMU_TRAIT(name, builtin)                                    \
  template <typename T> constexpr constant bool name##_v = builtin(T); \
  template <typename T> struct name : bool_constant<builtin(T)> {};
#define EMU_TRAIT2(name, builtin)                                                     \
  template <typename T, typename U> constexpr constant bool name##_v = builtin(T, U); \
  template <typename T, typename U> struct name : bool_constant<builtin(T, U)> {};
EMU_TRAIT2(is_same, __is_same) EMU_TRAIT2(is_convertible, __is_convertible) EMU_TRAIT2(is_base_of, __is_base_of)
EMU_TRAIT2(is_constructible, __is_constructible)
EMU_TRAIT(is_floating_point, __is_floating_point) EMU_TRAIT(is_integral, __is_integral)
EMU_TRAIT(is_arithmetic, __is_arithmetic) EMU_TRAIT(is_signed, __is_signed) EMU_TRAIT(is_unsigned, __is_unsigned)
EMU_TRAIT(is_trivial, __is_trivial) EMU_TRAIT(is_enum, __is_enum) EMU_TRAIT(is_class, __is_class)
EMU_TRAIT(is_const, __is_const) EMU_TRAIT(is_pointer, __is_pointer) EMU_TRAIT(is_void, __is_void)
EMU_TRAIT(is_reference, __is_reference)

template <typename T> struct remove_addrspace { typedef T type; };
template <typename T> struct remove_addrspace<device T> { typedef T type; };
template <typename T> struct remove_addrspace<threadgroup T> { typedef T type; };
template <typename T> struct remove_addrspace<constant T> { typedef T type; };
template <typename T> struct remove_addrspace<thread T> { typedef T type; };
template <typename T> using remove_addrspace_t = typename remove_addrspace<T>::type;
template <typename B> struct negation : bool_constant<!bool(B::value)> {};
template <typename... B> struct conjunction : true_type {};
template <typename B> struct conjunction<B> : B {};
template <typename B, typename... R>
struct conjunction<B, R...> : conditional_t<bool(B::value), conjunction<R...>, B> {};
template <typename... B> struct disjunction : false_type {};
template <typename B> struct disjunction<B> : B {};
template <typename B, typename... R>
struct disjunction<B, R...> : conditional_t<bool(B::value), B, disjunction<R...>> {};
template <typename... B> struct _disjunction : disjunction<B...> {};
template <typename T> using uniform = T;
template <typename T> EMU_INLINE T make_uniform(T x) { return x; }
template <typename T, size_t N>
struct array {
  T elements[N];
  EMU_INLINE T operator[](size_t i) const { return elements[i]; }
  EMU_INLINE size_t size() const { return N; }
};

template <typename T> struct numeric_limits;
#define EMU_INTEGER_LIMITS(T, low, high)                                          \
  template <> struct numeric_limits<T> {                                          \
    static constexpr T min() { return low; }                                      \
    static constexpr T max() { return high; }                                     \
    static constexpr T lowest() { return low; }                                   \
    static constexpr T infinity() { return 0; }                                   \
    static constexpr constant bool is_integer = true;                             \
    static constexpr constant bool is_signed = (low) < 0;                         \
    static constexpr constant int digits = sizeof(T) * 8 - ((low) < 0);           \
  };
EMU_INTEGER_LIMITS(bool, false, true)
EMU_INTEGER_LIMITS(char, -128, 127)
EMU_INTEGER_LIMITS(int8_t, -128, 127)
EMU_INTEGER_LIMITS(uchar, 0, 255)
EMU_INTEGER_LIMITS(short, -32768, 32767)
EMU_INTEGER_LIMITS(ushort, 0, 65535)
EMU_INTEGER_LIMITS(int, -2147483647 - 1, 2147483647)
EMU_INTEGER_LIMITS(uint, 0u, 4294967295u)
EMU_INTEGER_LIMITS(long, -9223372036854775807l - 1, 9223372036854775807l)
EMU_INTEGER_LIMITS(ulong, 0ul, 18446744073709551615ul)
#define EMU_FLOAT_LIMITS(T, B, smallest, largest, ulp, inf, nan)              \
  template <> struct numeric_limits<T> {                                      \
    static constexpr T min() { return as_type<T>(B(smallest)); }              \
    static constexpr T max() { return as_type<T>(B(largest)); }               \
    static constexpr T lowest() { return -as_type<T>(B(largest)); }           \
    static constexpr T epsilon() { return as_type<T>(B(ulp)); }               \
    static constexpr T infinity() { return as_type<T>(B(inf)); }              \
    static constexpr T quiet_NaN() { return as_type<T>(B(nan)); }             \
    static constexpr constant bool is_integer = false;                        \
    static constexpr constant bool is_signed = true;                          \
  };
EMU_FLOAT_LIMITS(float, uint, 0x00800000, 0x7F7FFFFF, 0x34000000, 0x7F800000, 0x7FC00000)
EMU_FLOAT_LIMITS(half, ushort, 0x0400, 0x7BFF, 0x1400, 0x7C00, 0x7E00)
EMU_FLOAT_LIMITS(bfloat, ushort, 0x0080, 0x7F7F, 0x3C00, 0x7F80, 0x7FC0)
}
