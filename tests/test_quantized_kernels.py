"""Tests of the Metal kernels with quantized weights, run in the emulator. They check the results, the bytes that the
kernels read, and the choice of the engine."""

import math
import re
from unittest.mock import patch

import ml_dtypes
import mlx.core as mx
import numpy as np
import pytest
from kernel_calls import Path, fitted, options_of
from machine_code.times import moved_bytes, ours, packed_shapes
from on_metal import matrices_from, on_metal
from quantized_cases import PACKINGS, check_quantized, quantized_case

from mlx_lstm.engines import METAL_ENGINES, choose
from mlx_lstm.engines.metal import fused
from mlx_lstm.engines.packing import Packing
from mlx_lstm.lab.timing.tasks import Size

# {name: (engine, (group size, bits, mode), (T, B, I, H, P), row of ROWS, other options)}. Most kernels of `stepwise`
# that read no quantized weights are those of test_kernel_paths.py, which also runs all options of an LSTM, with a
# projection and both directions, with nvfp4 on each product. The slow tests run each case on the other engine, too.
CASES = {
    "3 bits, large tiles": ("stepwise", (32, 3, "affine"), (2, 33, 5, 40, 32), "lstm", {"quantize": ("Wh",)}),
    "5 bits, gru": ("fused", (32, 5, "affine"), (2, 3, 32, 64, 64), "gru", {"mask": None, "keep": False}),
    "6 bits, gru before": ("fused", (64, 6, "affine"), (2, 2, 64, 64, 64), "gru_before", {}),
    "8 bits, gru before, tiles": ("stepwise", (32, 8, "affine"), (2, 8, 32, 32, 32), "gru_before", {}),
    "2 bits, rnn": ("fused", (128, 2, "affine"), (2, 8, 128, 128, 128), "rnn", {"reverse": True}),
    "mxfp4, gru, tiles": ("stepwise", (32, 4, "mxfp4"), (2, 9, 32, 32, 32), "gru", {}),
    "4 bits, norm": ("fused", (32, 4, "affine"), (2, 3, 32, 64, 64), "lstm, norm", {}),
    "6 bits, gru norm, tiles": ("stepwise", (32, 6, "affine"), (2, 9, 32, 32, 32), "gru, norm", {"lengths": None}),
    "4 bits, gru norm": ("stepwise", (32, 4, "affine"), (2, 3, 32, 32, 32), "gru, norm", {"lengths": None}),
}


@pytest.mark.parametrize(
    "engine, name",
    [
        pytest.param(engine, name, marks=[] if engine == case[0] else pytest.mark.slow)
        for name, case in CASES.items()
        for engine in METAL_ENGINES
        if engine == case[0] or case[2][3] % case[1][0] == 0  # Wh of `fused` has H columns, whole groups of them
    ],
)
def test_cells_directions_options(engine, name):
    _, packing, sizes, row, more = CASES[name]
    options = fitted(options_of(Path(engine, "", False), row) | more, *sizes[:2])
    with on_metal():
        check_quantized(engine, quantized_case(packing, sizes=sizes, **options))


EACH = [
    (32, 1, "affine"),
    (64, 2, "affine"),
    (32, 3, "affine"),
    (128, 4, "affine"),
    (32, 5, "affine"),
    (64, 6, "affine"),
]
EACH += [(32, 8, "affine"), (32, 4, "mxfp4"), (32, 8, "mxfp8"), (16, 4, "nvfp4")]
"""Each mode, number of bits and group size."""


@pytest.mark.not_on_a_mac("bytes: the emulator counts them")
@pytest.mark.parametrize(
    "packing", [pytest.param(p, id=str(p), marks=[] if p in EACH else pytest.mark.slow) for p in PACKINGS]
)
def test_every_mode_width_and_group_is_read_once_a_step(packing):
    """For a batch of one sequence, a step of `stepwise` reads each byte of quantized weights, scales and biases
    exactly once. The test covers every quantization mode, number of bits and group size."""
    group = packing[0]
    H = {16: 48, 32: 64, 64: 64, 128: 128}[group]
    with on_metal(unrolls=True) as log:
        check_quantized("stepwise", quantized_case(packing, sizes=(2, 1, group, H, H)), backward=False)
    steps = [launch for launch in log if "stepwise_forward" in launch.name]
    assert len(steps) == 2
    for launch in steps:
        weights = [traffic for name, traffic in launch.traffic.items() if name.startswith("Wh")]
        assert sum(each.bytes_read for each in weights) == sum(each.size for each in weights)
        assert len(weights) == (3 if packing[2] == "affine" else 2)


@pytest.mark.not_on_a_mac("bytes: the emulator counts them")
@pytest.mark.parametrize(
    "packing, H", [((32, 3, "affine"), 96), ((64, 4, "affine"), 128), ((128, 4, "affine"), 128)], ids=str
)
def test_a_tile_reads_each_byte_once(packing, H):
    """For a batch of 8 sequences, one threadgroup of `stepwise` multiplies all of them by its part of the quantized
    weights. So a time step reads each byte of these weights exactly once."""
    with on_metal() as log:
        check_quantized("stepwise", quantized_case(packing, sizes=(2, 8, packing[0], H, H)), backward=False)
    for launch in [launch for launch in log if "stepwise_forward" in launch.name]:
        weights = [traffic for name, traffic in launch.traffic.items() if name.startswith("Wh")]
        assert sum(each.bytes_read for each in weights) == sum(each.size for each in weights)


