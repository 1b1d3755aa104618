"""Put advice into the error texts of layers: if a user writes a name of another framework, such as `device=` or
`.to()`, the error says what to write here. The tables below map names of other frameworks to advice."""

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, TypeVar, cast

import mlx.core as mx
import mlx.nn as nn

from .checks import check_array, fail

Function = TypeVar("Function", bound=Callable[..., Any])
Self = TypeVar("Self", bound="Advised")

SIZES: dict[str, str] = dict.fromkeys(
    ("units", "num_units", "hidden_dim", "hidden_dims", "n_hidden"), "it is called hidden_size here"
)
SIZES |= dict.fromkeys(("input_dims", "input_dim", "n_input"), "it is called input_size here")
"""{name of a layer's size in another framework: advice with our name}."""

OF_CONSTRUCTORS: dict[str, str] = SIZES | {
    "device": "MLX uses a Mac's GPU by itself; mx.set_default_device(mx.cpu) selects the CPU",
    "dtype": "layer.set_dtype(mx.float16) changes it",
    "use_bias": "it is called bias here",
    "return_sequences": "a call returns all steps; output[:, -1] is the last one of a batch-first result",
    "return_state": "see what a call returns",
    "stateful": "pass the last states to the next call",
    "go_backwards": "mlx_lstm.lstm, gru and rnn have it, as reverse=True",
    "activation": "mlx_lstm.lstm and gru have activations=, mlx_lstm.rnn has activation=",
    "recurrent_activation": "mlx_lstm.lstm and gru have activations=",
    "recurrent_dropout": "mlx_lstm.lstm, gru and rnn have mask=, a factor on h",
    "layer_norm": "mlx_lstm.nn.LSTM, GRU and RNN have it, and mlx_lstm.nn.stack runs several of them",
}
"""{option of a constructor in another framework: advice what to use here}."""

OF_CALLS: dict[str, str] = {
    "mask": "lengths= takes the number of steps of each padded sequence, hold= the steps to skip",
    "training": "layer.train() and layer.eval() choose it",
    "return_sequences": "a call returns all steps",
}
OF_CALLS |= dict.fromkeys(
    ("sequence_lengths", "seq_lengths", "seq_lens", "sequence_length"), "it is called lengths here"
)
"""{argument of a call in another framework: advice what to use here}."""

STATES = ("initial_state", "state", "states", "h0", "h_0", "c0", "c_0", "carry")
"""Names of the first states in other frameworks."""

NO_DEVICE = (
    "arrays of MLX have no device. MLX uses a Mac's GPU by itself; mx.set_default_device(mx.cpu) or "
    "`with mx.stream(mx.cpu)` selects the CPU"
)
ATTRIBUTES: dict[str, str] = dict.fromkeys(("to", "cuda", "cpu", "mps"), NO_DEVICE)
DTYPES = {"float": "float32", "double": "float64", "half": "float16", "bfloat16": "bfloat16", "type": "float16"}
ATTRIBUTES |= {name: f"layer.set_dtype(mx.{dtype}) changes the dtype" for name, dtype in DTYPES.items()}
ATTRIBUTES |= {
    "load_state_dict": "layer.load_weights(list(arrays.items())) takes MLX arrays by name; mlx_lstm.convert.from_torch "
    "reads a state_dict",
    "state_dict": "layer.parameters() returns the arrays; mlx_lstm.convert.to_torch returns a state_dict",
    "named_parameters": "mlx.utils.tree_flatten(layer.parameters()) returns pairs of name and array",
    "flatten_parameters": "there is nothing to flatten, so leave the call out",
    "requires_grad_": "layer.freeze() and layer.unfreeze() choose what is trained",
    "reset_parameters": "a new layer draws new parameters",
    "backward": "nn.value_and_grad(model, loss) returns a function that computes the loss and its gradients",
    "zero_grad": "mx.grad and nn.value_and_grad return new gradients, so leave the call out",
    "register_buffer": "assign the array, and call layer.freeze(keys=...)",
    "set_weights": "layer.load_weights takes a file or pairs; mlx_lstm.convert.from_keras reads Keras' weights",
    "get_weights": "layer.parameters() returns the arrays",
    "predict": "call the layer itself",
    "forward": "call the layer itself",
}
"""{method of a layer in another framework: advice what to use here}."""


