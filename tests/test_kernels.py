"""Tests of the Metal engines against the float64 oracle. The emulator, or on a Mac the GPU, runs the shaders. Every
output buffer starts as NaN, so that a missing write is noticed."""

import re
from collections import Counter
from unittest.mock import patch

import ml_dtypes
import mlx.core as mx
import numpy as np
import pytest
from assertions import assert_within, keeps_off_kinks
from cases import (
    BOTH,
    CELLS,
    METAL,
    OPTIONS,
    OUTPUTS,
    ROUNDING_MARGIN,
    combination,
    draw,
    draw_away_from_kinks,
    draw_cotangents,
    elementwise_bounds,
    is_in_range,
    judge,
    run,
)
from kernel_calls import usual_call
from on_metal import (
    BATCHES,
    in_turns,
    matrices_from,
    on_metal,
    on_one_engine,
    options_at,
)

from mlx_lstm.engines import METAL_ENGINES
from mlx_lstm.engines.cells import GRUCell, LSTMCell, RNNCell
from mlx_lstm.engines.metal import fused as kernels_fused
from mlx_lstm.engines.metal import kernel as kernels
from mlx_lstm.engines.problem import Problem, limited
from mlx_lstm.oracle import ARRAYS, backward, forward

ENGINES = METAL_ENGINES
WAYS = [{"reverse": False}, {"reverse": True}, {"bidirectional": True}]
HALVES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def check(case, engine, cotangents, **emulator):
    """Run a case in float32 and check that outputs and gradients differ from the float64 oracle's by at most the
    error bounds. Return (results by name, log of the kernel launches)."""
    case = {n: v.astype(np.float32) if n in ARRAYS and v is not None else v for n, v in case.items()}
    cotangents = {name: value.astype(np.float32) for name, value in cotangents.items()}
    ref, limit = judge(case, np.float32, cotangents)
    with on_metal(**emulator) as log:
        outputs, gradients = run(case, engine, np.float32, cotangents)
    assert set(gradients) == {name for name in ARRAYS if case.get(name) is not None}
    assert_right(engine, outputs, gradients, ref, limit)
    return outputs | gradients, log


def assert_right(engine, outputs, gradients, ref, limit, dtype=np.float32):
    """Check the dtype of every result and its distance from the exact value. An error message names the engine, the
    pass and the array."""
    for of_pass, arrays in (("forward", outputs), ("backward, gradient of", gradients)):
        for name, value in arrays.items():
            label = f"{engine}, {of_pass} {name}"
            assert value.dtype == dtype, label
            assert_within(label, value, ref[name], limit[name])


ALONE = on_one_engine(OPTIONS | CELLS | BOTH)


@pytest.mark.slow
@pytest.mark.parametrize("engine, option, B", in_turns(ALONE, BATCHES))
def test_each_option_alone(engine, option, B):
    """Outputs and gradients are right when a case has only one option. The default tests in test_kernel_paths.py
    combine several. With a batch of 9, `fused` uses its kernel with 8 x 8 matrix products."""
    check_option(engine, options_at(option, B), B)


def check_option(engine, options, B):
    with matrices_from(9):
        check(*with_engine(engine, draw_away_from_kinks(1, ROUNDING_MARGIN, sizes=(4, B, 3, 2, 3), **options)))


def with_engine(engine, drawn):
    case, cotangents = drawn
    return case, engine, cotangents


UNBOUNDED = ("relu_gates", "identity_gates")
TILED = ("plain", "mask_0", "peephole_current", "lengths_reverse", "projection")


def half_batch(n, engine, option):
    """Return the batch size of case n of the test below: 9 for some cases of `fused`, else 2. In a batch of 9, some h
    that can grow without limit leaves the range of float16."""
    return 9 if engine == "fused" and n // 4 % 2 and not option.endswith(UNBOUNDED) else 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "engine, option, word, B",
    [(*turn, half_batch(n, *turn[:2])) for n, turn in enumerate(in_turns(ALONE[::2], [*HALVES]))]
    + [("stepwise", option, word, 9) for option in TILED for word in HALVES],
)
def test_half_precision(engine, option, word, B):
    """Every second option is right in 16 bits when a case has only this one."""
    check_half(engine, options_at(option, B), B, word)


