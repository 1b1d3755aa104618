"""Find out what a layer is: its class, its arrays, and the attributes that change its formula. Every function that
reads the parameters of a layer calls `describe` first.

A layer is a module of `mlx.nn`, a module of this package, any other object with arrays as attributes, or a dict of
arrays. A module of MLX is a dict, too, whose entries are its parameters and submodules. In all functions op is the name
of the public function, with which error texts begin, and name is the layer's name in an error text.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from ..engines.cells import GRUCell, LSTMCell
from ..ground.checks import fail

NONLINEARITIES: dict[Callable[..., Any], str] = {
    nn.tanh: "tanh",
    mx.tanh: "tanh",
    nn.relu: "relu",
    nn.sigmoid: "sigmoid",
    mx.sigmoid: "sigmoid",
}
"""The functions that `nn.RNN` can run, and their names in `mlx_lstm.rnn`."""

OF_MLX = (nn.LSTM, nn.GRU, nn.RNN)
"""The recurrent layers of `mlx.nn`."""

OPTIONAL = re.compile(
    r"(bias_(ih|hh)(_l\d+)?|(recurrent_)?bias|b(hn)?|peephole)(_(forward|fwd|backward|bwd|back|reverse))?"
)
"""A pattern of the names, in all formats, of parameters that a layer may lack, maybe with a word for the direction."""

HARMLESS = {"op", "stepper", "train", "eval", "_extra_repr"}
"""The names that a subclass of a layer may redefine without changing what the layer computes."""

DEFAULTS: dict[str, list[Any]] = {
    name: [getattr(cell, name) for cell in (LSTMCell(), GRUCell()) if name in cell._fields]
    for name in (*LSTMCell._fields, *GRUCell._fields)
} | {"reverse": [False], "go_backwards": [False], "activation": ["tanh"]}
"""Attributes that change the formula of a layer, by name, each with its default values, which change nothing. An object
of an unknown class may have these values only: with another value the arrays alone would give wrong results."""


class Description(NamedTuple):
    """What a layer is.

    known: its class in `mlx.nn` or `mlx_lstm`, or None for any other object. arrays: its arrays of MLX and NumPy by
    attribute name, without those whose name begins with an underscore. others: the attributes that hold arrays in
    another way, and how: "module", "list", "dict" and so on. strays: the values with the name of a parameter that are
    no array and hold none, such as a bias as a list of numbers; without them the layer would silently lose its bias.
    nonlinearity: the name of the activation of a plain RNN, or None if the layer has no such attribute. training:
    whether the layer is in training mode. drops: whether it applies dropout between its layers now.
    """

    known: type | None
    arrays: dict[str, Any]
    others: dict[str, str]
    strays: dict[str, Any]
    nonlinearity: str | None
    training: bool
    drops: bool

    @property
    def shapes(self) -> dict[str, Any]:
        """Return the shape of each array, and a word for every other attribute that holds arrays, for error texts."""
        return {name: list(array.shape) for name, array in self.arrays.items()} | self.others


def describe(op: str, name: str, layer: Any) -> Description:
    """Return the description of a layer: of a module of any package, of another object with arrays as attributes, or of
    a dict of arrays.

    Raise ValueError for a subclass that changes how its layer computes, and for an attribute that changes the formula,
    such as `forget_bias`. op, name: the public function, and what its error texts call the layer.
    """
    known = class_of(op, name, layer)
    attributes: dict[str, Any] = getattr(layer, "__dict__", {}) | (layer if isinstance(layer, dict) else {})
    check_keys(op, attributes)
    arrays: dict[str, Any] = {}
    others: dict[str, str] = {}
    strays: dict[str, Any] = {}
    for key, value in attributes.items():
        # As in MLX, an attribute whose name begins with an underscore is no parameter. None and False say that there is
        # no such array.
        if value is None or value is False or key[:1] == "_":
            continue
        if isinstance(value, (mx.array, np.ndarray)):
            arrays[key] = value
        elif isinstance(value, (dict, list, tuple, set)) and holds_arrays(value):
            others[key] = "module" if isinstance(value, nn.Module) else type(value).__name__
        elif OPTIONAL.fullmatch(key):
            strays[key] = value
    if strays.get("bias") is True and any(map(OPTIONAL.fullmatch, arrays)):  # torch's flag, next to bias_ih_l0 or so
        del strays["bias"]
    # The class of an unknown object (known is None) does not say what the object computes. So its attributes must not
    # change the formula: `DEFAULTS` has the attributes that could, and their values that change nothing.
    for key in DEFAULTS.keys() & attributes.keys() if known is None else ():
        check_default(op, f"{name}.{key}", key, attributes[key])
    # nonlinearity: the activation of a plain RNN, a name or a function of MLX, or None; act: its name, or None.
    nonlinearity = attributes["nonlinearity"] if "nonlinearity" in attributes else getattr(layer, "nonlinearity", None)
    act = activation_of(nonlinearity, op) if callable(nonlinearity) else nonlinearity
    # Dropout acts between layers, so an object with one layer does not apply it. An object without `num_layers` may
    # have several layers, so it counts as an object with two.
    dropout, layers = attributes.get("dropout"), attributes.get("num_layers", 2)
    training = getattr(layer, "training", True)
    drops = training and isinstance(dropout, (int, float)) and dropout > 0 and layers != 1
    return Description(known, arrays, others, strays, act, training, drops)


def check_keys(op: str, arrays: Mapping[Any, Any]) -> None:
    """Raise ValueError unless all keys of a dict of arrays are texts."""
    for key in arrays:
        if not isinstance(key, str):
            fail(op, "the keys of arrays must be texts", repr(key))


def class_of(op: str, name: str, layer: object) -> type | None:
    """Return the class of `mlx.nn` or `mlx_lstm` that a recurrent layer has or derives from, or None for any other
    object. Raise ValueError for a subclass that redefines a method such as `__call__` or `step`: its parameters do not
    say what it computes."""
    kind = type(layer)  # `__mro__`: the class and its bases, the nearest first
    known = next((base for base in kind.__mro__ if is_known(base)), None)
    if known is None or known is kind:
        return known
    # The layer's class derives from `known`. methods: the methods of `known` and of its bases below mlx.nn.Module. A
    # derived class may redefine those in HARMLESS, which compute nothing, and special methods such as `__init__`, but
    # no others, and not `__call__`.
    methods = {word for base in known.__mro__ if base not in nn.Module.__mro__ for word in vars(base)}
    for base in kind.__mro__[: kind.__mro__.index(known)]:
        for word in vars(base):
            if word in methods - HARMLESS and (word == "__call__" or word[:2] != "__"):
                of = f"{known.__module__.partition('.')[0]}.nn.{known.__name__}" if known in OF_MLX else known.__name__
                rule = f"{name} must compute what {of} computes: pass a dict of its parameters if it does,"
                fail(op, rule, f"{kind.__name__}, which redefines {word}")
    return known


def is_known(kind: type) -> bool:
    """Return whether a class is a recurrent layer of `mlx.nn`, or of this package, whose layers have an attribute
    `op`."""
    return kind in OF_MLX or ("op" in vars(kind) and kind.__module__.partition(".")[0] == "mlx_lstm")


def holds_arrays(value: Any, seen: frozenset[int] = frozenset()) -> bool:
    """Return whether a module, dict, list, tuple or set holds an array or a module at any depth. seen: the ids of the
    containers around `value`, because a container may hold itself."""
    if isinstance(value, (mx.array, np.ndarray, nn.Module)):
        return True
    if not isinstance(value, (dict, list, tuple, set)) or id(value) in seen:
        return False
    each = value.values() if isinstance(value, dict) else value
    return any(holds_arrays(one, seen | {id(value)}) for one in each)


def check_default(op: str, name: str, key: str, value: Any) -> None:
    """Raise ValueError if an attribute would change the formula of an object of an unknown class. Allowed are None and
    the values in `DEFAULTS`. name: the attribute's name in the error text; key: its name in `DEFAULTS`."""
    if key == "activation" and callable(value):  # a function of MLX: take its name
        value = next((word for function, word in NONLINEARITIES.items() if value is function), value)
    value = tuple(value) if isinstance(value, list) else value  # as JSON writes a tuple
    allowed = [None, *DEFAULTS[key]]
    # The test of the type excludes arrays, whose == returns an array, and the number 1, which equals True.
    if not any(value is one or (isinstance(value, type(one)) and value == one) for one in allowed):
        shown = ", ".join(map(repr, DEFAULTS[key]))
        fail(op, f"{name} must be {shown}, as only the arrays of the object are read,", repr(value))


