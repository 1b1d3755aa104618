"""Run a stack of recurrent layers: each layer is one call of `mlx_lstm.recurrence`. Store the results in the reserve
space, one array, and read them again in the backward pass.

- params: the parameter buffer, one array with all weights and biases. where: its `Layout`, with the sizes of the call:
  L layers, D directions, H units, S the width of h, G gates per unit; mode, the kind of layer ("lstm", "gru",
  "rnn_relu", "rnn_tanh"); skip, whether layer 0 has no input matrices.
- N: batch, T: steps, I: input features. A dot in a shape stands for any width.
- The arrays of one layer are in a dict by the names of `mlx_lstm.recurrence`: Wx, Wh, b, bhn (a GRU candidate's
  recurrent bias), the sequences x, h, c and gates [T, N, .], the first states h0, c0, the last states hT, cT [N, .].
  The names of gradients begin with d.
- first, last: dicts of the states of all layers, [L, N, .].
- factors: the dropout factors on a layer's h, each 0 or 1 / (1 - probability); None without dropout.
"""

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple, cast

import mlx.core as mx

from .. import recurrence
from ..convert.cudnn import join_layers, layer_arrays
from ..engines import choice
from ..engines.choice import Engine, Stream, check_device, on
from ..engines.problem import Arrays
from ..engines.tracing import have_values, is_transforming
from ..ground.checks import check_array, check_every, check_flag, check_lengths, check_option, check_sizes, fail
from ..recurrence import by_layer, join_biases, of_layers
from ._buffer import Attributes, Layout, check_attributes, check_params, layout

BATCH_LAST = ("gates", "c")
"""The names of the arrays that the reserve space stores with the batch last, [T, ., N], instead of [T, N, .]. The
engine `numpy` has them in memory in this order, so packing copies them without a transpose."""

OPS = {"lstm": recurrence.lstm, "gru": recurrence.gru, "rnn_relu": recurrence.rnn, "rnn_tanh": recurrence.rnn}
GRADIENTS = {"lstm": recurrence.lstm_gradients, "gru": recurrence.gru_gradients}
GRADIENTS |= dict.fromkeys(("rnn_relu", "rnn_tanh"), recurrence.rnn_gradients)
"""OPS: {rnn_mode: function that runs a layer}. GRADIENTS: {rnn_mode: function that returns a layer's gradients}."""

Inputs = tuple[mx.array, mx.array, mx.array, mx.array]
"""(input, input_h, input_c, params) of a call."""

Outputs = tuple[mx.array, mx.array, mx.array]
"""(output, output_h, output_c) of a call, or the gradients of these."""


class CudnnRNNBackpropOutput(NamedTuple):
    """Outputs of the backward ops: the gradients of input, input_h, input_c and params, each in the shape of its
    array."""

    input_backprop: mx.array
    input_h_backprop: mx.array
    input_c_backprop: mx.array
    params_backprop: mx.array


