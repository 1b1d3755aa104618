"""Tests of the Core ML packages that `convert.write` writes. coremltools reads a package back, and NumPy computes
its operations as Apple documents them, because only a Mac can run a package."""

import inspect
import re

import mlx.core as mx
import numpy as np
import pytest

import mlx_lstm.torch
from mlx_lstm import convert

T, I, H = 5, 3, 4
ACTIVATIONS = {"sigmoid": lambda x: 1 / (1 + np.exp(-x)), "tanh": np.tanh, "relu": lambda x: np.maximum(x, 0)}


def program_of(path):
    """Return (specification, operations) of a Core ML package. The operations are those of its function main."""
    # Importing coremltools takes seconds, so it is imported only when a test needs it.
    import coremltools
    from coremltools.converters.mil.frontend.milproto.load import load

    model = coremltools.models.MLModel(str(path), skip_model_load=True)
    spec = model.get_spec()
    return spec, load(spec, spec.specificationVersion, model.weights_dir).functions["main"].operations


def one_direction(op, x, h, c, end, back):
    """Compute one direction of an operation `lstm` of MIL (Core ML's language) in float64, as Apple documents it.
    The gates in the rows of the weights are input, forget, output, cell. `end` is the suffix of the weights' names.
    Return (outputs of all steps, last h, last c)."""
    W, R, b = (getattr(op, f"{name}{end}") for name in ("weight_ih", "weight_hh", "bias"))
    b = 0 if b is None else b.val.astype(np.float64)
    gate, cell, out = (ACTIVATIONS[getattr(op, f"{name}activation").val] for name in ("recurrent_", "cell_", ""))
    outputs = []
    for x_t in x[::-1] if back else x:
        i, f, o, z = np.split(x_t @ W.val.T.astype(np.float64) + h @ R.val.T.astype(np.float64) + b, 4, axis=-1)
        c = gate(f) * c + gate(i) * cell(z)
        h = gate(o) * out(c)
        outputs.append(h)
    return np.stack(outputs[::-1] if back else outputs), h, c


def run(operations, x, h_0, c_0):
    """Run the LSTM operations of a Core ML package one after the other. Return (h, h_n, c_n) in the shapes of torch."""
    states, row = ([], []), 0
    for op in operations:
        if op.op_type != "lstm":
            continue
        direction = op.direction.val
        ways = {"forward": [("", False)], "reverse": [("", True)]}.get(direction, [("", False), ("_back", True)])
        outputs = []
        for end, back in ways:
            output, h, c = one_direction(op, x, h_0[row], c_0[row], end, back)
            outputs.append(output)
            states[0].append(h)
            states[1].append(c)
            row += 1
        x = np.concatenate(outputs, axis=-1)
    return x, np.stack(states[0]), np.stack(states[1])


def test_the_gate_order_is_the_documented_one():
    """The documentation of MIL's operation lstm still states the gate order input, forget, output, cell for each of
    the operation's four matrices. `convert.write` writes this order."""
    from coremltools.converters.mil.mil.ops.defs.iOS15.recurrent import lstm

    text = re.sub(r"\s+", " ", inspect.getdoc(lstm))
    assert text.count("order of ``[input_gate, forget_gate, output_gate, cell_gate]``") == 4


