"""Read and write ONNX models that contain LSTM, GRU and RNN nodes. This needs the package onnx.

A model is a graph of nodes. A node has a type, inputs and outputs, which are names of arrays; an empty name stands for
an input that is not passed. The inputs of a recurrent node are W (input weights), R (recurrent weights), B (both
biases), P (peephole weights) and others (`INPUTS`). An array in the file is a tensor: an initializer, or the value of a
Constant node. Its bytes may lie in another file (external data). The file itself is a message of protobuf. Sizes: T
steps, N batch items, I input features, H units, L layers of a stack, D directions.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ..ground.budget import Budget, shown
from ..ground.checks import fail
from ..ground.files import NUMBERS, Foreign, broken, check_shape, foreign
from ..recurrence import common_dtype
from .onnx import OPS, from_node, to_onnx
from .weights import Found, Weights, of_layer, to_mlx

INPUTS = {"X": 0, "W": 1, "R": 2, "B": 3, "sequence_lens": 4, "initial_h": 5, "initial_c": 6, "P": 7}
"""The positions of the inputs of an LSTM node. GRU and RNN nodes have some of these inputs, at the same positions."""

MOST = 2**31 - 2**20
"""The largest number of bytes of all arrays in a written file. protobuf cannot store 2^31 bytes; the rest is for
names."""

OPSET, IR_VERSION = 14, 8
"""The ONNX versions that written files name: old enough for every runtime, new enough for all written attributes."""


def load() -> Any:
    """Import and return the package onnx; raise ImportError with advice if it is missing."""
    try:
        import onnx
    except ImportError as error:
        raise ImportError(f".onnx files need the package onnx: pip install '.[convert]' ({error})") from None
    return onnx


def read(file: Foreign, external_data: bool, only: Sequence[str] | None = None) -> Found:
    """Read an ONNX file. Return its layers by node name, the other initializers, the keys of each layer's arrays, and
    notes on inputs that are not weights. external_data: whether other files that hold tensors of the model may be read.
    only: the names of the layers that must be readable, or None for all; other unreadable layers are left out."""
    onnx, data = load(), file.read()
    check_count(data, onnx.ModelProto.DESCRIPTOR, file.budget)  # refuses a message that would take too much memory
    try:
        model = onnx.load_model_from_string(data)
    except Exception as error:  # protobuf raises an error whose class differs between releases
        broken(shown(error))
    if not model.graph.node or not model.opset_import:
        broken("or no model: it has no nodes or no opset")  # "it is truncated or damaged: or no model: ..."
    # torch's exporter stores some weights as initializers and others as Constant nodes, so both are read. In a Constant
    # that holds no tensor, such as a single integer, `t` is empty; `array_of` refuses an empty tensor as a weight.
    initializers = [(each.name, each) for each in model.graph.initializer]
    nodes = [node for node in model.graph.node if node.op_type == "Constant" and node.attribute]
    tensors = [*initializers, *((file.budget.name(node.output[0]), node.attribute[0].t) for node in nodes)]
    constants = dict(tensors)  # by name
    if len(constants) < len(tensors):
        broken("it holds a tensor's name twice")
    left: dict[str, int] = {}  # by file of external data: the number of bytes that no tensor has read yet
    for name, tensor in tensors:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            if not external_data:
                rule = f"{shown(name)} must lie in the file itself, or --external-data be given,"
                fail("convert", rule, shown(external_entries(tensor).get("location")))
            read_external(file.path, tensor, left)
    # keys: the names of each layer's tensors. used: the tensors that belong to a layer. taken: the names of layers.
    layers, keys, notes, used, taken = {}, {}, [], set(), set()
    for n, node in enumerate(model.graph.node):
        if not is_recurrent(node):
            continue
        name = file.budget.name(node.name or f"{node.op_type}_{n}").strip("/").replace("/", ".")
        # ONNX allows several nodes of one name: the later ones get the node's number, too.
        while name in taken:
            name += f"_{n}"
        taken.add(name)
        # names: for each input that is passed, the name of its tensor. weights: the names of the layer's arrays.
        names = {word: tensor for word, tensor in zip(INPUTS, node.input, strict=False) if tensor}
        weights = [names[word] for word in ("W", "R", "B", "P") if word in names]
        used |= {*weights}
        try:
            layers[name] = layer_of(onnx, node, name, names, constants, file.budget)
        except ValueError:
            if only is None or name in only:
                raise
            continue
        keys[name] = weights
        if runtime := [word for word in ("sequence_lens", "initial_h", "initial_c") if word in names]:
            notes.append(f"{name}: {', '.join(runtime)} are no weights: pass lengths and states to the call")
    notes += notes_on_unread(model)
    # A file that `write` wrote contains zeros for the first states, the default of inputs that a node Expand repeats
    # for each batch item. They are no weights, so they are added to `used`, which keeps them out of `rest`.
    inputs = {each.name for each in model.graph.input}
    used |= {node.input[0] for node in model.graph.node if node.op_type == "Expand" and node.input} & inputs
    rest = {key: array_of(onnx, tensor, key, file.budget) for key, tensor in initializers if key not in used}
    if no_numbers := [key for key, array in rest.items() if array is None]:
        notes.append(f"{len(no_numbers)} tensors without numbers are left out")
    return layers, {key: array for key, array in rest.items() if array is not None}, keys, notes


def notes_on_unread(model: Any) -> list[str]:
    """Return notes on recurrent nodes that `read` does not read: nodes inside of other nodes or of functions, and nodes
    of other sets of types than ONNX' own, such as DynamicQuantizeLSTM of ONNX Runtime."""
    notes = []
    if inner := layers_inside(model):
        where = "inside If, Loop, Scan or a function"
        notes.append(f"{inner} recurrent {'node' if inner == 1 else 'nodes'} {where}, not read: inline the graph first")
    others = {node.op_type for node in model.graph.node if node.op_type.endswith(tuple(OPS)) and not is_recurrent(node)}
    rule = "are not read, because the type is not ONNX' own: convert the model as it was before quantization"
    return notes + [f"nodes of the type {shown(kind)} {rule}" for kind in sorted(others)]


