"""PyTorch's LSTM, GRU and RNN as MLX layers, with several layers and both directions; LSTMCell, GRUCell and RNNCell.

Constructors, parameters and their names, initialisation, shapes and results are as in `torch.nn`. Sequences of
different lengths come as a `PackedSequence`, or padded with the argument `lengths`, which takes less time. Sizes: L
time, N batch, I input features, D directions, K layers, H hidden, S (`width`) the width of h: H, or `proj_size`.

A `state_dict` loads as it is. To load it from a file call `layer.load_weights("torch_layer.safetensors")`. To copy it
from a torch layer in the same process, and back:

    layer.load_weights([(name, mx.array(value.numpy())) for name, value in torch_layer.state_dict().items()])
    torch_layer.load_state_dict({name: torch.from_numpy(np.array(value)) for name, value in layer.parameters().items()})
"""

import math
from collections.abc import Sequence
from functools import partial
from operator import itemgetter, methodcaller
from typing import Any, TypeVar

import mlx.core as mx

from .convert import Weights
from .convert.layers import class_of
from .convert.torch import NAMES, WAYS, by_names
from .engines import cells
from .engines.at_once import Run, by_mlx, by_numpy, computes_now, derived
from .engines.choice import Engine, check_engine
from .engines.directions import join
from .engines.problem import Arrays
from .ground.advice import Advised, advised, missing
from .ground.checks import (
    NO_UNITS,
    check_array,
    check_every,
    check_flag,
    check_integer,
    check_lengths,
    check_option,
    check_probability,
    chosen_options,
    fail,
    warn_once,
)
from .recurrence import (
    Call,
    Hold,
    Lengths,
    PackedSequence,
    QuantizedLayer,
    Stepper,
    check_packed,
    common_dtype,
    engine_used,
    in_dtype,
    join_biases,
    join_states,
    pack_padded_sequence,
    pad_packed_sequence,
    split_states,
    whole_lengths,
    whole_steps,
)

__all__ = ["GRU", "LSTM", "RNN", "GRUCell", "LSTMCell", "QuantizedGRU", "QuantizedLSTM", "QuantizedRNN", "RNNCell"]
__all__ += ["PackedSequence", "from_weights", "pack_padded_sequence", "pad_packed_sequence"]

Input = TypeVar("Input", mx.array, PackedSequence)
"""The type of the input of a layer; the output has the same type."""

MOST_LAYERS = 65536
"""The largest number of layers of a module. Without a limit a mistyped number would draw parameters until the memory is
full."""


def __dir__() -> list[str]:
    """Return the public names."""
    return list(__all__)


def __getattr__(name: str) -> Any:
    """Raise AttributeError for a name that this module does not have. For functions of `torch.nn.utils.rnn` that are
    missing here, the text says what to use instead."""
    if name in ("pad_sequence", "pack_sequence", "unpack_sequence", "unpad_sequence"):
        text = "pad each array by mx.pad, join them by mx.stack, and pass lengths= to the layer"
        text = "output[n, : lengths[n]] of a batch-first output is sequence n" if name.startswith("un") else text
        raise AttributeError(f"mlx_lstm.torch has no {name}: {text}", name=name)
    raise missing("mlx_lstm.torch", name, names=())  # names=(): suggest no similar name


