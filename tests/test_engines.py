"""Tests of the choice of engine. A table lists the expected engine for each kind of machine. The tests check all
kinds of machines on any machine."""

import re
from contextlib import nullcontext

import mlx.core as mx
import numpy as np
import pytest
from on_metal import on_metal

from mlx_lstm import lstm, recurrence
from mlx_lstm.engines import ENGINES, METAL_ENGINES, choice, choose, definitions
from mlx_lstm.engines.cell_tracer import Counts, traced
from mlx_lstm.engines.cells import ACTIVATIONS, GRUCell, LSTMCell, PointwiseCell, RNNCell
from mlx_lstm.engines.metal import kernel
from mlx_lstm.engines.metal.fused import LayerSize, rows_for, step_cycles
from mlx_lstm.engines.metal.stepwise import tile_of
from mlx_lstm.engines.numpy.products import factored_names
from mlx_lstm.engines.predicted import predict, stepwise_cycles
from mlx_lstm.engines.problem import LIMITS, Problem, limited
from mlx_lstm.recurrence import _arguments

MAC = {"device": "gpu", "metal": True}
MAC_CPU = {"device": "cpu", "metal": True}
LINUX = {"device": "cpu", "metal": False}
CUDA = {"device": "gpu", "metal": False}
TRACED = "inside mx.compile, mx.vmap or an export"
HALF, BRAIN, DOUBLE = {"dtype": mx.float16}, {"dtype": mx.bfloat16}, {"dtype": mx.float64}


def widest(dtype, cores, B=2, cell=LSTMCell()):  # noqa: B008 (a cell is a tuple and never changes)
    """Return the largest hidden size H up to 256 for which `fused` is predicted to be the faster Metal engine."""
    return max(H for H in range(1, 257) if predict(cell, dtype, B, H, cores).engine == "fused")


# The largest hidden sizes H for which `fused` is chosen on 10 GPU cores: WIDE in float32, NARROW in 16 bits.
WIDE, NARROW = widest(mx.float32, 10), widest(mx.float16, 10)
CELLS = (LSTMCell(), GRUCell(), GRUCell(reset="before"), RNNCell())
KINDS = [{"cell": cell, "bidirectional": both} for cell in CELLS for both in (False, True)]

TABLE = [
    # (machine, other arguments, H, requested engine, expected engine or expected error message)
    (LINUX, {}, 128, None, "numpy"),
    (LINUX, {}, 128, "numpy", "numpy"),
    (LINUX, {}, 128, "ops", "ops"),
    (LINUX, {"traced": True}, 128, None, "ops"),
    (LINUX, {"traced": True}, 128, "ops", "ops"),
    (LINUX, {"traced": True}, 128, "numpy", f"engine='numpy' cannot run: {TRACED}"),
    (LINUX, {}, 128, "stepwise", "engine='stepwise' cannot run: Metal shaders run on the GPU"),
    (LINUX, {}, 128, "fused", "engine='fused' cannot run: Metal shaders run on the GPU"),
    (LINUX, {}, 128, "metal", "engine must be one of fused, stepwise, numpy, ops but got 'metal'"),
    (LINUX, DOUBLE, 128, None, "numpy"),
    *((LINUX, options, 16, None, "numpy") for options in KINDS),
    *((LINUX, options, 16, "ops", "ops") for options in KINDS),
    *((LINUX, {"traced": True, **options}, 16, None, "ops") for options in KINDS),
    *((LINUX, options, 16, "fused", "cannot run: Metal shaders run on the GPU") for options in KINDS),
    *((CUDA, options, 16, None, "ops") for options in KINDS),
    *((MAC, DOUBLE | options, 16, None, "float64 needs the CPU, stream=mx.cpu") for options in KINDS),
    (MAC_CPU, {}, 128, None, "numpy"),
    (MAC_CPU, DOUBLE, 128, None, "numpy"),
    (MAC_CPU, {"traced": True}, 128, None, "ops"),
    (MAC_CPU, {}, 128, "fused", "cannot run: Metal shaders run on the GPU and the stream's device is cpu"),
    (CUDA, {}, 128, None, "ops"),
    (CUDA, {"traced": True}, 128, None, "ops"),
    (CUDA, {}, 128, "stepwise", "cannot run: MLX has no Metal back end"),
    (MAC, {}, 1, None, "fused"),
    (MAC, {}, WIDE, None, "fused"),
    (MAC, {}, WIDE + 1, None, "stepwise"),
    (MAC, {}, 1024, None, "stepwise"),
    (MAC, HALF, NARROW, None, "fused"),
    (MAC, HALF, NARROW + 1, None, "stepwise"),
    (MAC, BRAIN, NARROW, None, "fused"),
    (MAC, BRAIN, NARROW + 1, None, "stepwise"),
    (MAC, {"traced": True}, WIDE, None, "fused"),
    (MAC, {"traced": True}, 512, None, "stepwise"),
    (MAC, {"bidirectional": True}, 128, None, "fused"),
    (MAC, {"cell": GRUCell()}, 128, None, "fused"),
    (MAC, {"cell": GRUCell(reset="before"), "bidirectional": True}, 257, "fused", "cannot run: H = 257 > 256"),
    (MAC, {"cell": RNNCell()}, 256, None, "fused"),
    (MAC, {"cell": RNNCell()}, 257, None, "stepwise"),
    (MAC, {"cell": RNNCell()}, 1024, "fused", "fused"),
    (MAC, {"cell": RNNCell()}, 1025, "fused", "cannot run: H = 1025 > 1024, and a threadgroup has at most 1024"),
    (MAC, {"projection": True}, 16, None, "stepwise"),
    (MAC, {"projection": True}, 16, "fused", "cannot run: a projection of h is a product between two steps"),
    (MAC, {}, 256, "fused", "fused"),
    (MAC, {}, 257, "fused", "cannot run: H = 257 > 256"),
    (MAC, {}, 16, "stepwise", "stepwise"),
    (MAC, {}, 16, "ops", "ops"),
    (MAC, {}, 16, "numpy", "cannot run: the numpy engine runs on the CPU and the stream's device is gpu"),
    (MAC, DOUBLE, 16, None, "float64 needs the CPU, stream=mx.cpu"),
    (MAC, DOUBLE, 16, "stepwise", "float64 needs the CPU"),
]