def check_half(engine, options, B, word):
    """Check the results of a case in a 16-bit dtype. With a batch of 9, `fused` uses its kernel with 8 x 8 matrix
    products."""
    dtype = HALVES[word]
    case, cotangents = draw_away_from_kinks(5, sizes=(4, B, 3, 5, 3), dtype=dtype, **options)
    ref, limit = judge(case, dtype, cotangents)
    with on_metal(), matrices_from(9):
        outputs, gradients = run(case, engine, dtype, cotangents)
    assert_right(engine, outputs, gradients, ref, limit, dtype)


# Each output has a cotangent in one of the calls and none in the other. Many other tests have a loss of h alone.
@pytest.mark.parametrize("outputs", [("h", "cT"), ("c", "gates", "hT")], ids=" ".join)
@pytest.mark.parametrize("engine, row, B", [("fused", "lstm, bare", 3), ("stepwise", "lstm", 9)])
def test_some_outputs_alone(engine, row, B, outputs):
    """Gradients are right when only two or three outputs have a cotangent."""
    case, cotangents = usual_call(engine, row, (6, B, 2, 12, 13))
    check(case, engine, {output: cotangents[output] for output in outputs})


ONE, FEW = (1, 1, 1, 1, 1), (2, 2, 1, 3, 2)
SHAPES = [
    # (engine, (time steps T, batch size B, input size I, hidden size H, projection size P)). The batch sizes of
    # `stepwise` are one of each tile.
    ("fused", ONE),
    ("fused", (2, 33, 2, 33, 7)),
    ("fused", (3, 2, 2, 101, 3)),
    ("stepwise", (2, 1, 1, 1, 1)),
    ("stepwise", (3, 3, 2, 101, 7)),
    ("stepwise", (2, 8, 3, 33, 7)),
    ("stepwise", (2, 33, 2, 33, 7)),
]


@pytest.mark.parametrize("engine, sizes", SHAPES, ids=str)
def test_odd_shapes(engine, sizes):
    """Results are right for sizes of one, prime sizes, sizes one larger than a tile, and arrays of fewer than 8
    elements, which MLX binds in Metal's constant address space."""
    check(*with_engine(engine, usual_call(engine, "lstm", sizes, reverse=True)))


@pytest.mark.parametrize(
    "engine, row, sizes",
    [("fused", "gru", ONE), ("stepwise", "gru", (2, 66, 2, 5, 3)), ("stepwise", "gru_before", ONE)],
)
def test_odd_shapes_of_both_directions(engine, row, sizes):
    """A GRU has most kinds of products and of carried arrays."""
    check(*with_engine(engine, usual_call(engine, row, sizes, bidirectional=True)))


def test_a_projection_of_few_numbers():
    """A projection is right when only some of its arrays have fewer than 8 elements. MLX binds these in Metal's
    constant address space, which functions of a kernel must not confuse with that of the other arrays. The call has
    no mask, `keep` and peephole, so that the gradients need few launches."""
    without = {"mask": None, "keep": False, "peephole": False}
    check(*with_engine("stepwise", usual_call("stepwise", "lstm", FEW, **without)))


def test_more_steps_than_arrays_that_a_launch_may_read():
    """`stepwise` is right for long sequences. Each step writes one array, but a launch can read only a limited
    number of arrays. Therefore other launches concatenate arrays of earlier steps during the pass; two threadgroups
    concatenate long arrays. The rare calls of test_kernel_paths.py do so with every option."""
    _, log = check(*with_engine("stepwise", usual_call("stepwise", "rnn", (30, 9, 2, 15, 15))))
    joining = [launch for launch in log if "_joining" in launch.name]
    steps = [launch for launch in log if launch.name.startswith("rnn_stepwise_forward") and launch not in joining]
    assert joining and joining[0].grid[0] == steps[0].grid[0] + 2 * joining[0].threadgroup[0]


@pytest.mark.parametrize("row, sizes", [("lstm", (2, 9, 2, 161, 128)), ("rnn", (2, 8, 2, 260, 260))])
def test_long_products_of_many_items(row, sizes):
    """Results of `stepwise` are right if a product has more than 128 terms. With at least 8 batch items the product
    takes 128 terms at a time, and then the remaining terms."""
    check(*with_engine("stepwise", usual_call("stepwise", row, sizes)))