class Layers(Advised):
    """Base class of `LSTM`, `GRU` and `RNN`, with PyTorch's parameter names. It checks the arguments and runs the
    layers one after another. From `Advised` it inherits that a method which only torch has, such as `to`, raises an
    error that says what to use here."""

    gates: int  # number of gates: a weight matrix has H rows for each gate
    engine: Engine | None  # "fused", "stepwise", "numpy" or "ops" if the user forces one, else None
    checkpoint_every: int | str | None  # in training save the states of every n-th step only; n, or "auto"
    nonlinearity: str  # the activation of a plain RNN
    engine_used = engine_used  # a property: the engine that ran in the latest call, which `run` stores

    @advised
    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        proj_size: int = 0,
        *,
        checkpoint_every: int | str | None = None,
        engine: Engine | None = None,
    ):
        super().__init__()
        self.input_size: int = check_integer(self.op, "input_size", input_size, least=1)
        self.hidden_size: int = check_integer(self.op, "hidden_size", hidden_size, least=1, why=NO_UNITS)
        self.num_layers: int = check_integer(self.op, "num_layers", num_layers, least=1)
        if self.num_layers > MOST_LAYERS:  # a mistyped number, whose parameters would fill the memory
            fail(self.op, f"num_layers must be at most {MOST_LAYERS}", num_layers)
        for name, flag in {"bias": bias, "batch_first": batch_first, "bidirectional": bidirectional}.items():
            check_flag(self.op, name, flag)
        self.dropout: float = check_probability(self.op, "dropout", dropout)
        if self.dropout and self.num_layers == 1:
            rule = "has no effect on one layer: it drops outputs between layers."
            warn_once(f"[{self.op}] dropout={self.dropout:g} {rule}")
        self.proj_size: int = check_integer(self.op, "proj_size", proj_size, least=0)
        if self.proj_size >= self.hidden_size:
            fail(self.op, f"proj_size must be less than hidden_size = {self.hidden_size}", proj_size)
        self.bias: bool = bias
        self.batch_first: bool = batch_first
        self.bidirectional: bool = bidirectional
        self.engine = check_engine(self.op, engine)
        self.checkpoint_every = check_every(self.op, checkpoint_every)
        scale = 1 / math.sqrt(self.hidden_size)  # the bound of the random parameters, as in torch
        # A module of MLX is a dict, whose entries are the parameters. ending: "" or "_reverse", the direction.
        for layer in range(self.num_layers):
            for ending in self.endings:
                for name, shape in self.shapes(layer).items():
                    self[self.key(name, layer, ending)] = mx.random.uniform(-scale, scale, shape)

    @property
    def endings(self) -> tuple[str, ...]:
        """Return the endings of parameter names by direction: "" and, if the layer is bidirectional, "_reverse"."""
        return WAYS if self.bidirectional else WAYS[:1]

    def key(self, name: str, layer: int, ending: str) -> str:
        """Return the full name of a parameter, such as weight_ih_l0_reverse. name: its first part, here weight_ih.
        layer: the layer's index, here 0. ending: the ending of the direction, here "_reverse"."""
        return f"{name}_l{layer}{ending}"

    @property
    def width(self) -> int:
        """Return S, the width of h in one direction."""
        return self.proj_size or self.hidden_size

    def shapes(self, layer: int) -> dict[str, tuple[int, ...]]:
        """Return {name: shape} of the parameters of one direction of a layer, in torch's order. A name is one such as
        weight_ih, without layer and direction. layer: the layer's index. A layer above the first one reads h of all
        directions of the layer below."""
        rows = self.gates * self.hidden_size
        columns = len(self.endings) * self.width if layer else self.input_size
        shapes = {"weight_ih": (rows, columns), "weight_hh": (rows, self.width)}
        shapes |= {"bias_ih": (rows,), "bias_hh": (rows,)} if self.bias else {}
        return shapes | ({"weight_hr": (self.proj_size, self.hidden_size)} if self.proj_size else {})

    def _extra_repr(self) -> str:
        """Return what `repr` shows between the parentheses: the sizes, and the options that are not the defaults."""
        # A list times True is the list, times False it is empty.
        shown = [str(self.input_size), str(self.hidden_size)]
        shown += [f"proj_size={self.proj_size}"] * bool(self.proj_size)
        shown += [f"num_layers={self.num_layers}"] * (self.num_layers != 1) + ["bias=False"] * (not self.bias)
        shown += ["batch_first=True"] * self.batch_first + [f"dropout={self.dropout}"] * bool(self.dropout)
        # `chosen_options`: such as ", engine='ops'" for engine and checkpoint_every if they are set.
        return ", ".join(shown + ["bidirectional=True"] * self.bidirectional) + chosen_options(self)

    def run_packed(
        self,
        input: Input,
        states: dict[str, Any],
        lengths: Lengths,
        key: mx.array | None,
        keep: mx.array | None,
        hold: Hold,
    ) -> tuple[Input, Arrays]:
        """Run all layers on an array or on a packed sequence, as `run` does for an array. The output is packed like the
        input. With a packed sequence `lengths`, `keep` and `hold` must be None."""
        if not isinstance(input, PackedSequence):
            return self.run(input, states, lengths, key, keep, hold)
        for name, value in {"lengths": lengths, "keep": keep, "hold": hold}.items():
            if value is not None:
                fail(self.op, f"{name} must be None for a PackedSequence: pad it by pad_packed_sequence,", "one")
        # A packed sequence holds the longest sequence first. order: the indices of the sequences in this order. counts:
        # the number of steps of each sequence, in the order of the batch.
        order, counts = check_packed(self.op, input)
        check_array(self.op, "the data of input", input.data, ["P", self.input_size])  # "P": any number of rows
        padded, _ = pad_packed_sequence(input, self.batch_first)
        output, last = self.run(padded, states, counts.tolist(), key, None, None)  # without keep and hold
        # The padded batch has the user's order of sequences, and so have the states. Only the packed output must have
        # the longest sequence first again.
        by_length = output[mx.array(order)] if self.batch_first else output[:, mx.array(order)]
        packed = pack_padded_sequence(by_length, counts[order].tolist(), self.batch_first)
        return input._replace(data=packed.data), last

    def run(
        self,
        input: mx.array,
        states: dict[str, Any],
        lengths: Lengths,
        key: mx.array | None,
        keep: mx.array | None,
        hold: Hold,
    ) -> tuple[mx.array, Arrays]:
        """Run all layers. Return h of the last layer at every step, and a dict of the last states of all layers: an
        array [layers x directions, batch, width] for h and, in an LSTM, for c. L, N: steps, sequences.

        `states` has the states before the first step by name, "h" and "c"; `None` stands for zeros. The other arguments
        are options, `None` if absent: `lengths` [N], the number of steps of each sequence; `key`, the random key of
        dropout; `keep` [L, N], factors on the states before each step; `hold` [L, N], true at steps that leave the
        states unchanged.
        """
        check_array(self.op, "input", input, self.input_shape(input))
        batched, time_first = input.ndim == 3, input.ndim == 2 or not self.batch_first
        # The recurrence takes [L, N, I]; an input without a batch gets N = 1. is_time_major: the input has this layout.
        is_time_major, N = batched and time_first, 1 if not batched else input.shape[1 if time_first else 0]
        L = input.shape[0 if time_first else 1]
        if not L:
            fail(self.op, "input must have at least one step", f"shape {list(input.shape)}")
        if key is not None:
            check_key(self.op, key)
        kept = 1 - check_probability(self.op, "dropout", self.dropout)  # a user may have changed the attribute
        # shapes: {name of a state: its shape, for all layers together}. first: the states that the caller passed.
        shapes = self.check_states(states, [N] if batched else [], time_first)
        first = {name: state for name, state in states.items() if state is not None}
        # now: the call computes immediately, on the CPU. run_small(function, *arrays) applies a function to arrays: by
        # NumPy if `now`, because it takes less time for the small operations around the recurrence, else by MLX.
        now, D = computes_now(self.engine), len(self.endings)
        run_small = by_numpy if now else by_mlx
        layers = [self.arrays(layer, now) for layer in range(self.num_layers)]
        dtype = common_dtype([input, *first.values(), *(array for arrays in layers for array in arrays.values())])
        if not N:  # an empty batch: nothing runs
            if lengths is not None:
                check_lengths(self.op, lengths, N, L, traced=True)  # checks the shape only: there are no values
            output = mx.zeros((*input.shape[:2], D * self.width), dtype)
            return output, {name: mx.zeros(shape, dtype) for name, shape in shapes.items()}
        if first:  # convert each state from [K D, N, .] to a list of [N, D .], one entry per layer
            by_layer = run_small(lambda *states: [split_states(D, state) for state in states], *first.values())
            first = dict(zip(first, by_layer, strict=True))
        x = (input if is_time_major else run_small(partial(swapped, batched), input)).astype(dtype)
        # steps: the options keep and hold, as arrays [L, N]; an option that was not passed is missing.
        steps = whole_steps(self.op, keep, hold, input.shape[:-1], "the steps of input")
        steps = {name: (array if time_first else array.T).reshape(L, N) for name, array in steps.items()}
        # `Call` takes hold as an option, `Call.forward` takes keep as an array. lengths_checked: `whole_lengths` has
        # checked the lengths, so that not every layer checks them again.
        options = {"engine": self.engine, "checkpoint_every": self.checkpoint_every, "hold": steps.pop("hold", None)}
        options |= {"lengths": whole_lengths(self.op, lengths, N, L), "lengths_checked": True}
        call = Call(self._cell(), bidirectional=self.bidirectional, **options, op=self.op)
        last = []
        for layer, arrays in enumerate(layers):
            if layer and kept < 1 and self.training:
                x, key = dropped(x, kept, key)
            arrays = arrays | {f"{name}0": state[layer] for name, state in first.items()}  # h0 and c0
            arrays = in_dtype(arrays | {"x": x}, dtype) | steps  # keep stays in its own dtype
            outputs, choice = call.forward(arrays, return_gates=False, training=self.training)
            vars(self)["_engine_used"] = choice  # in `vars`, because MLX would count a tuple attribute as parameters
            last.append({name: outputs[f"{name}T"] for name in states})
            x = outputs["h"]  # the input of the next layer
        output = x if is_time_major else run_small(partial(swapped, batched), x)
        # by_name: the last states as `join_all` takes them, h of each layer, then c of each layer.
        by_name = [layer[name] for name in states for layer in last]
        return output, run_small(partial(self.join_all, shapes), *by_name)

    def stepper(self, batch: int | Sequence[int] = ()) -> Stepper:
        """Return a `mlx_lstm.nn.Stepper`: an object that runs one time step per call and keeps the states inside. It
        computes the same as the layer in evaluation mode, with much less work per step, but has no gradient. torch has
        no such method. I: input features.

        Args:
            batch (int or sequence of int): N, the sizes of the batch axes of a step's input [N, I]. Default: none, the
                input is [I].

        Returns:
            Stepper: called as `stepper(x, keep=None)` with x [N, I] of MLX or NumPy, it returns the last layer's h
            [N, S] as the same kind of array; S is the width of h. Its states have the shapes of the argument `hx` of a
            call.

        Raises:
            ValueError: the layer is bidirectional, or the call is inside a transformation of MLX.
        """
        op = f"{self.op}.stepper"
        class_of(op, "the layer", self)  # raises an error for a subclass that may compute something else
        if self.bidirectional:
            fail(op, "bidirectional must be False, because the reverse direction starts at the end of the input,", True)

        # Return (cell, parameters, engine) of each layer. The stepper calls this again if parameters have changed.
        def read() -> list[tuple[cells.Cell, Arrays, Engine | None]]:
            return [(self._cell(), self.arrays(layer), self.engine) for layer in range(self.num_layers)]

        # [self]: the modules whose parameters the stepper watches for changes. is_stack: the states have a first axis,
        # one entry per layer; the states of LSTMCell, GRUCell and RNNCell have no such axis.
        return Stepper(op, read, [self], batch=batch, is_stack=not isinstance(self, Cell))

    def _cell(self) -> cells.Cell:
        """Return the cell: the formula that the recurrence computes at each step."""
        if self.gates == 1:
            return cells.RNNCell(self.nonlinearity)
        return cells.LSTMCell() if self.gates == 4 else cells.GRUCell()

    def join_all(self, shapes: dict[str, list[int]], *states: Any) -> dict[str, Any]:
        """Join the states of all layers. Return {"h" or "c": array of the shape `shapes[name]`}, which is [layers x
        directions, batch, width]. states: h of each layer, then c of each layer, each [batch, directions x width]."""
        D, K = len(self.endings), self.num_layers
        # n = 0: h, the first K entries of `states`. n = 1: c, the next K entries.
        return {
            name: join_states(D, shape, *states[n * K : (n + 1) * K]) for n, (name, shape) in enumerate(shapes.items())
        }

    def check_states(self, states: dict[str, Any], N: list[int], time_first: bool) -> dict[str, list[int]]:
        """Check the shapes of the states that the caller passed, and return the shapes by name. N: [the number of
        sequences], or [] for an input without a batch. time_first: whether the input's first axis is time."""
        rows, widths = self.num_layers * len(self.endings), {"h": self.width, "c": self.hidden_size}
        why = f", as input is {'[L, N, I]' if time_first else '[N, L, I]'}," if N else ""
        shapes = {name: [rows, *N, widths[name]] for name in states}
        for name, state in states.items():
            if state is not None:
                check_array(self.op, f"{name}_0", state, shapes[name], why=why)
        return shapes

    def input_shape(self, input: Any) -> list[int | str]:
        """Return the shape that `input` must have. The letters "L" (steps) and "N" (sequences) stand for any size. An
        input of two axes has no batch."""
        if isinstance(input, mx.array) and input.ndim == 2:
            return ["L", self.input_size]
        return ["N", "L", self.input_size] if self.batch_first else ["L", "N", self.input_size]

    def arrays(self, layer: int, now: bool = False) -> Arrays:
        """Return a layer's parameters as `mlx_lstm.lstm`, `gru` or `rnn` takes them, by names such as Wx: one bias,
        both directions in one array.

        layer: the layer's index. now: the call computes immediately, not in a trace. Then NumPy adds the two biases of
        a layer of one direction, because a graph of MLX at every call takes more time. For two directions MLX adds and
        joins the arrays, but only once, because the result is cached.
        """
        directions = []  # for each direction {name: parameter}, with torch's names such as weight_ih
        for ending in self.endings:
            arrays = {}
            for name, shape in self.shapes(layer).items():
                key = self.key(name, layer, ending)
                arrays[name] = array = self._parameter(key)
                if array.shape != shape:  # a bias of shape [1], for example, would broadcast in the sum of both biases
                    fail(self.op, f"{key} must have shape {list(shape)}", f"shape {list(array.shape)}")
            directions.append(arrays)
        if len(directions) == 1:
            return self.with_one_bias(directions[0], by_numpy if now else by_mlx)
        # `derived` calls the lambda with `directions`. If `now`, it caches the result while the parameters are the same
        # arrays. `join` puts both directions into one array per name.
        return derived(now, self.op, directions, lambda both: join([self.with_one_bias(one, by_mlx) for one in both]))

    def with_one_bias(self, arrays: dict[str, Any], run_small: Run) -> dict[str, Any]:
        """Convert the parameters of one direction from torch's names, such as weight_ih, to the argument names of
        `mlx_lstm.lstm`, `gru` or `rnn`. Torch's two biases become one, their sum. run_small: `by_numpy` or `by_mlx`,
        which computes the sum."""
        arrays = dict(arrays)
        biases: Any = {}  # b, the sum; a GRU also has bhn, the candidate's part of bias_hh, which gate r multiplies
        if self.bias:
            both = arrays.pop("bias_ih"), arrays.pop("bias_hh")
            biases = run_small(partial(join_biases, gru=self.gates == 3), *both)
        return {NAMES[name]: array for name, array in arrays.items()} | biases  # NAMES: weight_ih to Wx, and so on


