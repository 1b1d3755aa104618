"""Read and write ONNX models that contain LSTM, GRU and RNN nodes. This needs the package onnx."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ..checks import fail
from ..files import shown, size_of
from .onnx import OPS, from_node, to_onnx
from .weights import Weights, to_mlx

INPUTS = {"X": 0, "W": 1, "R": 2, "B": 3, "sequence_lens": 4, "initial_h": 5, "initial_c": 6, "P": 7}
MOST = 2**31 - 2**20
"""The most bytes of arrays in a written file, because protobuf cannot store more."""

OPSET, IR_VERSION = 14, 8
"""The ONNX versions that written files name: old enough for every runtime, new enough for all written attributes."""


def load() -> Any:
    """Import and return the package onnx; raise ImportError with advice if it is missing."""
    try:
        import onnx
    except ImportError as error:
        raise ImportError(f".onnx files need the package onnx: pip install '.[convert]' ({error})") from None
    return onnx


def read(path: Path, external_data: bool) -> tuple[dict[str, Weights], dict[str, Any], dict[str, list[str]], list[str]]:
    """Read an ONNX file. Return its layers by node name, the other initializers, the keys of each layer's arrays,
    and notes on inputs that are not weights."""
    onnx = load()
    try:
        model = onnx.load(path, load_external_data=False)
    except OSError:
        raise
    except Exception as error:  # protobuf raises an error whose class differs between releases
        raise ValueError(f"it is truncated or damaged: {shown(error)}") from None
    if not model.graph.node or not model.opset_import:
        raise ValueError("it is truncated or damaged, or no model: it has no nodes or no opset")
    # torch's exporter stores some weights as initializers and others as Constant nodes, so both are read.
    held = {each.name: each for each in model.graph.initializer}
    constants = held | {
        node.output[0]: node.attribute[0].t
        for node in model.graph.node
        if node.op_type == "Constant" and node.attribute
    }
    left: dict[str, int] = {}
    for tensor in constants.values():
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            if not external_data:
                rule = f"{shown(tensor.name)} must lie in the file itself, or --external-data be given,"
                fail("convert", rule, shown(external_entries(tensor).get("location")))
            read_external(path, tensor, left)
    layers, keys, notes, used = {}, {}, [], set()
    for n, node in enumerate(model.graph.node):
        if node.op_type not in OPS or node.domain not in ("", "ai.onnx"):
            continue
        name = (node.name or f"{node.op_type}_{n}").strip("/").replace("/", ".")
        names = {word: node.input[k] for word, k in INPUTS.items() if k < len(node.input) and node.input[k]}
        arrays = {}
        for word in ("W", "R", "B", "P"):
            if word in names:
                if names[word] not in constants:
                    rule = f"{word} of {name} must be an initializer or a constant: fold constants first,"
                    fail("convert", rule, repr(names[word]))
                arrays[word] = array_of(onnx, constants[names[word]], names[word])
        for word in ("W", "R"):
            if word not in arrays:
                fail("convert", f"{word} of {name} must be there", "no such input")
        attributes = {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute}
        layers[name] = from_node(
            "convert", node.op_type, arrays, attributes, lambda word, names=names: names.get(word, word)
        )
        H = layers[name].hidden_size
        for word in ("initial_h", "initial_c"):
            sizes = list(constants[names[word]].dims) if names.get(word) in constants else [H]
            if sizes[-1:] != [H]:  # torch.onnx.export drops an LSTM's projection, but the states keep its width
                fail("convert", f"{word} of {name} must be of the width H = {H}: was there a projection?", sizes)
        keys[name] = [names[word] for word in arrays]
        used |= set(keys[name])
        if runtime := [word for word in ("sequence_lens", "initial_h", "initial_c") if word in names]:
            notes.append(f"{name}: {', '.join(runtime)} are no weights: pass lengths and states to the call")
    rest = {key: array_of(onnx, tensor, key) for key, tensor in held.items() if key not in used}
    return layers, rest, keys, notes


def external_entries(tensor: Any) -> dict[str, str]:
    """Return a dict with the location, offset and length of a tensor's external data."""
    return {each.key: each.value for each in tensor.external_data}