def layers_inside(model: Any) -> int:
    """Return the number of nodes LSTM, GRU and RNN in the model's functions and in graphs inside of nodes such as If.
    The loop ends soon in any file: `check_count` has limited the model's size, and protobuf its depth."""
    found, graphs = 0, [*model.functions, model.graph]
    while graphs:
        for node in graphs.pop().node:
            found += is_recurrent(node)
            graphs += [inner for each in node.attribute for inner in (each.g, *each.graphs) if inner.node]
    return found - sum(map(is_recurrent, model.graph.node))


def is_recurrent(node: Any) -> bool:
    """Return whether a node has one of the types LSTM, GRU and RNN. "" and "ai.onnx" are the names of ONNX' own set of
    types."""
    return node.op_type in OPS and node.domain in ("", "ai.onnx")


def layer_of(
    onnx: Any, node: Any, name: str, names: Mapping[str, str], constants: Mapping[str, Any], budget: Budget
) -> Weights:
    """Return the weights of an LSTM, GRU or RNN node. Raise ValueError if the arrays do not fit. name: the layer's
    name, for error texts. names: for each input the name of its tensor. constants: the tensors of the file, by name."""
    arrays = {}
    for word in ("W", "R", *(word for word in ("B", "P") if word in names)):
        if word not in names:
            fail("convert", f"{word} of {name} must be there", "no such input")
        if names[word] not in constants:
            rule = f"{word} of {name} must be an initializer or a constant: fold constants first,"
            fail("convert", rule, repr(names[word]))
        arrays[word] = array_of(onnx, constants[names[word]], names[word], budget)
        if arrays[word] is None:
            fail("convert", f"{word} of {name} must hold numbers", shown(names[word]))
    attributes = {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute}
    # The last argument: error texts call the arrays W, R, B and P by the names of their tensors.
    weights = from_node("convert", node.op_type, arrays, attributes, lambda word: names.get(word, word))
    for word in ("initial_h", "initial_c"):
        H = weights.hidden_size
        # sizes: the shape of the first state, or [H] if the file does not contain it.
        sizes = list(constants[names[word]].dims) if names.get(word) in constants else [H]
        if sizes[-1:] != [H]:  # torch.onnx.export drops an LSTM's projection, but the states keep its size
            fail("convert", f"{word} of {name} must be of the width H = {H}: was there a projection?", sizes)
    return weights