def swapped(batched: bool, sequence: Any) -> Any:
    """Convert a sequence [N, L, .] to [L, N, .] or back. Without a batch (`batched` is False), convert [L, .] to [L, 1,
    .] or back. L, N: steps, sequences."""
    if batched:
        return sequence.swapaxes(0, 1)
    return sequence[:, None] if sequence.ndim == 2 else sequence[:, 0]


def check_key(op: str, key: object) -> None:
    """Check that `key` is a random key of MLX."""
    kind = f"{key.dtype}, shape {list(key.shape)}" if isinstance(key, mx.array) else type(key).__name__
    if kind != f"{mx.uint32}, shape [2]":
        fail(op, "key must be one of mx.random.key or mx.random.split", kind)


def dropped(x: mx.array, probability: float, key: mx.array | None) -> tuple[mx.array, mx.array | None]:
    """Apply dropout to x. Return the result, and the random key for the next layer. probability: the chance that an
    element stays; it is then divided by `probability`, and all other elements become 0. key: the random key, or None
    for MLX's global generator."""
    layer_key = None  # the key of this layer
    if key is not None:
        key, layer_key = mx.random.split(key)
    kept = mx.random.bernoulli(probability, x.shape, layer_key)
    return mx.where(kept, x * mx.array(1 / probability if probability else 0, x.dtype), 0), key


