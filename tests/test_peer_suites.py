"""Test cases of other packages, run with our ops. Some packages ship their cases as data. For the others, the
expected numbers are copied from the source of their tests.

If a package ships its cases, the test also asserts how many there are. docs/verification.md has a table of all
counts.
"""

import importlib
import os
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from assertions import assert_within, bounds
from cases import draw, run
from test_cudnn import assert_double
from test_torch import drawing, run_ours, run_torch

import mlx_lstm.torch
from mlx_lstm import convert, cudnn, gru, keras, lstm, rnn
from mlx_lstm.nn import from_weights

ENGINES = ("numpy", "ops")
engines = pytest.mark.parametrize("engine", ENGINES)


def assert_equal(engine, case, expected, dtype=np.float32):
    """Assert that our outputs differ from the expected outputs by at most twice the error bound, because both have
    rounding errors in this dtype."""
    outputs, limit = run(case, engine, dtype)[0], bounds(case, dtype)
    for name, value in expected.items():
        assert_within(name, outputs[name], np.asarray(value).astype(np.float64), 2 * limit[name])


# --- ONNX ------------------------------------------------------------------------------------------------------------

ONNX = {"LSTM": ("lstm", "iofg"), "GRU": ("gru", "zrn"), "RNN": ("rnn", "h")}


def onnx_case(onnx, found):
    """Convert an ONNX node test. Return (case, expected outputs under our names). In ONNX the directions are axis 0,
    and B contains two biases."""
    node, ((inputs, outputs),) = found.model.graph.node[0], found.data_sets
    attributes = {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute}
    given = dict(zip(filter(None, node.input), inputs, strict=True))
    wanted = dict(zip(filter(None, node.output), outputs, strict=True))
    op, order = ONNX[node.op_type]
    direction, D = attributes.pop("direction", b"forward").decode(), len(given["W"])
    batch_first = attributes.pop("layout", 0)
    assert attributes.keys() <= {"hidden_size"} and direction in ("forward", "reverse", "bidirectional")
    case = {"op": op, "bidirectional": D == 2, "reverse": direction == "reverse"}
    case |= {"gate_order": order} if op != "rnn" else {}
    case |= {"reset": "before"} if op == "gru" else {}
    case["x"] = given["X"].swapaxes(0, 1) if batch_first else given["X"]
    case["Wx"], case["Wh"] = np.concatenate(given["W"]), given["R"] if D == 2 else given["R"][0]
    if "B" in given:
        case["b"] = np.concatenate(given["B"].reshape(D, 2, -1).sum(axis=1))
    states = {"h0": "initial_h", "c0": "initial_c"}
    case |= {ours: side_by_side(given[name]) for ours, name in states.items() if name in given}
    case |= {"lengths": given["sequence_lens"].tolist()} if "sequence_lens" in given else {}
    if "P" in given:
        i, o, f = np.split(given["P"][0], 3)
        case["peephole"] = np.concatenate([i, o, f, 0 * i])
    turned = {
        "Y": (2, 0, 1, 3),
        "Y_h": (1, 0, 2),
        "Y_c": (1, 0, 2),
    }  # layout 1 moves B of [T, D, B, H] or [D, B, H] to the front
    if batch_first:
        wanted = {name: value.transpose(np.argsort(turned[name])) for name, value in wanted.items()}
    words = {"Y": "h", "Y_h": "hT", "Y_c": "cT"}
    return case, {words[name]: side_by_side(value) for name, value in wanted.items()}


def side_by_side(array):
    """Convert an array [.., D, B, H] (D directions) to [.., B, D H]."""
    return np.concatenate(np.split(array, array.shape[-3], axis=-3), axis=-1).squeeze(-3)


@engines
def test_nodes_of_onnx(engine):
    """All node tests of LSTM, GRU and RNN in the package onnx pass."""
    node = pytest.importorskip("onnx.backend.test.case.node")
    for name in ONNX:  # importing the module adds its test cases to ONNX's list of cases
        importlib.import_module(f"onnx.backend.test.case.node.{name.lower()}")
    found = [case for case in node._NodeTestCases if case.model.graph.node[0].op_type in ONNX]
    assert len({case.name for case in found}) == 18
    for each in found:
        case, expected = onnx_case(pytest.importorskip("onnx"), each)
        assert_equal(engine, case, expected)


