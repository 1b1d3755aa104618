"""Test the shim's math, integer and vector functions against NumPy. The shim implements MSL on the CPU."""

import numpy as np
import pytest

from metal_emulator.shim_cases import P, U, V, check

UNARY = {
    "exp": np.exp,
    "exp2": np.exp2,
    "sin": np.sin,
    "cos": np.cos,
    "tan": np.tan,
    "sinh": np.sinh,
    "cosh": np.cosh,
    "tanh": np.tanh,
    "asinh": np.arcsinh,
    "atan": np.arctan,
    "floor": np.floor,
    "ceil": np.ceil,
    "trunc": np.trunc,
    "rint": np.rint,
    "fabs": np.abs,
    "abs": np.abs,
    "sign": np.sign,
    "exp10": lambda x: 10.0**x,
    "fract": lambda x: x - np.floor(x),
    "saturate": lambda x: np.clip(x, 0, 1),
}
POSITIVE = {
    "log": np.log,
    "log2": np.log2,
    "log10": np.log10,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
}
FAMILIES = ("metal::", "metal::precise::", "metal::fast::")
COMMON_ONLY = ("abs", "sign", "saturate")


@pytest.mark.parametrize("family", FAMILIES)
def test_unary_math(family):
    x, p = U.astype(np.float64), P.astype(np.float64)
    table = {f"{family}{n}(v)": f(x) for n, f in UNARY.items() if family == "metal::" or n not in COMMON_ONLY} | {
        f"{family}{n}(w)": f(p) for n, f in POSITIVE.items()
    }
    check(table, [U, P], rtol=2e-6)


def test_other_math():
    x, p = U.astype(np.float64), P.astype(np.float64)
    table = {
        "pow(w, v)": p**x,
        "powr(w, v)": p**x,
        "atan2(v, w)": np.arctan2(x, p),
        "fmod(v, w)": np.fmod(x, p),
        "fmin(v, w)": np.minimum(x, p),
        "fmax(v, w)": np.maximum(x, p),
        "min(v, w)": np.minimum(x, p),
        "max(v, 0.0f)": np.maximum(x, 0),
        "fdim(w, v)": np.maximum(p - x, 0),
        "divide(v, w)": x / p,
        "fma(v, w, 1.0f)": x * p + 1,
        "clamp(v, -1.0f, 2.0f)": np.clip(x, -1, 2),
        "mix(v, w, 0.25f)": x + (p - x) * 0.25,
        "step(0.5f, v)": x >= 0.5,
        "copysign(w, v)": np.copysign(p, x),
        "ldexp(v, 3)": x * 8,
        "select(v, w, v > 0)": np.where(x > 0, p, x),
        "asin(v / 4)": np.arcsin(x / 4),
        "acos(v / 4)": np.arccos(x / 4),
        "atanh(v / 4)": np.arctanh(x / 4),
        "acosh(w + 1)": np.arccosh(p + 1),
        "sinpi(v)": np.sin(np.pi * x),
        "cospi(v)": np.cos(np.pi * x),
        "round(v * 2)": np.trunc(2 * x + np.copysign(0.5, x)),
        "float(isnan(v / 0.0f - v / 0.0f))": np.ones(64),
        "float(isinf(w / 0.0f))": np.ones(64),
        "float(isfinite(v))": np.ones(64),
        "float(signbit(v))": x < 0,
        "float(half(v) * half(2))": (2 * U.astype(np.float16)).astype(np.float64),
        "metal::numeric_limits<half>::max()": np.full(64, 65504),
    }
    check(table, [U, P], rtol=2e-6)


def test_integers_and_bits():
    n = V.astype(np.int64)
    u = (n & 0xFFFFFFFF).astype(np.uint64)
    table = {
        "float(abs(n))": np.abs(n),
        "float(min(n, 3))": np.minimum(n, 3),
        "float(max(n, 3))": np.maximum(n, 3),
        "float(clamp(n, -2, 2))": np.clip(n, -2, 2),
        "float(popcount(uint(n)))": [bin(int(k)).count("1") for k in u],
        "float(clz(uint(n)))": [32 - int(k).bit_length() for k in u],
        "float(ctz(uint(n) | 64u))": [((int(k) | 64) & -(int(k) | 64)).bit_length() - 1 for k in u],
        "float(mulhi(uint(n), 65536u))": u * 65536 >> 32,
        "float(rotate(uint(n) & 7u, 30u) >> 30)": n & 3,
        "as_type<float>(as_type<uint>(v))": V,
        "float(as_type<int>(v) == as_type<int>(float(n)))": np.ones(64),
        "float(as_type<half2>(0x3C004000u).x)": np.full(64, 2),
        "float(as_type<ushort>(half(1)))": np.full(64, 0x3C00),
    }
    check(table, [V], setup="const int n = int(v);")


def test_vectors():
    table = {
        "f.x + f.y + f.z + f.w": 2 * (V.astype(float) + U),
        "dot(f, f)": 2 * (V.astype(float) ** 2 + U.astype(float) ** 2),
        "f.wzyx.x": U,
        "float4(f.xy, 1.0f, 2.0f).z": np.ones(64),
        "float4(half4(1, 2, 3, 4)).w": np.full(64, 4),
        "float(half4(f).x)": V,
        "vec<T, 4>(v, w, v, w).y": U,
        "max(f, float4(0.0f)).x": np.maximum(V, 0),
        "metal::precise::exp(float2(0.0f, w)).y": np.exp(U.astype(float)),
        "fma(f, f, f).x": V * V + V,
        "float3(1, 2, 3).z": np.full(64, 3),
        "float(bfloat4(bfloat(1), bfloat(2), bfloat(3), bfloat(4)).w)": np.full(64, 4),
        "float(uint3(1, 2, 3).y)": np.full(64, 2),
        "metal::float2(v, w).x": V,
        "select(f, float4(0.0f), f > 0.0f).x": np.minimum(V, 0),
        "float(any(f > 100.0f))": np.zeros(64),
        "float(all(f > -100.0f))": np.ones(64),
        "length(float2(3.0f, 4.0f))": np.full(64, 5),
    }
    check(table, [V, U], setup="const float4 f = float4(v, w, v, w);", rtol=2e-6)