class LSTM(Layers):
    r"""An LSTM as in PyTorch: `torch.nn.LSTM` as an MLX layer.

    .. math::

        i, f, o &= \sigma(W_{ih} x_t + b_{ih} + W_{hh} h_{t-1} + b_{hh}) \qquad
        g = \tanh(W_{ih} x_t + b_{ih} + W_{hh} h_{t-1} + b_{hh}) \\
        c_t &= f \odot c_{t-1} + i \odot g \qquad h_t = o \odot \tanh(c_t), \text{ or } W_{hr} (o \odot \tanh(c_t))

    Parameters of layer k: `weight_ih_lk` [4H, I], from layer 1 on [4H, D S]; `weight_hh_lk` [4H, S]; `bias_ih_lk`,
    `bias_hh_lk` [4H]; with a projection `weight_hr_lk` [S, H]. D is the number of directions, S the width of h: H or
    `proj_size`. The names of the second direction end in `_reverse`. The gate order is i, f, g, o. All parameters are
    drawn from U(-1/sqrt(H), 1/sqrt(H)).

    `layer.eval()` turns dropout off and takes less memory. Call it also before `mx.export_function`, which fails in
    training mode with "Unable to serialize primitive CustomTransforms".

    Args:
        input_size (int): size of the features, I.
        hidden_size (int): size of the cell state, H.
        num_layers (int): K; a layer's input is the output of the one below. Default: 1.
        bias (bool): whether there are biases. Default: `True`.
        batch_first (bool): the batch axis of input and output comes before the time axis, not after it; states are not
            affected. Default: `False`.
        dropout (float): in training, the probability, in [0, 1], with which an element of a layer's output becomes 0
            before the next layer reads it; drawn from `mx.random`, or from the key of a call. It has no effect on a
            single layer. Default: 0.
        bidirectional (bool): whether a second direction runs from the end to the start. Default: `False`.
        proj_size (int): width of a projected h, less than `hidden_size`; 0 for none. Default: 0.
        checkpoint_every (int or str, optional): in training, save the states of every n-th step only (n or `"auto"`)
            and compute the others again, as in `mlx_lstm.lstm`. Also an attribute. Default: `None`, save all.
        engine (str, optional): force an engine, `"fused"`, `"stepwise"`, `"numpy"` or `"ops"`, as in `mlx_lstm.lstm`.
            Also an attribute. Default: the best for the stream's device.

    Raises:
        ValueError: an argument breaks a rule.

    Example:
        >>> import mlx.core as mx
        >>> from mlx_lstm.torch import LSTM
        >>> layer = LSTM(3, 4, num_layers=2, batch_first=True, bidirectional=True)
        >>> layer
        LSTM(3, 4, num_layers=2, batch_first=True, bidirectional=True)
        >>> output, (h_n, c_n) = layer(mx.ones((5, 10, 3)), lengths=[10, 2, 7, 1, 10])
        >>> output.shape, h_n.shape
        ((5, 10, 8), (4, 5, 4))
        >>> output, (h_n, c_n) = layer(mx.ones((5, 1, 3)), (h_n, c_n))  # go on from the last state
    """

    op: str = "torch.LSTM"
    gates: int = 4

    @advised
    def __call__(
        self,
        input: Input,
        hx: tuple[mx.array, mx.array] | None = None,
        *,
        lengths: Lengths = None,
        key: mx.array | None = None,
        keep: mx.array | None = None,
        hold: Hold = None,
    ) -> tuple[Input, tuple[mx.array, mx.array]]:
        """Return the last layer's h at every step, and the last states of all layers. Sizes: L steps, N batch, K
        layers, D directions, H units, S the width of h (H or `proj_size`). I: input features, P: the steps of all
        sequences of a packed input.

        Args:
            input (array or PackedSequence): [L, N, I]; [N, L, I] with `batch_first`; or [L, I]. A packed sequence has
                the data [P, I]; the output is then packed like it, and `lengths`, `keep` and `hold` are not allowed.
            hx (tuple, optional): (h_0 [K D, N, S], c_0 [K D, N, H]), without the axis N if `input` is [L, I]. Layers
                come in order, and in each layer the forward direction comes first. Default: zeros.
            lengths (integer array or list, optional): [N], the number of steps of each sequence, in 0..L, in place of
                torch's packed sequences. Past the end of sequence n its output is 0 and its input is never read.
                The forward direction ends at step `lengths[n] - 1`, and the second direction starts at this step and
                ends at step 0.
            key (array, optional): the random key of dropout, from `mx.random.key`: the same key drops the same
                elements. Default: MLX's global generator; a function that `mx.compile` compiles must then have
                `mx.random.state` among its inputs. Inside `mx.checkpoint` pass a key: the generator would drop other
                elements when the layer runs again for the gradient, and the gradient would be wrong.
            keep (array, optional): [L, N], [N, L] with `batch_first`, or [L]: a factor on the states of every layer
                before each step, as in `mlx_lstm.lstm`: 0 where an episode begins. The second direction runs through
                the factors in reverse. torch has no keep and hold.
            hold (array or list, optional): in the shape of keep, true at steps that leave the states of every layer
                unchanged.

        Returns:
            tuple: output [L, N, D S] (or [N, L, D S], or [L, D S]) and (h_n, c_n), shaped as `hx`; in the dtype to
            which input, states and parameters promote.
        """
        h, c = pair(self.op, hx)
        output, last = self.run_packed(input, {"h": h, "c": c}, lengths, key, keep, hold)
        return output, (last["h"], last["c"])