# --- torch -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_module_samples_of_torch():
    """All samples in torch's own tests of nn.LSTM, GRU and RNN give torch's results. They run in training mode
    with requires_grad, and in evaluation mode without.

    The samples run in a child process, because their imports crash a process that has imported TensorFlow.
    """
    pytest.importorskip("torch")
    pytest.importorskip("expecttest")
    code = "import test_peer_suites; print(test_peer_suites.check_module_samples())"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parent)
    assert found.returncode == 0, found.stderr
    assert found.stdout.split() == ["160"]


def check_module_samples():
    """Check all samples of torch's own tests and return how many there are."""
    import torch
    from torch.testing._internal import common_modules

    kinds, count = (torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN), 0
    for info in (info for info in common_modules.module_db if info.module_cls in kinds):
        for training, with_gradient in ((True, True), (False, False)):
            drawn = {"device": "cpu", "dtype": torch.float32, "requires_grad": with_gradient, "training": training}
            for sample in info.module_inputs_func(info, **drawn):
                check_sample(torch, info.module_cls, sample, training)
                count += 1
    return count


def check_sample(torch, kind, sample, training):
    options = dict(sample.constructor_input.kwargs)
    theirs = kind(*sample.constructor_input.args, **options, dtype=torch.float64).train(training)
    layer = getattr(mlx_lstm.torch, kind.__name__)(*sample.constructor_input.args, **options).train(training)
    layer.load_weights([(name, mx.array(value.numpy(), mx.float64)) for name, value in theirs.state_dict().items()])
    x, *hx = sample.forward_input.args
    assert not sample.forward_input.kwargs and len(hx) <= 1
    states = hx[0] if hx and isinstance(hx[0], tuple) else hx
    x, *states = (tensor.detach().numpy() for tensor in (x, *states))
    with mx.stream(mx.cpu):
        found = run_ours(layer, x, states, drawing(1), dtype=mx.float64)
    assert_double(found, run_torch(theirs, x, states, drawing(1)))


# --- TensorFlow ------------------------------------------------------------------------------------------------------

# Sizes of TensorFlow's tests of CudnnRNN, and the sum of all outputs that they expect if all arrays are ones.
SUMS = {  # mode: ((layers, H, I, N, T), sum)
    "lstm": ((4, 200, 200, 20, 10), 231833.22),
    "gru": ((4, 200, 200, 20, 10), 56000),
    "rnn_tanh": ((4, 200, 200, 20, 10), 56000),
    "rnn_relu": ((2, 8, 4, 4, 2), 130688),
}


@engines
@pytest.mark.parametrize("mode", SUMS)
def test_sums_of_tensorflow(engine, mode):
    """The sums of all outputs agree with the numbers in TensorFlow's own test within its tolerance of 1e-2. The
    calls are inference, so dropout has no effect."""
    (L, H, I, N, T), expected = SUMS[mode]
    with mx.stream(mx.cpu):
        params = mx.ones((cudnn.cudnn_rnn_params_size(L, H, I, rnn_mode=mode).item(),))
        state = mx.ones((L, N, H))
        for dropout in (0.0, 1.0) if engine == "numpy" else (0.5,):
            options = {"rnn_mode": mode, "dropout": dropout, "is_training": False, "engine": engine}
            out = cudnn.cudnn_rnn(mx.ones((T, N, I)), state, state, params, **options)
            total = sum(np.array(value, np.float64).sum() for value in out[: 3 if mode == "lstm" else 2])
            np.testing.assert_allclose(total, expected, rtol=1e-2, atol=1e-2)


@engines
def test_number_of_a_gru_without_an_input_product(engine):
    """The output of a cuDNN GRU agrees, to all printed digits, with the number that a GPU printed. The GRU has
    skip_input (x is added without a product with Wx), all parameters are 0, x is 1 and h is 0."""
    with mx.stream(mx.cpu):
        params = mx.zeros((cudnn.cudnn_rnn_params_size(1, 1, 1, rnn_mode="gru", input_mode="skip_input").item(),))
        options = {"rnn_mode": "gru", "input_mode": "skip_input", "is_training": False, "engine": engine}
        state = mx.zeros((1, 1, 1))
        found = cudnn.cudnn_rnn(mx.ones((1, 1, 1)), state, state, params, **options).output.item()
    assert abs(found - 0.20482421) <= 0.5e-8 + 4 * 2.0**-24 * 0.2


