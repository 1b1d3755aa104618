"""The cases of the command `compare`: calls of MPSGraph's ops with random arrays, forward and gradients.

Arrays are named as in `mlx_lstm.mpsgraph`: arguments in Python's spelling, and gradients "d" + the argument's name.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from ...mpsgraph.layouts import ACTIVATIONS, layouts, size_of

Arrays = dict[str, np.ndarray]

GATES = {"lstm": 4, "gru": 3, "single_gate_rnn": 1}
"""The number of gates of each op."""

RESULTS = {"lstm": ("h", "c", "z_state"), "gru": ("h", "z_state"), "single_gate_rnn": ("h", "z_state")}
"""The results of a forward op with training (for an LSTM also produce_cell) turned on, in the op's order."""

_WEIGHTS = ("recurrent_weight", "input_weight", "bias")  # every op has these weights
GRADIENTS = {
    "lstm": ("source", *_WEIGHTS, "peephole", "init_state", "init_cell"),
    "gru": ("source", *_WEIGHTS, "init_state", "secondary_bias"),
    "single_gate_rnn": ("source", *_WEIGHTS, "init_state"),
}
"""The arguments that have a gradient, in the order in which Apple's gradient op returns the gradients."""

COTANGENTS = {
    "lstm": ("source_gradient", "state_gradient", "cell_gradient"),
    "gru": ("source_gradient", "state_gradient"),
    "single_gate_rnn": ("source_gradient", "state_gradient"),
}
"""The cotangents: the gradients of h, of the last h and of the last c, which a gradient op takes as arguments."""

ACTIVATION_PROPERTIES = {
    "lstm": {
        "input_gate_activation": "sigmoid",
        "forget_gate_activation": "sigmoid",
        "cell_gate_activation": "tanh",
        "output_gate_activation": "sigmoid",
        "activation": "tanh",
    },
    "gru": {
        "update_gate_activation": "sigmoid",
        "reset_gate_activation": "sigmoid",
        "output_gate_activation": "tanh",
    },
    "single_gate_rnn": {"activation": "relu"},
}
"""The properties of each op's descriptor that name an activation, with Apple's defaults."""

SIZES = (5, 3, 4, 6)  # T, N, I, H
DIRECTIONS = {"uni": {}, "reverse": {"reverse": True}, "bi": {"bidirectional": True}}
"""The directions of a layer: {word in the name of a case: properties of the descriptor}."""
NO_STATES = ("init_state", "init_cell", "state_gradient", "cell_gradient")
WITHOUT = {
    "no input weight": ("input_weight", "peephole", "mask"),
    "no bias": ("bias", "peephole", "mask"),
    "no states": (*NO_STATES, "peephole", "mask"),
    "source and weights only": ("input_weight", "bias", *NO_STATES, "peephole", "mask"),
    "mask": ("peephole",),
    "peephole": ("mask",),
}
"""The arguments that are not passed, by a part of the case's name. Cases that are not listed here have no mask and no
peephole."""


class CompareCase(NamedTuple):
    """A call of an MPSGraph op, forward and backward. name: for reports. op: a key of `GATES`. descriptor: the
    descriptor's properties that differ from Apple's defaults (training and produce_cell are always set). arrays: by
    argument; arguments that are not passed have no array."""

    name: str
    op: str
    descriptor: dict[str, Any]
    arrays: Arrays

    @property
    def bidirectional(self) -> bool:
        return self.descriptor.get("bidirectional", False)

    @property
    def directions(self) -> int:
        return 2 if self.bidirectional else 1

    @property
    def hidden(self) -> int:
        return self.arrays["recurrent_weight"].shape[-1]

    @property
    def layers(self) -> list["CompareCase"]:
        """Return a case for each layer. If there is one layer, this is the case itself. In a stack, the arrays of the
        layers above the first have names such as "bias_l1" and "bias_l2". The returned cases have the weights of one
        layer by their plain names, and no `source`, which depends on the layer below."""
        count = 1 + sum(name.startswith("recurrent_weight_l") for name in self.arrays)
        if count == 1:
            return [self]
        ends = ["", *(f"_l{n}" for n in range(1, count))]
        names = (*_WEIGHTS, "secondary_bias")
        by_layer = [{name: self.arrays[name + end] for name in names if name + end in self.arrays} for end in ends]
        return [self._replace(arrays=arrays) for arrays in by_layer]

    @property
    def gradients(self) -> list[str]:
        """Return the names of the arguments that get a gradient, in the order of Apple's gradient op. Without
        `source_gradient`, the gradient of the output h, only the forward op runs, and the list is empty."""
        if "source_gradient" not in self.arrays:
            return []
        # The layers above the first have names that end in _l1, _l2 and so on.
        upper = [name for name in self.arrays if name[-3:-1] == "_l"]
        return [*(name for name in GRADIENTS[self.op] if name in self.arrays), *upper]

    @property
    def results(self) -> list[str]:
        return [*RESULTS[self.op], *(f"d{name}" for name in self.gradients)]


