"""A stack of layers, layer by layer on the recurrence."""

from __future__ import annotations

from itertools import accumulate
from math import prod
from typing import NamedTuple

import mlx.core as mx

from .. import recurrence
from ..checks import check_array, check_flag, check_lengths, check_option, check_sizes, fail
from ..engines import choice
from ..engines.choice import Stream, check_device, on
from ..engines.problem import Arrays
from ..engines.tracing import is_traced
from ..recurrence import by_layer, join_biases, of_layers
from ._buffer import Attributes, Layout, check_attributes, check_params, join_layers, layer_arrays, layout

# In the reserve space: as the numpy engine has them in memory, so that packing them is no transposition.
BATCH_LAST = ("gates", "c")


class CudnnRNNBackpropOutput(NamedTuple):
    """What the backward ops return: the gradients of the four arrays, each in its array's shape."""

    input_backprop: mx.array
    input_h_backprop: mx.array
    input_c_backprop: mx.array
    params_backprop: mx.array


class Stack(NamedTuple):
    """A call's attributes, as the caller gave them: checks them with the arrays and runs the layers.

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
        input: mx.array,
        input_h: mx.array,
        input_c: mx.array,
        params: mx.array,
        sequence_lengths: recurrence.Lengths,
        is_training: bool,
    ) -> tuple[mx.array, mx.array, mx.array, mx.array]:
        """(output, output_h, output_c, reserve_space)."""
        check_flag(self.op, "is_training", is_training)
        with on(self.stream):
            where, lengths = self.check(input, input_h, input_c, params, sequence_lengths)
            x, states = self.time_first(input), self.by_layer(where, input_h, input_c)
            drops = is_training and self.attributes.dropout
            factors = dropout_factors(where, x, self.attributes) if drops else [None] * where.L
            last, kept = [], []
            for layer, weights in enumerate(layer_arrays(where, params)):
                arrays = layer_arguments(where, layer, weights, x, states)
                out = run_layer(where, arrays, self.options(where, lengths), is_training)
                last.append(out)
                x = out.h if factors[layer] is None else out.h * factors[layer]
                kept.append(out._asdict() | {"factors": factors[layer]})
            output, output_h = self.time_first(x), self.in_layout(where, [out.hT for out in last])
            lstm = where.mode == "lstm"
            output_c = self.in_layout(where, [out.cT for out in last]) if lstm else mx.zeros((), input.dtype)
            if is_training:
                return output, output_h, output_c, pack(self.reserved(where, *x.shape[:2]), kept, input.dtype)
            # A plain graph can be exported.
            if not is_traced([input, input_h, params], wait=False):
                output, output_h, output_c = without_gradient(self.original, output, output_h, output_c)
            return output, output_h, output_c, mx.zeros((), input.dtype)

    def backward(
        self,
        input: mx.array,
        input_h: mx.array,
        input_c: mx.array,
        params: mx.array,
        sequence_lengths: recurrence.Lengths,
        output: mx.array,
        output_h: mx.array,
        output_c: mx.array,
        cotangents: tuple[mx.array, mx.array, mx.array],
        reserve_space: mx.array,
    ) -> CudnnRNNBackpropOutput:
        """The gradients of the four arrays, from those of output, output_h and output_c."""
        with on(self.stream):
            where, lengths = self.check(input, input_h, input_c, params, sequence_lengths)
            self.check_outputs(where, input, (output, output_h, output_c), cotangents)
            x, states = self.time_first(input), self.by_layer(where, input_h, input_c)
            saved = self.unpack(where, reserve_space, *x.shape[:2], x.dtype)
            saved[-1]["h"] = self.time_first(output)
            dh, dlast = self.time_first(cotangents[0]), self.by_layer(where, *cotangents[1:])
            weights, found = layer_arrays(where, params), [None] * where.L
            for layer in reversed(range(where.L)):
                below = saved[layer - 1] if layer else {"h": x}
                inputs = below["h"] * below["factors"] if "factors" in below else below["h"]
                arrays = layer_arguments(where, layer, weights[layer], inputs, states)
                given = {f"d{name}": rows[layer] for name, rows in dlast.items()} | {"dh": dh}
                given |= {name: value for name, value in saved[layer].items() if name != "factors"}
                found[layer] = run_layer_backward(where, arrays, self.options(where, lengths), given)
                dh = found[layer]["x"] * below["factors"] if "factors" in below else found[layer]["x"]
            if where.skip:
                dh = dh.reshape(*dh.shape[:2], -1, where.H).sum(axis=2)
            dh0 = self.in_layout(where, [gradients["h0"] for gradients in found])
            if where.mode == "lstm":
                dc0 = self.in_layout(where, [gradients["c0"] for gradients in found])
            else:
                dc0 = mx.zeros_like(input_c) if isinstance(input_c, mx.array) else mx.zeros((), input.dtype)
            dparams = join_layers(where, [buffer_gradients(where, gradients) for gradients in found])
            return CudnnRNNBackpropOutput(self.time_first(dh), dh0, dc0, dparams)

    # Layouts

    def time_first(self, sequence: mx.array) -> mx.array:
        """[T, N, .] out of the caller's layout, and back."""
        return sequence if self.time_major else mx.swapaxes(sequence, 0, 1)

    def by_layer(self, where: Layout, h: mx.array, c: mx.array) -> Arrays:
        """hT and, of an lstm, cT: [L, N, D S] and [L, N, D H] out of states in the caller's layout."""
        states = {"hT": h, "cT": c} if where.mode == "lstm" else {"hT": h}
        N = h.shape[1 if self.time_major else 0]
        found = {}
        for name, state in states.items():
            if not self.time_major and self.batch_major_states == "transpose":
                state = mx.swapaxes(state, 0, 1)
            found[name] = by_layer(state.reshape(where.L * where.D, N, -1), where.D)
        return found

    def in_layout(self, where: Layout, rows: list[mx.array]) -> mx.array:
        """States in the caller's layout, out of each layer's [N, D S]."""
        state = of_layers(rows, where.D)
        if self.time_major:
            return state
        if self.batch_major_states == "transpose":
            return mx.swapaxes(state, 0, 1)
        return state.reshape(state.shape[1], where.L * where.D, -1)

    def reserved(self, where: Layout, T: int, N: int) -> list[dict[str, tuple[int, int, int]]]:
        """The reserve space's arrays in their order: of each layer, shapes by name."""
        widths = {} if where.mode.startswith("rnn") else {"gates": where.D * where.G * where.H}
        if where.mode == "lstm":
            widths["c"] = where.D * where.H
        between = {"h": where.D * where.S} | ({"factors": where.D * where.S} if self.attributes.dropout else {})
        layers = [widths | between] * (where.L - 1) + [widths]
        return [{n: (T, w, N) if n in BATCH_LAST else (T, N, w) for n, w in layer.items()} for layer in layers]

    def unpack(self, where: Layout, reserve_space: mx.array, T: int, N: int, dtype: mx.Dtype) -> list[Arrays]:
        """Each layer's arrays in the reserve space, as views."""
        if isinstance(reserve_space, mx.array) and reserve_space.ndim == 0:
            raise ValueError(f"To use {self.original} in gradients, is_training must be set to True.")
        shapes = self.reserved(where, T, N)
        sizes = [prod(shape) for layer in shapes for shape in layer.values()]
        check_array(self.op, "reserve_space", reserve_space, [sum(sizes)], dtype)
        parts = iter(mx.split(reserve_space, list(accumulate(sizes))[:-1]) if sizes else ())
        arrays = [{name: next(parts).reshape(shape) for name, shape in layer.items()} for layer in shapes]
        return [{n: mx.swapaxes(a, 1, 2) if n in BATCH_LAST else a for n, a in layer.items()} for layer in arrays]

    def options(self, where: Layout, lengths: mx.array | None) -> dict[str, object]:
        """What every layer is run with."""
        options = {"bidirectional": where.D == 2, "lengths": lengths, "engine": self.engine}
        return options | ({"activation": where.mode.removeprefix("rnn_")} if where.G == 1 else {})

    # Checks

    def check(
        self, input: object, input_h: object, input_c: object, params: object, sequence_lengths: recurrence.Lengths
    ) -> tuple[Layout, mx.array | None]:
        """What the arrays are, once they and the attributes are found right; the lengths, None where all are T."""
        op = self.op
        check_attributes(op, self.attributes)
        check_flag(op, "time_major", self.time_major)
        check_option(op, "batch_major_states", self.batch_major_states, ("transpose", "reinterpret"))
        check_array(op, "input", input, ["T", "N", "I"] if self.time_major else ["N", "T", "I"])
        check_sizes(op, "input", input)
        check_device(op, input.dtype, choice.current_device())
        T, N, I = self.sizes(input)
        D = self.attributes.D
        first = input_c if self.attributes.rnn_mode == "lstm" else input_h
        name = "input_c" if self.attributes.rnn_mode == "lstm" else "input_h"
        check_array(op, name, first, ["L * D", N, "H"] if self.time_major else [N, "L * D", "H"], input.dtype)
        check_sizes(op, name, first)
        LD, H = first.shape[0 if self.time_major else 1], first.shape[2]
        if LD % D:
            fail(
                op, f"{name} must have two rows per layer with direction='bidirectional'", f"shape {list(first.shape)}"
            )
        where = layout(op, LD // D, H, I, self.attributes)
        check_array(op, "input_h", input_h, self.state_shape(where, N, where.S), input.dtype)
        check_params(op, where, params, input.dtype)
        if self.original != "CudnnRNNV3":
            return where, None
        traced = isinstance(sequence_lengths, mx.array) and is_traced([sequence_lengths], wait=True)
        lengths = check_lengths(op, sequence_lengths, N, T, traced=traced, name="sequence_lengths", shortest=1)
        return where, lengths if traced or (lengths < T).any().item() else None

    def check_outputs(
        self, where: Layout, input: mx.array, outputs: tuple[object, ...], cotangents: tuple[object, ...]
    ) -> None:
        """A forward pass's outputs and their gradients have the outputs' shapes."""
        T, N, _ = self.sizes(input)
        width = where.D * where.S
        shapes = {"output": [T, N, width] if self.time_major else [N, T, width]}
        shapes["output_h"] = self.state_shape(where, N, where.S)
        if where.mode == "lstm":
            shapes["output_c"] = self.state_shape(where, N, where.H)
        for suffix, arrays in (("", outputs), ("_backprop", cotangents)):
            for (name, shape), array in zip(shapes.items(), arrays, strict=False):
                check_array(self.op, name + suffix, array, shape, input.dtype)

    def sizes(self, input: mx.array) -> tuple[int, int, int]:
        """(T, N, I)."""
        first, second, I = input.shape
        return (first, second, I) if self.time_major else (second, first, I)

    def state_shape(self, where: Layout, N: int, width: int) -> list[int]:
        """Of a state in the caller's layout."""
        rows = where.L * where.D
        return [rows, N, width] if self.time_major else [N, rows, width]


def dropout_factors(where: Layout, x: mx.array, attributes: Attributes) -> list[mx.array | None]:
    """By layer, what its h [T, N, D S] is multiplied with on the way up, 0 or 1 / (1 - p); None of the last."""
    high, low = (int(seed) % 2**32 for seed in (attributes.seed, attributes.seed2))
    keep = 1 - float(attributes.dropout)
    shape, scale = (*x.shape[:2], where.D * where.S), mx.array(1 / keep, x.dtype)
    keys = mx.random.split(mx.random.key(high << 32 | low), where.L - 1) if where.L > 1 else []
    return [*(mx.random.bernoulli(keep, shape, key).astype(x.dtype) * scale for key in keys), None]


def pack(shapes: list[dict], kept: list[dict], dtype: mx.Dtype) -> mx.array:
    """The reserve space, out of each layer's arrays by name."""
    named = [(name, arrays[name]) for layer, arrays in zip(shapes, kept, strict=True) for name in layer]
    parts = [(mx.swapaxes(array, 1, 2) if name in BATCH_LAST else array).reshape(-1) for name, array in named]
    return mx.concatenate(parts) if parts else mx.zeros((0,), dtype)


def layer_arguments(where: Layout, layer: int, weights: Arrays, x: mx.array, states: Arrays) -> dict:
    """A layer's arrays as the recurrence names them."""
    arrays = {name: weights[name] for name in ("Wh", "Wp") if name in weights}
    biases = join_biases(weights["bW"], weights["bR"], gru=where.mode == "gru")
    arrays |= {name: b.reshape(-1) for name, b in biases.items()}
    skips = where.skip and layer == 0
    arrays |= {"x": mx.tile(x, (1, 1, where.D * where.G)) if skips else x, "Wx": None if skips else weights["Wx"]}
    return arrays | {name: states[last][layer] for name, last in (("h0", "hT"), ("c0", "cT")) if last in states}


def run_layer(where: Layout, arrays: dict, options: dict, is_training: bool) -> NamedTuple:
    """The recurrence's outputs."""
    ops = {"lstm": recurrence.lstm, "gru": recurrence.gru}
    keeps = is_training and where.G > 1
    return ops.get(where.mode, recurrence.rnn)(**arrays, **options, return_gates=keeps, training=is_training)


def run_layer_backward(where: Layout, arrays: dict, options: dict, given: Arrays) -> Arrays:
    """The recurrence's gradients, from what it kept and the gradients of its outputs."""
    ops = {"lstm": recurrence.lstm_gradients, "gru": recurrence.gru_gradients}
    return ops.get(where.mode, recurrence.rnn_gradients)(**arrays, **options, **given)


def buffer_gradients(where: Layout, gradients: Arrays) -> Arrays:
    """A layer's gradients as the buffer has its arrays: bW and bR were added, all but those of a GRU's candidate."""
    db = gradients["b"].reshape(where.D, -1)
    found = {name: gradients[name] for name in ("Wx", "Wh", "Wp") if name in gradients} | {"bW": db, "bR": db}
    if where.mode == "gru":
        found["bR"] = mx.concatenate([db[:, : 2 * where.H], gradients["bhn"].reshape(where.D, -1)], axis=1)
    return found


def without_gradient(original: str, *arrays: mx.array) -> tuple[mx.array, ...]:
    """The arrays, whose gradient is TensorFlow's refusal."""

    @mx.custom_function
    def identity(*arrays: mx.array) -> tuple[mx.array, ...]:
        return arrays

    @identity.vjp
    def refuse(primals, cotangents, outputs):
        raise ValueError(f"To use {original} in gradients, is_training must be set to True.")

    return identity(*arrays)