@pytest.mark.parametrize("name", ["", "encoder.lstm"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("K, D", [(1, 1), (3, 1), (2, 2)])
def test_a_package_holds_the_layers_with_their_states(K, D, bias, name, tmp_path):
    """The operations of a written Core ML package, computed as Apple documents them, give the outputs and the last
    states of the layer. The package takes and returns states and accepts any number of steps."""
    mx.random.seed(1)
    layer = mlx_lstm.torch.LSTM(I, H, K, bias, bidirectional=D == 2)
    path = tmp_path / "m.mlpackage"
    convert.write(path, {name: convert.from_torch(layer)})
    assert [each.name for each in tmp_path.iterdir()] == ["m.mlpackage"]
    spec, operations = program_of(path)
    dot = "encoder_lstm_" if name else ""
    assert [each.name for each in spec.description.input] == [f"{dot}{word}" for word in ("x", "h_0", "c_0")]
    assert [each.name for each in spec.description.output] == [f"{dot}{word}" for word in ("h", "h_n", "c_n")]
    x_type, h_type, _ = (each.type.multiArrayType for each in spec.description.input)
    assert list(h_type.shape) == [K * D, 1, H] and x_type.shapeRange.sizeRanges[0].upperBound >= 10000
    x, h, c = (mx.random.normal(shape) for shape in ((T, 1, I), (K * D, 1, H), (K * D, 1, H)))
    expected, (h_n, c_n) = layer(x, (h, c))
    for got, want in zip(run(operations, *map(np.array, (x, h, c))), (expected, h_n, c_n), strict=True):
        np.testing.assert_allclose(got, np.array(want), rtol=0, atol=2e-6)


def test_a_reversed_layer_other_activations_and_a_forget_bias(tmp_path):
    arrays = {key: mx.random.normal(shape) for key, shape in {"Wx": (4 * H, I), "Wh": (4 * H, H)}.items()}
    options = {"forget_bias": 1.0, "activations": ("sigmoid", "sigmoid", "relu", "sigmoid", "tanh"), "reverse": True}
    convert.write(tmp_path / "m.mlpackage", {"": convert.from_ops("lstm", [arrays], **options)})
    x, h, c = (mx.random.normal(shape) for shape in ((T, 1, I), (1, 1, H), (1, 1, H)))
    got = run(program_of(tmp_path / "m.mlpackage")[1], *map(np.array, (x, h, c)))
    expected = mlx_lstm.lstm(x, **arrays, h0=h[0], c0=c[0], **options)
    for array, want in zip(got, (expected.h, expected.hT[None], expected.cT[None]), strict=True):
        np.testing.assert_allclose(array, np.array(want), rtol=1e-5, atol=1e-5)


def test_packages_are_replaced_by_force_only(tmp_path):
    path, layers = tmp_path / "m.mlpackage", {"": convert.from_torch(mlx_lstm.torch.LSTM(I, H))}
    convert.write(path, layers)
    with pytest.raises(ValueError, match="must not exist, or be replaced by force"):
        convert.write(path, layers)
    convert.write(path, {"": convert.from_torch(mlx_lstm.torch.LSTM(I, 7))}, force=True)
    assert program_of(path)[0].description.input[1].type.multiArrayType.shape[-1] == 7
    (tmp_path / "folder.mlpackage").mkdir()
    with pytest.raises(ValueError, match="must be a Core ML package, to be replaced by force, but got something else"):
        convert.write(tmp_path / "folder.mlpackage", layers, force=True)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["folder.mlpackage", "m.mlpackage"]


ARRAYS = {"Wx": mx.ones((16, 3)), "Wh": mx.ones((16, 4))}
REFUSED = {
    "a GRU": (convert.from_torch(mlx_lstm.torch.GRU(I, H)), "must be LSTMs, as Core ML's gru has no bias inside"),
    "an RNN": (convert.from_torch(mlx_lstm.torch.RNN(I, H)), "must be LSTMs, for Core ML, but got rnn"),
    "a projection": (convert.from_torch(mlx_lstm.torch.LSTM(I, H, proj_size=2)), "a projection must be the default"),
    "a clip": (convert.from_ops("lstm", [ARRAYS], cell_clip=1.0), "must have no cell_clip and no peephole"),
    "a peephole": (convert.from_ops("lstm", [ARRAYS | {"peephole": mx.ones(16)}]), "no cell_clip and no peephole"),
    "activations": (
        convert.from_ops("lstm", [ARRAYS], activations=["hard_sigmoid"] * 2 + ["tanh", "hard_sigmoid", "tanh"]),
        "activations must be sigmoid, tanh, relu, identity, the same for i, f and o",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_options_that_core_ml_lacks_are_refused(case, tmp_path):
    weights, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        convert.write(tmp_path / "m.mlpackage", {"": weights})
    assert not list(tmp_path.iterdir())


def test_packages_are_not_read(tmp_path):
    with pytest.raises(ValueError, match=r"m.mlpackage must end in .*: Core ML packages can be written, not read,"):
        convert.read(tmp_path / "m.mlpackage")
