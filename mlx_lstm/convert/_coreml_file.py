"""Write Core ML packages (.mlpackage) that contain LSTM layers. This needs the package coremltools.

MIL is the language of Core ML models. Its operation lstm runs one layer, in one direction or both, so a stack of layers
becomes several such operations. Sizes: K layers of a stack, D directions, T steps, I input features, H units. h_0 and
c_0 are the first states, h_n and c_n the last states.
"""

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ..engines.problem import Arrays
from ..ground.budget import shown
from ..ground.checks import fail
from .weights import OURS, Format, Weights, as_stored, evened, of_layer, one_bias, reorder

ENDING = ".mlpackage"
"""The ending of a package's name."""

FORMAT = Format({"lstm": "ifog"}, options=True, reverse=True)
"""What MIL's operation lstm can store, and its gate order in our letters. `mil_arrays` also refuses clips and
peepholes."""

ACTIVATIONS = {"sigmoid": "sigmoid", "tanh": "tanh", "relu": "relu", "identity": "linear"}
"""For each activation that MIL has: our name, and MIL's name."""

LONGEST = 65536
"""The largest number of steps that a written model accepts. Core ML requires a limit for an axis of any length."""


def load() -> Any:
    """Import and return the package coremltools; raise ImportError with advice if it is missing."""
    try:
        import coremltools
        import coremltools.converters.mil.mil
    except ImportError as error:
        advice = "pip install '.[coreml]'"
        raise ImportError(f".mlpackage files need the package coremltools: {advice} ({error})") from None
    return coremltools


def write(path: Path, layers: Mapping[str, Weights], force: bool) -> None:
    """Write the layers, `Weights` by name, as a Core ML package. The package is written under a temporary name and then
    renamed, so `path` never names an incomplete package. force: replace an old package. The old package is removed only
    after this rename, and is restored if the rename fails."""
    arrays = {}  # by stack: for each layer the arrays that MIL's operation lstm takes
    for name, weights in layers.items():
        with of_layer(name):  # adds the stack's name to the text of an error
            arrays[name] = mil_arrays(weights)
    titles = [title(name, word) for name in layers for word in ("x", "h_0", "c_0", "h", "h_n", "c_n")]
    if len(set(titles)) < len(titles):
        rule = "names of layers must differ in more than characters for which Core ML has underscores"
        fail("convert", rule, ", ".join(map(shown, layers)))
    if path.exists() and not (path.is_dir() and (path / "Manifest.json").is_file()):
        fail("convert", f"{path} must be a Core ML package, to be replaced by force,", "something else")
    tools = load()
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".") as folder:
        new = Path(folder) / f"new{ENDING}"
        try:
            model_of(tools, layers, arrays).save(str(new))
        except RuntimeError as error:  # of coremltools' own writer, for example if the disk is full
            raise OSError(f"coremltools could not write {path}: {shown(error)}") from error
        if not path.exists():
            os.replace(new, path)
            return
        if not force:
            raise FileExistsError(f"{path} exists")
        # The old package is moved into a separate folder, not into the temporary one, so that it is not deleted if it
        # cannot be renamed back.
        aside = Path(tempfile.mkdtemp(dir=path.parent, prefix="."))
        os.replace(path, old := aside / f"old{ENDING}")
        try:
            os.replace(new, path)
        except BaseException:
            os.replace(old, path)
            aside.rmdir()
            raise
        shutil.rmtree(aside)


def model_of(tools: Any, layers: Mapping[str, Weights], arrays: dict[str, list[Arrays]]) -> Any:
    """Return a coremltools model of all stacks of layers, for one sequence per call. A stack of K layers with D
    directions has the inputs x [T, 1, I], h_0 and c_0 [K D, 1, H], and the outputs h [T, 1, D H], h_n and c_n [K D, 1,
    H]. The number of steps T may differ from call to call. tools: the module coremltools; arrays: the results of
    `mil_arrays` for each stack."""
    from coremltools.converters.mil import Builder as mb
    from coremltools.converters.mil.mil import Function, Program, get_new_symbol

    shapes: dict[str, tuple[Any, ...]] = {}
    for name, weights in layers.items():
        rows = len(weights.layers) * weights.directions
        shapes[title(name, "x")] = (get_new_symbol(), 1, weights.input_size)
        shapes |= {title(name, word): (rows, 1, weights.hidden_size) for word in ("h_0", "c_0")}
    program, target = Program(), tools.target.iOS15  # the oldest system that can run the model
    placeholders = {key: mb.placeholder(shape=shape) for key, shape in shapes.items()}
    with Function(placeholders, opset_version=target) as function:
        outputs = []
        for name, weights in layers.items():
            inputs = [function.inputs[title(name, word)] for word in ("x", "h_0", "c_0")]
            outputs += add_stack(mb, name, weights, arrays[name], inputs)
        function.set_outputs(outputs)
    program.add_function("main", function)
    length = tools.RangeDim(1, LONGEST)  # the number of steps, for which Core ML requires a limit
    types = [
        tools.TensorType(name=key, shape=tuple(size if isinstance(size, int) else length for size in shape))
        for key, shape in shapes.items()
    ]
    return tools.convert(
        program,
        convert_to="mlprogram",
        inputs=types,
        minimum_deployment_target=target,
        compute_precision=tools.precision.FLOAT32,
        skip_model_load=True,  # else Core ML would compile and load the model, which only macOS can
    )