@pytest.mark.parametrize("machine, arguments, H, requested, expected", TABLE)
def test_choice(machine, arguments, H, requested, expected):
    arguments = {"sizes": (8, 2, 3, H), "dtype": mx.float32, "traced": False, **machine, **arguments}
    if expected in ENGINES:
        choice = choose(**arguments, requested=requested)
        assert choice.engine == expected and choice.reason
    else:
        with pytest.raises(ValueError, match=expected):
            choose(**arguments, requested=requested)


@pytest.mark.parametrize("cell", [LSTMCell(), GRUCell(), GRUCell(reset="before"), RNNCell()])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_the_choice_for_every_number_of_cores(cell, dtype):
    """For 7 to 80 GPU cores `fused` runs small layers and `stepwise` large ones. The reason names the number of
    cores. With a batch of 128, a GPU with 8 cores uses 8 x 8 matrix products, while each threadgroup of a GPU with
    80 cores computes two sequences."""
    for cores in range(7, 81):
        where = {"sizes": (8, 32, 3, 64), "dtype": dtype, "traced": False, "cell": cell, **MAC}
        choice = choose(**where, cores=cores)
        assert choice.engine == "fused" and f"B = 32, H = 64 on {cores} GPU cores, predicted" in choice.reason
        assert choose(**where | {"sizes": (8, 32, 3, 1024)}, cores=cores).engine == "stepwise"
        assert rows_for(LayerSize(cell, 1, 96, dtype.size, cores=cores)) == 1
    assert [rows_for(LayerSize(LSTMCell(), 128, 96, dtype.size, cores=cores)) for cores in (8, 80)] == [8, 2]


def test_of_two_equal_divisions_the_simpler_one_runs():
    """A threadgroup of `fused` computes as few sequences as possible, unless more sequences per threadgroup reduce
    the predicted time by more than 5 %."""
    for B in range(1, 65):
        times = {rows: step_cycles(LayerSize(LSTMCell(), B, 64, 4), rows) for rows in (1, 2, 8)}
        best = min(times.values())
        assert rows_for(LayerSize(LSTMCell(), B, 64, 4)) == min(rows for rows in times if times[rows] <= 1.05 * best)


def test_a_call_is_divided_for_the_cores_of_this_gpu():
    """A call of `fused` divides the batch among threadgroups for the GPU's number of cores, or for the number of
    cores that the context manager `limited` sets."""
    seen = []
    arrays = [mx.zeros(shape) for shape in ((2, 32, 1), (256, 1), (256, 64))]
    with on_metal() as log:
        for cores in (8, 80):
            with limited(cores=cores):
                mx.eval(lstm(*arrays).h)
            seen.append(any("matrix" in launch.name for launch in log))
            log.clear()
    assert seen == [True, False]


