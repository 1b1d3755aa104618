"""Tests of the Metal kernels at the edges: infinite numbers, the last digits of an activation, indices that need 64
bits, and quantized weights of many units."""

import re

import mlx.core as mx
import numpy as np
import pytest
from cases import METAL
from kernel_texts import name_of, noted
from on_metal import on_metal
from quantized_cases import check_quantized, quantized_case

from mlx_lstm import cells, gru, lstm, pointwise
from mlx_lstm.engines.cells import GRUCell, LSTMCell, RNNCell
from mlx_lstm.engines.metal import fused as kernels_fused
from mlx_lstm.engines.metal import kernel as kernels
from mlx_lstm.engines.metal import stepwise as kernels_stepwise
from mlx_lstm.engines.packing import Packing
from mlx_lstm.engines.problem import LIMITS, Problem
from mlx_lstm.recurrence._trial import trial_of


def computed(shaders, body, inputs, output):
    """Run the Metal code `body`, which calls functions of the files `shaders`, with one thread per element of the
    first input. Return the array `found` that the code writes. output: (shape, dtype) of `found`."""
    with on_metal(), mx.stream(METAL):
        header = "using Index = long;\n" + kernels.header(shaders, body)
        kernel = mx.fast.metal_kernel(
            name="computed", input_names=list(inputs), output_names=["found"], source=body, header=header
        )
        arrays = [mx.array(value) for value in inputs.values()]
        grid = (arrays[0].size, 1, 1)
        (found,) = kernel(
            inputs=arrays, grid=grid, threadgroup=(1, 1, 1), output_shapes=[output[0]], output_dtypes=[output[1]]
        )
        return np.array(found)


# --- Activations and infinite numbers --------------------------------------------------------------------------------


def squashed(x, is_tanh):
    """Return tanh (if `is_tanh`) or sigmoid of the array x, computed by the shader function `squash`."""
    body = f"const int n = int(thread_position_in_grid.x);\nfound[n] = squash({str(is_tanh).lower()}, x[n]);\n"
    return computed(("arrays", "cell"), body, {"x": x}, (x.shape, mx.float32))


@pytest.mark.not_on_a_mac("digits: those of a GPU's exp2 differ, within Metal's specification")
@pytest.mark.parametrize("is_tanh", [True, False])
def test_activations_have_the_stated_precision(is_tanh):
    """tanh differs from the exact value by at most 4 units in the last place, also near 0, where it is a polynomial.
    The sigmoid differs by at most 4 units in the last place for x >= -4, and by at most -x units for x < -4."""
    rng = np.random.default_rng(0)
    sizes = np.concatenate([np.linspace(1e-4, 0.6, 500), np.exp(rng.uniform(-12, np.log(20), 500))])
    x = (sizes * rng.choice([-1, 1], sizes.size)).astype(np.float32)
    exact = np.tanh(x.astype(np.float64)) if is_tanh else 1 / (1 + np.exp(-x.astype(np.float64)))
    error = np.abs(squashed(x, is_tanh) - exact) / np.spacing(np.abs(exact).astype(np.float32))
    assert (error < (4 if is_tanh else np.maximum(4, -x))).all()


def test_activations_of_large_numbers():
    """sigmoid and tanh stay finite for every argument, although the GPU's fast division is not defined for divisors
    above 2^126."""
    x = np.array([87.5, 88.5, 100, 1e30, np.inf], np.float32)
    np.testing.assert_array_equal(squashed(x, False), 1)
    np.testing.assert_array_equal(squashed(x, True), 1)
    np.testing.assert_array_equal(squashed(-x, True), -1)
    assert (np.abs(squashed(-x, False)) < 1e-37).all()


# Both engines call the same function.
@pytest.mark.parametrize("engine, activation, flip_z", [("fused", "identity", False), ("stepwise", "relu", True)])
def test_an_infinite_candidate_makes_an_infinite_h(engine, activation, flip_z):
    """An infinite candidate n of a GRU gives an infinite h, as z h + (1 - z) n does. The formula n + z (h - n), which
    the shaders use for bounded activations, would give NaN."""
    options = {"flip_z": flip_z, "activations": ("sigmoid", "sigmoid", activation), "engine": engine}
    x, h0 = mx.array([[[0.5, 0.5, np.inf]]]), mx.array([[-2.0]])
    with on_metal(), mx.stream(METAL):
        assert gru(x, None, mx.zeros((3, 1)), h0=h0, **options).h.item() == np.inf


# --- Arrays that need 64-bit indices, and long sequences -------------------------------------------------------------

