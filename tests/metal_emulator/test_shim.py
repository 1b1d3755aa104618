"""Test the shim's types, vector loads, matrices, atomics and thread attributes against NumPy. The shim implements
MSL on the CPU."""

import mlx.core as mx
import numpy as np
import pytest

from metal_emulator import emulated_metal
from metal_emulator.sample_kernels import Sample
from metal_emulator.shim_cases import QUADS, U, V, check, rows


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=["half", "bfloat"])
def test_narrow_types(dtype):
    narrow = np.array(mx.array(U).astype(dtype).astype(mx.float32)).astype(np.float64)
    table = {
        "metal::exp(v)": np.exp(narrow),
        "metal::precise::tanh(float(v))": np.tanh(narrow),
        "v * v": narrow * narrow,
        "v + T(1)": narrow + 1,
        "metal::max(v, T(0))": np.maximum(narrow, 0),
        "select(v, T(0), v > T(0))": np.minimum(narrow, 0),
        "simd_max(v)": rows(narrow.reshape(2, 32).max(1)),
        "simd_shuffle_xor(v, ushort(1))": narrow.reshape(32, 2)[:, ::-1],
    }
    check(table, [U], rtol=2e-3 if dtype == mx.float16 else 1.6e-2, dtype=dtype)


@pytest.mark.parametrize("name,dtype", [("float", mx.float32), ("half", mx.float16), ("bfloat", mx.bfloat16)])
def test_vector_loads_and_stores(name, dtype):
    kind = f"{name}4"
    source = (
        f"const uint i = thread_position_in_grid.x;\n{kind} q = *(const device {kind}*)(a0 + 4 * i);\n"
        f"*(device {kind}*)(o0 + 4 * i) = q.wzyx;"
    )
    with emulated_metal():
        got = Sample(source, [V], [(64,)], (16, 1, 1), (16, 1, 1), dtype=dtype).run()[0]
    assert np.array_equal(got, QUADS[:, ::-1].reshape(-1))


MATRIX = """
simdgroup_matrix<T, 8, 8> a, b;
simdgroup_matrix<float, 8, 8> c;
threadgroup T tile[64];
threadgroup float result[64];
const uint l = thread_index_in_simdgroup;
for (uint k = l; k < 64; k += 32) tile[k] = a1[k];
for (uint flags = 0; flags < 8; ++flags) {
  threadgroup_barrier(mem_flags::mem_threadgroup);
  simdgroup_load(a, a0, 8, ulong2(0, 0), (flags & 1) != 0);
  simdgroup_load(b, tile, 8, ulong2(0, 0), (flags & 2) != 0);
  simdgroup_multiply(c, a, b);
  simdgroup_multiply_accumulate(c, a, b, c);
  simdgroup_store(c, result, 8, ulong2(0, 0), (flags & 4) != 0);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint k = l; k < 64; k += 32) o0[64 * flags + k] = static_cast<T>(result[k]);
}
"""


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=["float", "half", "bfloat"])
def test_matrices_with_every_transpose(dtype):
    r = np.random.default_rng(1)
    a, b = (r.integers(-2, 3, (8, 8)).astype(np.float32) for _ in range(2))
    sample = Sample(MATRIX, [a.reshape(-1), b.reshape(-1)], [(8, 8, 8)], (32, 1, 1), (32, 1, 1), dtype=dtype)
    with emulated_metal():
        got = sample.run()[0]
    for flags in range(8):
        want = 2 * (a.T if flags & 1 else a) @ (b.T if flags & 2 else b)
        assert np.array_equal(got[flags], want.T if flags & 4 else want)


def test_matrix_origin_elements_and_constructors():
    source = """
    simdgroup_float8x8 m, unit(1.0f), filled = make_filled_simdgroup_matrix<float, 8, 8>(2.0f);
    simdgroup_load(m, a0, 16, ulong2(8, 8));
    simdgroup_float8x8 sum;
    simdgroup_multiply_accumulate(sum, m, unit, filled);
    sum.thread_elements()[0] += 1.0f;
    sum.thread_elements()[1] += 1.0f;
    const uint l = thread_index_in_simdgroup;
    simdgroup_store(sum, o0, 8);"""
    a = np.arange(256, dtype=np.float32).reshape(16, 16)
    with emulated_metal():
        got = Sample(source, [a], [(8, 8)], (32, 1, 1), (32, 1, 1)).run()[0]
    assert np.array_equal(got, a[8:, 8:] + 3)


def test_atomics():
    source = """
    const uint i = thread_position_in_grid.x;
    threadgroup atomic_uint count;
    if (thread_index_in_threadgroup == 0) atomic_store_explicit(&count, 0u, memory_order_relaxed);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    atomic_fetch_add_explicit(&count, 1u, memory_order_relaxed);
    atomic_fetch_add_explicit(&o0[0], a0[i], memory_order_relaxed);
    atomic_fetch_max_explicit(&o0[1], a0[i], memory_order_relaxed);
    atomic_fetch_min_explicit(&o0[2], a0[i], memory_order_relaxed);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const uint total = atomic_load_explicit(&count, memory_order_relaxed);
    if (i == 0) atomic_store_explicit(&o0[3], float(total), memory_order_relaxed);
    """
    sample = Sample(source, [V], [(4,)], (64, 1, 1), (32, 1, 1), init_value=0.0, atomic_outputs=True)
    with emulated_metal():
        got = sample.run()[0]
    assert got.tolist() == [V.sum(), V.max(), V.min(), 32]


def test_attributes():
    names = (
        "thread_position_in_grid.x",
        "thread_position_in_grid.y",
        "thread_position_in_threadgroup.y",
        "threadgroup_position_in_grid.x",
        "threads_per_grid.x",
        "threads_per_threadgroup.x",
        "threadgroups_per_grid.x",
        "thread_index_in_threadgroup",
        "thread_index_in_simdgroup",
        "simdgroup_index_in_threadgroup",
        "simdgroups_per_threadgroup",
        "threads_per_simdgroup",
        "dispatch_threads_per_threadgroup.x",
        "thread_index_in_quadgroup",
    )
    source = "const uint at = thread_position_in_grid.y * 40 + thread_position_in_grid.x;\n"
    source += "\n".join(f"o0[{k * 80} + at] = float({name});" for k, name in enumerate(names))
    with emulated_metal():
        got = Sample(source, [V], [(len(names), 2, 40)], (40, 2, 1), (32, 2, 1)).run()[0]
    y, x = np.mgrid[:2, :40]
    edge = np.where(x < 32, 32, 8)
    index = y * edge + x % 32
    want = [x, y, y, x // 32, 40, edge, 2, index, index % 32, index // 32, -(-2 * edge // 32), 32, 32, index % 4]
    for name, row, value in zip(names, got, want, strict=True):
        assert np.array_equal(row, np.broadcast_to(value, row.shape)), name
