"""Test the shim's simdgroup and quadgroup functions against NumPy. The shim implements MSL on the CPU."""

import numpy as np

from metal_emulator.shim_cases import LANE, QUADS, V, X, check, quads, rows

I32 = X.astype(np.int64)
SMALL = np.where(X % 2 == 0, 1.0, -1.0)
REDUCTIONS = {
    "simd_sum(v)": rows(X.sum(1)),
    "simd_max(v)": rows(X.max(1)),
    "simd_min(v)": rows(X.min(1)),
    "simd_product(int(v) % 2 == 0 ? 1.0f : -1.0f)": rows(SMALL.prod(1)),
    "float(simd_sum(int(v)))": rows(X.sum(1)),
    "float(simd_sum(uint(v + 9.0f)))": rows((X + 9).sum(1)),
    "float(simd_sum(half(v)))": rows(X.sum(1)),
    "float(simd_max(half(v)))": rows(X.max(1)),
    "float(simd_sum(bfloat(v)))": rows(X.sum(1)),
    "simd_sum(float2(v, 1.0f)).y": np.full(64, 32),
    "simd_sum(float4(v)).w": rows(X.sum(1)),
    "float(simd_and(int(v)))": rows(np.bitwise_and.reduce(I32, 1)),
    "float(simd_or(int(v)))": rows(np.bitwise_or.reduce(I32, 1)),
    "float(simd_xor(int(v)))": rows(np.bitwise_xor.reduce(I32, 1)),
    "float(simd_any(v > 7))": rows((X > 7).any(1)),
    "float(simd_all(v > -10))": rows((X > -10).all(1)),
    "float(simd_is_first())": np.tile(LANE == 0, 2),
    "float(popcount(uint(ulong(simd_ballot(v > 0)))))": rows((X > 0).sum(1)),
    "quad_sum(v)": quads(QUADS.sum(1)),
    "quad_product(int(v) % 2 == 0 ? 1.0f : -1.0f)": quads(np.where(QUADS % 2 == 0, 1.0, -1.0).prod(1)),
    "quad_max(v)": quads(QUADS.max(1)),
    "quad_min(v)": quads(QUADS.min(1)),
    "float(quad_and(int(v)))": quads(np.bitwise_and.reduce(QUADS.astype(int), 1)),
    "float(quad_or(int(v)))": quads(np.bitwise_or.reduce(QUADS.astype(int), 1)),
    "float(quad_xor(int(v)))": quads(np.bitwise_xor.reduce(QUADS.astype(int), 1)),
    "simd_prefix_inclusive_sum(v)": X.cumsum(1),
    "simd_prefix_exclusive_sum(v)": X.cumsum(1) - X,
    "simd_prefix_inclusive_product(int(v) % 2 == 0 ? 1.0f : -1.0f)": SMALL.cumprod(1),
    "simd_prefix_exclusive_product(int(v) % 2 == 0 ? 1.0f : -1.0f)": SMALL.cumprod(1) * SMALL,
}
Q = X.reshape(2, 8, 4)
SHUFFLES = {
    "simd_shuffle(v, ushort(31 - l))": X[:, ::-1],
    "simd_broadcast(v, ushort(5))": rows(X[:, 5]),
    "simd_broadcast_first(v)": rows(X[:, 0]),
    "simd_shuffle_xor(v, ushort(3))": X[:, LANE ^ 3],
    "simd_shuffle_down(v, ushort(4))": np.concatenate([X[:, 4:], X[:, 28:]], 1),
    "simd_shuffle_up(v, ushort(4))": np.concatenate([X[:, :4], X[:, :28]], 1),
    "simd_shuffle_rotate_down(v, ushort(4))": np.roll(X, -4, 1),
    "simd_shuffle_rotate_up(v, ushort(4))": np.roll(X, 4, 1),
    "simd_shuffle_and_fill_down(v, v * 2, ushort(4))": np.concatenate([X[:, 4:], 2 * X[:, :4]], 1),
    "simd_shuffle_and_fill_up(v, v * 2, ushort(4))": np.concatenate([2 * X[:, 28:], X[:, :28]], 1),
    "simd_shuffle_and_fill_down(v, v * 2, ushort(1), ushort(8))": np.concatenate(
        [X.reshape(2, 4, 8)[..., 1:], 2 * X.reshape(2, 4, 8)[..., :1]], -1
    ),
    "quad_broadcast(v, ushort(2))": np.repeat(Q[..., 2:3], 4, -1),
    "quad_shuffle(v, ushort(3 - l % 4))": Q[..., ::-1],
    "quad_shuffle_xor(v, ushort(1))": Q[..., [1, 0, 3, 2]],
    "quad_shuffle_down(v, ushort(1))": Q[..., [1, 2, 3, 3]],
    "quad_shuffle_up(v, ushort(1))": Q[..., [0, 0, 1, 2]],
    "float(simd_shuffle(half2(half(v), half(1)), ushort(3)).x)": rows(X[:, 3]),
}


def test_reductions():
    check(REDUCTIONS, [V])


def test_shuffles():
    check(SHUFFLES, [V])