RECORDER = """
struct Recorder {
  device int64_t* to;
  device float* number;
  device float& operator[](long index) const { *to = index; return *number; }
};
"""


def test_places_of_the_recurrent_input():
    """The shader function `recurrent_input` computes right indices for arrays of more than 2^31 elements. The arrays
    in this test only record the index, so they need no memory."""
    T, B, D, H = 70001, 601, 2, 1021
    t, b, j = T - 2, B - 1, H - 1
    body = f"""
found[3] = 0;
device float* number = (device float*)(found + 3);
using Sizes = decltype(as_field(sizes));
struct Arrays {{
  Recorder h, mask, h_in;
  Sizes sizes;
  Absent h0, lengths, x, ones, x_in;
}};
const Arrays a = {{
  {{found, number}}, {{found + 1, number}}, {{found + 2, number}}, sizes, absent, absent, absent, absent, absent
}};
recurrent_input<float>(a, uint3({b * H + j}, {t}, 1));
"""
    with on_metal(), mx.stream(METAL):
        header = kernels.header(("arrays", "recurrent_input"), body) + RECORDER
        kernel = mx.fast.metal_kernel(
            name="places_of_input", input_names=["sizes"], output_names=["found"], source=body, header=header
        )
        sizes = mx.array([T, B, D, H, 0, 1, 0], mx.int32)
        found = kernel(
            inputs=[sizes], grid=(1, 1, 1), threadgroup=(1, 1, 1), output_shapes=[(4,)], output_dtypes=[mx.int64]
        )[0].tolist()
    item, step = (b * D + 1) * H + j, B * D * H
    assert found[:3] == [(t + 1) * step + item, t * step + item, (T * B + t * B + b) * H + j]


@pytest.mark.parametrize("back", [False, True])
def test_places_of_keep_and_of_the_candidates_product(back):
    """`fused` computes right indices into `keep` (factors on the state) and `q` (the candidate's recurrent product
    of a GRU), and right distances between two steps, if `keep` has more than 2^31 numbers."""
    T, B, D, H = 70001, 2**15 + 3, 2, 1021
    t, b, unit, word = T - 1, B - 1, H - 1, str(back).lower()
    body = f"""
const Sweep sweep = {{0, {T}, {T}, {B}, {D}, 1, true, true}};
Place<ulong> at, next;
first_place<{word}>(sweep, {b}, 3, 2, {H}, {unit}, at);
between_steps<{word}>(sweep, 3, {H}, next);
found[0] = at.keep, found[1] = next.keep, found[2] = at.q, found[3] = next.q;
"""
    found = computed(("arrays", "cell", "fused"), body, {"one": np.zeros(1, np.int32)}, ((4,), mx.int64)).tolist()
    first, sign = (0, 1) if back else (t, -1)  # direction 1 begins its forward pass at the last time index
    expected = [(first * B + b) * D + 1, sign * B * D, ((T + first) * B + b) * H + unit, sign * B * H]
    assert found == expected


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16], ids=str)
@pytest.mark.parametrize("cell", [LSTMCell(), GRUCell(), GRUCell(reset="before"), RNNCell()], ids=str)
def test_a_row_of_many_numbers_has_wide_indices(cell, dtype):
    """`stepwise` uses 64-bit indices if an array has 2^31 elements. Such an array may be the row: the array that one
    launch writes for a step."""
    for H, P in ((1024, 1024), (64, 640), (640, 64)):
        # Besides c (or its gradient), a row holds at most one array per gate and one more: h in the forward pass, or in
        # the backward pass the gradient before it is multiplied by `keep`. So it holds at most gates + 1 arrays.
        for arrays in range(1, cell.gates + 2):
            carries = "c" in cell.outputs or cell.op == "gru"
            of_item = kernels_stepwise.row_length(Problem(1, 1, H, P, cell, dtype), max(H, P), arrays, carries)
            B = -(-LIMITS.index // of_item)
            assert kernels_stepwise.index_bits(Problem(1, B, H, P, cell)) == 64
    assert kernels_stepwise.index_bits(Problem(100, 64, 1024, 1024, cell)) == 32


def by_lstm(engine, z, Wh, h0):
    return lstm(z, None, Wh, None, h0=h0, engine=engine).h


def by_pointwise(engine, z, Wh, h0):
    return pointwise(cells.lstm, z, None, Wh, None, (h0, h0), engine=engine)[0]


@pytest.mark.parametrize(
    "call, engine, T, B, H",
    [
        (by_lstm, "fused", 64, 2**17, 128),
        (by_lstm, "stepwise", 3, 2**18, 1024),
        (by_pointwise, "fused", 2**12, 2**11, 65),
    ],
)
def test_arrays_of_more_than_2_31_elements_reach_the_kernels(call, engine, T, B, H):
    """The forward and the backward pass launch kernels with 64-bit indices if z has 2^31 elements or more. An axis of
    an MLX array may not be that long, so no pass may flatten such an array. No kernel runs here, so the arrays need no
    memory."""
    arrays = [mx.zeros(shape, mx.float16) for shape in ((T, B, 4 * H), (4 * H, H), (B, H))]
    assert arrays[0].size > 2**31
    with noted() as texts:
        _, gradients = mx.vjp(lambda *a: [call(engine, *a)], arrays, [mx.zeros((T, B, H), mx.float16)])
    assert [d.shape for d in gradients] == [a.shape for a in arrays]
    passes = [text for text in texts if re.search("forward|backward", name_of(text))]
    assert len(passes) >= 2 and all(re.search(r"Index = u?long;", text) for text in passes)


def test_steps_of_a_launch():
    """`fused` divides a sequence into launches of at most 4096 steps, and of fewer steps if more would be predicted to
    take longer than 20 ms, as for many threadgroups or large weights."""
    for B, H, T, steps in ((1, 64, 4096, [4096]), (1, 64, 10000, [4096, 4096, 1808]), (1, 256, 2000, [772, 772, 456])):
        problem = Problem(T, B, H, H, LSTMCell())
        assert [count for count, _ in kernels_fused.division(problem, False)] == steps


@pytest.mark.parametrize(
    "cell, H", [(LSTMCell(), 256), (GRUCell(), 256), (GRUCell(reset="before"), 64), (RNNCell(), 1024)]
)
@pytest.mark.parametrize("B", [1, 100, 10**6])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16])
def test_no_launch_is_predicted_to_take_longer_than_20_ms(cell, H, B, dtype):
    """Each launch of both passes is predicted to take at most 20 ms on an M1, unless a single step takes longer."""
    problem = Problem(9999, B, H, H, cell, dtype, bidirectional=True)
    steps = [count for count, _ in kernels_fused.division(problem, False)]
    assert sum(steps) == 9999
    layer = kernels_fused.layer_size(problem)
    both = kernels_fused.step_cycles(layer, kernels_fused.rows_for(layer))
    assert max(steps) == 1 or max(steps) * both / 2 <= 0.02 * 1.278e9


