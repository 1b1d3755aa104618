"""Make a layer with any option of the cell from weights of any format.

A `Weights` has the weights of a stack of layers, in the same layout for all file formats, and the cell (the formula and
its options). B: sequences, T: steps, I: input features, H: units, P: the width of h, K: layers, D: directions.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..convert import Weights, to_ops
from ..convert.layers import whole_lists
from ..engines.choice import Engine, check_engine
from ..engines.problem import Arrays
from ..ground.checks import check_array, check_every, fail, in_the_name_of
from ..recurrence import (
    Call,
    Hold,
    Lengths,
    Stepper,
    common_dtype,
    engine_used,
    in_dtype,
    join_states,
    split_states,
    weight_shapes,
    whole_lengths,
    whole_steps,
)

OP = "nn.from_weights"  # the name of the function in error texts

WORDS = ("Wx", "Wh", "b", "bhn", "Wp", "peephole")
"""The names of a layer's parameters; every layer has the first two."""


class Recurrence(nn.Module):
    """A stack of layers with any options of `mlx_lstm.lstm`, `gru` or `rnn`; `from_weights` makes one.

    Parameters: `layers`, a list with one dict per layer. A dict has the arrays of its layer by the names of the
    function's arguments: `Wx`, `Wh`, and, where the layer has them, `b`, `bhn`, `Wp`, `peephole`. One array has both
    directions, as the function takes them with `bidirectional=True`.
    """

    op: str = OP
    engine_used = engine_used

    def __init__(self, weights: Weights, checkpoint_every: int | str | None, engine: Engine | None):
        """Make a layer with these weights. checkpoint_every, engine: options, as in `from_weights`."""
        super().__init__()
        self.engine = engine
        self.checkpoint_every = checkpoint_every
        with in_the_name_of(OP, "to_ops"):
            self.layers = to_ops(weights)
        # The names begin with an underscore, so MLX does not count these attributes as parameters.
        self._cell, self._is_reverse = weights.cell, weights.reverse
        # (D, I, H, P); P is 0 without a projection.
        self._sizes = weights.directions, weights.input_size, weights.hidden_size, weights.proj_size

    def _validate_keys(self, keys: Any, strict: bool) -> list[str]:
        # MLX's `freeze` and `unfreeze`, also those of a whole model, call this method.
        return whole_lists(self, super()._validate_keys(keys, strict))

    def _extra_repr(self) -> str:
        directions, I, H, P = self._sizes
        projection = f", projected to {P}" if P else ""
        return f"{self._cell.op}, {I} -> {H}{projection}, layers={len(self.layers)}, directions={directions}"

    def _arrays(self) -> list[Arrays]:
        """Return the parameters of each layer. A user may have changed the dicts in `layers`, so raise ValueError if a
        matrix is missing, a name is unknown, or a value is no MLX array with the right number of axes."""
        D, I, H, P = self._sizes
        shapes = weight_shapes(self._cell.gates, (I, H, P or H), D)
        for k, arrays in enumerate(self.layers):
            if not {"Wx", "Wh"} <= arrays.keys() <= set(WORDS):
                fail(OP, f"layers[{k}] must hold Wx, Wh and maybe {', '.join(WORDS[2:])}", sorted(arrays))
            for name, array in arrays.items():
                if not isinstance(array, mx.array):
                    check_array(OP, f"layers[{k}]: {name}", array, shape=None)  # raises the error
                if array.ndim != (axes := len(shapes[name])):
                    fail(OP, f"layers[{k}]: {name} must have {axes} axes", f"shape {list(array.shape)}")
        return self.layers

    def __call__(
        self,
        x: mx.array,
        state: Any = None,
        *,
        lengths: Lengths = None,
        keep: mx.array | None = None,
        hold: Hold = None,
    ) -> tuple[mx.array, Any]:
        """Return the last layer's h at every step, and the last states of all layers. Sizes: B sequences, T time steps,
        I input features, H hidden units, P the width of h.

        Args:
            x (array): [B, T, I].
            state (optional): a tuple (h_0 [K D, B, P], c_0 [K D, B, H]) for an LSTM, else h_0, for K layers of D
                directions. Layers come in order; in each layer the forward direction comes first. P is H, or the
                projection's width. Default: zeros.
            lengths (integer array or list, optional): [B], the number of steps of each sequence, in 0..T.
            keep (array, optional): [B, T], a factor on the states of every layer before each step.
            hold (array or list, optional): [B, T], true at steps that leave the states of every layer unchanged.

        Returns:
            tuple: the output [B, T, D P], and the last states, shaped as `state`; in the dtype to which x, states and
            parameters promote.
        """
        (D, I, H, P), cell, layers = self._sizes, self._cell, self._arrays()
        K = len(layers)
        check_array(OP, "x", x, ["B", "T", I])
        B, T, _ = x.shape
        if not B or not T:
            fail(OP, "x must have at least one item and one step", f"shape {list(x.shape)}")
        shapes = {"h": (K * D, B, P or H)} | ({"c": (K * D, B, H)} if cell.carried else {})  # of the states h and c
        if state is None or len(shapes) == 1:
            state = [state] * len(shapes)
        elif not isinstance(state, (tuple, list)) or len(state) != 2:
            fail(OP, "state must be a tuple (h_0, c_0)", type(state).__name__)
        first = {name: array for name, array in zip(shapes, state, strict=True) if array is not None}
        for name, array in first.items():
            check_array(OP, f"{name}_0", array, shapes[name])
        dtype = common_dtype([x, *first.values(), *(array for layer in self.layers for array in layer.values())])
        steps = whole_steps(OP, keep, hold, (B, T), "[B, T]")
        options: dict[str, Any] = {"hold": steps.pop("hold", None), "lengths": whole_lengths(OP, lengths, B, T)}
        options |= {"engine": self.engine, "checkpoint_every": self.checkpoint_every, "batch_first": True}
        call = Call(cell, self._is_reverse, D == 2, lengths_checked=True, **options)
        # rows: {"h" or "c": the first states of each layer}. last: the outputs of each layer, also its last states.
        rows, last = {name: split_states(D, array) for name, array in first.items()}, []
        for k, layer in enumerate(layers):
            # The arguments of the call for this layer: its parameters, its input, and its first states h0 and c0.
            arrays = layer | {"x": x} | {f"{name}0": array[k] for name, array in rows.items()}
            outputs, choice = call.forward(in_dtype(arrays, dtype) | steps, return_gates=False, training=self.training)
            last.append(outputs)
            vars(self)["_engine_used"] = choice  # in `vars`, because MLX would count a tuple attribute as parameters
            x = outputs["h"]
        of_layers = {name: [outputs[f"{name}T"] for outputs in last] for name in shapes}
        states = [join_states(D, shapes[name], *of_layers[name]) for name in shapes]
        return x, tuple(states) if len(states) == 2 else states[0]

    def stepper(self, batch: int | Sequence[int] = ()) -> Stepper:
        """Return a `Stepper`: an object that runs one time step of all layers per call and keeps the states inside.
        Sizes: I input features, P the width of h; "..." stands for the batch axes.

        Args:
            batch (int or sequence of int): the sizes of the batch axes of a step's input. Default: none.

        Returns:
            Stepper: called as `stepper(x, keep=None)` with x [..., I] of MLX or NumPy, it returns the last layer's h
            [..., P] as the same kind of array.

        Raises:
            ValueError: the layers run in reverse or in both directions, which need the end of the sequence first.
        """
        op = f"{OP}.stepper"
        if self._sizes[0] == 2 or self._is_reverse:
            rule = "layers must run forward, because the reverse direction starts at the end of the sequence,"
            fail(op, rule, "both directions" if self._sizes[0] == 2 else "the reverse direction")
        # read: returns each layer's cell, parameters and engine; the stepper calls it again if parameters have changed.
        read = lambda: [(self._cell, arrays, self.engine) for arrays in self._arrays()]  # noqa: E731
        # is_stack=True: the states of a single layer are [1, ..., H], too, as this class takes and returns them.
        return Stepper(op, read, self.layers, batch=batch, is_stack=True)


