"""A stack of layers, layer by layer on the recurrence; the reserve space."""

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple, cast

import mlx.core as mx

from .. import recurrence
from ..checks import check_array, check_every, check_flag, check_lengths, check_option, check_sizes, fail
from ..convert.cudnn import join_layers, layer_arrays
from ..engines import choice
from ..engines.choice import Stream, check_device, on
from ..engines.problem import Arrays
from ..engines.tracing import are_free, have_values
from ..recurrence import by_layer, join_biases, of_layers
from ._buffer import Attributes, Layout, check_params, layout

# In the reserve space: as the numpy engine has them in memory, so that packing them is no transposition.
BATCH_LAST = ("gates", "c")

OPS = {"lstm": recurrence.lstm, "gru": recurrence.gru, "rnn_relu": recurrence.rnn, "rnn_tanh": recurrence.rnn}
GRADIENTS = {"lstm": recurrence.lstm_gradients, "gru": recurrence.gru_gradients}
GRADIENTS |= dict.fromkeys(("rnn_relu", "rnn_tanh"), recurrence.rnn_gradients)

Inputs = tuple[mx.array, mx.array, mx.array, mx.array]
Outputs = tuple[mx.array, mx.array, mx.array]


class CudnnRNNBackpropOutput(NamedTuple):
    """What the backward ops return: the gradients of the four arrays, each in its array's shape."""

    input_backprop: mx.array
    input_h_backprop: mx.array
    input_c_backprop: mx.array
    params_backprop: mx.array