def read_external(path: Path, tensor: Any, left: dict[str, int]) -> None:
    """Load a tensor's external data from a file in the model's own folder; a link is refused. left: for each file,
    the number of bytes that no tensor has read yet. No byte may be read twice: otherwise many tensors that share
    bytes could fill the memory."""
    entries = external_entries(tensor)
    location = entries.get("location", "")
    file = path.parent / location
    if Path(location).name != location or location in ("", "..") or file.is_symlink():
        rule = f"the file of {shown(tensor.name)} must lie beside the model, and be no link,"
        fail("convert", rule, repr(shown(location)))
    size, offset = size_of(file), int(entries.get("offset", 0))
    length = int(entries.get("length", size - offset))
    if offset < 0 or length < 0 or offset + length > size:
        raise ValueError(f"it is truncated or damaged: {shown(tensor.name)} lies beyond the end of {shown(location)}")
    left[location] = left.get(location, size) - length
    if left[location] < 0:
        fail("convert", f"the tensors in {shown(location)} must not overlap", shown(tensor.name))
    with file.open("rb") as stream:
        stream.seek(offset)
        tensor.raw_data = stream.read(length)
    tensor.data_location = 0  # 0: the data are in the model itself


def array_of(onnx: Any, tensor: Any, name: str) -> Any:
    """Return a tensor's data as a NumPy array, or as an MLX array if it is bfloat16."""
    try:
        array = onnx.numpy_helper.to_array(tensor)
    except Exception as error:
        raise ValueError(f"it is truncated or damaged: {shown(name)}: {shown(error)}") from None
    return to_mlx(array) if array.dtype.name == "bfloat16" else array


def write(path: Path, ending: str, layers: Mapping[str, Weights]) -> None:
    """Write a model that has, for each stack of layers, an input [T, N, I], a chain of nodes and an output [T, N, D
    H]."""
    onnx = load()
    make, nodes, tensors, inputs, outputs = onnx.helper.make_node, [], [], [], []
    shape = onnx.numpy_helper.from_array(np.array([0, 0, -1], np.int64), "shape")
    nodes.append(make("Constant", [], ["side by side"], value=shape))
    for name, weights in layers.items():
        each, dot = to_onnx(weights), f"{name}." if name else ""
        dtype = {"float64": onnx.TensorProto.DOUBLE, "float16": onnx.TensorProto.FLOAT16}
        kind = dtype.get(str(each[0][1]["W"].dtype).rpartition(".")[2], onnx.TensorProto.FLOAT)
        sizes = weights.input_size, weights.directions * weights.hidden_size
        inputs.append(onnx.helper.make_tensor_value_info(f"{dot}x", kind, [f"{dot}T", f"{dot}N", sizes[0]]))
        outputs.append(onnx.helper.make_tensor_value_info(f"{dot}h", kind, [f"{dot}T", f"{dot}N", sizes[1]]))
        x = f"{dot}x"
        for n, (op_type, arrays, attributes) in enumerate(each):
            title = name or op_type
            title += f".{n}" if len(each) > 1 else ""
            h = f"{dot}h" if n == len(each) - 1 else f"{title}.h"
            for word, array in arrays.items():
                values = array.astype(mx.float32) if array.dtype == mx.bfloat16 else array
                tensors.append(onnx.numpy_helper.from_array(np.array(values), f"{title}.{word}"))
            names = [""] * (INPUTS["P"] + 1)
            for word in arrays:
                names[INPUTS[word]] = f"{title}.{word}"
            names[0] = x
            while not names[-1]:  # a node omits trailing empty inputs
                names.pop()
            nodes.append(make(op_type, names, [f"{title}.Y"], title, **attributes))
            nodes.append(make("Transpose", [f"{title}.Y"], [f"{title}.turned"], perm=[0, 2, 1, 3]))
            nodes.append(make("Reshape", [f"{title}.turned", "side by side"], [h]))
            x = h
    graph = onnx.helper.make_graph(nodes, "mlx_lstm", inputs, outputs, tensors)
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
    if (size := sum(len(tensor.raw_data) for tensor in tensors)) > MOST:
        fail("convert", f"an .onnx file must have less than {MOST} bytes of arrays, protobuf's most,", size)
    onnx.checker.check_model(model)
    path.write_bytes(model.SerializeToString())