def test_rows_that_the_forward_pass_keeps():
    """The gradients of `stepwise` are right if the caller does not ask for the gates of an LSTM. The forward pass then
    does not copy the gates into one array. The backward pass reads them from the arrays of single steps, and from
    arrays that launches have concatenated from several steps."""
    case, cotangents = usual_call("stepwise", "lstm", (24, 3, 2, 5, 5), **ENDS_ONLY, bidirectional=True)
    _, log = check(case, "stepwise", {name: value for name, value in cotangents.items() if name != "gates"})
    assert not any(" gates [[buffer" in launch.source for launch in log)


ENDS_ONLY = {"projection": False, "projection_clip": None, "mask": None, "keep": False, "peephole": False}
"""What an LSTM of `usual_call` lacks in some tests, which are those of `lengths` alone."""


def found_on_metal(shaders, body, count, inputs):
    """Run Metal source `body`, which calls functions of metal/, in a single GPU thread. Return the integers that the
    source stores in the output `found`."""
    with on_metal(), mx.stream(METAL):
        header, names = "using Index = long;\n" + kernels.header(shaders, body), list(inputs)
        source = f"device int64_t* to = found;\n{body}"
        kernel = mx.fast.metal_kernel(
            name="places", input_names=names, output_names=["found"], source=source, header=header
        )
        arrays = [mx.array(value, mx.int32) for value in inputs.values()]
        return kernel(
            inputs=arrays, grid=(1, 1, 1), threadgroup=(1, 1, 1), output_shapes=[(count,)], output_dtypes=[mx.int64]
        )[0].tolist()


@pytest.mark.parametrize("T, B", [(70001, 601), (5, 2**21 + 1)])
def test_places_that_32_bits_do_not_count(T, B):
    """The shaders compute right offsets for arrays of more than 2**31 elements. The test runs only the functions
    that compute offsets, so it needs no such arrays."""
    H, G, length = 1021, 4, 2**31 - 9
    t, b, at = T - 1, B - 1, ((T - 1) * B + B - 1) * 2 + 1
    step = f"const Step s = {{0, {t}, {T}, {B}, {H}, {H}, 2, 1, 1, false}};\n"
    rows = f"const Rows<int> rows = {{{{{', '.join(['piece'] * 20)}}}}};\nItemsRow<const device int*> row = {{}};\n"
    body = f"""
*to++ = place(s, s.t, {b}, {G * H});
*to++ = place_by_direction(s, {b}, {H});
const Items<int> items = items_of(s, piece, {H});
find_row(items, {b}, 0, row);
*to++ = row.values - piece;
*to++ = row_of(rows, starts, kind, {t}) - piece;
*to++ = carried<half>(place(s, s.t, {b}, {H}));
"""
    shaders = ("arrays", "cell", "stepwise", "stepwise_rows")
    inputs = {"piece": [0] * 8, "starts": [0] * 20 + [T], "kind": (length, H, 0)}
    # The expected offsets, one per line of `body` that writes to `to`. All arrays have two directions, and `at` counts
    # the vectors before time step t, sequence b, direction 1. `row_of` chooses the array that holds step t among up to
    # 20 arrays; starts[n] is the first step of array n. Here the last array has all T steps, so the offset in it is t *
    # length.
    expected = [at * G * H, ((T + t) * B + b) * H, (b * 2 + 1) * H, t * length, 2 * at * H]
    assert found_on_metal(shaders, step + rows + body, 5, inputs) == expected
    body = f"""
const Sweep sweep = {{0, {T}, {T}, {B}, 2, 1, true, true}};
Place<ulong> at, next;
first_place<false>(sweep, {b}, {G}, 3, {H}, {H - 1}, at);
between_steps<false>(sweep, {G}, {H}, next);
*to++ = at.state, *to++ = at.gate, *to++ = at.mask, *to++ = at.q, *to++ = next.state, *to++ = next.gate;
"""
    unit, states = at * H + H - 1, B * 2 * H
    expected = [unit, (at * G + 3) * H + H - 1, unit, ((T + t) * B + b) * H + H - 1, -states, -G * states]
    assert found_on_metal(("arrays", "cell", "fused"), body, 6, {"piece": [0] * 8}) == expected