def add_stack(mb: Any, name: str, weights: Weights, arrays: list[Arrays], inputs: list[Any]) -> list[Any]:
    """Add the operations of a stack of layers to a Core ML program, and return the stack's outputs h, h_n, c_n. mb: the
    class `Builder` of coremltools, which makes operations; name: the stack's name; arrays: for each layer the arrays
    that operation lstm takes; inputs: x, h_0 and c_0."""
    x, *first = inputs
    K, D, H = len(weights.layers), weights.directions, weights.hidden_size
    last: list[list[Any]] = [[], []]  # h_n and c_n of each layer, [D, 1, H]
    for k, layer in enumerate(arrays):
        states = []
        for state in first:  # the layer's rows [D, 1, H] of h_0 or c_0, joined to [1, D H] for lstm
            rows = mb.slice_by_size(x=state, begin=[k * D, 0, 0], size=[D, 1, H])
            states.append(mb.reshape(x=mb.transpose(x=rows, perm=[1, 0, 2]), shape=[1, D * H]))
        direction = "bidirectional" if D == 2 else "reverse" if weights.reverse else "forward"
        own = {"initial_h": states[0], "initial_c": states[1], "direction": direction, "output_sequence": True}
        own |= activations(weights.cell) | {"name": title(name, f"lstm_{k}")}
        # The operation returns h of all steps, which the next layer reads as x, then the last h and the last c, both
        # [1, D H].
        x, *found = mb.lstm(x=x, **own, **layer)
        for of_layers, state in zip(last, found, strict=True):
            of_layers.append(mb.transpose(x=mb.reshape(x=state, shape=[1, D, H]), perm=[1, 0, 2]))
    states = [mb.concat(values=of_layers, axis=0) if K > 1 else of_layers[0] for of_layers in last]
    titles = [title(name, word) for word in ("h", "h_n", "c_n")]
    # An operation that changes nothing gives each output its name.
    return [mb.identity(x=array, name=each) for array, each in zip([x, *states], titles, strict=True)]


def title(name: str, word: str) -> str:
    """Return the name of an input, an output or an operation of a stack in a Core ML model: the stack's `name`, if it
    has one, and the `word`, such as "h_0". Core ML allows letters, digits and underscores only, so other characters
    become underscores."""
    whole = "".join(c if c.isascii() and c.isalnum() else "_" for c in (f"{name}_{word}" if name else word))
    return whole if not whole[0].isdigit() else f"_{whole}"


def mil_arrays(weights: Weights) -> list[Arrays]:
    """Return for each layer a dict of float32 arrays with the names and the gate order of Core ML's operation lstm.
    Raise ValueError for options that this operation lacks."""
    op = "convert"
    if weights.cell.op != "lstm":
        why = "as Core ML's gru has no bias inside of its reset gate" if weights.cell.op == "gru" else "for Core ML"
        fail(op, f"layers of a {ENDING} file must be LSTMs, {why},", weights.cell.op)
    weights = evened(as_stored(op, weights, FORMAT))  # adds the forget bias to the bias; refuses a projection
    if weights.cell.cell_clip is not None or any("peephole" in each for layer in weights.layers for each in layer):
        # Core ML's documentation does not say which value is clipped, nor whether the output gate's peephole reads the
        # old or the new c. So both options are refused.
        fail(op, f"layers of a {ENDING} file must have no cell_clip and no peephole", weights)
    activations(weights.cell)  # raises the error for activations that Core ML lacks
    layers, theirs = [], FORMAT.orders["lstm"]  # theirs: Core ML's gate order
    for layer in weights.layers:
        mil: dict[str, Any] = {}
        for ending, arrays in zip(("", "_back"), layer, strict=False):  # "_back": the reverse direction
            with_b = arrays | one_bias(weights.cell, arrays)  # b: the sum of both biases
            for word, key in (("Wx", "weight_ih"), ("Wh", "weight_hh"), ("b", "bias")):
                if word in with_b:
                    mil[key + ending] = np.array(reorder(with_b[word], OURS["lstm"], theirs).astype(mx.float32))
        layers.append(mil)
    return layers


def activations(cell: Any) -> dict[str, str]:
    """Return an LSTM's activations as arguments of Core ML's operation lstm. Raise ValueError for activations that
    this operation lacks."""
    i, f, g, o, h = cell.activations  # of the gates i, f, g, o and of the output h; `ACTIVATIONS` has Core ML's names
    if not {i, g, h} <= ACTIVATIONS.keys() or not i == f == o:
        rule = f"activations must be {', '.join(ACTIVATIONS)}, the same for i, f and o, as Core ML has them,"
        fail("convert", rule, cell.activations)
    return {"recurrent_activation": ACTIVATIONS[i], "cell_activation": ACTIVATIONS[g], "activation": ACTIVATIONS[h]}