class OneState(Layers):
    """Base class of `GRU` and `RNN`, whose only state is h. It has their call."""

    @advised
    def __call__(
        self,
        input: Input,
        hx: mx.array | None = None,
        *,
        lengths: Lengths = None,
        key: mx.array | None = None,
        keep: mx.array | None = None,
        hold: Hold = None,
    ) -> tuple[Input, mx.array]:
        """Return the last layer's h at every step, and the last h of all layers. Sizes: L steps, N sequences, I
        features, K layers, D directions, H units; P: the steps of all sequences of a packed input.

        Args:
            input (array or PackedSequence): [L, N, I]; [N, L, I] with `batch_first`; or [L, I]. A packed sequence has
                the data [P, I]; the output is then packed like it, and `lengths`, `keep` and `hold` are not allowed.
            hx (array, optional): h_0 [K D, N, H], or [K D, H] for an input [L, I], with K layers and D directions.
                Default: zeros.
            lengths (integer array or list, optional): [N], the number of steps of each sequence, as in `LSTM`.
            key (array, optional): the random key of dropout, as in `LSTM`.
            keep (array, optional): [L, N], factors on the states before each step, as in `LSTM`.
            hold (array, optional): [L, N], true at steps that leave the states unchanged, as in `LSTM`.

        Returns:
            tuple: output [L, N, D H] (or [N, L, D H], or [L, D H]) and h_n, shaped as `hx`.
        """
        output, last = self.run_packed(input, {"h": hx}, lengths, key, keep, hold)
        return output, last["h"]