# Both engines call the same functions for activations and clips.
@pytest.mark.parametrize(
    "engine, options",
    [
        ("fused", {"activations": ("hard_sigmoid",) * 5}),
        ("stepwise", {"activations": ("relu",) * 5, "cell_clip": 0.5}),
    ],
    ids=["hard_sigmoid", "relu and a clip"],
)
def test_nan_stays_nan(engine, options):
    """NaN in x reaches h and c, although Metal's own max and clamp would replace NaN by a number."""
    case = draw(np.random.default_rng(0), sizes=(3, 2, 2, 3, 3), dtype=np.float32, **options)
    case["x"][1, 0] = np.nan
    with on_metal():
        outputs = run(case, engine, np.float32)[0]
    for value in (outputs["h"], outputs["c"]):
        assert np.isnan(value[1:, 0]).all() and np.isfinite(value[0]).all() and np.isfinite(value[:, 1]).all()


def test_fused_with_weights_that_do_not_fit_in_registers():
    """`test_odd_shapes` has such weights in float32."""
    H, dtype, rng = 200, np.float16, np.random.default_rng(0)
    for of, itemsize in ((101, 4), (H, 2)):
        layer = kernels_fused.LayerSize(LSTMCell(), 2, of, itemsize)
        assert kernels_fused.fused_tiling(layer, backward=False).resident_part < 1
    case = draw(rng, sizes=(2, 2, 2, H, H), dtype=dtype)
    case |= {"Wh": (case["Wh"] / np.sqrt(H).astype(dtype)).astype(dtype)}
    cotangents = draw_cotangents(rng, forward(**case), dtype)
    ref, limit = judge(case, dtype, cotangents)
    with on_metal():
        outputs, gradients = run(case, "fused", dtype, cotangents)
    assert_right("fused", outputs, gradients, ref, limit, dtype)


# --- Digits of small numbers -----------------------------------------------------------------------------------------

# The arithmetic of a cell is one text for all kernels, so each cell runs on one engine.
DIGITS = [("fused", "lstm", 2), ("stepwise", "gru", 9), ("fused", "rnn", 9)]
DIGITS += [pytest.param("stepwise", "lstm", 2, marks=pytest.mark.slow)]
DIGITS += [pytest.param("fused", "gru", 9, marks=pytest.mark.slow)]


@pytest.mark.parametrize("engine, op, B", DIGITS)
def test_small_numbers_have_all_their_digits(engine, op, B):
    """Each element of the results has a small relative error even for tiny x, where tanh(x) is nearly x. The formula 2
    sigmoid(2 x) - 1 would lose all digits there."""
    case = draw(np.random.default_rng(3), op=op, sizes=(4, B, 3, 10, 10), dtype=np.float32)
    scale = {"x": 1e-4, "b": 1e-5, "bhn": 1e-5, "h0": 1e-4, "c0": 1e-4}
    judge_each_element(case | {n: case[n] * np.float32(s) for n, s in scale.items() if n in case}, engine)


@pytest.mark.parametrize("engine, op, B", DIGITS)
def test_what_a_nearly_closed_gate_lets_through_has_all_its_digits(engine, op, B):
    """Each element of the results has a small relative error when sigmoid gates are nearly closed (biases from -30 to
    -8) or fully open (bias 30)."""
    rng, gates = np.random.default_rng(7), {"lstm": "ifgo", "gru": "rzn", "rnn": "h"}[op]
    options = {"activation": "sigmoid"} if op == "rnn" else {}
    case = draw(rng, op=op, sizes=(4, B, 3, 10, 10), dtype=np.float32, **options)
    closed = np.repeat([gate not in "gn" for gate in gates], 10)
    case["b"][closed] = rng.permutation(np.linspace(-30, -8, closed.sum()))
    case["b"][np.flatnonzero(closed)[::7]] = 30
    judge_each_element(case, engine)


def judge_each_element(case, engine):
    """Check that every element of outputs and gradients is within its own error bound. `fused` computes batches of
    at least 9 with 8 x 8 matrix products here, so that cases with B = 9 test this kernel."""
    cotangents = draw_cotangents(np.random.default_rng(5), forward(**case), np.float32)
    ref, limit = forward(**case) | backward(case, cotangents), elementwise_bounds(case, np.float32, cotangents)
    with on_metal(), matrices_from(9):
        outputs, gradients = run(case, engine, np.float32, cotangents)
    assert_right(engine, outputs, gradients, ref, limit)


