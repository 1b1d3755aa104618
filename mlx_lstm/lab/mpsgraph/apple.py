"""Run a case (a call of an MPSGraph op with its arrays) on Apple's MPSGraph, which PyObjC makes callable from Python.

This needs a Mac with PyObjC. The module must run in a separate process, because MPSGraph ends the process if it rejects
a shape.
"""

import re
from typing import Any

import numpy as np

from .cases import CompareCase

FORWARD = {
    "lstm": "LSTMWithSourceTensor:recurrentWeight:inputWeight:bias:initState:initCell:mask:peephole:descriptor:name:",
    "gru": "GRUWithSourceTensor:recurrentWeight:inputWeight:bias:initState:mask:secondaryBias:descriptor:name:",
    "single_gate_rnn": "singleGateRNNWithSourceTensor:recurrentWeight:inputWeight:bias:initState:mask:descriptor:name:",
}
BACKWARD = {
    "lstm": "LSTMGradientsWithSourceTensor:recurrentWeight:sourceGradient:zState:cellOutputFwd:stateGradient:"
    "cellGradient:inputWeight:bias:initState:initCell:mask:peephole:descriptor:name:",
    "gru": "GRUGradientsWithSourceTensor:recurrentWeight:sourceGradient:zState:outputFwd:stateGradient:inputWeight:"
    "bias:initState:mask:secondaryBias:descriptor:name:",
    "single_gate_rnn": "singleGateRNNGradientsWithSourceTensor:recurrentWeight:sourceGradient:zState:stateGradient:"
    "inputWeight:bias:initState:mask:descriptor:name:",
}
"""For each op the Objective-C selectors of its forward method and of its gradient method, in the variants that take
every argument. A selector is a method's name, with a colon after the name of each argument."""

DESCRIPTORS = {
    "lstm": "MPSGraphLSTMDescriptor",
    "gru": "MPSGraphGRUDescriptor",
    "single_gate_rnn": "MPSGraphSingleGateRNNDescriptor",
}
SAVED = {"z_state": -1, "cell_output_fwd": 1, "output_fwd": 0}
"""Arguments of the gradient ops that are results of the forward op, each with its index in the forward op's list of
results."""

DTYPES = {"float32": "MPSDataTypeFloat32", "float16": "MPSDataTypeFloat16"}


def arguments(selector: str) -> list[str]:
    """Return the names of a method's arguments in Python's spelling, without descriptor and name."""
    words = ["source", *selector.split(":")[1:-3]]
    return [re.sub("([A-Z])", lambda letter: f"_{letter[1].lower()}", word) for word in words]


def run(case: CompareCase) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Run a case (a call of an op with its arrays) on MPSGraph. Return (results of the forward op, results of the
    gradient op). The second list is empty if the case has no cotangents."""
    import Metal
    import MetalPerformanceShadersGraph as G
    import objc

    with objc.autorelease_pool():
        device = Metal.MTLCreateSystemDefaultDevice()
        if device is None:
            raise RuntimeError("this machine has no Metal device")
        graph, descriptor = G.MPSGraph.alloc().init(), make_descriptor(G, case)
        dtype = getattr(G, DTYPES[case.arrays["source"].dtype.name])
        tensors, feeds = {}, {}
        for name, array in case.arrays.items():
            tensors[name] = graph.placeholderWithShape_dataType_name_(list(array.shape), dtype, name)
            buffer = shared_buffer(Metal, device, array)
            feeds[tensors[name]] = tensor_data(G, buffer, array.shape, dtype)
        forward = call(graph, FORWARD[case.op], tensors, descriptor)
        backward = []
        if "source_gradient" in tensors:
            # Pass the results that the gradient op takes, but only those that the forward op has returned. The index -1
            # is zState; if there is only one result, it is h, and the condition leaves zState out.
            saved = {name: forward[place] for name, place in SAVED.items() if abs(place) < len(forward)}
            backward = call(graph, BACKWARD[case.op], tensors | saved, descriptor)
        buffers, results = [], {}
        for tensor in [*forward, *backward]:
            # MPSGraph writes each result into a buffer. The buffer contains zeros before.
            shape = [int(size) for size in tensor.shape()]
            zeros = np.zeros(shape, case.arrays["source"].dtype)
            buffers.append((shared_buffer(Metal, device, zeros), zeros))
            results[tensor] = tensor_data(G, buffers[-1][0], shape, dtype)
        queue = device.newCommandQueue()
        graph.runWithMTLCommandQueue_feeds_targetOperations_resultsDictionary_(queue, feeds, None, results)
        arrays = [read(buffer, zeros) for buffer, zeros in buffers]
    return arrays[: len(forward)], arrays[len(forward) :]


def make_descriptor(G: Any, case: CompareCase) -> Any:
    """Return Apple's descriptor object for a case. training and produce_cell are True unless the case sets them."""
    descriptor = getattr(G, DESCRIPTORS[case.op]).descriptor()
    flags = {"training": True} | ({"produce_cell": True} if case.op == "lstm" else {})
    for name, value in (flags | case.descriptor).items():
        if isinstance(value, str):
            value = getattr(G, f"MPSGraphRNNActivation{camel(value)}")
        getattr(descriptor, f"set{camel(name)}_")(value)
    return descriptor


def camel(name: str) -> str:
    """Return a name in camel case: hard_sigmoid becomes HardSigmoid."""
    return "".join(word.capitalize() for word in name.split("_"))


def call(graph: Any, selector: str, tensors: dict[str, Any], descriptor: Any) -> list[Any]:
    """Call an op of an MPSGraph and return its result tensors. tensors: the arguments by name. Missing ones become nil
    (None), and so does the last argument, a name for the op in the graph."""
    method = getattr(graph, selector.replace(":", "_"))  # PyObjC writes the selector with _ in place of colons
    return list(method(*(tensors.get(name) for name in arguments(selector)), descriptor, None))


def shared_buffer(Metal: Any, device: Any, array: np.ndarray) -> Any:
    """Return a Metal buffer in memory shared by CPU and GPU, with the array's values."""
    options = Metal.MTLResourceStorageModeShared
    return device.newBufferWithBytes_length_options_(array.tobytes(), array.nbytes, options)


def tensor_data(G: Any, buffer: Any, shape: Any, dtype: int) -> Any:
    """Wrap a Metal buffer as MPSGraphTensorData, the type in which MPSGraph takes and returns arrays."""
    return G.MPSGraphTensorData.alloc().initWithMTLBuffer_shape_dataType_(buffer, list(shape), dtype)


def read(buffer: Any, like: np.ndarray) -> np.ndarray:
    """Return a copy of a Metal buffer's values, in the dtype and shape of `like`."""
    return np.frombuffer(bytes(buffer.contents().as_buffer(like.nbytes)), like.dtype).reshape(like.shape)