def check_count(data: bytes, kind: Any, budget: Budget) -> None:
    """Raise ValueError if a message of protobuf has more parts than the budget allows: a part may have only two bytes
    in the file, but becomes an object of about a hundred bytes in memory. data: the message. kind: protobuf's
    description of its type. A truncated message or an unknown encoding raises IndexError or KeyError, which the caller
    reports as a damaged file."""
    # open_messages: for each message that is not read to its end: the next position in `data`, its end, and its type.
    parts, open_messages = 0, [(0, len(data), kind)]
    # A message is a sequence of fields. Each field begins with a tag: the field's number, and in the lowest three bits
    # its encoding: 0 is a number, 1 eight bytes, 2 a length and as many bytes, 5 four bytes.
    while open_messages:
        place, stop, kind = open_messages.pop()
        while place < stop:
            tag, place = varint(data, place)  # place: now the position after the tag
            if tag & 7 == 2:  # a text, an array or a message: its length, then its bytes
                size, place = varint(data, place)
                parts += 1
                budget.values(parts)  # raises ValueError if there are too many
                field = kind.fields_by_number.get(tag >> 3)
                if field is not None and field.message_type is not None:  # a message: read it first, the rest later
                    open_messages.append((place + size, stop, kind))
                    stop, kind = min(place + size, stop), field.message_type
                else:
                    place += size
            elif tag & 7 == 0:  # a number
                _, place = varint(data, place)
            else:  # eight or four bytes
                place += {1: 8, 5: 4}[tag & 7]


def varint(data: bytes, place: int) -> tuple[int, int]:
    """Return the number that protobuf stores at the position `place` of `data`, and the position after it. Each byte
    has seven bits of the number, the lowest first; the highest bit of a byte says that another byte follows."""
    number = 0
    for n in range(10):  # 10 bytes with 7 bits each are enough for 64 bits
        number |= (data[place + n] & 127) << 7 * n
        if data[place + n] < 128:
            return number, place + n + 1
    broken("it has a number of more than 64 bits")


def external_entries(tensor: Any) -> dict[str, str]:
    """Return the location, offset and length of a tensor's external data, as texts."""
    return {each.key: each.value for each in tensor.external_data}


def read_external(path: Path, tensor: Any, left: dict[str, int]) -> None:
    """Load a tensor's external data into the tensor, from a file in the model's own folder; a link is refused. No byte
    may be read twice, because many tensors that share bytes could fill the memory. path: the model's file. left: for
    each file, the number of bytes that no tensor has read yet."""
    entries = external_entries(tensor)  # location: the file's name; offset and length, in bytes, may be missing
    location = entries.get("location", "")
    data_path = path.parent / location
    if Path(location).name != location or location in ("", "..") or data_path.is_symlink():
        rule = f"the file of {shown(tensor.name)} must lie beside the model, and be no link,"
        fail("convert", rule, repr(shown(location)))
    with foreign(data_path) as file:
        size, offset = file.budget.stored, int(entries.get("offset", 0))  # stored: the bytes of the file
        length = int(entries.get("length", size - offset))  # without a length: up to the end of the file
        if offset < 0 or length < 0 or offset + length > size:
            broken(f"{shown(tensor.name)} lies beyond the end of {shown(location)}")
        left[location] = left.get(location, size) - length
        if left[location] < 0:
            fail("convert", f"the tensors in {shown(location)} must not overlap", shown(tensor.name))
        file.stream.seek(offset)
        tensor.raw_data = file.stream.read(length)
    tensor.data_location = 0  # 0: the data are in the model itself