class GRU(OneState):
    r"""A GRU as in PyTorch: `torch.nn.GRU` as an MLX layer.

    .. math::

        r, z &= \sigma(W_{ih} x_t + b_{ih} + W_{hh} h_{t-1} + b_{hh}) \\
        n &= \tanh(W_{ih} x_t + b_{ih} + r \odot (W_{hh} h_{t-1} + b_{hh})) \qquad
        h_t = (1 - z) \odot n + z \odot h_{t-1}

    The parameters have the same names as in `LSTM`, with three blocks of H rows in the gate order r, z, n. Everything
    else is as in `LSTM`, but there is no projection.

    Args:
        input_size, hidden_size, num_layers (int): the size I of the features, the size H of the state, the number of
            layers K.
        bias, batch_first, dropout, bidirectional: as in `torch.nn.GRU`; `LSTM` here describes them, too.
        checkpoint_every (int or str, optional): in training, save the states of every n-th step only; n or `"auto"`.
        engine (str, optional): force `"fused"`, `"stepwise"`, `"numpy"` or `"ops"`. Default: the best for the device.

    Example:
        >>> import mlx.core as mx
        >>> from mlx_lstm.torch import GRU
        >>> output, h_n = GRU(3, 4, num_layers=2)(mx.ones((10, 5, 3)))
        >>> output.shape, h_n.shape
        ((10, 5, 4), (2, 5, 4))
    """

    op: str = "torch.GRU"
    gates: int = 3

    @advised
    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        *,
        checkpoint_every: int | str | None = None,
        engine: Engine | None = None,
    ):
        options: Any = {"dropout": dropout, "bidirectional": bidirectional}
        options |= {"checkpoint_every": checkpoint_every, "engine": engine}
        super().__init__(input_size, hidden_size, num_layers, bias, batch_first, **options)


class RNN(OneState):
    r"""A plain RNN as in PyTorch: `torch.nn.RNN` as an MLX layer.

    .. math:: h_t = s(W_{ih} x_t + b_{ih} + W_{hh} h_{t-1} + b_{hh})

    The parameters have the same names as in `LSTM`, with one block of H rows. Everything else is as in `LSTM`, but
    there is no projection.

    Args:
        input_size, hidden_size, num_layers (int): the size I of the features, the size H of the state, the number of
            layers K.
        nonlinearity (str): the function s in the formula, `"tanh"` or `"relu"`. Default: `"tanh"`.
        bias, batch_first, dropout, bidirectional: whether there are biases, whether input and output have the batch
            first, the probability of dropout between layers, and whether there is a second direction, as in `LSTM`.
        checkpoint_every (int or str, optional): in training, save the states of every n-th step only; n or `"auto"`.
        engine (str, optional): force `"fused"`, `"stepwise"`, `"numpy"` or `"ops"`. Default: the best for the device.

    Example:
        >>> import mlx.core as mx
        >>> from mlx_lstm.torch import RNN
        >>> output, h_n = RNN(3, 4, num_layers=2, nonlinearity="relu")(mx.ones((10, 5, 3)))
        >>> output.shape, h_n.shape
        ((10, 5, 4), (2, 5, 4))
    """

    op: str = "torch.RNN"
    gates: int = 1

    @advised
    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        nonlinearity: str = "tanh",
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        *,
        checkpoint_every: int | str | None = None,
        engine: Engine | None = None,
    ):
        check_option(self.op, "nonlinearity", nonlinearity, ("tanh", "relu"))
        options: Any = {"dropout": dropout, "bidirectional": bidirectional}
        options |= {"checkpoint_every": checkpoint_every, "engine": engine}
        super().__init__(input_size, hidden_size, num_layers, bias, batch_first, **options)
        self.nonlinearity: str = nonlinearity


class QuantizedLSTM(QuantizedLayer, LSTM):
    """`LSTM` with quantized weights in all layers and directions.

    The layer equals an `LSTM` with the weights that `mx.dequantize` returns. Use `from_layer(layer, group_size, bits,
    mode)` or `mlx_lstm.nn.quantize` to make one. It has the parameters of `LSTM`; a quantized weight has two more
    arrays whose names end in `_scales` and `_biases`, for example `weight_hh_l0`, `weight_hh_l0_scales`,
    `weight_hh_l0_biases`. All parameters are frozen. The width of h (H, or `proj_size`) must be a multiple of
    `group_size`. If the number of columns of a `weight_ih_lk` or `weight_hr_lk` is not a multiple of it, this array
    stays a float weight.

    Args:
        input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, proj_size, engine: the
            arguments of `LSTM`.
        group_size, bits, mode: how `mx.quantize` packs the weights, as in `mlx_lstm.nn.QuantizedLSTM`.

    Example:
        >>> import mlx.core as mx
        >>> from mlx_lstm.torch import LSTM, QuantizedLSTM
        >>> layer = QuantizedLSTM.from_layer(LSTM(3, 64, num_layers=2, bidirectional=True), bits=8)
        >>> layer
        QuantizedLSTM(3, 64, num_layers=2, bidirectional=True, group_size=64, bits=8, mode=affine)
        >>> output, (h_n, c_n) = layer(mx.ones((10, 5, 3)))
        >>> output.shape, h_n.shape
        ((10, 5, 128), (4, 5, 64))
    """

    op = "torch.QuantizedLSTM"
    of, kinds = LSTM, (LSTM,)  # of: the class of float layers; kinds: the classes that `from_layer` takes