def draw(
    rng: np.random.Generator,
    op: str,
    sizes: tuple[int, int, int, int] = (3, 2, 3, 2),
    *,
    name: str = "",
    absent: Iterable[str] = ("peephole", "mask"),
    mask_shape: tuple[int | str, ...] = ("N", "DH"),
    weights: float = 0.7,
    dtype: DTypeLike = np.float32,
    **descriptor: Any,
) -> CompareCase:
    """Return a case with random arrays for all arguments but those in `absent`.

    sizes: T time steps, N items of the batch, I inputs, H hidden units. mask_shape: the shape of the mask, where T, N,
    H and DH (H times the number of directions) stand for sizes. weights: the standard deviation of the recurrent
    weights. descriptor: the properties of the op's descriptor.
    """
    bidirectional = descriptor.get("bidirectional", False)
    lengths = dict(zip("TNIH", sizes, strict=True))
    # A GRU has a secondary bias only with `reset_after`: its reset gate then multiplies the recurrent product and this
    # bias. Without it the gate multiplies h before the product.
    absent = set(absent) | ({"secondary_bias"} if not descriptor.get("reset_after") else set())
    shapes = layouts(GATES[op], bidirectional, projects="input_weight" not in absent)
    arrays = {}
    for argument in (*GRADIENTS[op], *COTANGENTS[op]):
        if argument not in absent:
            shape = [size_of(axis, lengths) for axis in shapes[argument]]
            spread = weights if argument == "recurrent_weight" else 0.7
            arrays[argument] = rng.normal(0, spread, shape).astype(dtype)
    if "mask" not in absent:
        letters = lengths | {"DH": lengths["H"] * (2 if bidirectional else 1)}
        shape = [letters[axis] if isinstance(axis, str) else axis for axis in mask_shape]
        arrays["mask"] = (rng.random(shape) * 1.5).astype(dtype)  # factors below and above 1, as in scaled dropout
    return CompareCase(name, op, descriptor, arrays)


def draw_stack(
    rng: np.random.Generator, op: str, sizes: tuple[int, int, int, int], count: int, **chosen: Any
) -> CompareCase:
    """Return a random case of `count` layers, where each layer's output is the source of the next layer. Its results
    are h and the gradients of source and weights."""
    # torch's layers have no peephole and no mask. The states of a stack are left out, because torch joins the states of
    # all layers into one array.
    absent = ("peephole", "mask", "init_state", "init_cell", "state_gradient", "cell_gradient")
    case = draw(rng, op, sizes, absent=absent, **chosen)
    # Add the weights of each layer n > 0, with the ending _l1, _l2 and so on after the names of the first layer.
    T, N, _, H = sizes
    for n in range(1, count):
        upper = draw(rng, op, (T, N, case.directions * H, H), absent=absent, **chosen).layers[0].arrays
        weights = {name: upper[name] for name in (*_WEIGHTS, "secondary_bias") if name in upper}
        case.arrays.update({f"{name}_l{n}": array for name, array in weights.items()})
    return case