def tflite(arrays, x, width, cell_clip, projection_clip):
    """Run TensorFlow Lite's LSTM over a sequence and return h [T, B, P]. `arrays` are in the order of the op's
    inputs; None means an absent input."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    tensorflow = pytest.importorskip("tensorflow")
    flatbuffers = pytest.importorskip("flatbuffers")
    schema = pytest.importorskip("tensorflow.lite.python.schema_py_generated")
    buffers, tensors = [schema.BufferT()], []

    def tensor(shape, data=None, is_state=False):
        buffers.append(schema.BufferT())
        if data is not None:
            buffers[-1].data = np.frombuffer(data.astype(np.float32).tobytes(), np.uint8)
        tensors.append(schema.TensorT())
        tensors[-1].shape, tensors[-1].type = list(shape), schema.TensorType.FLOAT32
        tensors[-1].buffer, tensors[-1].name, tensors[-1].isVariable = len(buffers) - 1, str(len(tensors)), is_state
        return len(tensors) - 1

    inputs = [tensor(x.shape), *(-1 if array is None else tensor(array.shape, array) for array in arrays)]
    hidden = len(arrays[2])
    inputs += [tensor((x.shape[1], size), is_state=True) for size in (width, hidden)]
    operator, options = schema.OperatorT(), schema.UnidirectionalSequenceLSTMOptionsT()
    options.fusedActivationFunction, options.timeMajor = schema.ActivationFunctionType.TANH, True
    options.cellClip, options.projClip = cell_clip or 0.0, projection_clip or 0.0
    operator.inputs, operator.outputs = inputs, [tensor((*x.shape[:2], width))]
    operator.builtinOptionsType = schema.BuiltinOptions.UnidirectionalSequenceLSTMOptions
    operator.builtinOptions = options
    graph, code, model = schema.SubGraphT(), schema.OperatorCodeT(), schema.ModelT()
    graph.tensors, graph.operators, graph.inputs, graph.outputs = tensors, [operator], inputs[:1], operator.outputs
    code.builtinCode = code.deprecatedBuiltinCode = schema.BuiltinOperator.UNIDIRECTIONAL_SEQUENCE_LSTM
    model.version, model.buffers, model.subgraphs, model.operatorCodes = 3, buffers, [graph], [code]
    builder = flatbuffers.Builder(1024)
    builder.Finish(model.Pack(builder), b"TFL3")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TensorFlow warns that the interpreter will move to another package
        interpreter = tensorflow.lite.Interpreter(model_content=bytes(builder.Output()))
    interpreter.allocate_tensors()
    interpreter.set_tensor(0, x)
    interpreter.invoke()
    return interpreter.get_tensor(operator.outputs[0])


def test_lstm_of_tensorflow_lite():
    """Our LSTM agrees with TensorFlow Lite for every combination of coupled gates, peepholes, projection and clips.
    Coupled gates have i = 1 - f, which is the sigmoid of the negated argument of f."""
    count = 0
    for flags in np.ndindex(2, 2, 3, 2):
        coupled, peephole, projection, clip = map(bool, flags)
        rng = np.random.default_rng(count)
        options = {"peephole": peephole, "projection": projection, "cell_clip": 0.3 if clip else None}
        options["projection_clip"] = 0.1 if flags[2] == 2 else None
        case = draw(rng, sizes=(5, 2, 3, 4, 3 if projection else 4), dtype=np.float32, **options)
        case |= {"h0": None, "c0": None}
        split = {name: np.split(case[name], 4) for name in ("Wx", "Wh", "b", "peephole") if name in case}
        for name, (i, f, g, o) in split.items():
            if name == "peephole":
                g[...] = 0
            if coupled:
                i[...] = -f
            case[name] = np.concatenate([i, f, g, o])
        p_i, p_f, _, p_o = split.get("peephole", [None] * 4)
        own = [[None if coupled else i, *rest] for i, *rest in (split[name] for name in ("Wx", "Wh", "b"))]
        given = [*own[0], *own[1], None if coupled else p_i, p_f, p_o, *own[2], case.get("Wp"), None]
        expected = tflite(given, case["x"], case["Wh"].shape[1], case["cell_clip"], case["projection_clip"])
        assert_equal(ENGINES[sum(flags) % 2], case, {"h": expected})
        count += 1
    assert count == 24


# --- Cells of equinox, haiku and flax --------------------------------------------------------------------------------
# Each function computes one step of a cell with the formulas of the package's documentation:
# (parameters, x, *state) -> next state, a tuple that ends with h.


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def equinox_lstm(p, x, c, h):
    i, f, g, o = np.split(x @ p["Wx"].T + h @ p["Wh"].T + p["b"], 4, axis=-1)
    c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
    return c, sigmoid(o) * np.tanh(c)


def equinox_gru(p, x, h):
    (x_r, x_z, x_n), (h_r, h_z, h_n) = (np.split(a, 3, -1) for a in (x @ p["Wx"].T + p["b"], h @ p["Wh"].T))
    z, n = sigmoid(x_z + h_z), np.tanh(x_n + sigmoid(x_r + h_r) * (h_n + p["bhn"]))
    return (n + z * (h - n),)


def haiku_lstm(p, x, c, h):
    i, g, f, o = np.split(np.concatenate([x, h], -1) @ np.concatenate([p["Wx"], p["Wh"]], 1).T + p["b"], 4, axis=-1)
    c = sigmoid(f + 1) * c + sigmoid(i) * np.tanh(g)
    return c, sigmoid(o) * np.tanh(c)


def haiku_gru(p, x, h):
    H = h.shape[-1]
    z, r = np.split(sigmoid(x @ p["Wx"][: 2 * H].T + h @ p["Wh"][: 2 * H].T + p["b"][: 2 * H]), 2, axis=-1)
    a = np.tanh(x @ p["Wx"][2 * H :].T + (r * h) @ p["Wh"][2 * H :].T + p["b"][2 * H :])
    return ((1 - z) * h + z * a,)


def haiku_rnn(p, x, h):
    return (np.maximum(x @ p["Wx"].T + h @ p["Wh"].T + p["b"], 0),)


def flax_lstm(p, x, c, h):
    dense = [x @ W.T + h @ R.T + b for W, R, b in zip(*(np.split(p[k], 4) for k in ("Wx", "Wh", "b")), strict=True)]
    i, f, o = (sigmoid(dense[n]) for n in (0, 1, 3))
    c = f * c + i * np.tanh(dense[2])
    return c, o * np.tanh(c)


def flax_gru(p, x, h):
    (W_r, W_z, W_n), (R_r, R_z, R_n), (b_r, b_z, b_n) = (np.split(p[k], 3) for k in ("Wx", "Wh", "b"))
    r, z = sigmoid(x @ W_r.T + b_r + h @ R_r.T), sigmoid(x @ W_z.T + b_z + h @ R_z.T)
    n = np.tanh(x @ W_n.T + b_n + r * (h @ R_n.T + p["bhn"]))
    return ((1 - z) * n + z * h,)


def flax_minimal(p, x, h):
    """Compute one step of flax's minimal gated unit, which has one gate where a GRU has two. Return a tuple with the
    next state."""
    (W_f, W_n), (R_f, R_n), (b_f, b_n) = (np.split(p[k], 3)[1:] for k in ("Wx", "Wh", "b"))
    f = sigmoid(x @ W_f.T + b_f + h @ R_f.T)
    n = np.tanh(x @ W_n.T + b_n + f * (h @ R_n.T + p["bhn"]))
    return ((1 - f) * n + f * h,)


def flax_minimal_without_reset(p, x, h):
    (W_f, W_n), (R_f, R_n), (b_f, b_n) = (np.split(p[k], 3)[1:] for k in ("Wx", "Wh", "b"))
    f, n = sigmoid(x @ W_f.T + b_f + h @ R_f.T), np.tanh(x @ W_n.T + b_n + h @ R_n.T)
    return ((1 - f) * n + f * h,)


def flax_simple(p, x, h):
    return (np.tanh(x @ p["Wx"].T + p["b"] + h @ p["Wh"].T),)


def of_one_gate(case):
    """Copy the weights of the GRU's update gate to its reset gate, so that both gates are equal."""
    H = case["Wh"].shape[1]
    for name in ("Wx", "Wh", "b"):
        case[name][:H] = case[name][H : 2 * H]