@pytest.mark.parametrize(
    "wrong",
    [{"dtype": "float32"}, {"dtype": mx.int32}, {"dtype": None}, {"device": "tpu"}, {"device": mx.gpu}],
    ids=str,
)
def test_a_dtype_or_device_that_is_none_is_refused(wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(ValueError, match=rf"^\[lstm\] {name} must be one of .* but got {value!r}\.$"):
        choose(**{"sizes": (8, 2, 3, 4), "dtype": mx.float32, "traced": False, **MAC, **wrong})


@pytest.mark.parametrize(
    ("wrong", "rule"),
    [
        ({"sizes": (8, 2, 3)}, r"sizes must be \(T, B, I, H\) but got \(8, 2, 3\)"),
        ({"sizes": 8}, "sizes must be"),
        ({"sizes": (8, 2, 3, 4.5)}, "size H of sizes must be an integer of at least 1 but got 4.5"),
        ({"cores": 0}, "cores must be an integer of at least 1"),
        ({"metal": None}, "metal must be True or False"),
        ({"traced": "no"}, "traced must be True or False"),
    ],
)
def test_wrong_facts_about_a_call_are_refused(wrong, rule):
    with pytest.raises(ValueError, match=rf"^\[lstm\] {rule}"):
        choose(**{"sizes": (8, 2, 3, 4), "dtype": mx.float32, "traced": False, **MAC, **wrong})


def test_refusals_name_the_op():
    for op in ("gru", "rnn_gradients"):
        with pytest.raises(ValueError, match=rf"^\[{op}\] engine='fused' cannot run"):
            choose(sizes=(8, 2, 3, 4), dtype=mx.float32, traced=False, **LINUX, requested="fused", op=op)


def test_a_stream_argument_is_where_it_runs():
    """An op runs on the stream that its argument `stream` names, like any op of MLX. Without the argument, the op
    runs on the default device."""
    arrays = [mx.zeros(shape) for shape in ((2, 1, 1), (4, 1), (4, 1))]
    for stream in (None, mx.cpu, mx.new_stream(mx.cpu)):
        assert lstm(*arrays, stream=stream).h.shape == (2, 1, 1)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("op", ["lstm", "gru", "rnn"])
def test_an_activation_that_an_engine_does_not_know_is_an_error(monkeypatch, engine, op):
    """Every engine raises an error for an activation that is missing in the engine's own table, even if the argument
    check accepts the activation's name."""
    monkeypatch.setattr(_arguments, "ACTIVATIONS", (*ACTIVATIONS, "swish"))
    named = {
        "lstm": {"activations": ["swish"] * 5},
        "gru": {"activations": ["swish"] * 3},
        "rnn": {"activation": "swish"},
    }
    G = {"lstm": 4, "gru": 3, "rnn": 1}[op]
    arrays = mx.ones((2, 1, 3)), mx.ones((G * 4, 3)), mx.ones((G * 4, 4))
    with on_metal() if engine in METAL_ENGINES else nullcontext(), pytest.raises(ValueError, match="'swish'"):
        mx.eval(getattr(recurrence, op)(*arrays, engine=engine, **named[op]).h)


def test_every_engine_knows_every_activation():
    enum = re.search(r"enum Activation \{(.*)\}", (kernel.shader_folder() / "cell.metal").read_text())
    assert enum and enum[1].lower().replace(" ", "").split(",") == list(ACTIVATIONS)
    assert set(definitions.ACTIVATIONS) == set(kernel.ACTIVATIONS) == set(ACTIVATIONS)
    assert list(kernel.ACTIVATIONS.values()) == list(range(len(ACTIVATIONS)))


@pytest.mark.parametrize("cell", CELLS[:2] + CELLS[3:], ids=lambda cell: cell.op)
@pytest.mark.parametrize(
    "B, H, cores", [(32, 256, 4), (32, 256, 40), (64, 64, 10), (128, 128, 40), (64, 256, 76), (32, 128, 8)]
)
def test_two_directions_are_predicted_to_take_the_time_of_twice_the_batch(cell, B, H, cores):
    """For these sizes, which fill the threadgroups, both engines have the same work in both cases."""
    both, wide = ((cell, mx.float32, b, H, cores, d) for b, d in ((B, 2), (2 * B, 1)))
    assert stepwise_cycles(*both, None) == stepwise_cycles(*wide, None)
    assert predict(*both).reason.partition(" of ")[0] == predict(*wide).reason.partition(" of ")[0]
    assert predict(*both).reason != predict(cell, mx.float32, B, H, cores, 1).reason
    sizes = (3, B, 2, H)
    found = choose(sizes=sizes, cell=cell, bidirectional=True, dtype=mx.float32, traced=False, cores=cores, **MAC)
    assert found.reason.startswith(predict(*both).reason)
    limits = LIMITS._replace(cores=cores)
    problems = (
        Problem(3, B, H, H, cell, bidirectional=True, limits=limits),
        Problem(3, 2 * B, H, H, cell, limits=limits),
    )
    assert tile_of(problems[0], H) == tile_of(problems[1], H)


def own_cell(gates, states=1, recurrent=True):
    """Return a cell of the user's own with so many gates and states. recurrent: whether Wh multiplies h."""

    def cell(a, s):
        return (mx.tanh(sum(a[1:], a[0]) + s[0]), *s[1:])

    return PointwiseCell(traced(cell, Counts(gates, states, 0, 0), False, (2, 3), mx.float32), recurrent)


def test_limits_are_exact():
    """Each engine runs a call at its limit, and refuses the next larger one."""
    here = {"sizes": (5, 3, 2, 8), "dtype": mx.float32, "traced": False, **MAC}
    numbers, gates = choice.FUSED_NUMBERS, choice.STEPWISE_GATES
    assert choose(cell=own_cell(numbers - 3, 3), requested="fused", **here).engine == "fused"
    assert choose(cell=own_cell(gates), requested="stepwise", **here).engine == "stepwise"
    for cell, engine in ((own_cell(numbers - 3, 4), "fused"), (own_cell(gates + 1), "stepwise")):
        with pytest.raises(ValueError, match="cannot run: its"):
            choose(cell=cell, requested=engine, **here)
    for H, recurrent in ((256, True), (1024, False)):  # a threadgroup has 4 threads per unit, or 1 without a product
        cell, wide = own_cell(2, 1, recurrent), here | {"sizes": (5, 3, 2, H + 1)}
        assert choose(cell=cell, requested="fused", **here | {"sizes": (5, 3, 2, H)}).engine == "fused"
        with pytest.raises(ValueError, match=rf"cannot run: H = {H + 1} > {H},"):
            choose(cell=cell, requested="fused", **wide)
    H = 1024
    B = choice.ONE_STEP // (4 * H**2)
    assert [choice.is_small_step(LSTMCell(), T, b, H) for T, b in ((1, B), (1, B + 1), (2, B))] == [True, False, False]
    for engine, longest in choice.LONGEST.items():
        for T in (longest, longest + 1) if longest else ():
            problem = Problem(T, 2, 3, 3, LSTMCell())
            assert (choice.chunks_of(engine, problem, None) is None) == (longest == T)
            assert choice.chunks_of(engine, problem, "auto").is_long == (longest < T)


def test_the_largest_chunk_of_a_long_sequence():
    """A sequence with more steps than one graph of the engine has is cut into chunks. The gates of a chunk are at most
    2^24 numbers, and 2^20 for `ops`; `numpy` builds no graph."""
    problem = Problem(5000, 64, 1024, 1024, LSTMCell())  # 2^18 numbers per step
    steps = {engine: choice.chunks_of(engine, problem, None) for engine in ENGINES}
    assert steps == {
        "fused": (64, False, True),
        "stepwise": (64, False, True),
        "numpy": None,
        "ops": (4, False, True),
    }


def test_the_weight_gradients_that_stay_two_factors():
    """A single step in one direction returns the gradient of a large weight as two factors, if these have fewer
    numbers. So a program with one call per step does not hold a gradient of each weight for each step."""
    shapes = {"Wx": (512, 16), "Wh": (512, 128), "Wp": (64, 128)}
    v = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    problem = Problem(1, 8, 128, 64, LSTMCell())
    assert factored_names(problem, v) == ["Wx", "Wh", "Wp"]
    assert factored_names(problem._replace(B=16), v) == ["Wh", "Wp"]  # dz has 16 * 512 numbers, as many as Wx
    assert factored_names(problem._replace(T=2), v) == factored_names(problem._replace(bidirectional=True), v) == []
