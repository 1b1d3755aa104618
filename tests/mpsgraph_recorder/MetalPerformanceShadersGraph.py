"""Linux replacement for PyObjC's `MetalPerformanceShadersGraph`, for tests. It has the RNN ops with Apple's names
and argument counts, records every call, and returns the results of the float64 oracle.

The environment variable RECORDER (JSON) makes it differ from Apple's framework on purpose:
    {"plant": {"op": "lstm", "result": "dbias", "index": [3], "by": 0.1}}   this element of a result is wrong
    {"crash": "gru"}            the op ends the process, as MPSGraph does for a shape that it rejects
    {"readings": {...}}         the oracle uses another formula: keyword arguments of `judge.evaluated`
    {"leading_ones": ["dbias"]} these gradients have two more axes of size 1 in front
    {"results": 2}              training without produceCell returns only 2 results, without the cell states
"""

import json
import os
import re

import numpy as np

from mlx_lstm.lab.mpsgraph import judge
from mlx_lstm.lab.mpsgraph.cases import COTANGENTS, RESULTS, CompareCase
from mlx_lstm.mpsgraph.layouts import LEADING_ONE

# The selectors of all RNN ops in Apple's header MPSGraphRNNOps.h.
HEADER = """
LSTMWithSourceTensor:recurrentWeight:inputWeight:bias:initState:initCell:mask:peephole:descriptor:name:
LSTMWithSourceTensor:recurrentWeight:inputWeight:bias:initState:initCell:descriptor:name:
LSTMWithSourceTensor:recurrentWeight:initState:initCell:descriptor:name:
GRUWithSourceTensor:recurrentWeight:inputWeight:bias:initState:mask:secondaryBias:descriptor:name:
GRUWithSourceTensor:recurrentWeight:inputWeight:bias:initState:descriptor:name:
GRUWithSourceTensor:recurrentWeight:inputWeight:bias:descriptor:name:
singleGateRNNWithSourceTensor:recurrentWeight:inputWeight:bias:initState:mask:descriptor:name:
singleGateRNNWithSourceTensor:recurrentWeight:inputWeight:bias:initState:descriptor:name:
singleGateRNNWithSourceTensor:recurrentWeight:initState:descriptor:name:
LSTMGradientsWithSourceTensor:recurrentWeight:sourceGradient:zState:cellOutputFwd:stateGradient:cellGradient:inputWeight:\
bias:initState:initCell:mask:peephole:descriptor:name:
LSTMGradientsWithSourceTensor:recurrentWeight:sourceGradient:zState:cellOutputFwd:inputWeight:bias:initState:initCell:mask:\
descriptor:name:
LSTMGradientsWithSourceTensor:recurrentWeight:sourceGradient:zState:cellOutputFwd:inputWeight:bias:initState:initCell:\
descriptor:name:
LSTMGradientsWithSourceTensor:recurrentWeight:sourceGradient:zState:cellOutputFwd:descriptor:name:
GRUGradientsWithSourceTensor:recurrentWeight:sourceGradient:zState:outputFwd:stateGradient:inputWeight:bias:initState:mask:\
secondaryBias:descriptor:name:
GRUGradientsWithSourceTensor:recurrentWeight:sourceGradient:zState:outputFwd:inputWeight:bias:initState:descriptor:name:
GRUGradientsWithSourceTensor:recurrentWeight:sourceGradient:zState:outputFwd:inputWeight:bias:descriptor:name:
singleGateRNNGradientsWithSourceTensor:recurrentWeight:sourceGradient:zState:stateGradient:inputWeight:bias:initState:mask:\
descriptor:name:
singleGateRNNGradientsWithSourceTensor:recurrentWeight:sourceGradient:zState:inputWeight:bias:initState:mask:descriptor:name:
singleGateRNNGradientsWithSourceTensor:recurrentWeight:sourceGradient:zState:inputWeight:bias:initState:descriptor:name:
singleGateRNNGradientsWithSourceTensor:recurrentWeight:sourceGradient:zState:initState:descriptor:name:
"""
SELECTORS = HEADER.split()

MPSDataTypeFloat32, MPSDataTypeFloat16 = 268435488, 268435472
ACTIVATIONS = ("none", "relu", "tanh", "sigmoid", "hard_sigmoid")
MPSGraphRNNActivationNone, MPSGraphRNNActivationRelu, MPSGraphRNNActivationTanh = 0, 1, 2
MPSGraphRNNActivationSigmoid, MPSGraphRNNActivationHardSigmoid = 3, 4

CALLS = []
"""One tuple for each call of an RNN op: (selector, {argument: tensor or None}, descriptor)."""

SIZES = {MPSDataTypeFloat32: np.float32, MPSDataTypeFloat16: np.float16}
FAULTS = json.loads(os.environ.get("RECORDER", "{}"))


def end_process():
    os.abort()


def descriptor_class(name, flags, activations):
    """Return a descriptor class that has only the setters of Apple's class, so that a misspelt property raises an
    error."""

    class Descriptor:
        def __init__(self):
            self.values = {}

        @classmethod
        def descriptor(cls):
            return cls()

    def setter(prop, kind):
        def set_value(self, value):
            assert isinstance(value, bool) if kind is bool else value in range(5), (prop, value)
            self.values[prop] = value if kind is bool else ACTIVATIONS[value]

        return set_value

    for kind, names in ((bool, flags), (int, activations)):
        for prop in names.split():
            setattr(Descriptor, f"set{prop[0].upper()}{prop[1:]}_", setter(snake(prop), kind))
    Descriptor.__name__ = name
    return Descriptor