def of_open_reset(case):
    """Change a GRU's weights so that the reset gate is always 1. The activation of this gate is a hard sigmoid,
    which is 1 for arguments of 3 and more."""
    H = case["Wh"].shape[1]
    case["Wx"][:H], case["Wh"][:H], case["b"][:H], case["bhn"][:] = 0, 0, 3, 0


def unchanged(case):
    pass


OPEN = ("hard_sigmoid", "sigmoid", "tanh")
CELLS = {  # name: (step function of the other package, our options, function that makes our cell equal to it)
    "equinox LSTMCell": (equinox_lstm, {}, unchanged),
    "equinox GRUCell": (equinox_gru, {"op": "gru"}, unchanged),
    "haiku LSTM": (haiku_lstm, {"gate_order": "igfo", "forget_bias": 1.0}, unchanged),
    "haiku GRU": (haiku_gru, {"op": "gru", "gate_order": "zrn", "reset": "before", "flip_z": True}, unchanged),
    "haiku VanillaRNN": (haiku_rnn, {"op": "rnn", "activation": "relu"}, unchanged),
    "flax LSTMCell, OptimizedLSTMCell": (flax_lstm, {}, unchanged),
    "flax GRUCell": (flax_gru, {"op": "gru"}, unchanged),
    "flax MGUCell": (flax_minimal, {"op": "gru"}, of_one_gate),
    "flax MGUCell, reset_gate=False": (flax_minimal_without_reset, {"op": "gru", "activations": OPEN}, of_open_reset),
    "flax SimpleCell": (flax_simple, {"op": "rnn"}, unchanged),
}