def activation_of(nonlinearity: object, op: str = "nn.RNN") -> str:
    """Return the name that `mlx_lstm.rnn` uses for a nonlinearity, which is a function of MLX such as `nn.tanh`.
    Raise ValueError for any other function, with `op` at the beginning of its text."""
    # Compare one by one instead of looking up: a module such as nn.Tanh() is not hashable, so it cannot be a dict key.
    for function, name in NONLINEARITIES.items():
        if nonlinearity is function:
            return name
    rule = "nonlinearity must be MLX's tanh, relu or sigmoid here, because no kernel or stepper has another,"
    fail(op, rule, repr(nonlinearity))


def whole_lists(layer: nn.Module, keys: list[str]) -> list[str]:
    """Return the keys that `freeze` gets, with the key of a list, such as "params", in place of the keys of all its
    arrays, "params.0" and so on.

    If a layer is frozen as a whole, MLX freezes each array of a list by itself. The trainable parameters then have an
    empty dict in its place, which `mlx.nn.value_and_grad` of the model refuses.
    """
    for name, value in layer.items():
        flat: Any = tree_flatten(value) if isinstance(value, (list, dict)) else []
        own = {f"{name}.{key}" for key, _ in flat}
        if own and own <= set(keys):
            keys = [*(key for key in keys if key not in own), name]
    return keys