class Stack(NamedTuple):
    """A call, as the caller gave it: checks it with the arrays, brings them into our layout and runs the layers.

    Inside, all is time-major, and states are [L, N, D S]: both directions of a layer side by side, as the recurrence
    has them.
    """

    op: str
    original: str
    attributes: Attributes
    time_major: bool = True
    batch_major_states: str = "transpose"
    engine: str | None = None
    stream: Stream = None

    def forward(
        self,
        inputs: Inputs,
        sequence_lengths: recurrence.Lengths,
        is_training: bool,
        checkpoint_every: int | str | None,
    ) -> tuple[mx.array, mx.array, mx.array, mx.array]:
        """(output, output_h, output_c, reserve_space)."""
        check_flag(self.op, "is_training", is_training)
        every = check_every(self.op, checkpoint_every)
        with on(self.stream, self.op):
            where, lengths = self.check(inputs, sequence_lengths)
            input, input_h, input_c, params = inputs
            x, first = self.sequence(input), self.by_layer(where, h0=input_h, c0=input_c)
            dropout = self.attributes.dropout if is_training else 0
            none: list[mx.array | None] = [None] * where.L
            factors = dropout_factors(where, x, self.attributes) if dropout else none
            options = {"lengths": lengths, "engine": self.engine, "training": is_training, "checkpoint_every": every}
            kept = run_layers(where, params, x, first, factors, options)
            output, output_h = self.sequence(kept[-1]["h"]), self.of_layers(where, kept, "hT")
            output_c = self.of_layers(where, kept, "cT") if where.mode == "lstm" else mx.zeros((), input.dtype)
            if is_training:
                none_reserved = mx.zeros((0,), input.dtype)
                reserve = none_reserved if every else pack(reserved(where, x, dropout), kept, input.dtype)
                return output, output_h, output_c, reserve
            # Only where a gradient can be asked for; a graph without values stays plain, so that it can be exported.
            inputs_used = [input, input_h, params, *([input_c] if where.mode == "lstm" else [])]
            if not are_free(inputs_used) and have_values(inputs_used):
                output, output_h, output_c = without_gradient(self.original, output, output_h, output_c)
            return output, output_h, output_c, mx.zeros((), input.dtype)

    def backward(
        self,
        inputs: Inputs,
        sequence_lengths: recurrence.Lengths,
        outputs: Outputs,
        cotangents: Outputs,
        reserve_space: mx.array,
    ) -> CudnnRNNBackpropOutput:
        """The gradients of the four arrays, from those of output, output_h and output_c."""
        with on(self.stream, self.op):
            where, lengths = self.check(inputs, sequence_lengths)
            input, input_h, input_c, params = inputs
            self.check_outputs(where, input, outputs, cotangents)
            x, first = self.sequence(input), self.by_layer(where, h0=input_h, c0=input_c)
            shapes = reserved(where, x, self.attributes.dropout)
            saved = unpack(self.op, self.original, shapes, reserve_space, x.dtype)
            saved[-1]["h"] = self.sequence(outputs[0])
            dh, last = self.sequence(cotangents[0]), self.by_layer(where, dhT=cotangents[1], dcT=cotangents[2])
            options = {"lengths": lengths, "engine": self.engine}
            found = run_layers_backward(where, params, x, first, saved, dh, last, options)
            dx = found[0]["x"]
            if where.skip:
                dx = dx.reshape(*x.shape[:2], -1, where.H).sum(axis=2)
            if where.mode == "lstm":
                dc0 = self.of_layers(where, found, "c0")
            else:
                dc0 = mx.zeros_like(input_c) if isinstance(input_c, mx.array) else mx.zeros((), input.dtype)
            dparams = join_layers(where, [buffer_gradients(where, gradients) for gradients in found])
            return CudnnRNNBackpropOutput(self.sequence(dx), self.of_layers(where, found, "h0"), dc0, dparams)

    def turned(self, shape: Sequence[Any]) -> list[Any]:
        """The shape of a sequence [T, N, .] or of states [L D, N, .] in the caller's layout, and back."""
        first, second, *rest = shape
        return [first, second, *rest] if self.time_major else [second, first, *rest]

    def sequence(self, array: mx.array) -> mx.array:
        """[T, N, .] out of the caller's layout, and back."""
        return array if self.time_major else mx.swapaxes(array, 0, 1)

    def states(self, array: mx.array) -> mx.array:
        """[L D, N, .] out of the caller's layout, and back."""
        if self.batch_major_states == "reinterpret":
            return array.reshape(self.turned(array.shape))
        return self.sequence(array)

    def by_layer(self, where: Layout, **states: mx.array) -> Arrays:
        """Those of h and, of an lstm, those of c: [L, N, D S] and [L, N, D H] out of the caller's layout."""
        names = [name for name in states if where.mode == "lstm" or "c" not in name]
        return {name: by_layer(self.states(states[name]), where.D) for name in names}

    def of_layers(self, where: Layout, layers: list[Arrays], name: str) -> mx.array:
        """States in the caller's layout, out of each layer's [N, D S]."""
        return self.states(of_layers([arrays[name] for arrays in layers], where.D))

    def check(self, inputs: Inputs, sequence_lengths: recurrence.Lengths) -> tuple[Layout, mx.array | None]:
        """What the arrays are, once they and the attributes are found right; the lengths, None where all are T."""
        op, attributes, (input, input_h, input_c, params) = self.op, self.attributes, inputs
        check_flag(op, "time_major", self.time_major)
        check_option(op, "batch_major_states", self.batch_major_states, ("transpose", "reinterpret"))
        check_array(op, "input", input, self.turned(["T", "N", "I"]))
        check_sizes(op, "input", input)
        check_device(op, input.dtype, choice.current_device())
        T, N, I = self.turned(input.shape)
        name, first = ("input_c", input_c) if attributes.rnn_mode == "lstm" else ("input_h", input_h)
        check_array(op, name, first, self.turned(["L * D", N, "H"]), input.dtype)
        check_sizes(op, name, first)
        rows, _, H = self.turned(first.shape)
        if rows % attributes.D:
            rule = f"{name} must have two rows per layer with direction='bidirectional'"
            fail(op, rule, f"shape {list(first.shape)}")
        where = layout(op, rows // attributes.D, H, I, attributes)
        check_array(op, "input_h", input_h, self.turned([rows, N, where.S]), input.dtype)
        check_params(op, where, params, input.dtype)
        if self.original != "CudnnRNNV3":
            return where, None
        traced = isinstance(sequence_lengths, mx.array) and not have_values([sequence_lengths])
        lengths = check_lengths(op, sequence_lengths, N, T, traced=traced, name="sequence_lengths", shortest=1)
        return where, lengths if traced or (lengths < T).any().item() else None

    def check_outputs(self, where: Layout, input: mx.array, outputs: Outputs, cotangents: Outputs) -> None:
        """A forward pass's outputs and their gradients have the outputs' shapes."""
        T, N, _ = self.turned(input.shape)
        shapes = {"output": [T, N, where.D * where.S], "output_h": [where.L * where.D, N, where.S]}
        if where.mode == "lstm":
            shapes["output_c"] = [where.L * where.D, N, where.H]
        for suffix, arrays in (("", outputs), ("_backprop", cotangents)):
            for (name, shape), array in zip(shapes.items(), arrays, strict=False):
                check_array(self.op, name + suffix, array, self.turned(shape), input.dtype)


def dropout_factors(where: Layout, x: mx.array, attributes: Attributes) -> list[mx.array | None]:
    """By layer, what its h [T, N, D S] is multiplied with on the way up, 0 or 1 / (1 - p); None of the last. With p = 1
    nothing is kept, and nothing is divided."""
    high, low = (int(seed) % 2**32 for seed in (attributes.seed, attributes.seed2))
    keep = 1 - float(attributes.dropout)
    shape, scale = (*x.shape[:2], where.D * where.S), mx.array(1 / keep if keep else 0, x.dtype)
    keys = mx.random.split(mx.random.key(high << 32 | low), where.L - 1) if where.L > 1 else []
    return [*(mx.random.bernoulli(keep, shape, key).astype(x.dtype) * scale for key in keys), None]


def run_layers(
    where: Layout, params: mx.array, x: mx.array, first: Arrays, factors: list[mx.array | None], options: dict[str, Any]
) -> list[dict[str, Any]]:
    """Each layer's outputs, and the factors on its h."""
    found, keeps = [], options["training"] and options["checkpoint_every"] is None and where.G > 1
    for layer, weights in enumerate(layer_arrays(where, params)):
        arrays = layer_arguments(where, layer, weights, x, first)
        out = OPS[where.mode](**arrays, **options, return_gates=keeps)._asdict()
        found.append(out | {"factors": factors[layer]})
        x = scaled(out["h"], factors[layer])
    return found


def run_layers_backward(
    where: Layout,
    params: mx.array,
    x: mx.array,
    first: Arrays,
    saved: list[Arrays],
    dh: mx.array,
    last: Arrays,
    options: dict[str, Any],
) -> list[Arrays]:
    """Each layer's gradients, from what was saved of it; of the last layer dh, of all those in `last` are given."""
    weights, found = layer_arrays(where, params), []
    factors = [None, *(layer.pop("factors", None) for layer in saved)]
    for layer in reversed(range(where.L)):
        below = scaled(saved[layer - 1]["h"], factors[layer]) if layer else x
        arrays = layer_arguments(where, layer, weights[layer], below, first)
        given = {name: states[layer] for name, states in last.items()} | {"dh": dh} | saved[layer]
        found.insert(0, GRADIENTS[where.mode](**arrays, **given, **options))
        dh = scaled(found[0]["x"], factors[layer])
    return found


def scaled(h: mx.array, factors: mx.array | None) -> mx.array:
    """h, or its gradient, with what dropout makes of it."""
    return h if factors is None else h * factors


def layer_arguments(where: Layout, layer: int, weights: Arrays, x: mx.array, states: Arrays) -> dict[str, Any]:
    """A layer as the recurrence takes it."""
    arrays: dict[str, Any] = {name: weights[name] for name in ("Wh", "Wp") if name in weights}
    arrays |= {name: rows[layer] for name, rows in states.items()}
    biases = join_biases(weights["bW"], weights["bR"], gru=where.mode == "gru")
    arrays |= {name: b.reshape(-1) for name, b in biases.items()} | {"bidirectional": where.D == 2}
    if where.G == 1:
        arrays["activation"] = where.mode.removeprefix("rnn_")
    if where.skip and layer == 0:
        return arrays | {"x": mx.tile(x, (1, 1, where.D * where.G)), "Wx": None}
    return arrays | {"x": x, "Wx": weights["Wx"]}


def buffer_gradients(where: Layout, gradients: Arrays) -> Arrays:
    """A layer's gradients as the buffer has its arrays: bW and bR were added, all but those of a GRU's candidate."""
    db = gradients["b"].reshape(where.D, -1)
    found = {name: gradients[name] for name in ("Wx", "Wh", "Wp") if name in gradients} | {"bW": db, "bR": db}
    if where.mode == "gru":
        found["bR"] = mx.concatenate([db[:, : 2 * where.H], gradients["bhn"].reshape(where.D, -1)], axis=1)
    return found


def reserved(where: Layout, x: mx.array, dropout: float) -> list[dict[str, tuple[int, int, int]]]:
    """The reserve space's arrays in their order: of each layer, shapes by name. Of x only T and N count."""
    T, N, _ = x.shape
    widths = {} if where.mode.startswith("rnn") else {"gates": where.D * where.G * where.H}
    if where.mode == "lstm":
        widths["c"] = where.D * where.H
    between = {"h": where.D * where.S} | ({"factors": where.D * where.S} if dropout else {})
    layers = [widths | between] * (where.L - 1) + [widths]
    return [{n: (T, w, N) if n in BATCH_LAST else (T, N, w) for n, w in layer.items()} for layer in layers]


def pack(shapes: list[dict[str, tuple[int, int, int]]], kept: list[dict[str, Any]], dtype: mx.Dtype) -> mx.array:
    """The reserve space, out of each layer's arrays by name."""
    named = [(name, arrays[name]) for layer, arrays in zip(shapes, kept, strict=True) for name in layer]
    parts = [(mx.swapaxes(array, 1, 2) if name in BATCH_LAST else array).reshape(-1) for name, array in named]
    return mx.concatenate(parts) if parts else mx.zeros((0,), dtype)


def unpack(
    op: str, original: str, shapes: list[dict[str, tuple[int, int, int]]], reserve_space: mx.array, dtype: mx.Dtype
) -> list[Arrays]:
    """Each layer's arrays in the reserve space, as views."""
    if isinstance(reserve_space, mx.array) and reserve_space.ndim == 0:
        raise ValueError(f"To use {original} in gradients, is_training must be set to True.")
    sizes = [prod(shape) for layer in shapes for shape in layer.values()]
    why = ", but with checkpoint_every there is none," if getattr(reserve_space, "size", None) == 0 else ""
    check_array(op, "reserve_space", reserve_space, [sum(sizes)], dtype, why)
    parts = iter(mx.split(reserve_space, list(accumulate(sizes))[:-1]) if sizes else ())
    arrays = [{name: next(parts).reshape(shape) for name, shape in layer.items()} for layer in shapes]
    return [{n: mx.swapaxes(a, 1, 2) if n in BATCH_LAST else a for n, a in layer.items()} for layer in arrays]


def without_gradient(original: str, *arrays: mx.array) -> tuple[mx.array, ...]:
    """The arrays, whose gradient is TensorFlow's refusal."""

    @mx.custom_function
    def identity(*arrays: mx.array) -> tuple[mx.array, ...]:
        return arrays

    @identity.vjp
    def refuse(primals: Any, cotangents: Any, outputs: Any) -> Any:
        raise ValueError(f"To use {original} in gradients, is_training must be set to True.")

    return cast(Any, identity)(*arrays)