class Stack(NamedTuple):
    """The attributes of one call of a cuDNN op. The methods `forward` and `backward` check all arguments, convert
    them to the layout of `mlx_lstm.recurrence`, run the layers, and convert the results back.

    In the layout of `mlx_lstm.recurrence` sequences have time first, and states are [layers, batch, directions x
    width], with both directions of a layer side by side. op: the name in errors. forward_name: TensorFlow's name of the
    forward op, such as "CudnnRNNV3". time_major: the caller's sequences have time first, not the batch.
    batch_major_states: how the caller's states are in memory if time_major is False, "transpose" or "reinterpret" (see
    `convert_states`).
    """

    op: str
    forward_name: str
    attributes: Attributes
    time_major: bool = True
    batch_major_states: str = "transpose"
    engine: Engine | None = None
    stream: Stream = None

    def forward(
        self,
        inputs: Inputs,
        sequence_lengths: recurrence.Lengths,
        is_training: bool,
        checkpoint_every: int | str | None,
    ) -> tuple[mx.array, mx.array, mx.array, mx.array]:
        """Run all layers and return output, output_h, output_c and reserve_space, in the caller's layout.

        inputs: input, input_h (the first h), input_c (the first c) and params, in this order. sequence_lengths: the
        number of steps of each sequence, which only CudnnRNNV3 has. checkpoint_every: gradient checkpointing as in
        `mlx_lstm.lstm`; with it nothing is stored in the reserve space.
        """
        check_flag(self.op, "is_training", is_training)
        every = check_every(self.op, checkpoint_every)
        with on(self.stream, self.op):
            where, lengths = self.check(inputs, sequence_lengths)
            input, input_h, input_c, params = inputs
            x, first = self.convert_sequence(input), self.states_by_layer(where, h0=input_h, c0=input_c)
            dropout = self.attributes.dropout if is_training else 0
            no_factors: list[mx.array | None] = [None] * where.L
            factors = dropout_factors(where, x, self.attributes) if dropout else no_factors
            if dropout and choice.current_device() == "cpu":
                # Evaluate the dropout factors here, once; `have_values` does this. Otherwise the engine `numpy`, which
                # needs values, would evaluate their graph, and generate the random numbers, later. transforming=False:
                # the factors need not keep their graph, because they depend only on the seeds and have no gradient.
                have_values([factor for factor in factors if factor is not None], transforming=False)
            options = {"lengths": lengths, "engine": self.engine, "training": is_training, "checkpoint_every": every}
            results = run_layers(where, params, x, first, factors, options)
            # results[-1]: the outputs of the top layer.
            output, output_h = self.convert_sequence(results[-1]["h"]), self.join_states(where, results, "hT")
            # TensorFlow's op returns output_c in all modes; without a cell state it is the scalar 0.
            output_c = self.join_states(where, results, "cT") if where.mode == "lstm" else mx.zeros((), input.dtype)
            if is_training:
                shapes = [] if every else reserve_shapes(where, x, dropout)  # []: store nothing
                return output, output_h, output_c, pack(shapes, results, input.dtype)
            # If is_training is False, asking for a gradient must raise an error. A custom function in the graph raises
            # it. But MLX cannot export a graph with a custom function. So leave the function out while `mx.compile` or
            # an export traces the op: then the arrays have no values.
            inputs_used = [input, input_h, params, *([input_c] if where.mode == "lstm" else [])]
            if is_transforming() and have_values(inputs_used, transforming=True):
                output, output_h, output_c = without_gradient(self.forward_name, output, output_h, output_c)
            return output, output_h, output_c, mx.zeros((), input.dtype)  # a scalar: there is no reserve space

    def backward(
        self,
        inputs: Inputs,
        sequence_lengths: recurrence.Lengths,
        outputs: Outputs,
        cotangents: Outputs,
        reserve_space: mx.array,
    ) -> CudnnRNNBackpropOutput:
        """Return the gradients of input, input_h, input_c and params. inputs, outputs: the arguments and results of the
        forward op. sequence_lengths: the argument of the forward op; None if the op has no such argument. cotangents:
        the gradients of output, output_h and output_c. reserve_space: what the forward op saved."""
        with on(self.stream, self.op):
            where, lengths = self.check(inputs, sequence_lengths)
            input, input_h, input_c, params = inputs
            self.check_outputs(where, input, outputs, cotangents)
            x, first = self.convert_sequence(input), self.states_by_layer(where, h0=input_h, c0=input_c)
            shapes = reserve_shapes(where, x, self.attributes.dropout)
            saved = unpack(self.op, self.forward_name, shapes, reserve_space, x.dtype)
            # The reserve space lacks h of the top layer, because the caller has it: it is the forward op's output.
            saved[-1]["h"] = self.convert_sequence(outputs[0])
            d = self.states_by_layer(where, dhT=cotangents[1], dcT=cotangents[2])
            d["dh"] = self.convert_sequence(cotangents[0])
            options = {"lengths": lengths, "engine": self.engine}
            gradients = run_layers_backward(where, params, x, first, saved, d, options)
            dx = gradients[0]["x"]
            if where.skip:  # each gate and direction of layer 0 read its own copy of x: sum the copies' gradients
                dx = dx.reshape(*x.shape[:2], -1, where.H).sum(axis=2)
            if where.mode == "lstm":
                dc0 = self.join_states(where, gradients, "c0")
            else:  # input_c has no effect, and may be any value
                dc0 = mx.zeros_like(input_c) if isinstance(input_c, mx.array) else mx.zeros((), input.dtype)
            dparams = join_layers(where, [buffer_gradients(where, layer) for layer in gradients])
            dh0 = self.join_states(where, gradients, "h0")
            return CudnnRNNBackpropOutput(self.convert_sequence(dx), dh0, dc0, dparams)

    def convert_shape(self, shape: Sequence[Any]) -> list[Any]:
        """Convert the shape of a sequence [T, N, .] or of states [L D, N, .] to the caller's layout, or back: if
        `time_major` is False, the first two axes change places. T, N, L, D: steps, batch, layers, directions."""
        first, second, *rest = shape
        return [first, second, *rest] if self.time_major else [second, first, *rest]

    def convert_sequence(self, array: mx.array) -> mx.array:
        """Convert a sequence from the caller's layout to [T, N, .], or back: if `time_major` is False, the first two
        axes change places. T, N: steps, batch."""
        return array if self.time_major else mx.swapaxes(array, 0, 1)

    def convert_states(self, array: mx.array) -> mx.array:
        """Convert states from the caller's layout to [L D, N, .], or back. L: layers, D: directions, N: batch items.

        If `time_major` is False, the caller's states have the shape [N, L D, .]. With "transpose" the first two axes
        are swapped. With "reinterpret" the memory has the order [L D, N, .] nevertheless, as TensorFlow treats it, so
        only the shape changes.
        """
        if self.batch_major_states == "reinterpret":
            return array.reshape(self.convert_shape(array.shape))
        return self.convert_sequence(array)

    def states_by_layer(self, where: Layout, **states: mx.array) -> Arrays:
        """Convert states, or their gradients, from the layout of the op's arguments to [L, N, D S] for h and, in an
        lstm, [L, N, D H] for c: by layer, with both directions of a layer side by side. L: layers, N: batch, D:
        directions, S: the width of h, H: the width of c. states: h0 and c0, or dhT and dcT, by name. In modes other
        than lstm the array of c is left out of the result."""
        names = [name for name in states if where.mode == "lstm" or "c" not in name]
        return {name: by_layer(self.convert_states(states[name]), where.D) for name in names}

    def join_states(self, where: Layout, layers: list[Arrays], name: str) -> mx.array:
        """Join the states `name` (h0, c0, hT or cT) of all layers. `layers` holds the arrays of each layer by name;
        a state is [batch, directions x width]. Return one array in the layout of the op's arguments."""
        return self.convert_states(of_layers([arrays[name] for arrays in layers], where.D))

    def check(self, inputs: Inputs, sequence_lengths: recurrence.Lengths) -> tuple[Layout, mx.array | None]:
        """Check arrays and attributes. Return the layout of the parameter buffer, and the sequence lengths [N], or None
        if all lengths equal T. inputs: input, input_h, input_c and params. The number of layers and units is read from
        the shapes of the states. N: the batch size, T: the number of steps."""
        op, attributes, (input, input_h, input_c, params) = self.op, self.attributes, inputs
        check_attributes(op, attributes)  # first, because rnn_mode and direction say what the states must be
        check_flag(op, "time_major", self.time_major)
        check_option(op, "batch_major_states", self.batch_major_states, ("transpose", "reinterpret"))
        check_array(op, "input", input, self.convert_shape(["T", "N", "I"]))
        check_sizes(op, "input", input)  # no axis of size 0
        check_device(op, input.dtype, choice.current_device())  # float64 runs on the CPU only
        T, N, I = self.convert_shape(input.shape)
        # Read the number of units H from c, if there is one, because h may have the width of a projection.
        name, state = ("input_c", input_c) if attributes.rnn_mode == "lstm" else ("input_h", input_h)
        check_array(op, name, state, self.convert_shape(["L * D", N, "H"]), input.dtype)
        check_sizes(op, name, state)
        rows, _, H = self.convert_shape(state.shape)
        if rows % attributes.D:
            rule = f"{name} must have two rows per layer with direction='bidirectional'"
            fail(op, rule, f"shape {list(state.shape)}")
        where = layout(op, rows // attributes.D, H, I, attributes)
        check_array(op, "input_h", input_h, self.convert_shape([rows, N, where.S]), input.dtype)
        check_params(op, where, params, input.dtype)
        if self.forward_name != "CudnnRNNV3":  # the other versions have no lengths
            return where, None
        # traced: the lengths are a placeholder, for example of `mx.compile`, so their values cannot be read.
        # shortest=1: each sequence must have at least one step, as `cudnn_rnn_v3` documents.
        traced = isinstance(sequence_lengths, mx.array) and not have_values([sequence_lengths])
        lengths = check_lengths(op, sequence_lengths, N, T, traced=traced, name="sequence_lengths", shortest=1)
        return where, lengths if traced or (lengths < T).any().item() else None

    def check_outputs(self, where: Layout, input: mx.array, outputs: Outputs, cotangents: Outputs) -> None:
        """Check that two groups of arrays have the shapes of the forward op's outputs: `outputs`, which are (output,
        output_h, output_c), and `cotangents`, their gradients. In modes other than lstm output_c and its gradient are
        ignored. input: the op's argument, from which sizes are read."""
        # shapes: with time first; `convert_shape` swaps the first two axes if the caller's layout differs.
        T, N, _ = self.convert_shape(input.shape)
        shapes = {"output": [T, N, where.D * where.S], "output_h": [where.L * where.D, N, where.S]}
        if where.mode == "lstm":
            shapes["output_c"] = [where.L * where.D, N, where.H]
        for suffix, arrays in (("", outputs), ("_backprop", cotangents)):
            for (name, shape), array in zip(shapes.items(), arrays, strict=False):
                check_array(self.op, name + suffix, array, self.convert_shape(shape), input.dtype)


def dropout_factors(where: Layout, x: mx.array, attributes: Attributes) -> list[mx.array | None]:
    """Return for each layer the dropout factors on its output h, an array [T, N, D S] of 0 or 1 / (1 - p); None for
    the last layer, whose output is never dropped. T: steps, N: batch, D: directions, S: the width of h, p: the
    probability of dropout.

    With p = 1 all factors are 0, without a division by 0.
    """
    # Make one 64-bit random seed: its high half is the low 32 bits of `seed`, its low half the low 32 bits of `seed2`.
    high, low = (int(seed) % 2**32 for seed in (attributes.seed, attributes.seed2))
    kept = 1 - float(attributes.dropout)  # the probability that an element is kept
    shape, scale = (*x.shape[:2], where.D * where.S), mx.array(1 / kept if kept else 0, x.dtype)
    keys = mx.random.split(mx.random.key(high << 32 | low), where.L - 1) if where.L > 1 else []
    return [*(mx.random.bernoulli(kept, shape, key).astype(x.dtype) * scale for key in keys), None]


def run_layers(
    where: Layout, params: mx.array, x: mx.array, first: Arrays, factors: list[mx.array | None], options: dict[str, Any]
) -> list[dict[str, Any]]:
    """Run all layers; return for each a dict of the outputs of the recurrence (h, hT, ...) and the dropout factors on
    the layer's h. params: the parameter buffer. x [T, N, I]: the stack's input. first: the first states h0 and c0 of
    all layers. factors: for each layer its dropout factors or None. options: lengths, engine, training and
    checkpoint_every, as the functions of `OPS`, which run one layer, take them. T, N, I: steps, batch, features."""
    # saves_gates: whether the reserve space needs the gates. A plain RNN (one gate) saves none, because its gradient is
    # computed from h.
    results, saves_gates = [], options["training"] and options["checkpoint_every"] is None and where.G > 1
    for layer, weights in enumerate(layer_arrays(where, params)):
        arrays = layer_arguments(where, layer, weights, x, first)
        outputs = OPS[where.mode](**arrays, **options, return_gates=saves_gates)._asdict()
        results.append(outputs | {"factors": factors[layer]})
        x = scaled(outputs["h"], factors[layer])  # the input of the next layer
    return results


def run_layers_backward(
    where: Layout,
    params: mx.array,
    x: mx.array,
    first: Arrays,
    saved: list[Arrays],
    cotangents: dict[str, Any],
    options: dict[str, Any],
) -> list[Arrays]:
    """Return the gradients of each layer, as dicts by the names of the arguments (x, Wx, Wh, b, h0, ...). x: the
    stack's input. first: the first states h0, c0 of all layers. options: lengths and engine.

    saved: for each layer a dict of what the forward pass saved: h, gates, c, and the dropout factors on h, "factors".
    cotangents: the incoming gradients "dh" [T, N, .] of the top layer's h, and "dhT" and "dcT" [L, N, .] of the states
    of all layers after the last step. L, T, N: layers, steps, batch."""
    weights, gradients, last = layer_arrays(where, params), [], dict(cotangents)
    dh = last.pop("dh")
    # input_factors[n]: the dropout factors on the input of layer n, which is h of layer n - 1; None for layer 0. Pop
    # them from `saved`, because the rest of saved[n] becomes keywords of the gradient function below. The last entry,
    # for h of the top layer, is not used, because nothing is dropped there.
    input_factors = [None, *(layer.pop("factors", None) for layer in saved)]
    for layer in reversed(range(where.L)):
        layer_input = scaled(saved[layer - 1]["h"], input_factors[layer]) if layer else x
        arrays = layer_arguments(where, layer, weights[layer], layer_input, first)
        d = {name: states[layer] for name, states in last.items()} | {"dh": dh}
        # The gradient function takes the layer's arguments, its saved outputs and their gradients. The loop runs from
        # the top layer down, so insert the result at the front.
        gradients.insert(0, GRADIENTS[where.mode](**arrays, **saved[layer], **d, **options))
        dh = scaled(gradients[0]["x"], input_factors[layer])  # for h of the layer below
    return gradients


def scaled(h: mx.array, factors: mx.array | None) -> mx.array:
    """Return h, or the gradient of h, times the dropout factors; unchanged if they are None."""
    return h if factors is None else h * factors


def layer_arguments(where: Layout, layer: int, weights: Arrays, x: mx.array, states: Arrays) -> dict[str, Any]:
    """Return a layer's arrays and options as arguments of `mlx_lstm.recurrence`. weights: the layer's arrays in the
    parameter buffer: Wx, Wh, the biases bW and bR [D, G H] of the input's and the recurrent product and, with a
    projection, its matrix Wp. x: what the layer reads. states: the first states h0 and c0 of all layers. D, G, H:
    directions, gates, units."""
    arrays: dict[str, Any] = {name: weights[name] for name in ("Wh", "Wp") if name in weights}
    arrays |= {name: of_all[layer] for name, of_all in states.items()}
    # biases: b, the sum of both, and for a GRU also bhn. Their directions [D, .] become one axis.
    biases = join_biases(weights["bW"], weights["bR"], gru=where.mode == "gru")
    arrays |= {name: bias.reshape(-1) for name, bias in biases.items()} | {"bidirectional": where.D == 2}
    if where.G == 1:  # a plain RNN: the mode is "rnn_relu" or "rnn_tanh"
        arrays["activation"] = where.mode.removeprefix("rnn_")
    if where.skip and layer == 0:
        # Layer 0 skips the product with Wx: each gate of each direction adds x itself. So x has H features.
        return arrays | {"x": mx.tile(x, (1, 1, where.D * where.G)), "Wx": None}
    return arrays | {"x": x, "Wx": weights["Wx"]}


def buffer_gradients(where: Layout, gradients: Arrays) -> Arrays:
    """Return a layer's gradients by the names of the arrays in the parameter buffer: Wx, Wh, Wp (a projection), and the
    biases bW and bR of the input's and the recurrent product. gradients: those of `mlx_lstm.recurrence`, by name.

    The forward pass adds bW and bR, so both get the gradient of the sum. Only the candidate of a GRU, the last of three
    gates, has a separate bR, called bhn in `mlx_lstm.recurrence`.
    """
    db = gradients["b"].reshape(where.D, -1)  # [D, G H]
    parts = {name: gradients[name] for name in ("Wx", "Wh", "Wp") if name in gradients} | {"bW": db, "bR": db}
    if where.mode == "gru":
        parts["bR"] = mx.concatenate([db[:, : 2 * where.H], gradients["bhn"].reshape(where.D, -1)], axis=1)
    return parts


def reserve_shapes(where: Layout, x: mx.array, dropout: float) -> list[dict[str, tuple[int, int, int]]]:
    """Return for each layer the shapes of its arrays in the reserve space, by name and in the order of storage. The
    reserve space is the array in which the forward op saves arrays for the backward op. x: the op's input, [steps,
    batch, features]. dropout: the probability; if it is 0, no factors are saved."""
    T, N, _ = x.shape
    # widths: {name of an array: its size per step and batch item}. A plain RNN saves no gates, because its gradient is
    # computed from h.
    widths = {} if where.mode.startswith("rnn") else {"gates": where.D * where.G * where.H}
    if where.mode == "lstm":
        widths["c"] = where.D * where.H
    # Only the layers below the top layer save h and dropout factors. The top layer's h is the op's output, which the
    # caller passes to the backward op, and it has no dropout.
    below_top = {"h": where.D * where.S} | ({"factors": where.D * where.S} if dropout else {})
    layers = [widths | below_top] * (where.L - 1) + [widths]
    # BATCH_LAST: the arrays that are stored with the batch last.
    return [
        {name: (T, width, N) if name in BATCH_LAST else (T, N, width) for name, width in layer.items()}
        for layer in layers
    ]


def pack(shapes: list[dict[str, tuple[int, int, int]]], results: list[dict[str, Any]], dtype: mx.Dtype) -> mx.array:
    """Store each layer's results in one array of this dtype, the reserve space, and return this array.

    shapes: for each layer {name of an array to store, such as "gates": its shape}; if the list is empty, the reserve
    space is empty, too. results: for each layer its arrays by name, from `run_layers`.
    """
    named = [(name, arrays[name]) for layer, arrays in zip(shapes, results, strict=False) for name in layer]
    # The arrays are [T, N, .]. Those in BATCH_LAST are stored as [T, ., N], their order in memory after engine `numpy`.
    parts = [(mx.swapaxes(array, 1, 2) if name in BATCH_LAST else array).reshape(-1) for name, array in named]
    return mx.concatenate(parts) if parts else mx.zeros((0,), dtype)


def unpack(
    op: str, forward_name: str, shapes: list[dict[str, tuple[int, int, int]]], reserve_space: mx.array, dtype: mx.Dtype
) -> list[Arrays]:
    """Return the arrays that the forward pass saved in the reserve space, as one dict of views per layer.

    forward_name: TensorFlow's name of the forward op, for an error text. shapes: for each layer {name of a stored
    array: its shape}, in the order of storage. dtype: the dtype that the reserve space must have.
    """
    if isinstance(reserve_space, mx.array) and reserve_space.ndim == 0:  # a forward pass without is_training
        raise ValueError(f"To use {forward_name} in gradients, is_training must be set to True.")
    sizes = [prod(shape) for layer in shapes for shape in layer.values()]
    why = ", but with checkpoint_every there is none," if getattr(reserve_space, "size", None) == 0 else ""
    check_array(op, "reserve_space", reserve_space, [sum(sizes)], dtype, why)
    # `accumulate` returns where each array ends. [:-1]: without the last end, which is the end of the reserve space.
    parts = iter(mx.split(reserve_space, list(accumulate(sizes))[:-1]) if sizes else ())
    layers = [{name: next(parts).reshape(shape) for name, shape in layer.items()} for layer in shapes]
    # Return all arrays as [T, N, .]. Those in BATCH_LAST are stored as [T, ., N].
    return [
        {name: mx.swapaxes(array, 1, 2) if name in BATCH_LAST else array for name, array in layer.items()}
        for layer in layers
    ]


def without_gradient(forward_name: str, *arrays: mx.array) -> tuple[mx.array, ...]:
    """Return the same arrays, but raise TensorFlow's error if their gradient is asked for. forward_name: TensorFlow's
    name of the op, for the error text."""

    @mx.custom_function
    def identity(*arrays: mx.array) -> tuple[mx.array, ...]:
        return arrays

    @identity.vjp
    def refuse(primals: Any, cotangents: Any, outputs: Any) -> Any:
        raise ValueError(f"To use {forward_name} in gradients, is_training must be set to True.")

    return cast(Any, identity)(*arrays)