def missing(module: str, name: str, names: Iterable[str]) -> AttributeError:
    """Return the AttributeError for a name that a module does not have. names: the names that the module has. If
    another framework spells one of them in this way, such as BlockLSTM for block_lstm, the error text gives our
    spelling."""
    ours = {one.replace("_", ""): one for one in names}.get(name.lower())
    text = (
        f"{module} has no {name}: it is called {ours} here" if ours else f"module {module!r} has no attribute {name!r}"
    )
    return AttributeError(text, name=name)


class Advised(nn.Module):
    """Base class of layers. If a user calls a method that only other frameworks have, such as `.to()`, the
    AttributeError says what to use here. It also reads and checks a layer's parameters."""

    op: str  # the layer's name in error texts

    # `train` and `eval` are defined only for type checkers: here they are declared to return a layer of this class, in
    # mlx.nn an nn.Module.
    def train(self: Self, mode: bool = True) -> Self:
        """Set training mode, or with `False` evaluation mode; return the layer."""
        super().train(mode)
        return self

    def eval(self: Self) -> Self:
        """Set evaluation mode; return the layer."""
        return self.train(False)

    def _parameter(self, name: str) -> Any:
        """Return the parameter of this name; raise ValueError if it is no MLX array. A quantized layer overrides this
        method and returns a weight as `Quantized`."""
        array: Any = self.get(name)
        if not isinstance(array, mx.array):  # for example a NumPy array, which MLX does not count as a parameter
            array = getattr(self, name, array)
            check_array(self.op, name, array, shape=None)  # raises the error
        return array

    def __getattr__(self, key: str) -> Any:
        if key not in ATTRIBUTES or key in self:
            return super().__getattr__(key)
        raise AttributeError(f"[{self.op}] there is no method {key}: {ATTRIBUTES[key]}.", name=key, obj=self)


def advised(function: Function) -> Function:
    """Decorate the constructor or `__call__` of a layer, so that it refuses keywords of other frameworks with an error
    that contains advice. Another unknown keyword is a TypeError, as in Python."""
    # known: the names of the function's parameters, which are the first names in `co_varnames`.
    code = function.__code__
    known = frozenset(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
    is_call = function.__name__ == "__call__"

    @wraps(function)
    def checked(self: Any, *arguments: Any, **options: Any) -> Any:
        if not known.issuperset(options):
            for name in sorted(options.keys() - known):
                refuse(self.op, name, options[name], is_call)
            # Python's own error would name the base class that defines the function, not the layer.
            raise TypeError(f"{type(self).__name__}.{function.__name__}() got an unexpected keyword argument {name!r}")
        return function(self, *arguments, **options)

    return cast(Function, checked)


def refuse(op: str, name: str, value: object, is_call: bool) -> None:
    """Raise ValueError if another framework has an option of this name. The text says what to use here. value: what the
    caller passed. is_call: whether `name` is an argument of a call, not of the constructor."""
    # kind: "nn" or "torch", whose layers have different names and options. layer: the class, such as "LSTM".
    kind, _, layer = op.partition(".")
    # advice: {name of an option of another framework: what to write instead}. It begins with the options that no layer
    # has. The code below adds options that some of our layers have, but not this one.
    advice: dict[str, str] = OF_CALLS if is_call else OF_CONSTRUCTORS
    if is_call:
        states = "the first states are called hx here" if kind == "torch" else "the first state is called hidden here"
        states += ", and that of c cell" if op.endswith("nn.LSTM") else ""
        own = ("hidden", "cell") if kind == "torch" else ("hx",)  # the names in our layers of the other kind
        advice = dict.fromkeys((*STATES, *own), states) | advice
    elif kind == "nn":
        names = ("norm", "layernorm", "use_layer_norm", "use_layernorm", "ln")
        advice = dict.fromkeys(names, "it is called layer_norm here") | advice
        other = f"mlx_lstm.torch.{layer} has it, and mlx_lstm.nn.stack runs several layers and directions"
        names = ("num_layers", "bidirectional", "batch_first", "dropout", "proj_size")
        advice = dict.fromkeys(names, other) | advice
    elif layer in ("GRU", "RNN"):
        advice = {"proj_size": "only the LSTM has it, as in PyTorch"} | advice
    if name in advice:
        # shown: the value in the error text; of anything that may be long, such as an array, only the class.
        shown = repr(value) if isinstance(value, str | int | float | None) else type(value).__name__
        what = "argument of a call" if is_call else "option of this layer"
        fail(op, f"{name} is no {what}: {advice[name]},", f"{name}={shown}")
