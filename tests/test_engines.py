"""Tests of the choice of engine. A table lists the expected engine for each kind of machine. The tests check all
kinds of machines on any machine."""

import re
from contextlib import nullcontext

import mlx.core as mx
import pytest
from on_metal import on_metal

from mlx_lstm import lstm, recurrence
from mlx_lstm.engines import ENGINES, METAL_ENGINES, choose, definitions
from mlx_lstm.engines.cells import ACTIVATIONS, GRUCell, LSTMCell, RNNCell
from mlx_lstm.engines.metal import kernel
from mlx_lstm.engines.metal.fused import LayerSize, rows_for, step_cycles
from mlx_lstm.engines.predicted import predict
from mlx_lstm.engines.problem import limited
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