def through_layers(case: CompareCase, run: Callable[[CompareCase], Arrays]) -> Arrays:
    """Return the results and gradients of a case with one or more layers. The function `run` computes one layer,
    forward and backward. For a stack it is first called for the lower layers, one after the other, to compute the input
    of the layer above. Then it is called for all layers, the highest first, with the gradient from the layer above."""
    layers = case.layers
    if len(layers) == 1:
        return run(case)
    sources = [case.arrays["source"]]
    for layer in layers[:-1]:
        sources.append(run(layer._replace(arrays=layer.arrays | {"source": sources[-1]}))["h"])
    gradient, results = case.arrays["source_gradient"], {}
    for n in reversed(range(len(layers))):
        arrays = layers[n].arrays | {"source": sources[n], "source_gradient": gradient}
        of_layer = run(layers[n]._replace(arrays=arrays))
        gradient = of_layer["dsource"]
        results.setdefault("h", of_layer["h"])
        results |= {f"d{name}" + (f"_l{n}" if n else ""): of_layer[f"d{name}"] for name in layers[n].arrays}
    return results | {"dsource": gradient}


def grid(off_kinks: Callable[[CompareCase], bool], seed: int = 0) -> list[CompareCase]:
    """Return the cases of the command `compare`. off_kinks: a function that returns whether the arguments of relu and
    hard_sigmoid in a random case are far enough from kinks, where the slope jumps."""
    rng = np.random.default_rng(seed)
    single = [draw_until(off_kinks, rng, op, name=f"{op}: {name}", **chosen) for op, name, chosen in descriptions()]
    return [*single, *stacks(rng)]


def stacks(rng: np.random.Generator) -> Iterator[CompareCase]:
    """Yield cases of several layers, which torch can run."""
    flags = {
        "lstm": {},
        "gru": {"reset_gate_first": True, "reset_after": True},
        "single_gate_rnn": {"activation": "tanh"},
    }
    for op, own in flags.items():
        yield draw_stack(rng, op, SIZES, count=2, name=f"{op}: 2 layers, bi", bidirectional=True, **own)
        yield draw_stack(rng, op, SIZES, count=3, name=f"{op}: 3 layers", **own)


def draw_until(accept: Callable[[CompareCase], bool], rng: np.random.Generator, op: str, **chosen: Any) -> CompareCase:
    """Draw random cases until the function `accept` accepts one, and return it."""
    for _ in range(1000):
        case = draw(rng, op, **chosen)
        if accept(case):
            return case
    raise RuntimeError(f"no accepted case of {op} {chosen}")


def descriptions() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield (op, name, arguments of `draw`) for each case of one layer."""
    sizes: dict[str, Any] = {"sizes": SIZES}
    for op in GATES:
        for direction, flags in DIRECTIONS.items():
            yield op, direction, sizes | flags
            for name, absent in WITHOUT.items():
                # A reverse layer has the same layouts as a forward layer. Only an LSTM has a peephole.
                if direction != "reverse" and (op == "lstm" or name != "peephole"):
                    yield op, f"{direction}, {name}", sizes | flags | {"absent": absent}
        for name in ACTIVATIONS:
            # With these unbounded activations the states would overflow within five steps, so run two steps.
            short = {"sizes": (2, *SIZES[1:])} if name in ("none", "relu") else sizes
            yield op, f"every activation {name}", short | dict.fromkeys(ACTIVATION_PROPERTIES[op], name)
        yield op, "one of everything", {"sizes": (1, 1, 1, 1)}
        # In 64 steps the state would grow without bound with relu, Apple's default for the single gate, and errors
        # would grow with recurrent weights whose norm is above 1. So take tanh and small weights.
        smooth = {"activation": "tanh"} if op == "single_gate_rnn" else {}
        yield op, "64 steps", {"sizes": (64, 2, 8, 16), "weights": 0.15} | smooth
        yield op, "float16", sizes | {"dtype": np.float16} | smooth
    for direction, flags in DIRECTIONS.items():  # with a peephole, whose order also changes
        yield "lstm", f"{direction}, forget gate last", sizes | flags | {"forget_gate_last": True, "absent": ("mask",)}
    for first in (False, True):
        # The case without any of the three flags is the case "uni". reset_gate_first occurs only with other flags.
        for after, flip in ((False, True), (True, False), (True, True)):
            flavour = {"reset_gate_first": first, "reset_after": after, "flip_z": flip}
            words = ", ".join(name.replace("_", " ") for name, value in flavour.items() if value)
            yield "gru", words, sizes | flavour
    as_torch = {"reset_gate_first": True, "reset_after": True, "bidirectional": True}
    yield "gru", "bi, as PyTorch", sizes | as_torch
