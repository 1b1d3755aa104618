"""Tests of the Core ML packages that `convert.write` writes. coremltools reads a package back, and NumPy computes
its operations as Apple documents them, because only a Mac can run a package."""

import inspect
import os
import re
import shutil

import mlx.core as mx
import numpy as np
import pytest

import mlx_lstm.torch
from mlx_lstm import convert
from mlx_lstm.convert import _coreml_file
from mlx_lstm.convert.__main__ import main

T, I, H = 5, 3, 4
ACTIVATIONS = {"sigmoid": lambda x: 1 / (1 + np.exp(-x)), "tanh": np.tanh, "relu": lambda x: np.maximum(x, 0)}


def program_of(path):
    """Return (specification, function main) of a Core ML package."""
    # Importing coremltools takes seconds, so it is imported only when a test needs it.
    import coremltools
    from coremltools.converters.mil.frontend.milproto.load import load

    model = coremltools.models.MLModel(str(path), skip_model_load=True)
    spec = model.get_spec()
    return spec, load(spec, spec.specificationVersion, model.weights_dir).functions["main"]


def lstm(
    x, initial_h, initial_c, direction, output_sequence, recurrent_activation, cell_activation, activation, **arrays
):
    """Compute the operation `lstm` of MIL (Core ML's language) in float64, as Apple documents it. The gates in the rows
    of the weights are input, forget, output, cell. With both directions the states are side by side, [1, 2 H]. Return
    (outputs of all steps, last h, last c)."""
    assert output_sequence
    ways = {"forward": [("", False)], "reverse": [("", True)], "bidirectional": [("", False), ("_back", True)]}[
        direction
    ]
    gate, cell, out = (ACTIVATIONS[name] for name in (recurrent_activation, cell_activation, activation))
    h_0, c_0 = (np.split(state, len(ways), axis=-1) for state in (initial_h, initial_c))
    sides = []
    for d, (end, back) in enumerate(ways):
        W, R, b, h, c = (*(arrays[f"{name}{end}"] for name in ("weight_ih", "weight_hh", "bias")), h_0[d], c_0[d])
        outputs = []
        for x_t in x[::-1] if back else x:
            i, f, o, z = np.split(x_t @ W.T + h @ R.T + b, 4, axis=-1)
            c = gate(f) * c + gate(i) * cell(z)
            h = gate(o) * out(c)
            outputs.append(h)
        sides.append((np.stack(outputs[::-1] if back else outputs), h, c))
    return [np.concatenate(parts, axis=-1) for parts in zip(*sides, strict=True)]


OPERATIONS = {
    "concat": lambda values, axis, interleave=False: np.concatenate(values, axis),
    "identity": lambda x: x,
    "lstm": lstm,
    "reshape": lambda x, shape: x.reshape(shape),
    "slice_by_size": lambda x, begin, size: x[tuple(slice(b, b + n) for b, n in zip(begin, size, strict=True))],
    "transpose": lambda x, perm: x.transpose(perm),
}
"""The operations of MIL that written packages have, as Apple documents them. Any other one fails the test."""


def run(program, **inputs):
    """Compute all operations of a Core ML program on inputs by name. Return its outputs by name."""
    spec, function = program
    values = {name: np.array(array, np.float64) for name, array in inputs.items()}

    def value(given):
        if isinstance(given, (list, tuple)):
            return [value(each) for each in given]
        if given.val is None:
            return values[given.name]
        return given.val.astype(np.float64) if getattr(given.val, "dtype", None) == np.float32 else given.val

    for op in function.operations:
        if op.op_type != "const":
            absent = {"bias": 0.0, "bias_back": 0.0} if op.op_type == "lstm" else {}
            arguments = {name: value(given) for name, given in op.inputs.items() if given is not None}
            found = OPERATIONS[op.op_type](**absent | arguments)
            for output, array in zip(op.outputs, found if op.op_type == "lstm" else [found], strict=True):
                values[output.name] = array
    return {each.name: values[each.name] for each in spec.description.output}


def test_the_gate_order_is_the_documented_one():
    """The documentation of MIL's operation lstm still states the gate order input, forget, output, cell for each of
    the operation's four matrices. `convert.write` writes this order."""
    from coremltools.converters.mil.mil.ops.defs.iOS15.recurrent import lstm

    text = re.sub(r"\s+", " ", inspect.getdoc(lstm))
    assert text.count("order of ``[input_gate, forget_gate, output_gate, cell_gate]``") == 4


@pytest.mark.parametrize("K, D, bias, name", [(1, 1, True, ""), (3, 1, False, "encoder.lstm"), (2, 2, True, "lstm")])
def test_a_package_holds_the_layers_with_their_states(K, D, bias, name, tmp_path):
    """The operations of a written Core ML package, computed as Apple documents them, give the outputs and the last
    states of the layer. The package takes and returns states and accepts any number of steps."""
    mx.random.seed(1)
    layer = mlx_lstm.torch.LSTM(I, H, K, bias, bidirectional=D == 2)
    path = tmp_path / "m.mlpackage"
    convert.write(path, {name: convert.from_torch(layer)})
    assert [each.name for each in tmp_path.iterdir()] == ["m.mlpackage"]
    spec, function = program_of(path)
    dot = f"{name.replace('.', '_')}_" if name else ""
    assert [each.name for each in spec.description.input] == [f"{dot}{word}" for word in ("x", "h_0", "c_0")]
    assert [each.name for each in spec.description.output] == [f"{dot}{word}" for word in ("h", "h_n", "c_n")]
    x_type, h_type, _ = (each.type.multiArrayType for each in spec.description.input)
    assert list(h_type.shape) == [K * D, 1, H] and x_type.shapeRange.sizeRanges[0].upperBound >= 10000
    x, h, c = (mx.random.normal(shape) for shape in ((T, 1, I), (K * D, 1, H), (K * D, 1, H)))
    expected, (h_n, c_n) = layer(x, (h, c))
    got = run((spec, function), **{f"{dot}x": x, f"{dot}h_0": h, f"{dot}c_0": c})
    for word, want in {"h": expected, "h_n": h_n, "c_n": c_n}.items():
        np.testing.assert_allclose(got[f"{dot}{word}"], np.array(want), rtol=0, atol=2e-6)