# --- Long rows of quantized weights ----------------------------------------------------------------------------------


@pytest.mark.parametrize("B, H", [(1, 320), (3, 160)])
def test_quantized_rows_that_take_more_than_one_turn(B, H):
    """`stepwise` is right if a row of quantized weights is so long that the lanes of a SIMD group read it in several
    passes: 256 weights per pass for one sequence, 128 for several sequences."""
    with on_metal() as log:
        for packing in ((32, 8, "affine"), (32, 4, "mxfp4")):
            prepared = quantized_case(packing, sizes=(2, B, 32, H, H), op="rnn")
            check_quantized("stepwise", prepared, backward=False)
    assert any("packed_weights" in launch.source for launch in log)


@pytest.mark.parametrize("B, H, least", [(1, 64, 32), (1, 320, 257), (1, 1024, 257), (3, 160, 129)])
def test_the_trial_of_long_quantized_rows_takes_several_turns(B, H, least):
    """If the lanes of a SIMD group need several passes to read a row of quantized weights in a call, they also need
    several passes in the call's trial (the small test run before the first use of kernels)."""
    names = ("x", "Wx", "Wh", "Wh_scales", "Wh_biases", "b")
    problem = Problem(9, B, H, H, LSTMCell(), names=names, packing=Packing(32, 4, "affine"))
    small = trial_of("stepwise", problem).problem
    assert least <= small.H <= H and small.P == small.H < least + 64


WIDE = {
    "lstm, 256 units": ((64, 4, "affine"), (2, 1, 64, 256, 256), {}),
    "rnn, 1024 units": ((64, 2, "affine"), (2, 1, 64, 1024, 1024), {"op": "rnn"}),
}


@pytest.mark.parametrize("name", WIDE)
def test_fused_with_quantized_weights(name):
    """`fused` is right with quantized weights for the largest hidden sizes that it supports."""
    packing, sizes, options = WIDE[name]
    with on_metal() as log:
        prepared = quantized_case(packing, sizes=sizes, quantize=("Wh",), **options)
        check_quantized("fused", prepared, backward="op" in options)
    (sweep,) = (launch for launch in log if re.search("fused_forward", launch.name))
    assert "PackedVector" in sweep.source