@pytest.mark.parametrize("name", CELLS)
@engines
def test_cells_by_their_formulas(engine, name):
    step, options, share = CELLS[name]
    case = draw(np.random.default_rng(3), sizes=(6, 3, 4, 5, 5), **options)
    share(case)
    states, found = (case["c0"], case["h0"]) if "c0" in case else (case["h0"],), []
    for x in case["x"]:
        states = step(case, x, *states)
        found.append(states)
    expected = {"h": np.stack([each[-1] for each in found]), "hT": states[-1]}
    if "c0" in case:
        expected |= {"c": np.stack([each[0] for each in found]), "cT": states[0]}
    assert_equal(engine, case, expected, np.float64)


def of_flax(p, op, gates):
    """Make flax's dict of parameters from our arrays, and `Weights` from this dict, as docs/convert.md says."""
    names = {side: [side + gate for gate in gates] for side in "ih"}
    biased = names["h" if op == "lstm" else "i"]  # in an LSTM the products with h have a bias, in a GRU those with x
    params = {}
    for side, key in (("i", "Wx"), ("h", "Wh")):
        blocks = np.split(p[key], len(gates))
        params |= {name: {"kernel": block.T} for name, block in zip(names[side], blocks, strict=True)}
    for name, block in zip(biased, np.split(p["b"], len(gates)), strict=True):
        params[name]["bias"] = block

    def joined(names, part):
        return np.concatenate([params[name][part].T for name in names])

    arrays = {"Wx": joined(names["i"], "kernel"), "Wh": joined(names["h"], "kernel"), "b": joined(biased, "bias")}
    return convert.from_ops(op, [arrays | ({"bhn": p["bhn"]} if op == "gru" else {})])


def of_equinox(p, **more):
    return convert.from_names({"weight_ih": p["Wx"], "weight_hh": p["Wh"], "bias": p["b"]} | more)