FEW = [(32, 1, "affine"), (128, 5, "affine"), (32, 8, "mxfp8")]
"""The cases above run other packings on `fused`."""


@pytest.mark.not_on_a_mac("bytes: the emulator counts them")
@pytest.mark.parametrize(
    "packing", [pytest.param(p, id=str(p), marks=[] if p in FEW else pytest.mark.slow) for p in PACKINGS]
)
def test_fused_reads_every_mode_width_and_group_once_a_call(packing):
    """`fused` reads quantized weights once per call. A first launch sorts them into the order in which the lanes
    read them. The forward kernel then keeps them in registers for all steps."""
    H = {16: 48, 32: 64, 64: 64, 128: 128}[packing[0]]
    with on_metal() as log:
        check_quantized("fused", quantized_case(packing, sizes=(3, 1, packing[0], H, H)), backward=False)
    (arrange,) = (launch for launch in log if "fused_arrange_quantized" in launch.name)
    (sweep,) = (launch for launch in log if "fused_forward" in launch.name)
    for name in ("Wh", "Wh_scales", "Wh_biases")[: 3 if packing[2] == "affine" else 2]:
        assert arrange.traffic[name].distinct_read == arrange.traffic[name].size
    assert sweep.traffic["arranged"].bytes_read == sweep.traffic["arranged"].size


@pytest.mark.not_on_a_mac("bytes: the emulator counts them")
@pytest.mark.parametrize("op, B, rows", [pytest.param("lstm", 17, 2, marks=pytest.mark.slow), ("gru", 65, 4)])
def test_fused_reads_what_registers_do_not_hold_at_every_step(op, B, rows):
    """If only some quantized weights fit in registers, `fused` reads the weights in registers once per threadgroup,
    and all other weights once per threadgroup and step. The arrays are float16, for which `fused` never uses matrix
    products with quantized weights."""
    with on_metal() as log, patch.object(fused, "working_registers", lambda *_: 116):
        prepared = quantized_case((32, 4, "affine"), np.float16, (2, B, 32, 64, 64), op=op)
        check_quantized("fused", prepared, np.float16, backward=False)
    (sweep,) = (launch for launch in log if "fused_forward" in launch.name)
    resident, found = (int(re.search(rf"int {name} = (\d+);", sweep.source)[1]) for name in ("RESIDENT", "ROWS"))
    vectors, read = sweep.traffic["arranged"].size // (16 * sweep.threadgroup[0]), sweep.traffic["arranged"].bytes_read
    assert found == rows and 0 < resident < vectors
    assert read == 16 * sweep.threadgroup[0] * -(-B // rows) * (resident + 2 * (vectors - resident))


def test_a_batch_in_matrices_has_its_weights_unpacked():
    """If `fused` computes a float32 batch with 8 x 8 matrix products, the weights are dequantized before the launch.
    So the kernel that rearranges quantized weights does not run."""
    with on_metal() as log, matrices_from(3):
        check_quantized("fused", quantized_case((32, 4, "affine"), sizes=(2, 3, 32, 32, 32)), backward=False)
    assert {"fused_arrange_quantized" in launch.name for launch in log} == {False}


def test_bfloat16():
    """Scales and biases of 16 bits are right on `stepwise`. A test above has those of `fused`, test_kernel_paths.py has
    quantized weights without biases next to both 16-bit dtypes."""
    prepared = quantized_case((32, 6, "affine"), ml_dtypes.bfloat16, (2, 1, 32, 64, 64))
    with on_metal():
        check_quantized("stepwise", prepared, ml_dtypes.bfloat16, backward=False)


@pytest.mark.parametrize(
    "bits, B, cores, largest",
    [(2, 1, 10, 256), (4, 2, 10, 256), (8, 1, 38, 224), (5, 16, 10, 160), (4, 32, 10, 128), (8, 32, 10, 128)],
)
def test_who_reads_them(bits, B, cores, largest):
    """For float32 arrays and quantized weights, the default engine is `fused` for small H and `stepwise` for large
    H. The parameter `largest` is the largest H with `fused`; the next larger H gets `stepwise`."""
    here = {"device": "gpu", "metal": True, "traced": False, "packing": Packing(32, bits, "affine"), "cores": cores}
    found = {H: choose(sizes=(8, B, 32, H), dtype=mx.float32, **here) for H in (32, largest, largest + 32)}
    assert [choice.engine for choice in found.values()] == ["fused", "fused", "stepwise"]
    where = f"weights of {bits} bits, at B = {B}, H = 32 on {cores} GPU cores, predicted"
    assert found[32].reason.endswith(where)


@pytest.mark.parametrize("packing", [(64, 4, "affine"), (16, 4, "nvfp4")], ids=str)
def test_predictions_know_the_bytes(packing):
    """The predicted bytes of a `stepwise` launch contain 2 / 3 of the bytes of quantized weights, scales and biases.
    The prediction is an average over the 3 time steps of the sequence. Two of them read all weights once, and the first
    reads none, because it has no product. Other tests of this file count the bytes in the emulator."""
    problem, graph = ours(Size(3, 1, 64, 64), mx.float32, "stepwise", "forward", packing=Packing(*packing))
    step = next(launch for launch in graph.launches if "stepwise_forward" in launch.name)
    count = moved_bytes(step, problem) - moved_bytes(step, problem, weights=False)
    shapes = packed_shapes("Wh", (256, 64), mx.float32, Packing(*packing)).values()
    assert 3 * count == pytest.approx(2 * sum(math.prod(shape) * dtype.size for shape, dtype in shapes))