def array_of(onnx: Any, tensor: Any, name: str, budget: Budget) -> Any:
    """Return a tensor's data as a NumPy array, or as an MLX array if it is bfloat16, or None if it holds no numbers.
    name: the tensor's name. budget: raises an error if the file takes too much memory."""
    budget.name(name)  # raises an error for a name that is too long, or if there are too many names
    if tensor.data_location == onnx.TensorProto.EXTERNAL:  # else onnx would read a file in the working folder
        fail("convert", f"{shown(name)} must lie in the file itself", "external data")
    check_shape(name, tuple(tensor.dims))
    # Numbers that are not in raw_data are in a field such as float_data or int64_data. A number may take one byte in
    # the file and eight in memory.
    kinds = ("float", "double", "int32", "int64", "uint64")
    budget.take(8 * max(len(getattr(tensor, f"{kind}_data")) for kind in kinds), name)
    try:
        array = onnx.numpy_helper.to_array(tensor)
    except Exception as error:
        broken(f"{shown(name)}: {shown(error)}")
    if array.dtype.name == "bfloat16":
        return to_mlx(array)
    return array if array.dtype in NUMBERS else None  # NUMBERS: the dtypes that can be read


class Graph:
    """The parts of an ONNX model that is written. Each method adds nodes or arrays and returns the name of the result.
    The constants "side by side" and "one" exist from the beginning."""

    def __init__(self, onnx: Any):
        """Create an empty model. onnx: the module."""
        self.onnx: Any = onnx
        self.nodes: list[Any] = []
        self.tensors: list[Any] = []
        self.inputs: list[Any] = []
        self.outputs: list[Any] = []
        self.constant("side by side", [0, 0, -1])  # the shape that keeps two axes and joins all others
        self.constant("one", [1])  # the index 1, and a size of 1

    def node(self, op_type: str, inputs: list[str], output: str, **attributes: Any) -> str:
        """Add a node that has one output. Return the output's name, which another node takes as an input."""
        self.nodes.append(self.onnx.helper.make_node(op_type, inputs, [output], **attributes))
        return output

    def constant(self, name: str, numbers: list[int]) -> str:
        """Add a node whose output is a constant array of integers. Return the output's name."""
        value = self.onnx.numpy_helper.from_array(np.array(numbers, np.int64), name)
        return self.node("Constant", [], name, value=value)

    def initializer(self, name: str, array: np.ndarray) -> str:
        """Store an array in the file, as a tensor with this name. Return the name, which a node takes as an input."""
        self.tensors.append(self.onnx.numpy_helper.from_array(array, name))
        return name

    def states(self, dot: str, word: str, kind: int, sizes: tuple[int, int, int]) -> list[str]:
        """Add the model input for the first states [L D, N, H] of a stack, with the default 0. Return for each layer
        the name of its part [D, N, H]. dot: the beginning of the stack's names, its name and a dot, or "". word: "h" or
        "c". kind: ONNX' number of the dtype. sizes: L layers, D directions, H hidden units."""
        L, D, H = sizes
        zeros = np.zeros((L * D, 1, H), self.onnx.helper.tensor_dtype_to_np_dtype(kind))
        name = self.initializer(f"{dot}{word}0", zeros)
        self.inputs.append(self.onnx.helper.make_tensor_value_info(name, kind, [L * D, f"{dot}N", H]))
        # The default has one batch item, because N is not known here. `Expand` repeats it N times: the stack's array
        # "items" holds the factors 1, N, 1.
        whole = self.node("Expand", [name, f"{dot}items"], f"{dot}{word}0.whole")
        if L == 1:
            return [whole]
        # Split axis 0 into parts of D rows, one per layer.
        parts, counts = [f"{dot}{n}.{word}0" for n in range(L)], self.constant(f"{dot}{word}0.parts", [D] * L)
        self.nodes.append(self.onnx.helper.make_node("Split", [whole, counts], parts, axis=0))
        return parts