CONVERTED = {
    "equinox LSTMCell": of_equinox,
    "equinox GRUCell": lambda p: of_equinox(p, bhn=p["bhn"]),
    "haiku LSTM": lambda p: convert.from_tf(np.concatenate([p["Wx"], p["Wh"]], 1).T, p["b"]),
    "flax LSTMCell, OptimizedLSTMCell": lambda p: of_flax(p, "lstm", "ifgo"),
    "flax GRUCell": lambda p: of_flax(p, "gru", "rzn"),
}


@pytest.mark.parametrize("name", CONVERTED)
def test_converted_weights_of_equinox_haiku_and_flax(name):
    step, options, _ = CELLS[name]
    p = draw(np.random.default_rng(4), sizes=(6, 3, 4, 5, 5), **options)
    states, found = [np.zeros((3, 5))] * (2 if "c0" in p else 1), []
    for x in p["x"]:
        states = step(p, x, *states)
        found.append(states[-1])
    with mx.stream(mx.cpu):
        layer = from_weights(CONVERTED[name](p))
        output, _ = layer(mx.array(p["x"], mx.float64).swapaxes(0, 1))
    np.testing.assert_allclose(np.array(output).swapaxes(0, 1), found, atol=1e-13)


# --- Keras -----------------------------------------------------------------------------------------------------------

TAIL = [[1, 1, 1, 0], [1, 1, 0, 0]]
HOLES = [[1, 1, 0, 1], [1, 0, 0, 1]]
HEAD = [[0, 1, 1, 1], [0, 0, 1, 1]]
ALL, ZERO = {"sequences": True}, {"sequences": True, "zero": True}
BACK, AGAIN = {"backwards": True}, {"again": True}
STATES = {"states": (1, 1)}
STATELESS_BIAS = {"unit_forget_bias": False}
X23, X24, X36 = (2, 3, 4), (2, 4, 3), (3, 6, 4)

# One test of Keras per row: (layer, H, shape of x, options, expected output of each sequence of the batch). If all
# units have the same output, it is listed once. Kernels are 0.01, recurrent kernels 0.02, biases 0.03.
# x is 0, 1, 2, ...
KERAS = [
    ("LSTM", 3, X36, {}, [[0.6288687], [0.86899155], [0.9460773]]),
    ("LSTM", 3, X36, BACK, [[0.35622165], [0.74789524], [0.8872726]]),
    ("LSTM", 3, X36, STATELESS_BIAS, [[0.57019705], [0.8661914], [0.9459622]]),
    ("LSTM", 3, X36, {"bias": False}, [[0.54986924], [0.86226785], [0.9443936]]),
    ("LSTM", 4, X23, AGAIN, [[0.3124785], [0.6863672]]),
    ("LSTM", 2, X24, STATES, [[0.20574439, 0.3558822], [0.64930826, 0.66276]]),
    ("LSTM", 2, X24, STATES | BACK, [[0.13281618, 0.2790356], [0.5839337, 0.5992567]]),
    ("LSTM", 2, X24, {"mask": TAIL}, [[0.11755939], [0.28556206]]),
    ("LSTM", 2, X24, {"mask": TAIL} | ALL, [
        [[0.0158891], [0.05552048], [0.11755939], [0.11755939]],
        [[0.14185596], [0.28556206], [0.28556206], [0.28556206]],
    ]),
    ("LSTM", 2, X24, {"mask": TAIL} | ZERO, [
        [[0.0158891], [0.05552048], [0.11755939], [0.0]], [[0.14185596], [0.28556206], [0.0], [0.0]],
    ]),
    ("LSTM", 2, X24, {"mask": HEAD} | BACK, [[0.15341201], [0.3844719]]),
    ("GRU", 3, X36, {}, [[0.5217289], [0.6371659], [0.39384964]]),
    ("GRU", 3, X36, BACK, [[0.24406259], [0.611516], [0.3928808]]),
    ("GRU", 3, X36, {"reset_after": False}, [[0.51447755], [0.6426879], [0.40208298]]),
    ("GRU", 3, X36, {"bias": False}, [[0.49988455], [0.64701194], [0.4103359]]),
    ("GRU", 4, X23, AGAIN, [[0.29542392], [0.5885018]]),
    ("GRU", 2, X24, STATES, [[0.23774096, 0.33508456], [0.83659905, 1.0227708]]),
    ("GRU", 2, X24, STATES | BACK, [[0.13486053, 0.23261218], [0.78257304, 0.9691353]]),
    ("GRU", 2, X24, {"mask": HOLES}, [[0.19393763], [0.30818558]]),
    ("GRU", 2, X24, {"mask": HOLES} | ALL, [
        [[0.03606692], [0.09497581], [0.09497581], [0.19393763]],
        [[0.16051409], [0.16051409], [0.16051409], [0.30818558]],
    ]),
    ("GRU", 2, X24, {"mask": HOLES} | ZERO, [
        [[0.03606692], [0.09497581], [0.0], [0.19393763]], [[0.16051409], [0.0], [0.0], [0.30818558]],
    ]),
    ("GRU", 2, X24, {"mask": HOLES} | BACK, [[0.11669192], [0.28380975]]),
    ("SimpleRNN", 4, X23, {}, [[0.405432], [0.73605347]]),
    ("SimpleRNN", 4, X23, BACK, [[0.11144729], [0.5528889]]),
    ("SimpleRNN", 4, X23, AGAIN, [[0.40559256], [0.7361247]]),
    ("SimpleRNN", 4, X24, STATES, [[0.33621645], [0.6262637]]),
    ("SimpleRNN", 4, X24, STATES | BACK, [[0.07344437], [0.43043602]]),
    ("SimpleRNN", 4, X24, {"mask": HOLES}, [[0.32951632], [0.61799484]]),
    ("SimpleRNN", 2, X24, {"mask": HOLES} | ALL, [
        [[0.0599281], [0.15122814], [0.15122814], [0.32394567]], [[0.3969304], [0.3969304], [0.3969304], [0.608085]],
    ]),
    ("SimpleRNN", 2, X24, {"mask": HOLES} | ZERO, [
        [[0.0599281], [0.15122814], [0.0], [0.32394567]], [[0.3969304], [0.0], [0.0], [0.608085]],
    ]),
    ("SimpleRNN", 4, X24, {"mask": HOLES} | BACK, [[0.07376196], [0.43645123]]),
]  # fmt: skip