# --- How the fused kernels read their arrays -------------------------------------------------------------------------


@pytest.mark.parametrize("matrices", [False, True])
@pytest.mark.parametrize("sweep", kernels_fused.SWEEPS)
@pytest.mark.parametrize("layer", ["lstm", "gru", "gru_before", "rnn", "both"])
def test_every_weight_is_arranged_once(layer, sweep, matrices):
    """The library copies the weights into the order in which the `fused` kernel reads them. The copy contains each
    weight of a direction exactly once. All other elements are padding and 0."""
    cell = {"gru": GRUCell(gate_order="zrn"), "gru_before": GRUCell("zrn", reset="before"), "rnn": RNNCell()}
    cell, D = cell.get(layer, LSTMCell("ogfi")), 2 if layer == "both" else 1
    for H in (1, 33, 40) if layer == "lstm" else (33, 40):
        problem = Problem(2, 3, H, H, cell, bidirectional=D == 2)
        Wh = 1 + np.arange(D * cell.gates * H * H, dtype=np.float32).reshape(D, -1, H)
        with on_metal(), matrices_from(1 if matrices else 100):
            launch = kernels_fused.arrange_launch(sweep, problem)
            arranged = np.array(launch(inputs=[mx.array(Wh[0] if D == 1 else Wh)])[0])
        for of_direction, weights in zip(arranged, Wh, strict=True):
            found = np.sort(of_direction, axis=None)
            np.testing.assert_array_equal(found[found > 0], weights.reshape(-1))
            assert (found >= 0).all()