def from_weights(
    weights: Weights, *, checkpoint_every: int | str | None = None, engine: Engine | None = None
) -> Recurrence:
    """Return a trainable layer with these weights. Their cell may have any options. Sizes: B sequences, T time steps, I
    input features.

    Use it for weights that `LSTM`, `GRU` and `RNN` cannot hold: several layers, both directions, a GRU that resets
    before the product (ONNX's default), peepholes, a clip, other activations, a projection. The layer equals
    `mlx_lstm.lstm`, `gru` or `rnn` with `weights.options`, called for one layer after another.

    Args:
        weights (Weights): as a reader of `mlx_lstm.convert` returns them, such as `from_onnx`.
        checkpoint_every (int or str, optional): in training, save the states of every n-th step only and compute the
            other steps again for the gradient, as in `mlx_lstm.lstm`. Default: `None`, save all.
        engine (str, optional): force an engine, as in `mlx_lstm.lstm`. Default: the best for the stream's device.

    Returns:
        Module: called as `layer(x, state, lengths=, keep=, hold=)` with x [B, T, I], it returns the output [B, T, D P]
        and the last states. D is the number of directions, P the width of h. `stack` describes the shapes of the states
        and the three options: lengths of sequences, factors on the states, steps that leave the states unchanged. The
        parameters have the gate order i, f, g, o (LSTM) or r, z, n (GRU).

    Raises:
        ValueError: an argument breaks a rule.

    Example:
        >>> import mlx.core as mx
        >>> from mlx_lstm import convert
        >>> from mlx_lstm.nn import from_weights
        >>> arrays = {"Wx": mx.ones((12, 3)), "Wh": mx.ones((12, 4))}
        >>> layer = from_weights(convert.from_ops("gru", [arrays], reset="before"))
        >>> layer
        Recurrence(gru, 3 -> 4, layers=1, directions=1)
        >>> output, h_n = layer(mx.ones((2, 10, 3)), lengths=[10, 7])
        >>> output.shape, h_n.shape
        ((2, 10, 4), (1, 2, 4))
    """
    return Recurrence(weights, check_every(OP, checkpoint_every), check_engine(OP, engine))