# Bidirectional layers: (merge mode of the two outputs, layer, shape of x, options, expected output). H is 2.
BOTH = [
    ("concat", "SimpleRNN", X23, {}, [[0.39687276, 0.39687276, 0.10004295, 0.10004295],
                                      [0.7237238, 0.7237238, 0.53391594, 0.53391594]]),
    ("ave", "SimpleRNN", X23, {}, [[0.24845785], [0.6288199]]),
    ("mul", "SimpleRNN", X23, {"swapped": True}, [[0.08374989], [0.6740834]]),
    ("sum", "GRU", X23, ALL, [[[0.20937867], [0.34462988], [0.40290534]], [[0.59829646], [0.6734641], [0.6479671]]]),
    ("concat", "LSTM", X24, AGAIN, [[0.26234663, 0.26234663, 0.16959146, 0.16959146],
                                    [0.6137073, 0.6137073, 0.5381646, 0.5381646]]),
    ("concat", "LSTM", X24, {"states": (1, 2, 3, 4)}, [[0.20794602, 0.4577124, 0.14046375, 0.48191673],
                                                       [0.6682636, 0.6711909, 0.60943645, 0.60950446]]),
    ("concat", "GRU", X24, {"mask": HOLES}, [[0.19393763, 0.19393763, 0.11669192, 0.11669192],
                                             [0.30818558, 0.30818558, 0.28380975, 0.28380975]]),
    ("concat", "LSTM", X24, {}, [[0.1990008, 0.1990008, 0.12659755, 0.12659755],
                                 [0.52335435, 0.52335435, 0.44717982, 0.44717982]]),
]  # fmt: skip
MERGED = {"concat": lambda a, b: np.concatenate([a, b], -1), "ave": lambda a, b: (a + b) / 2}
MERGED |= {"mul": np.multiply, "sum": np.add}