def snake(word):
    return re.sub("([A-Z])", lambda letter: f"_{letter[1].lower()}", word)


MPSGraphLSTMDescriptor = descriptor_class(
    "MPSGraphLSTMDescriptor",
    "reverse bidirectional produceCell training forgetGateLast",
    "inputGateActivation forgetGateActivation cellGateActivation outputGateActivation activation",
)
MPSGraphGRUDescriptor = descriptor_class(
    "MPSGraphGRUDescriptor",
    "reverse bidirectional training resetGateFirst resetAfter flipZ",
    "updateGateActivation resetGateActivation outputGateActivation",
)
MPSGraphSingleGateRNNDescriptor = descriptor_class(
    "MPSGraphSingleGateRNNDescriptor", "reverse bidirectional training", "activation"
)


class MPSGraphTensor:
    def __init__(self, shape, dtype, maker=None):
        self._shape, self.dtype, self.maker = tuple(shape), dtype, maker

    def shape(self):
        return list(self._shape)


class MPSGraphTensorData:
    @classmethod
    def alloc(cls):
        return cls()

    def initWithMTLBuffer_shape_dataType_(self, buffer, shape, dtype):
        assert isinstance(shape, list) and len(buffer.data) == np.prod(shape) * np.dtype(SIZES[dtype]).itemsize
        self.buffer, self.shape, self.dtype = buffer, shape, SIZES[dtype]
        return self

    def array(self):
        return np.frombuffer(bytes(self.buffer.data), self.dtype).reshape(self.shape)


class MPSGraph:
    @classmethod
    def alloc(cls):
        return cls()

    def init(self):
        return self

    def placeholderWithShape_dataType_name_(self, shape, dtype, name):
        assert isinstance(shape, list) and isinstance(name, str)
        return MPSGraphTensor(shape, dtype)

    def runWithMTLCommandQueue_feeds_targetOperations_resultsDictionary_(self, queue, feeds, operations, results):
        assert queue == "queue" and operations is None
        for tensor, data in results.items():
            value = tensor.maker(feeds)
            assert list(value.shape) == data.shape and value.dtype == data.dtype
            data.buffer.data[:] = value.tobytes()


def op_of(selector):
    return {"L": "lstm", "G": "gru", "s": "single_gate_rnn"}[selector[0]]


def call(selector, *arguments):
    """Record a call of an RNN op and return its result tensors, whose values are computed later when the graph runs."""
    assert len(arguments) == selector.count(":"), selector
    op, backward = op_of(selector), "Gradients" in selector
    *tensors, descriptor, name = arguments
    assert name is None and all(tensor is None or isinstance(tensor, MPSGraphTensor) for tensor in tensors)
    words = ["source", *(snake(word) for word in selector.split(":")[1:-3])]
    given = dict(zip(words, tensors, strict=True))
    CALLS.append((selector, given, descriptor))
    if FAULTS.get("crash") == op:
        end_process()
    saved = {word: given.pop(word) for word in ("z_state", "cell_output_fwd", "output_fwd") if word in given}
    given = {word: tensor for word, tensor in given.items() if tensor is not None}
    if "mask" in given and given["mask"]._shape[:-2] not in ((), (1,)):
        end_process()
    dtype = given["source"].dtype
    shapes = {word: np.zeros(tensor._shape, SIZES[dtype]) for word, tensor in given.items()}
    case = CompareCase("", op, descriptor.values, shapes)
    if backward:
        for word, tensor in saved.items():
            assert tensor.result == {"z_state": "z_state", "cell_output_fwd": "c", "output_fwd": "h"}[word]
        names = [f"d{word}" for word in case.gradients]
    else:
        assert not set(given) & set(COTANGENTS[op])
        names = names_of_results(op, descriptor.values)
    made = []
    for result in names:
        tensor = MPSGraphTensor(shape_of(result, case), dtype, maker(case, given, result))
        tensor.result = result
        made.append(tensor)
    return made


def names_of_results(op, flags):
    """Return the names of the results that a forward op returns with these descriptor flags."""
    if op == "lstm":
        cell = flags.get("produce_cell") or (flags.get("training") and FAULTS.get("results") != 2)
        return ["h", *(["c"] if cell else []), *(["z_state"] if flags.get("training") else [])]
    return list(RESULTS[op][: 2 if flags.get("training") else 1])


def shape_of(result, case):
    T, N = case.arrays["source"].shape[:2]
    wide = case.directions * case.hidden
    if result in ("h", "c", "z_state"):
        gates = {"lstm": 4, "gru": 3, "single_gate_rnn": 1}[case.op]
        return (T, N, wide * (gates if result == "z_state" else 1))
    argument = case.arrays[result[1:]].shape
    return (1, 1) * (result in FAULTS.get("leading_ones", ())) + (argument[-2:] if "init" in result else argument)


def maker(case, given, result):
    """Return a function that computes the array `result` from the arrays fed to the graph."""

    def make(feeds):
        arrays = {word: feeds[tensor].array() for word, tensor in given.items()}
        arrays |= {word: arrays[word].reshape(arrays[word].shape[-2:]) for word in LEADING_ONE if word in arrays}
        full = case._replace(arrays=arrays)
        value = judge.expected(full, **FAULTS.get("readings", {}))[result]
        plant = FAULTS.get("plant", {})
        if (plant.get("op"), plant.get("result")) == (case.op, result):
            value[tuple(plant["index"])] += plant["by"]
        return value.astype(arrays["source"].dtype).reshape(shape_of(result, case))

    return make


for _selector in SELECTORS:
    setattr(
        MPSGraph, _selector.replace(":", "_"), lambda self, *arguments, selector=_selector: call(selector, *arguments)
    )
