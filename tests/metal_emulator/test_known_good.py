"""Test that correct kernels give the right values and no findings, in every order of threads."""

import mlx.core as mx
import numpy as np
import pytest

from metal_emulator import emulated_metal
from metal_emulator import sample_kernels as samples

ORDERS = ("forward", "reverse", "random")
# 16-bit dtypes: one rounding per step of values up to 4. float32: the rounding errors of a few dozen additions.
TOLERANCE = {mx.float32: 1e-5, mx.float16: 4e-3, mx.bfloat16: 6e-2}
CASES = {
    "elementwise": (samples.elementwise, lambda x, s: [x * s + 1]),
    "pointwise_forward": (samples.pointwise_forward, samples.pointwise_forward_equation),
    "pointwise_backward": (samples.pointwise_backward, samples.pointwise_backward_equation),
    "persistent": (samples.persistent, samples.persistent_equation),
    "matmul": (samples.matmul, lambda a, b: [a.astype(np.float64) @ b]),
    "row_sums": (samples.row_sums, lambda x: [x.astype(np.float64).sum(-1)]),
}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda d: str(d).split(".")[-1])
@pytest.mark.parametrize("name", CASES)
def test_values_and_silence(name, dtype):
    build, equation = CASES[name]
    sample = build(dtype=dtype)
    rounded = [np.array(mx.array(a).astype(dtype).astype(mx.float32)) for a in sample.arrays]
    want, runs = equation(*rounded), []
    for order in ORDERS:
        with emulated_metal(order=order, seed=7) as log:
            runs.append(sample.run())
        assert log[0].findings == []
    for got, expected in zip(runs[0], want, strict=True):
        scale = max(1.0, float(np.abs(expected).max()))
        assert np.abs(got - expected).max() <= TOLERANCE[dtype] * scale
    for other in runs[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(runs[0], other, strict=True))


@pytest.mark.parametrize("version", [310, 320, 400])
def test_metal_versions(version):
    sample = samples.elementwise()
    sample.source += f'static_assert(__METAL_VERSION__ == {version}, "version");\n'
    with emulated_metal(metal_version=version):
        sample.run()


def test_noise_moves_results_within_the_specified_bounds():
    sample = samples.persistent()
    want = samples.persistent_equation(*sample.arrays)[0]
    with emulated_metal():
        exact = sample.run()[0]
    with emulated_metal(noise=True):
        noisy = sample.run()[0]
    assert not np.array_equal(exact, noisy)
    assert np.abs(noisy - want).max() < 1e-5


def test_skewed_inputs():
    with emulated_metal(skew=1):
        got = samples.pointwise_forward().run()
    with emulated_metal():
        assert all(np.array_equal(a, b) for a, b in zip(got, samples.pointwise_forward().run(), strict=True))


def test_fast_tanh_overflows_as_the_specification_defines_it():
    source = "o0[0] = metal::fast::tanh(a0[0]); o0[1] = metal::precise::tanh(a0[0]);"
    sample = samples.Sample(source, [np.full(1, 60, np.float32)], [(2,)], (1, 1, 1), (1, 1, 1))
    with emulated_metal():
        fast, precise = sample.run()[0]
    assert np.isnan(fast) and precise == 1