# The default options of a test of Keras. again: run the layer twice, and start the second run from the last states of
# the first. zero: outputs of masked steps are 0. states: (h0, c0), as factors of 0, 1, 2, ... swapped: the reverse
# layer has kernels of 0.03 and biases of 0.01.
PLAIN = {"backwards": False, "mask": None, "states": (), "again": False, "sequences": False, "zero": False}
PLAIN |= {"bias": True, "unit_forget_bias": True, "reset_after": True, "swapped": False}


def keras_layer(kind, H, shape, engine, **options):
    """Run our op with weights in Keras' layout, converted by `mlx_lstm.keras`. Return h [B, H], or [B, T, H] with
    the option `sequences`."""
    o, (B, T, I) = SimpleNamespace(**PLAIN | options), shape
    # A masked step leaves the state unchanged. So move the unmasked steps of each sequence to the front, in the order
    # in which Keras runs them.
    on = np.ones((B, T), bool) if o.mask is None else np.array(o.mask, bool)
    order = [np.flatnonzero(row)[:: -1 if o.backwards else 1] for row in on]
    x = np.zeros((T, B, I), np.float32)
    for b, steps in enumerate(order):
        x[: len(steps), b] = np.arange(B * T * I).reshape(shape)[b, steps]
    with mx.stream(mx.cpu):
        first = [np.arange(B * H, dtype=np.float32).reshape(B, H) * scale for scale in o.states]
        states = dict(zip(("h0", "c0"), map(mx.array, first), strict=False))
        for _ in range(1 + o.again):
            out = keras_run(kind, mx.array(x), H, o, states, lengths=on.sum(axis=1).tolist(), engine=engine)
            states = {f"{name[0]}0": getattr(out, name) for name in ("hT", "cT") if hasattr(out, name)}
        h, final = np.array(out.h).swapaxes(0, 1), np.array(out.hT)
    if not o.sequences:
        return final
    found = np.zeros((B, T, H), np.float32)
    for b, steps in enumerate(order):
        found[b, np.sort(steps)] = h[b, : len(steps)]
        for t in np.flatnonzero(~on[b]):
            found[b, t] = 0 if o.zero or t == 0 else found[b, t - 1]
    return found


def keras_run(kind, x, H, o, states, **options):
    G, kernel, bias = {"LSTM": 4, "GRU": 3, "SimpleRNN": 1}[kind], *((0.03, 0.01) if o.swapped else (0.01, 0.03))
    b = np.full((2, 3 * H) if kind == "GRU" and o.reset_after else G * H, bias, np.float32)
    if kind == "LSTM" and o.unit_forget_bias:
        b[H : 2 * H] = 1
    weights = [np.full((rows, G * H), value, np.float32) for rows, value in ((x.shape[-1], kernel), (H, 0.02))]
    weights += [b] if o.bias else []
    if kind == "SimpleRNN":
        W, R, b = map(mx.array, weights)
        return rnn(x, W.T, R.T, b, **states, **options)
    if kind == "GRU":
        reset = "after" if o.reset_after else "before"
        return gru(x, **keras.gru_from_keras(*weights), **states, **options, reset=reset)
    return lstm(x, **keras.lstm_from_keras(*weights), **states, **options)


def assert_is(found, expected):
    """Assert that a result differs from the expected numbers by at most the tolerance of Keras' own tests, 1e-5."""
    expected = np.broadcast_to(np.array(expected), found.shape)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@engines
def test_numbers_of_keras(engine):
    for kind, H, shape, options, expected in KERAS:
        states = options.get("states", ())[: 2 if kind == "LSTM" else 1]
        assert_is(keras_layer(kind, H, shape, engine, **options | {"states": states}), expected)
    assert len(KERAS) == 31


@engines
def test_numbers_of_keras_in_both_directions(engine):
    for merge, kind, shape, options, expected in BOTH:
        states, swapped = options.get("states", ()), options.get("swapped", False)
        ahead = keras_layer(kind, 2, shape, engine, **options | {"states": states[:2], "swapped": False})
        own = options | {"states": states[2:], "swapped": swapped, "backwards": True}
        back = keras_layer(kind, 2, shape, engine, **own)
        assert_is(MERGED[merge](ahead, back[:, ::-1] if "sequences" in options else back), expected)
    assert len(BOTH) == 8
