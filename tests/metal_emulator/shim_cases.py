"""Evaluate MSL expressions for the tests of the shim, which implements MSL's functions on the CPU. One kernel
evaluates many expressions and writes one output row for each."""

import mlx.core as mx
import numpy as np

from metal_emulator import emulated_metal
from metal_emulator.sample_kernels import Sample

V = np.random.default_rng(0).integers(-9, 9, 64).astype(np.float32)
X = V.reshape(2, 32)
QUADS = V.reshape(16, 4)
LANE = np.arange(32)
U = np.linspace(-3, 3, 64, dtype=np.float32)
P = np.linspace(0.1, 4, 64, dtype=np.float32)


def evaluate(expressions: list[str], arrays: list[np.ndarray], setup: str = "", dtype=mx.float32) -> np.ndarray:
    """Return an array with one row per expression and one value per thread. In an expression, `v` and `w` are the
    thread's elements of the first two arrays, and `l` is its lane."""
    names = "vwxyz"
    lines = ["const uint i = thread_position_in_grid.x, l = thread_index_in_simdgroup;"]
    lines += [f"const T {names[k]} = a{k}[i];" for k in range(len(arrays))]
    lines += [setup, *(f"o0[{64 * k} + i] = static_cast<T>({e});" for k, e in enumerate(expressions))]
    sample = Sample("\n".join(lines), arrays, [(len(expressions), 64)], (64, 1, 1), (64, 1, 1), dtype=dtype)
    with emulated_metal():
        return sample.run()[0]


def check(table: dict[str, np.ndarray], arrays: list[np.ndarray], rtol: float = 0.0, **more) -> None:
    got = evaluate(list(table), arrays, **more)
    for (expression, want), row in zip(table.items(), got, strict=True):
        want = np.broadcast_to(np.asarray(want, np.float64).reshape(-1), 64)
        np.testing.assert_allclose(row, want, rtol=rtol, atol=rtol, err_msg=expression)


def rows(values: np.ndarray) -> np.ndarray:
    """Return an array in which each of the values, one per simdgroup, is repeated for the 32 lanes of its simdgroup."""
    return np.repeat(values, 32)


def quads(values: np.ndarray) -> np.ndarray:
    return np.repeat(values, 4)