class QuantizedGRU(QuantizedLayer, GRU):
    """`GRU` with quantized weights in all layers and directions, as in `QuantizedLSTM`.

    Example:
        >>> import mlx.core as mx
        >>> from mlx_lstm.torch import GRU, QuantizedGRU
        >>> QuantizedGRU.from_layer(GRU(3, 32), mode="mxfp8")(mx.ones((10, 5, 3)))[0].shape
        (10, 5, 32)
    """

    op = "torch.QuantizedGRU"
    of, kinds = GRU, (GRU,)  # the class of float layers, and the classes that `from_layer` takes


class QuantizedRNN(QuantizedLayer, RNN):
    """`RNN` with quantized weights in all layers and directions, as in `QuantizedLSTM`.

    Example:
        >>> import mlx.core as mx
        >>> from mlx_lstm.torch import RNN, QuantizedRNN
        >>> QuantizedRNN.from_layer(RNN(3, 32), mode="nvfp4")(mx.ones((10, 5, 3)))[0].shape
        (10, 5, 32)
    """

    op = "torch.QuantizedRNN"
    of, kinds = RNN, (RNN,)  # the class of float layers, and the classes that `from_layer` takes


class Cell(Layers):
    """Base class of `LSTMCell`, `GRUCell` and `RNNCell`: a layer that runs one step per call. Its parameter names do
    not end in `_l0`. Do not confuse it with `cells.Cell`, which is the formula of a step."""

    @advised
    def __init__(self, input_size: int, hidden_size: int, bias: bool = True, *, engine: Engine | None = None):
        super().__init__(input_size, hidden_size, bias=bias, engine=engine)

    def key(self, name: str, layer: int, ending: str) -> str:
        """Return `name`, such as weight_ih, unchanged: a cell has one layer and one direction, so its parameter names
        have no ending for them."""
        return name

    def one_step(self, input: mx.array, states: dict[str, Any]) -> Arrays:
        """Run one step. Return {name: state} after it, each [N, H], or [H] for an input [I]. input: [N, I] or [I].
        states: the states before the step by name, "h" and "c"; `None` stands for zeros. N, I, H: sequences, features,
        units."""
        batched = not isinstance(input, mx.array) or input.ndim != 1  # a wrong type is refused by `check_array` below
        check_array(self.op, "input", input, ["N", self.input_size] if batched else [self.input_size])
        why = f", as input is {'[N, I]' if batched else '[I]'} = {list(input.shape)},"
        for name, state in states.items():
            if state is not None:
                check_array(self.op, name, state, [*input.shape[:-1], self.hidden_size], why=why)
        # now: the call computes immediately, on the CPU. run_small(function, *arrays) applies a function to arrays: by
        # NumPy if `now`, because it takes less time for small operations, else by MLX, which adds them to its graph.
        now, H = computes_now(self.engine), self.hidden_size
        run_small, arrays = by_numpy if now else by_mlx, self.arrays(0, now)  # 0: the only layer
        first = {name: state for name, state in states.items() if state is not None}
        dtype, shape = common_dtype([input, *first.values(), *arrays.values()]), (*input.shape[:-1], H)
        if 0 in shape:  # an empty batch
            return {name: mx.zeros(shape, dtype) for name in states}
        # Add the first states as h0 and c0, each [N, H]. A state [H] without a batch gets a batch axis of size 1, as in
        # state[None]: itemgetter(None) is a function that indexes with None.
        arrays |= {
            f"{name}0": state if batched else run_small(itemgetter(None), state) for name, state in first.items()
        }
        arrays["x"] = run_small(methodcaller("reshape", (1, -1, self.input_size)), input)  # [1, N, I]: one step
        call = Call(self._cell(), engine=self.engine, op=self.op)
        outputs, choice = call.forward(in_dtype(arrays, dtype), return_gates=False, training=self.training)
        # choice: which engine ran, for the property `engine_used`. It is stored in `vars`, because MLX would count a
        # tuple attribute as parameters.
        vars(self)["_engine_used"] = choice
        last = {name: outputs[f"{name}T"] for name in states}
        return last if batched else {name: run_small(itemgetter(0), state) for name, state in last.items()}


class LSTMCell(Cell):
    """An LSTM cell as in PyTorch: `torch.nn.LSTMCell` as an MLX layer. Each call runs one step of an LSTM with one
    layer and one direction.

    Parameters: `weight_ih` [4H, I], `weight_hh` [4H, H], `bias_ih`, `bias_hh` [4H]; gate order i, f, g, o. To run many
    steps in one call, or to quantize the weights, make an `LSTM` with these weights:
    `from_weights(convert.from_torch(cell))`.

    Args:
        input_size, hidden_size (int): the sizes I of the features and H of the states.
        bias (bool): whether there are biases. Default: `True`.
        engine (str, optional): force `"fused"`, `"stepwise"`, `"numpy"` or `"ops"`. Default: the best for the device.

    Example:
        >>> import mlx.core as mx
        >>> from mlx_lstm.torch import LSTMCell
        >>> cell, state = LSTMCell(3, 4), None
        >>> for x in mx.ones((10, 5, 3)):
        ...     state = cell(x, state)
        >>> cell, state[0].shape
        (LSTMCell(3, 4), (5, 4))
    """

    op: str = "torch.LSTMCell"
    gates: int = 4

    @advised
    def __call__(self, input: mx.array, hx: tuple[mx.array, mx.array] | None = None) -> tuple[mx.array, mx.array]:
        """Return the states after a step. Sizes: N sequences, I features, H units.

        Args:
            input (array): [N, I] or [I].
            hx (tuple, optional): (h, c) before the step, each [N, H] or [H]. Default: zeros.

        Returns:
            tuple: (h, c), in these shapes.
        """
        states = self.one_step(input, dict(zip("hc", pair(self.op, hx), strict=True)))
        return states["h"], states["c"]