def test_indices_are_narrow_as_long_as_they_suffice():
    for T, dtype in ((2**31 // (4 * 8 * 64) - 1, mx.uint32), (2**31 // (4 * 8 * 64), mx.uint64)):
        assert kernels_fused.index_of(Problem(T, 8, 64, 64, LSTMCell())) == dtype
    assert kernels_fused.index_of(Problem(2**19, 8, 64, 64, LSTMCell(), bidirectional=True)) == mx.uint64


DRAWN_SIZES = ([1, 2, 3, 5], [1, 2, 3, 8, 17], [1, 3], [1, 2, 5], [1, 3])
"""The values of T, B, I, H and P from which random cases are drawn."""


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_options_in_many_random_combinations(engine, request):
    """Random combinations of options and sizes give right results. With a batch of 8 or more, `fused` uses its
    kernel with 8 x 8 matrix products."""
    check_drawn(engine, 1447, (5, 8, 3, 5, 1), "gru", False, {"h"})  # in this case h grows to 1e73
    first = 1000 * request.config.getoption("--fuzz-seed")
    for seed in range(first, first + 60):
        rng = np.random.default_rng(seed)
        sizes = tuple(int(rng.choice(values)) for values in DRAWN_SIZES)
        op, both = ("lstm", "gru", "rnn")[rng.integers(3)], bool(rng.integers(2))
        check_drawn(engine, seed, sizes, op, both, {name for name in OUTPUTS if rng.random() < 0.5})


def check_drawn(engine, seed, sizes, op, both, shown):
    """Check the combination of options that a seed gives. shown: the outputs with a cotangent."""
    options = combination(np.random.default_rng(seed), sizes, op, both)
    if op == "lstm":
        options |= {} if engine == "stepwise" else {"projection": False, "projection_clip": None}
    case, cotangents = draw_away_from_kinks(seed, ROUNDING_MARGIN, sizes=sizes, **options)
    cotangents = {name: cotangents[name] for name in (shown & cotangents.keys()) or {"h"}}
    if is_in_range(forward(**case) | backward(case, cotangents)):
        try:
            with matrices_from(8):
                check(case, engine, cotangents)
        except AssertionError as error:
            if keeps_off_kinks(case, np.float32):
                raise AssertionError(f"seed {seed}, {sizes}") from error


# Each cell, each shape, and both buffers for the cell with the most gates.
@pytest.mark.parametrize(
    "row, directions, sizes",
    [
        ("lstm", 1, (3, 4, 2, 33, 7)),
        ("lstm", 2, (2, 8, 3, 9, 3)),
        ("gru", 2, (2, 5, 3, 40, 9)),
        ("rnn", 1, ONE),
    ],
)
def test_odd_shapes_in_matrices(row, directions, sizes):
    """`fused` with 8 x 8 matrix products is right for odd sizes, which do not fill all matrices. The gradients d of
    the gates are in threadgroup memory, as a double buffer or as a single buffer. The test runs the double buffer
    with one direction and the single buffer with two."""
    with (
        matrices_from(1),
        patch.object(kernels_fused, "THREADGROUP_BYTES", 1 if directions == 2 else 32768),
    ):
        check(*with_engine("fused", usual_call("fused", row, sizes, bidirectional=directions == 2)))


def test_wide_batches_run_in_matrices():
    """`fused` multiplies 8 x 8 matrices if there are many sequences for each GPU core."""
    for B, directions in ((129, 1), (65, 2)):
        drawn = usual_call("fused", "lstm", (2, B, 2, 12, 12), bidirectional=directions == 2)
        with limited(cores=1):
            _, log = check(*with_engine("fused", drawn))
        assert {"matrix" in launch.name for launch in log if re.search("ward", launch.name)} == {True}


# {row: batch size}. A batch of 9 runs in matrices below, as do the calls of test_kernel_paths.py with 32-bit indices.
BATCH = {"lstm": 9, "gru": 3, "gru_before": 3, "rnn": 9}


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("row", BATCH)
def test_fused_in_several_launches(row, way):
    """A launch of three steps begins at an odd step, where the two halves of the buffer of states change places. The
    rare calls of test_kernel_paths.py have several launches with every option, of lanes and of matrices."""
    drawn = usual_call("fused", row, (7, BATCH[row], 2, 12, 12), **way)
    with limited(launch_steps=3), matrices_from(9):  # three sequences in both directions count as six
        _, log = check(*with_engine("fused", drawn))
    sweeps = Counter(
        re.search("arrange|forward|backward", launch.name).group() for launch in log if "fused" in launch.name
    )
    assert sweeps == {"arrange": 2, "forward": 3, "backward": 3}


@pytest.mark.parametrize("row, B, word", [("lstm", 3, "float16"), ("gru", 9, "bfloat16")])
def test_h_is_rounded_to_16_bits_at_every_step(row, B, word):
    """One launch over all steps gives bit for bit the same result as one launch per step. Separate launches pass h
    on in 16 bits, so a launch over all steps must round h to 16 bits at every step, too."""
    (case, _), found = usual_call("fused", row, (7, B, 2, 12, 12), dtype=HALVES[word], bidirectional=True), []
    for steps in (1, 100):
        # 64-bit indices, because test_kernel_paths.py has 16 bits with these.
        with on_metal(), matrices_from(9), limited(launch_steps=steps, index=1):
            found.append(run(case, "fused", HALVES[word])[0])
    for name, value in found[0].items():
        np.testing.assert_array_equal(value, found[1][name], err_msg=name)


# (engine, row, batch size). The kernels are those of test_kernel_paths.py. The last call has `lengths` alone, so its
# backward pass copies x, with 0 in the padding.
PADDED = [("fused", row, B) for row, B in BATCH.items()]
PADDED += [("stepwise", row, B) for row, B in (("lstm", 9), ("gru", 3), ("gru_before", 9), ("rnn", 9), ("lstm", 3))]


@pytest.mark.parametrize("engine, row, B, way", in_turns(PADDED, WAYS, others=True))
def test_what_lies_in_the_padding_is_never_used(engine, row, B, way):
    options = ENDS_ONLY if (engine, row, B) == ("stepwise", "lstm", 3) else {}
    case, cotangents = usual_call(engine, row, (7, B, 2, 12, 13), dtype=np.float32, **options, **way)
    with on_metal(), matrices_from(9):
        clean = run(case, engine, np.float32, cotangents)
        spoilt = [cotangents[name] for name in ("h", "c", "gates") if name in cotangents]
        for array in (case["x"], *(case[name] for name in ("mask", "keep") if case.get(name) is not None), *spoilt):
            array[np.arange(7)[:, None] >= case["lengths"]] = np.nan
        spoilt = run(case, engine, np.float32, cotangents)
    for before, after in zip(clean, spoilt, strict=True):
        for name in before:
            np.testing.assert_array_equal(before[name], after[name], err_msg=name)