def test_a_reversed_layer_other_activations_and_a_forget_bias(tmp_path):
    arrays = {key: mx.random.normal(shape) for key, shape in {"Wx": (4 * H, I), "Wh": (4 * H, H)}.items()}
    options = {"forget_bias": 1.0, "activations": ("sigmoid", "sigmoid", "relu", "sigmoid", "tanh"), "reverse": True}
    convert.write(tmp_path / "m.mlpackage", {"": convert.from_ops("lstm", [arrays], **options)})
    x, h, c = (mx.random.normal(shape) for shape in ((T, 1, I), (1, 1, H), (1, 1, H)))
    got = run(program_of(tmp_path / "m.mlpackage"), x=x, h_0=h, c_0=c)
    expected = mlx_lstm.lstm(x, **arrays, h0=h[0], c0=c[0], **options)
    for word, want in {"h": expected.h, "h_n": expected.hT[None], "c_n": expected.cT[None]}.items():
        np.testing.assert_allclose(got[word], np.array(want), rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """Write a package once for the tests that replace a copy of it, since coremltools takes most of a second."""
    path = tmp_path_factory.mktemp("coreml") / "m.mlpackage"
    convert.write(path, {"": convert.from_torch(mlx_lstm.torch.LSTM(I, H))})
    return path


def test_packages_are_replaced_by_force_only(package, tmp_path):
    path, layers = tmp_path / "m.mlpackage", {"": convert.from_torch(mlx_lstm.torch.LSTM(I, H))}
    shutil.copytree(package, path)
    with pytest.raises(ValueError, match="must not exist, or be replaced by force"):
        convert.write(path, layers)
    convert.write(path, {"": convert.from_torch(mlx_lstm.torch.LSTM(I, 7))}, force=True)
    assert program_of(path)[0].description.input[1].type.multiArrayType.shape[-1] == 7
    (tmp_path / "folder.mlpackage").mkdir()
    with pytest.raises(ValueError, match="must be a Core ML package, to be replaced by force, but got something else"):
        convert.write(tmp_path / "folder.mlpackage", layers, force=True)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["folder.mlpackage", "m.mlpackage"]


def test_the_command_writes_packages_and_reads_none(tmp_path, capsys):
    convert.write(tmp_path / "a.npz", {"": convert.from_torch(mlx_lstm.torch.LSTM(I, H))})
    given = [str(tmp_path / name) for name in ("a.npz", "a.mlpackage")]
    assert main(given) == 0 and (tmp_path / "a.mlpackage" / "Manifest.json").is_file()
    assert "not read again: Core ML packages are only written" in capsys.readouterr().out
    assert main(given) == 2 and main([given[1], str(tmp_path / "b.npz")]) == 2
    assert "Core ML packages can be written, not read" in capsys.readouterr().err


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_package_comes_back_if_a_rename_fails(comes_back, package, tmp_path, monkeypatch):
    """If the new package cannot be renamed, the old one comes back. If it cannot come back either, it is kept under
    another name."""
    path, rename, renames = tmp_path / "m.mlpackage", os.replace, []
    shutil.copytree(package, path)
    old = {each.relative_to(path): each.read_bytes() for each in path.rglob("*") if each.is_file()}

    def second_fails(source, target):
        renames.append(target)
        if len(renames) == 2 or (len(renames) == 3 and not comes_back):
            raise OSError("input/output error")
        rename(source, target)

    monkeypatch.setattr(os, "replace", second_fails)
    with pytest.raises(OSError, match="input/output"):
        convert.write(path, {"": convert.from_torch(mlx_lstm.torch.LSTM(I, 7))}, force=True)
    (kept,) = [path] if comes_back else tmp_path.rglob("old.mlpackage")
    assert {each.relative_to(kept): each.read_bytes() for each in kept.rglob("*") if each.is_file()} == old
    assert not comes_back or [each.name for each in tmp_path.iterdir()] == ["m.mlpackage"]


def test_an_error_of_coremltools_is_one_line(tmp_path, monkeypatch, capsys):
    """If coremltools cannot write a package, as on a full disk, the command prints one line and leaves no file."""

    def model_of(*arguments):
        raise RuntimeError("[MIL FileWriter]: Unknown error occurred while writing data to the file.")

    convert.write(tmp_path / "a.npz", {"": convert.from_torch(mlx_lstm.torch.LSTM(I, H))})
    monkeypatch.setattr(_coreml_file, "model_of", model_of)
    assert main([str(tmp_path / "a.npz"), str(tmp_path / "a.mlpackage")]) == 2
    said = capsys.readouterr().err
    assert "not converted: coremltools could not write" in said and "[MIL FileWriter]" in said
    assert [each.name for each in tmp_path.iterdir()] == ["a.npz"]


def test_names_that_core_ml_makes_equal_are_refused(tmp_path):
    layer = convert.from_torch(mlx_lstm.torch.LSTM(I, H))
    with pytest.raises(ValueError, match=r"must differ in more than characters .* but got enc\.a, enc_a"):
        convert.write(tmp_path / "m.mlpackage", {"enc.a": layer, "enc_a": layer})


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