def write(path: Path, ending: str, layers: Mapping[str, Weights]) -> None:
    """Write an ONNX model to `path`. For each stack of layers the model has a chain of nodes with these inputs and
    outputs, in torch's shapes: x [T, N, I], the first states h0 and c0 [L D, N, H] (default: 0), the output h [T, N, D
    H], and the last states hT and cT. ending: not used; the caller passes the same arguments to each writer of
    files."""
    onnx = load()
    graph = Graph(onnx)
    for name, weights in layers.items():
        write_stack(graph, name, weights)
    made = onnx.helper.make_graph(graph.nodes, "mlx_lstm", graph.inputs, graph.outputs, graph.tensors)
    model = onnx.helper.make_model(made, opset_imports=[onnx.helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
    if (size := sum(len(tensor.raw_data) for tensor in graph.tensors)) > MOST:
        fail("convert", f"an .onnx file must have less than {MOST} bytes of arrays, protobuf's most,", size)
    try:
        onnx.checker.check_model(model)
    except onnx.checker.ValidationError as error:  # such as two arrays of one name
        fail("convert", "the layers' names must give a model that onnx accepts", " ".join(str(error).split())[:200])
    path.write_bytes(model.SerializeToString())


def write_stack(graph: Graph, name: str, weights: Weights) -> None:
    """Add a stack of layers to the graph: a node for each layer, whose input x is the output h of the node before.
    name: the stack's name. The methods of `graph` take and return names of arrays."""
    with of_layer(name):  # adds the stack's name to the text of an error
        layers = to_onnx(weights)  # for each layer (type of its node, arrays, attributes)
    onnx, dot = graph.onnx, f"{name}." if name else ""
    # A node's arrays must have the dtype of its input, so all arrays of a stack get one dtype; bfloat16 becomes
    # float32. kind: ONNX' number of this dtype.
    dtype = common_dtype([array for _, arrays, _ in layers for array in arrays.values()])
    dtype = mx.float32 if dtype == mx.bfloat16 else dtype
    kinds = {mx.float64: onnx.TensorProto.DOUBLE, mx.float16: onnx.TensorProto.FLOAT16}
    kind = kinds.get(dtype, onnx.TensorProto.FLOAT)
    L, D, H = len(layers), weights.directions, weights.hidden_size
    # info(name, kind, shape) describes an input or output of the model; in a shape a text names an unknown size.
    info, batch = onnx.helper.make_tensor_value_info, f"{dot}N"
    graph.inputs.append(info(f"{dot}x", kind, [f"{dot}T", batch, weights.input_size]))
    graph.outputs.append(info(f"{dot}h", kind, [f"{dot}T", batch, D * H]))
    # "items" holds the numbers 1, N, 1, where the batch size N is the second size of x. With them a node Expand repeats
    # the default of the first states, which has one batch item.
    count = graph.node("Gather", [graph.node("Shape", [f"{dot}x"], f"{dot}sizes"), "one"], f"{dot}count")
    graph.node("Concat", ["one", count, "one"], f"{dot}items", axis=0)
    words = ["h", "c"] if weights.cell.op == "lstm" else ["h"]
    # first, last: for "h" and "c", the names of each layer's first and last states.
    first = {word: graph.states(dot, word, kind, (L, D, H)) for word in words}
    last: dict[str, list[str]] = {word: [] for word in words}
    x = f"{dot}x"
    for n, (op_type, arrays, attributes) in enumerate(layers):
        title = (name or op_type) + (f".{n}" if L > 1 else "")
        h = f"{dot}h" if n == L - 1 else f"{title}.h"
        names = [""] * (INPUTS["P"] + 1)  # the node's inputs; P has the last position
        for word, array in arrays.items():
            values = array if array.dtype == dtype else array.astype(dtype)
            names[INPUTS[word]] = graph.initializer(f"{title}.{word}", np.array(values))
        names[0] = x
        for word in words:
            names[INPUTS[f"initial_{word}"]] = first[word][n]
            last[word].append(f"{title}.{word}T" if L > 1 else f"{dot}{word}T")
        while not names[-1]:  # a node omits trailing empty inputs
            names.pop()
        outputs = [f"{title}.Y", *(last[word][n] for word in words)]
        graph.nodes.append(onnx.helper.make_node(op_type, names, outputs, title, **attributes))
        # The node's output is [T, D, N, H]. The next layer, and the user, get both directions side by side, [T, N, D
        # H].
        graph.node("Transpose", [f"{title}.Y"], f"{title}.turned", perm=[0, 2, 1, 3])
        x = graph.node("Reshape", [f"{title}.turned", "side by side"], h)
    for word in words:
        if L > 1:
            graph.node("Concat", last[word], f"{dot}{word}T", axis=0)
        graph.outputs.append(info(f"{dot}{word}T", kind, [L * D, batch, H]))