class OneStateCell(Cell):
    """Base class of `GRUCell` and `RNNCell`, whose only state is h. It has their call."""

    @advised
    def __call__(self, input: mx.array, hx: mx.array | None = None) -> mx.array:
        """Return h after a step, [N, H] or [H]. Sizes: N sequences, I features, H units.

        Args:
            input (array): [N, I] or [I].
            hx (array, optional): h before the step, [N, H] or [H]. Default: zeros.
        """
        return self.one_step(input, {"h": hx})["h"]


class GRUCell(OneStateCell):
    """A GRU cell as in PyTorch: `torch.nn.GRUCell` as an MLX layer. Each call runs one step of a GRU with one layer and
    one direction.

    Parameters: `weight_ih` [3H, I], `weight_hh` [3H, H], `bias_ih`, `bias_hh` [3H]; gate order r, z, n. The arguments
    are those of `LSTMCell`. I: input features, H: units.

    Example:
        >>> import mlx.core as mx
        >>> from mlx_lstm.torch import GRUCell
        >>> GRUCell(3, 4)(mx.ones((5, 3)), mx.zeros((5, 4))).shape
        (5, 4)
    """

    op: str = "torch.GRUCell"
    gates: int = 3


class RNNCell(OneStateCell):
    """A plain RNN cell as in PyTorch: `torch.nn.RNNCell` as an MLX layer. Each call runs one step of an RNN with one
    layer and one direction.

    Parameters: `weight_ih` [H, I], `weight_hh` [H, H], `bias_ih`, `bias_hh` [H]. The argument `nonlinearity` is "tanh"
    or "relu"; the other arguments are those of `LSTMCell`. I: input features, H: units.

    Example:
        >>> import mlx.core as mx
        >>> from mlx_lstm.torch import RNNCell
        >>> RNNCell(3, 4, nonlinearity="relu")(mx.ones((5, 3))).shape
        (5, 4)
    """

    op: str = "torch.RNNCell"
    gates: int = 1

    @advised
    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        nonlinearity: str = "tanh",
        *,
        engine: Engine | None = None,
    ):
        check_option(self.op, "nonlinearity", nonlinearity, ("tanh", "relu"))
        super().__init__(input_size, hidden_size, bias, engine=engine)
        self.nonlinearity: str = nonlinearity

    def _extra_repr(self) -> str:
        return super()._extra_repr() + (f", nonlinearity={self.nonlinearity}" if self.nonlinearity != "tanh" else "")


def pair(op: str, hx: Any) -> tuple[Any, Any]:
    """Return the pair (h, c) of an LSTM's argument `hx`, or (None, None) if `hx` is None. Raise ValueError for anything
    else than a pair. op: the layer's name, with which the error text begins."""
    if hx is None:
        return None, None
    if not (isinstance(hx, (tuple, list)) and len(hx) == 2):
        number = f" of {len(hx)}" if isinstance(hx, (tuple, list)) else ""
        fail(op, "hx must be a tuple (h_0, c_0)", f"{type(hx).__name__}{number}")
    return hx[0], hx[1]


def from_weights(
    weights: Weights, *, batch_first: bool = False, dropout: float = 0.0, engine: Engine | None = None
) -> LSTM | GRU | RNN:
    """Return a layer with these weights. `mlx_lstm.convert.from_torch(layer)` does the reverse: it returns a layer's
    weights.

    Args:
        weights (Weights): as a reader of `mlx_lstm.convert` returns them, such as `from_keras`.
        batch_first, dropout, engine: as in `LSTM`.

    Returns:
        LSTM, GRU or RNN: the layer, with both biases or none.

    Raises:
        ValueError: the cell has an option that torch's layers do not have; `mlx_lstm.nn.from_weights` takes all
            options.

    Example:
        >>> import mlx.nn
        >>> from mlx_lstm import convert, torch
        >>> torch.from_weights(convert.from_mlx(mlx.nn.GRU(3, 4)), batch_first=True)
        GRU(3, 4, batch_first=True)
    """
    arrays = by_names("torch.from_weights", weights)  # {torch's name: array}; raises the documented ValueError
    sizes = {"input_size": weights.input_size, "hidden_size": weights.hidden_size, "num_layers": len(weights.layers)}
    bias = any(name.startswith("bias") for name in arrays)  # True also if the cell's forget bias is the only bias
    options = {"bias": bias, "batch_first": batch_first, "dropout": dropout, "engine": engine}
    options |= {"bidirectional": weights.directions == 2}
    cell = weights.cell
    # own: the options that only one class has. cell.op: "lstm", "gru" or "rnn".
    own = {"lstm": {"proj_size": weights.proj_size}, "gru": {}, "rnn": {"nonlinearity": cell.activations[0]}}
    layer = {"lstm": LSTM, "gru": GRU, "rnn": RNN}[cell.op](**sizes, **options, **own[cell.op])
    layer.load_weights(list(arrays.items()))
    return layer
